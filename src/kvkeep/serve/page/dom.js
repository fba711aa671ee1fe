// Elements of the page, found and made.

export const by = (id) => document.getElementById(id);
export const make = (tag, name, text) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
};
