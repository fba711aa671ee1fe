// Method, budget and the other settings of a conversation.

import { by, make } from "./dom.js";

const BUDGET = "How much of the text stays in memory: entries per layer (512), bytes (64MB), or a share of the context (25%).";
const SUGGESTED = "512";

/** Methods in a user's words; the others are explained by their group. The first ones of a group are suggested. */
const WORDS = {
  "full": "Keeps everything. Exact, but memory grows with the text.",
  "kv-direct": "Keeps the newest text in memory and the rest elsewhere, usually on disk, where the model still reads it. Same answers as with everything in memory, in less memory.",
  "snapkv+verified": "Answers from the important parts and checks every word against the whole text. Same answers as with everything in memory.",
  "h2o": "Keeps what the model has looked at most, and the newest text. The rest is forgotten. A good first choice for small memory.",
  "snapkv": "Keeps what matters for your last question. The rest is forgotten.",
  "kvzip": "Keeps what is needed to repeat the text, whatever you ask next. The rest is forgotten. Slow to read, good for documents.",
  "revive": "Keeps the important parts exactly and the rest roughly, in fewer bits. Nothing is forgotten completely.",
  "streaming-llm": "Keeps the beginning and the newest text. The middle is forgotten. The conversation can continue indefinitely.",
  "window": "Keeps the newest text only.",
  "kvreviver": "Keeps the important parts exactly and a rough summary of the rest; parts of it can come back.",
};
const GROUPS = {
  exact: ["Same answers as with everything in memory", "Gives the same answers as with everything in memory."],
  reversible: ["May bring back what was evicted", "Moves parts of the text out of memory, and can bring them back."],
  lossy: ["Forgets", "Forgets parts of the text when the budget is full, and may answer differently."],
};

let methods = [], budget = SUGGESTED;

/** Fill the list of methods. standard: method and budget of the server. */
export function fill(found, standard) {
  methods = found;
  budget = standard.budget ?? SUGGESTED;
  const rank = ({ name }) => name === standard.method ? -1 : name in WORDS ? Object.keys(WORDS).indexOf(name) : 99;
  by("method").replaceChildren(...Object.entries(GROUPS).map(([kind, [label]]) => {
    const group = make("optgroup");
    group.label = label;
    group.append(...methods.filter((one) => one.exactness === kind).sort((a, b) => rank(a) - rank(b)).map(({ name }) => {
      const option = make("option", "", name === standard.method ? `${name} (this server's choice)` : name);
      option.value = name;
      return option;
    }));
    return group;
  }));
  by("method").value = standard.method;
  explain();
}

/** Explain the chosen method. A budget that was given stays, also while a method without one is chosen. */
function explain() {
  const method = methods.find((one) => one.name === by("method").value), field = by("budget");
  by("about-method").textContent = WORDS[method?.name] ?? GROUPS[method?.exactness]?.[1] ?? "";
  field.value = method?.budgeted ? budget : "";
  field.placeholder = method?.budgeted ? "" : "none";
  field.disabled = !method?.budgeted || by("method").disabled;
  by("about-budget").textContent = method?.budgeted ? BUDGET : "This method has no budget.";
}
by("method").addEventListener("change", explain);
by("budget").addEventListener("input", () => { budget = by("budget").value; });

/** The settings as they are now; a field that is empty is left to the server. */
export function settings() {
  return {
    method: by("method").value, budget: by("budget").value.trim(), temperature: Number(by("temperature").value),
    length: Number(by("length").value) || null, system: by("system").value.trim(),
  };
}

/** Show the settings of a conversation, of which only temperature and length may still change; null: of a new one. */
export function showSettings(talk) {
  for (const name of ["method", "system"]) by(name).disabled = talk !== null;
  if (talk) {
    by("method").value = talk.method;
    by("temperature").value = talk.temperature ?? 0.7;
    by("length").value = talk.length ?? "";
  }
  by("system").value = talk?.system ?? "";
  explain();
  if (talk) by("budget").value = talk.budget ?? "";
}
