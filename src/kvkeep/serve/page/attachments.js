// Text files that are sent with a message.

import { by, make } from "./dom.js";

const LARGEST = 2_000_000;  // bytes; a request may have 8 MB

let files = [];
export const attached = () => files;

export function clear() {
  files = [];
  list();
}

function list() {
  by("files").replaceChildren(...files.map((file) => {
    const chip = make("span", "file", file.name), away = make("button", "", "\u2715");
    away.type = "button";
    away.setAttribute("aria-label", `Remove ${file.name}`);
    away.addEventListener("click", () => { files = files.filter((one) => one !== file); list(); });
    chip.append(away);
    return chip;
  }));
  by("prompt").dispatchEvent(new Event("input"));
}

/** Attach files; returns why one of them was not. */
export async function attach(found) {
  let why = "";
  for (const file of found) {
    const text = file.size <= LARGEST ? await file.text() : null;
    if (text === null) why = `${file.name} is larger than ${LARGEST / 1e6} MB.`;
    else if (text.startsWith("%PDF-")) why = `${file.name} is a PDF, and this page reads only text; save it as text (pdftotext), and attach that.`;
    else if (text.includes("\0") || text.includes("\ufffd")) why = `${file.name} is not a text file.`;
    else if (!text.trim()) why = `${file.name} is empty.`;
    else files.push({ name: file.name, text });
  }
  list();
  return why;
}

/** A message as the model reads it: its files, and then what was written. */
export function withFiles({ content, files = [] }) {
  const parts = files.map(({ name, text }) => `File ${name}:\n\n${text.trimEnd()}`);
  return [...parts, ...(content ? [content] : [])].join("\n\n");
}
