// Conversations, whose texts this browser keeps. The server knows a conversation by its id and keeps only its cache.

const STORE = "kvkeep.talks";

function read() {
  try {
    const found = JSON.parse(localStorage.getItem(STORE) ?? "[]");
    return Array.isArray(found) ? found.map(halted) : [];
  } catch { return []; }
}

/** Return a conversation whose last answer may have been kept while it was written: it broke off there. */
function halted(talk) {
  const last = talk.messages?.at(-1);
  if (!last?.running) return talk;
  delete last.running;
  if (last.content) last.ended = "broke off";
  else talk.messages.pop();
  return talk;
}

const random = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export const talks = read();

/** Take over what another tab has written. */
export function reread() {
  talks.splice(0, talks.length, ...read());
}

/** Keep all; returns whether there was room. */
export function keep() {
  try { localStorage.setItem(STORE, JSON.stringify(talks)); return true; } catch { return false; }
}

export function begin(settings) {
  const talk = { id: `page-${random()}`, title: "", messages: [], ...settings };
  talks.unshift(talk);
  return talk;
}

export function remove(talk) {
  talks.splice(talks.indexOf(talk), 1);
  keep();
}

export const title = (text) => {
  const line = text.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 58)}…` : line;
};
