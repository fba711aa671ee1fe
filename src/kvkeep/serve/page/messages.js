// A message as an element, with what can be done with it.

import { attached, clear, withFiles } from "./attachments.js";
import { by, copy, make } from "./dom.js";
import { render } from "./markdown.js";
import { bar, bytes, number, said } from "./memory.js";
import { random } from "./talks.js";

const LONG = 4000, BEGINNING = 600;  // characters of a message that is folded, and of what is shown of it

export const CUT = "cut off at its length", STOPPED = "stopped", BROKEN = "broke off";

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
  box.setAttribute("aria-label", { user: "You", system: "System prompt", assistant: "Answer", tool: "Result of a tool" }[message.role]);
  if (message.role === "assistant") {
    body.replaceChildren(...content(message, run));
    box.append(body, after(message, talk, actions, run));
    return box;
  }
  if (message.role === "tool") body.append(folded(message, "result", "Result of a tool", code(message.content)));
  else {
    for (const { name } of message.files ?? []) body.append(make("span", "file", name));
    const { content: text } = message, long = text.length > LONG;
    body.append(make("div", "", long ? `${text.slice(0, BEGINNING)} …` : text));
    if (long) body.append(folded(message, "all", `All ${number(text.length)} characters`, make("div", "", text)));
  }
  box.append(body);
  if (message.role === "user") box.append(under(message, talk, actions));
  return box;
}

// -- folded parts -----------------------------------------------------------------------------------------

const unfolded = new WeakMap();  // messages: the names of their parts that a reader has unfolded

/** A part that is shown when its title is clicked. It stays as it is while the message grows. */
function folded(message, name, title, ...inside) {
  const box = make("details", "folded"), open = unfolded.get(message) ?? new Set();
  unfolded.set(message, open);
  box.open = open.has(name);
  box.addEventListener("toggle", () => { if (box.open) open.add(name); else open.delete(name); });
  box.append(make("summary", "", title), ...inside);
  return box;
}

function code(text) {
  const pre = make("pre");
  pre.append(make("code", "", text));
  pre.tabIndex = 0;
  return pre;
}

function indented(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

/** The reasoning of models that write it within their answer, and the rest. */
function split({ content, reasoning = "" }) {
  const [, inside, rest] = /^\s*<think>([^]*?)(?:<\/think>([^]*)|$)/.exec(content) ?? [];
  return inside === undefined ? [reasoning, content] : [reasoning + inside, rest ?? ""];
}

/** The text of an answer with its reasoning and calls folded, or how far its prompt is read. */
export function content(message, run) {
  const [reasoning, text] = split(message), calls = message.calls ?? [], parts = [];
  if (reasoning.trim()) {
    const inside = make("div", "thought");
    inside.append(...render(reasoning.trim()));
    parts.push(folded(message, "reasoning", run && !text && !calls.length ? "Reasoning …" : "Reasoning", inside));
  }
  parts.push(...render(text));
  calls.forEach((call, at) => parts.push(folded(message, `call ${at}`, `Call of ${call.name}`, code(indented(call.arguments)))));
  return parts.length || !run ? parts : [reading(run)];
}

/** How far a prompt is read, and about how long the rest takes. */
function reading({ reading: found, left }) {
  const line = make("p", "reading");
  if (!found) { line.textContent = "Waiting"; return line; }
  const part = make("progress"), [tokens, prompt] = found;
  part.max = prompt;
  part.value = tokens;
  part.setAttribute("aria-label", "Reading the prompt");
  line.append(part, `Reading ${number(tokens)} of ${number(prompt)} tokens`);
  if (left >= 2) line.append(make("span", "left", `, about ${duration(left)} left`));
  return line;
}

const duration = (seconds) => seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`;

// -- below a message --------------------------------------------------------------------------------------

function under(message, talk, actions) {
  const line = make("div", "after");
  line.append(copying(() => withFiles(message)), button("Edit", "Change this message and get a new answer", () => actions.edit(message, talk, line.parentElement)));
  return line;
}

/** What of a prompt was read, in the server's words if it says them. */
function reused({ usage, reuse }) {
  if (reuse) return reuse;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0, prompt = usage.prompt_tokens;
  if (!cached) return `read all ${number(prompt)} tokens of the prompt`;
  return `reused ${number(cached)} of ${number(prompt)} tokens, read ${number(prompt - cached)}`;
}

/** What can be done with an answer, what it cost, and what its cache holds now. */
export function after(message, talk, actions, run) {
  const line = make("div", "after"), { usage, seconds, held, ended } = message;
  const last = talk.messages.at(-1) === message;
  if (!run) {
    line.append(copying(() => split(message)[1].trim()));
    if (last) line.append(button("Regenerate", "Get another answer", () => actions.regenerate(talk)));
    if (last && message.content && [CUT, STOPPED, BROKEN].includes(ended)) {
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
    const speed = seconds > 0 && usage.completion_tokens > 1 ? `, ${(usage.completion_tokens / seconds).toFixed(0)} per second` : "";
    line.append(make("span", "", `${number(usage.completion_tokens)} tokens${speed}`), make("span", "reuse", reused(message)));
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
  const message = { id: random(), role: "user", content: by("prompt").value.trim() };
  if (attached().length) message.files = attached();
  by("prompt").value = "";
  clear();
  return message;
}

/** A conversation as Markdown. */
export function exported(talk) {
  const names = { user: "You", assistant: "Answer", tool: "Result of a tool" };
  const parts = [`# ${talk.title}`, `Method ${talk.method}${talk.budget ? `, budget ${talk.budget}` : ""}.`];
  if (talk.system) parts.push("## System prompt", talk.system);
  for (const message of talk.messages) parts.push(`## ${names[message.role]}`, withFiles(message));
  return parts.join("\n\n") + "\n";
}
