// Elements of the page, found and made; the clipboard and downloads.

export const by = (id) => document.getElementById(id);
export const make = (tag, name, text) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
};

/** Copy a text; returns whether that was possible. Browsers give the clipboard to pages of HTTPS and localhost alone. */
export async function copy(text) {
  try { await navigator.clipboard.writeText(text); return true; } catch { /* the older way */ }
  const field = make("textarea", "hidden");
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

export function download(name, text) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/markdown" }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
