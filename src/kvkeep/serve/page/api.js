// The server as this page speaks to it. The key lives in this tab alone.

const KEY = "kvkeep.key";

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}`, ...more } : more;
}

async function asked(path, options) {
  let found;
  try { found = await fetch(path, { cache: "no-store", ...options }); }
  catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The server does not respond.");
  }
  if (found.ok) return found;
  const body = await found.json().catch(() => null);
  throw new Refused(found.status, body?.error?.message ?? `The server replied with status ${found.status}.`);
}

export const get = async (path) => (await asked(path, { headers: headers() })).json();
export const remove = (path) => asked(path, { method: "DELETE", headers: headers() });

/** Yield the objects of a streamed answer. */
export async function* stream(body, signal) {
  const options = { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body), signal };
  const found = await asked("/v1/chat/completions", options);
  const reader = found.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };  // the connection broke
    });
    if (done) throw new Refused(0, "The answer broke off because the server does not respond.");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;  // a comment, which only keeps the line open
      if (event === "data: [DONE]") return;
      const one = JSON.parse(event.slice(6));
      if (one.error) throw new Refused(500, one.error.message);
      yield one;
    }
  }
}
