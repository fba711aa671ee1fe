// Method, budget and the other settings of a conversation.

import { by, make } from "./dom.js";

const BUDGET = "How much of the text stays in memory: entries per layer (512), bytes (64MB), or a share of the context (25%).";
const SUGGESTED = "512";

/** Methods in a user's words, the often chosen ones first; the others are explained by their summary. */
const WORDS = {
  "full": "Keeps everything. Exact, but memory grows with the text.",
  "kv-direct": "Keeps the newest text in memory and the rest elsewhere, usually on disk, where the model still reads it. Same answers as with everything in memory, in less memory.",
  "endless": "Exact up to the model's context. Beyond it the conversation continues with the newest text and the passages that match your question.",
  "h2o": "Keeps what the model has looked at most, and the newest text. The rest is forgotten. A good first choice for small memory.",
  "revive": "Keeps the important parts exactly and the rest roughly, in fewer bits. Nothing is forgotten completely.",
  "snapkv+verified": "Answers from the important parts and checks every word against the whole text. Same answers as with everything in memory.",
  "snapkv": "Keeps what matters for your last question. The rest is forgotten.",
  "kvzip": "Keeps what is needed to repeat the text, whatever you ask next. The rest is forgotten. Slow to read, good for documents.",
  "streaming-llm": "Keeps the beginning and the newest text. The middle is forgotten. The conversation can continue indefinitely.",
  "window": "Keeps the newest text only.",
  "kvreviver": "Keeps the important parts exactly and a rough summary of the rest; parts of it can come back.",
};
const OFTEN = ["kv-direct", "full", "endless", "h2o", "revive"];
const GROUPS = { exact: "Same answers as with everything in memory", reversible: "May bring back what was evicted", lossy: "Forgets" };
/** The settings of an answer by their names in requests, and their fields' names. */
const SAMPLING = {
  temperature: "Temperature", top_p: "Top-p", top_k: "Top-k", min_p: "Min-p", repetition_penalty: "Repetition penalty",
  presence_penalty: "Presence penalty", frequency_penalty: "Frequency penalty", seed: "Seed", max_tokens: "Longest answer",
};
export const LABELS = { ...SAMPLING, "kvkeep.method": "Method", "kvkeep.budget": "Budget" };

let methods = [], standard = {}, budget = SUGGESTED;

const about = ({ name, summary }) => WORDS[name] ?? summary;
const short = (text) => {
  const [first] = text.split(/[.:] /, 1);
  return first.length > 72 ? `${first.slice(0, 72).replace(/[ ,;]+[^ ]*$/, "")} …` : first.replace(/\.$/, "");
};

/** Fill the list of methods and the defaults of an answer. found: what the server says of methods and of its model. */
export function fill(found, model) {
  methods = found.data;
  standard = found.default;
  const option = (method) => {
    const choice = method.name === standard.method ? " (default)" : "";
    const made = make("option", "", `${method.name}${choice}: ${short(about(method))}`);
    made.value = method.name;
    return made;
  };
  const first = [standard.method, ...OFTEN.filter((name) => name !== standard.method)];
  const often = first.map((name) => methods.find((one) => one.name === name)).filter(Boolean);
  const rest = methods.filter((one) => !often.includes(one));
  const groups = [["Often chosen", often], ...Object.entries(GROUPS).map(([kind, label]) => [label, rest.filter((one) => one.exactness === kind)])];
  by("method").replaceChildren(...groups.filter(([, list]) => list.length).map(([label, list]) => {
    const group = make("optgroup");
    group.label = label;
    group.append(...list.map(option));
    return group;
  }));
  const defaults = { ...model.kvkeep?.sampling, max_tokens: model.kvkeep?.max_tokens, seed: "random" };
  for (const name of Object.keys(SAMPLING)) by(name).placeholder = defaults[name] ?? "";
}

/** Explain the chosen method. A budget that was given stays, also while a method without one is chosen. */
function explain() {
  const method = methods.find((one) => one.name === by("method").value), field = by("budget");
  by("about-method").textContent = method ? about(method) : "";
  field.value = method?.budgeted ? budget : "";
  field.placeholder = method?.budgeted ? "" : "none";
  field.disabled = !method?.budgeted || by("method").disabled;
  by("about-budget").textContent = method?.budgeted ? BUDGET : "This method has no budget.";
}
by("method").addEventListener("change", explain);
by("budget").addEventListener("input", () => { budget = by("budget").value; });

/** The settings as they are now; a field that is empty is left to the server. */
export function settings() {
  return { method: by("method").value, budget: by("budget").value.trim(), system: by("system").value.trim(), sampling: sampling() };
}

/** The settings of an answer, without those that are left to the server. */
export function sampling() {
  return Object.fromEntries(Object.keys(SAMPLING).filter((name) => by(name).value !== "").map((name) => [name, Number(by(name).value)]));
}

/** Call when a setting of an answer is changed. */
export const onSampling = (call) => { for (const name of Object.keys(SAMPLING)) by(name).addEventListener("change", call); };

/** Show the settings of a conversation; null: those with which a new one begins. begun: only its sampling may still change. */
export function showSettings(talk, begun = talk !== null) {
  const given = talk?.sampling ?? {};
  for (const name of ["method", "system"]) by(name).disabled = begun;
  by("method").value = talk?.method ?? standard.method ?? "";
  budget = talk ? talk.budget : standard.budget ?? SUGGESTED;
  by("system").value = talk?.system ?? "";
  for (const name of Object.keys(SAMPLING)) by(name).value = given[name] ?? "";
  by("sampling").open = Object.keys(given).some((name) => by("sampling").contains(by(name)));
  explain();
  if (begun) by("budget").value = talk.budget ?? "";
}
