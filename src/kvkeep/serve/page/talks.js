// Conversations, whose texts this browser keeps for all of its tabs. The server knows a conversation by its id and keeps
// its cache, and for a while its answers.

const STORE = "kvkeep.talks";

export const random = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export const talks = [];
/** Messages that this tab receives: it knows more of them than what is stored. */
export const received = new Set();

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

/** Take over what is stored, which another tab may have changed. Known conversations and messages stay the same objects. */
export function reread() {
  const known = new Map(talks.map((talk) => [talk.id, talk]));
  talks.splice(0, talks.length, ...stored().map((other) => {
    const mine = known.get(other.id);
    if (!mine) return other;
    const messages = new Map(mine.messages.map((message) => [message.id, message]));
    other.messages = other.messages.map((message) => messages.has(message.id) ? taken(messages.get(message.id), message) : message);
    return Object.assign(mine, other);
  }));
}

/** Change conversations as they are stored now, so that no tab undoes what another one did; returns whether there was space. */
export function change(make = () => {}) {
  reread();
  make();
  try { localStorage.setItem(STORE, JSON.stringify(talks)); return true; } catch { return false; }
}

export function begin(settings, first) {
  const talk = { id: `page-${random()}`, title: "", messages: [first], ...settings };
  change(() => talks.unshift(talk));
  return talk;
}

export const remove = (talk) => change(() => { if (talks.includes(talk)) talks.splice(talks.indexOf(talk), 1); });

export const title = (text) => {
  const line = text.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 58)}…` : line;
};

reread();
