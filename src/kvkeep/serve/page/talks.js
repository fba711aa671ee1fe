// Conversations, whose texts this browser keeps for all of its tabs. The server knows a conversation by its id and keeps
// its cache, and for a while its answers.

const STORE = "kvkeep.talks";

export const random = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export const talks = [];
/** Messages that this tab receives: it knows more of them than what is stored. */
export const received = new Set();
/** When this tab added messages, by their ids. A tab that has not seen them yet may store a conversation without them. */
const added = new Map();
const UNSEEN_MS = 3000;
/** Ids of conversations for whose present state the browser had no space: this tab alone knows it. */
let unstored = new Set();

function stored() {
  try {
    const found = JSON.parse(localStorage.getItem(STORE) ?? "[]");
    if (!Array.isArray(found)) return [];
    for (const talk of found) talk.messages.forEach((message, at) => { message.id ??= `m${at}`; });
    return found;
  } catch { return []; }
}

/** Give ``mine`` the fields of ``other``, of another tab. */
function taken(mine, other) {
  if (received.has(mine)) {
    if (other.ended) mine.ended = other.ended;  // it was stopped there
    return mine;
  }
  for (const name of Object.keys(mine)) if (!(name in other)) delete mine[name];
  return Object.assign(mine, other);
}

/** Take over what is stored, which another tab may have changed. Known conversations and messages stay the same objects.
    Returns whether the other tab had not seen messages of this one, which stay. */
function reread() {
  const known = new Map(talks.map((talk) => [talk.id, talk])), found = stored(), there = new Set(found.map(({ id }) => id));
  const isNew = ({ id }) => Date.now() - (added.get(id) ?? 0) < UNSEEN_MS;
  const begun = talks.filter((talk) => !there.has(talk.id) && (unstored.has(talk.id) || talk.messages.some(isNew)));
  let unseen = begun.length > 0;
  talks.splice(0, talks.length, ...begun, ...found.map((other) => {
    const mine = known.get(other.id);
    if (!mine) return other;
    if (unstored.has(mine.id)) return mine;
    const messages = new Map(mine.messages.map((message) => [message.id, message]));
    const ids = new Set(other.messages.map((message) => message.id));
    const kept = mine.messages.filter((message) => !ids.has(message.id) && isNew(message));
    unseen ||= kept.length > 0;
    other.messages = other.messages.map((message) => messages.has(message.id) ? taken(messages.get(message.id), message) : message);
    other.messages.push(...kept);
    return Object.assign(mine, other);
  }));
  return unseen;
}

/** Store all conversations; returns whether there was space. */
function store() {
  try { localStorage.setItem(STORE, JSON.stringify(talks)); } catch {
    const there = new Map(stored().map((talk) => [talk.id, JSON.stringify(talk)]));
    unstored = new Set(talks.filter((talk) => there.get(talk.id) !== JSON.stringify(talk)).map(({ id }) => id));
    return false;
  }
  unstored.clear();
  return true;
}

/** Take over what another tab has stored, and store what it had not seen. */
export function takeOver() {
  if (reread()) store();
}

/** Change conversations as they are stored now, so that no tab undoes what another one did; returns whether there was space. */
export function change(make = () => {}) {
  reread();
  const all = () => new Set(talks.flatMap((talk) => talk.messages)), before = all();
  make();
  const after = all();
  for (const message of after) if (!before.has(message)) added.set(message.id, Date.now());
  for (const message of before) if (!after.has(message)) added.delete(message.id);
  return store();
}

export function begin(settings, first) {
  const talk = { id: `page-${random()}`, title: "", messages: [first], ...settings };
  change(() => talks.unshift(talk));
  return talk;
}

/** Begin another conversation with the first ``count`` messages of ``talk``, which stays as it is. */
export function branch(talk, count) {
  const copy = { ...structuredClone(talk), id: `page-${random()}` };
  copy.messages = copy.messages.slice(0, count).map((message) => ({ ...message, id: random() }));
  change(() => talks.unshift(copy));
  return copy;
}

export const remove = (talk) => change(() => { if (talks.includes(talk)) talks.splice(talks.indexOf(talk), 1); });

export const title = (text) => {
  const line = text.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 58)}…` : line;
};

reread();
