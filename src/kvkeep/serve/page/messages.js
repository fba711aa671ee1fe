// A message as an element, with what can be done with it.

import { attached, clear, withFiles } from "./attachments.js";
import { by, copy, make } from "./dom.js";
import { render } from "./markdown.js";
import { bar, bytes, number, said } from "./memory.js";

export const CUT = "cut off at its length";

function button(text, title, call) {
  const made = make("button", "act", text);
  made.type = "button";
  made.title = title;
  made.addEventListener("click", () => call(made));
  return made;
}

const copying = (text) => button("Copy", "Copy the text", async (own) => {
  own.textContent = await copy(text()) ? "Copied" : "Not copied";
  setTimeout(() => { own.textContent = "Copy"; }, 1500);
});

/** message: of conversation ``talk``. actions: edit, regenerate, proceed, memory. run: what is known while it is being answered. */
export function element(message, talk, actions, run) {
  const box = make("article", `message ${message.role}`), body = make("div", "body");
  box.setAttribute("aria-label", { user: "You", system: "System prompt", assistant: "Answer" }[message.role]);
  if (message.role !== "assistant") {
    for (const { name } of message.files ?? []) body.append(make("span", "file", name));
    body.append(make("div", "", message.content));
    box.append(body);
    if (message.role === "user") box.append(under(message, talk, actions));
    return box;
  }
  body.replaceChildren(...content(message, run));
  box.append(body, after(message, talk, actions, run));
  return box;
}

/** The text of an answer, or how far its prompt is read. */
export function content(message, run) {
  if (message.content || !run) return render(message.content);
  const line = make("p", "reading"), { tokens, prompt } = run.reading ?? {};
  if (!prompt) line.textContent = "Waiting";
  else {
    const part = make("progress");
    part.max = prompt;
    part.value = tokens;
    part.setAttribute("aria-label", "Reading the prompt");
    line.append(part, `Reading ${number(tokens)} of ${number(prompt)} tokens`);
  }
  return [line];
}

function under(message, talk, actions) {
  const line = make("div", "after");
  line.append(copying(() => withFiles(message)), button("Edit", "Change this message and get a new answer", () => actions.edit(message, talk, line.parentElement)));
  return line;
}

/** What can be done with an answer, what it cost, and what its cache holds now. */
export function after(message, talk, actions, run) {
  const line = make("div", "after"), { usage, seconds, held, ended } = message;
  const last = talk.messages.at(-1) === message;
  if (!run) {
    line.append(copying(() => message.content));
    if (last) line.append(button("Regenerate", "Get another answer", () => actions.regenerate(talk)));
    if (last && ended === CUT) {
      const more = button("Continue", "Continue this answer", () => actions.proceed(talk));
      more.classList.add("more");
      line.append(more);
    }
  }
  if (held) {
    const holds = make("button", "holds"), part = make("span", "bar");
    holds.type = "button";
    holds.title = "Show what the model remembers";
    part.append(...bar(held.entries));
    holds.append(part, make("span", "", `${said(held.entries, held.where)} (${bytes(held.bytes)})`));
    holds.addEventListener("click", actions.memory);
    line.append(holds);
  }
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const speed = seconds > 0 && usage.completion_tokens > 1 ? `, ${(usage.completion_tokens / seconds).toFixed(0)} per second` : "";
    const prompt = `prompt: ${number(usage.prompt_tokens - cached)} read, ${number(cached)} from memory`;
    line.append(make("span", "", `${number(usage.completion_tokens)} tokens${speed}; ${prompt}`));
    if (usage.exact_tokens) line.append(make("span", "", `exact up to ${number(usage.exact_tokens)} tokens`));
    if (usage.lost_tokens) line.append(make("span", "", `${number(usage.lost_tokens)} dropped`));
  }
  if (ended) line.append(make("span", "", ended));
  return line;
}

/** Let a message be changed in its place; done: is called with the new text. */
export function editor(box, message, done) {
  const text = make("textarea"), line = make("div", "after"), form = make("form", "editor");
  text.value = message.content;
  text.setAttribute("aria-label", "Your message");
  text.rows = Math.min(12, message.content.split("\n").length + 1);
  const close = () => { form.remove(); for (const part of box.children) part.hidden = false; };
  const save = make("button", "act", "Send");
  line.append(save, button("Cancel", "Keep the message as it was", close));
  form.append(text, line);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (text.value.trim()) done(text.value.trim());
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); close(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
  });
  for (const part of box.children) part.hidden = true;
  box.append(form);
  text.focus();
}

/** The message in the field, with its files; the field is empty then. */
export function written() {
  const message = { role: "user", content: by("prompt").value.trim() };
  if (attached().length) message.files = attached();
  by("prompt").value = "";
  clear();
  return message;
}

/** A conversation as Markdown. */
export function exported(talk) {
  const names = { user: "You", assistant: "Answer" };
  const parts = [`# ${talk.title}`, `Method ${talk.method}${talk.budget ? `, budget ${talk.budget}` : ""}.`];
  if (talk.system) parts.push("## System prompt", talk.system);
  for (const message of talk.messages) parts.push(`## ${names[message.role]}`, withFiles(message));
  return parts.join("\n\n") + "\n";
}
