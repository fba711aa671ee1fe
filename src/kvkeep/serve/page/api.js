// The server as this page speaks to it. The key lives in this tab alone.

const KEY = "kvkeep.key";

export class Refused extends Error {
  /** status: 0 if there was no response. broken: whether it broke off in the middle. */
  constructor(status, message, { code = null, param = null, broken = false } = {}) {
    super(message);
    Object.assign(this, { status, code, param, broken });
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}`, ...more } : more;
}

async function response(path, options) {
  let found;
  try { found = await fetch(path, { cache: "no-store", ...options }); }
  catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The server does not respond.", { broken: true });
  }
  if (found.ok) return found;
  const { error } = await found.json().catch(() => ({ error: null }));
  throw new Refused(found.status, error?.message ?? `The server replied with status ${found.status}.`, error ?? {});
}

export const get = async (path) => (await response(path, { headers: headers() })).json();
export const remove = (path) => response(path, { method: "DELETE", headers: headers() });

const answer = (session, name) => `/v1/sessions/${session}/answers/${name}`;

/** Stop an answer. The request outlives the page. */
export const cancel = (session, name) => response(`${answer(session, name)}/cancel`, { method: "POST", headers: headers(), keepalive: true });

/** Yield the objects of a new answer's stream, and { reading: [tokens, of] } while its prompt is read. */
export async function* stream(body, signal) {
  const options = { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body), signal };
  yield* events(await response("/v1/chat/completions", options));
}

/** Yield the same of an answer that the server completes, from its beginning. */
export async function* follow(session, name, signal) {
  yield* events(await response(answer(session, name), { headers: headers(), signal }));
}

const READING = /^: reading ([\d,]+) of ([\d,]+) tokens/;

async function* events(found) {
  const reader = found.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };  // the connection broke
    });
    if (done) throw new Refused(0, "The answer broke off because the server does not respond.", { broken: true });
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const event of parts) {
      const reading = READING.exec(event);
      if (reading) yield { reading: reading.slice(1).map((number) => Number(number.replaceAll(",", ""))) };
      if (!event.startsWith("data: ")) continue;  // a comment
      if (event === "data: [DONE]") return;
      const one = JSON.parse(event.slice(6));
      if (one.error) throw new Refused(500, one.error.message, one.error);
      yield one;
    }
  }
}
