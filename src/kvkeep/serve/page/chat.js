// The chat page: conversations, their answers, and the panel of what the model remembers.

import { cancel, follow, get, remove as removed, Refused, setKey, stream } from "./api.js";
import { attach, attached, clear, withFiles } from "./attachments.js";
import { by, download, make } from "./dom.js";
import { after, BROKEN, content, CUT, editor, element, exported, STOPPED, written } from "./messages.js";
import { bytes, number, show } from "./memory.js";
import { fill, LABELS, onSampling, sampling, settings, showSettings } from "./settings.js";
import { begin, branch, change, random, received, remove, takeOver, talks, title } from "./talks.js";

const HERE = "kvkeep.here", DRAFT = "kvkeep.draft";  // of this tab: the open conversation, and the text that is not sent
const FIRST_LOOK_MS = 400, LOOK_MS = 1000, SERVER_MS = 5000, COLUMNS = 320;
const AGAIN_MS = [300, 700, 1500];  // waits before an answer is followed once more

let here = null;                // the conversation that is shown; null: a new one
let model = "";
const running = new Map();      // answers that this tab receives, by conversation: { control, message, reading, left, draw }

// -- coming in --------------------------------------------------------------------------------------------

async function come() {
  try {
    const [one] = (await get("/v1/models")).data;
    fill(await get("/v1/methods"), one);
    model = one.id;
    by("prompt").value ||= sessionStorage.getItem(DRAFT) ?? "";
    const last = location.hash.slice(1) || sessionStorage.getItem(HERE);
    open(talks.find((talk) => talk.id === last) ?? null);
    grow();
    server();
  } catch (error) {
    if (error.status === 401) askKey();
    else notice(said(error), come);
  }
}

function askKey() {
  const dialog = by("key-dialog");
  by("key-wrong").hidden = !sessionStorage.getItem("kvkeep.key");
  if (!dialog.open) dialog.showModal();
}
by("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(by("key").value.trim());
  by("key").value = "";
  by("key-dialog").close();
  come();
});

/** What went wrong, in the words of this page. */
function said({ code, param, message }) {
  if (code === "context_length_exceeded") return `This conversation is longer than the model can read at once. Shorten the message or begin a new conversation; with the method "endless" it can be of any length. (${message.split(/[;.] /, 1)[0]}.)`;
  if (code === "session" || code === "session_differs") return "The server remembers this conversation by another model, version or method. Begin a new one.";
  if (param in LABELS) return message.replace(`'${param}'`, LABELS[param]);
  return message;
}

/** Say what went wrong, and offer to do it again. */
function notice(text, again) {
  const box = by("notice");
  box.hidden = !text;
  box.replaceChildren(text);
  if (text && again) {
    const button = make("button", "", "Try again");
    button.type = "button";
    button.addEventListener("click", () => { notice(""); again(); });
    box.append(button);
  }
}

// -- the list ---------------------------------------------------------------------------------------------

function list() {
  by("talks").replaceChildren(...talks.map((talk) => {
    const line = make("li", `${talk === here ? "here" : ""} ${talk.messages.at(-1)?.running ? "busy" : ""}`);
    const button = make("button", "open", talk.title || "Untitled"), away = make("button", "remove", "\u2715");
    button.type = away.type = "button";
    if (talk === here) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => open(talk));
    away.setAttribute("aria-label", `Delete ${talk.title || "this conversation"}`);
    away.addEventListener("click", () => forget(talk));
    line.append(button, away);
    return line;
  }));
}

function forget(talk) {
  if (!confirm(`Delete "${talk.title}"? There is no other copy: its text is stored in this browser only.`)) return;
  running.get(talk.id)?.control.abort();
  forgotten(talk.id);
  remove(talk);
  if (talk === here) open(null); else list();
}

/** Delete a conversation at the server, which stops its answer first. Otherwise it would go by itself, later. */
async function forgotten(id) {
  for (const wait of AGAIN_MS) {
    try { await removed(`/v1/sessions/${id}`); return; } catch (error) { if (error.status !== 409) return; }
    await new Promise((done) => setTimeout(done, wait));
  }
}

function open(talk) {
  here = talk;
  history.replaceState(null, "", talk ? `#${talk.id}` : location.pathname);
  sessionStorage.setItem(HERE, talk?.id ?? "");
  notice("");
  by("welcome").hidden = talk !== null;
  by("title").textContent = talk?.title || "New conversation";
  by("kind").textContent = talk ? [talk.method, talk.budget && `budget ${talk.budget}`].filter(Boolean).join(", ") : model;
  document.title = talk?.title ? `${talk.title} \u00b7 kvkeep` : "kvkeep";
  showSettings(talk);
  toggleSettings(talk === null);
  messages(talk);
  const last = talk && !running.has(talk.id) && talk.messages.at(-1);
  if (last?.role === "user") notice("This message has no answer.", () => answer(talk));
  else if (last?.ended === BROKEN) notice("The answer broke off.", () => anew(talk));
  if (last?.running) proceed(talk, last);
  list();
  buttons();
  sideways(false);
  by("log").scrollTop = by("log").scrollHeight;
  show(null);
  look(true);
  if (matchMedia("(min-width: 761px)").matches) by("prompt").focus();
}

// -- messages ---------------------------------------------------------------------------------------------

const actions = {
  memory: () => remember(true),
  regenerate: (talk) => { if (!running.has(talk.id)) anew(talk); },
  proceed: (talk) => { if (!running.has(talk.id)) answer(talk, true); },
  edit: (message, talk, box) => {
    if (running.has(talk.id)) return;
    editor(box, message, (text) => {
      const count = talk.messages.indexOf(message) + 1, branches = talk.messages.length > count + 1;
      const changed = branches ? branch(talk, count) : talk;
      change(() => {
        changed.messages[count - 1].content = text;
        changed.messages.splice(count);
        if (branches || count === 1) changed.title = title(text);
      });
      open(changed);
      answer(changed);
    });
  },
};

/** Show the messages of a conversation. */
function messages(talk) {
  const texts = [...(talk?.system ? [{ role: "system", content: talk.system }] : []), ...(talk?.messages ?? [])];
  by("messages").replaceChildren(...texts.map((message) => shown(message, talk)));
}

function shown(message, talk) {
  const run = running.get(talk.id), own = run?.message === message ? run : null;
  const box = element(message, talk, actions, own);
  if (own) draws(talk, box);
  return box;
}

/** Let a running answer be drawn into ``box``, once a frame at most. */
function draws(talk, box) {
  const run = running.get(talk.id), body = box.querySelector(".body");
  let due = false;
  run.draw = () => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      const log = by("log"), follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60, now = running.get(talk.id) === run;
      body.replaceChildren(...content(run.message, now ? run : null));
      box.classList.toggle("waiting", now);
      box.querySelector(".after").replaceWith(after(run.message, talk, actions, now ? run : null));
      if (follows) log.scrollTop = log.scrollHeight;
    });
  };
  run.draw();
}

/** Answer the last message once more. */
function anew(talk) {
  change(() => talk.messages.pop());
  open(talk);
  answer(talk);
}

function request(talk, more, answer) {
  const messages = talk.messages.map((message) => ({ role: message.role, content: withFiles(message) }));
  if (talk.system) messages.unshift({ role: "system", content: talk.system });
  return {
    model, messages, stream: true, stream_options: { include_usage: true }, continue_final_message: more, ...talk.sampling,
    kvkeep: { session: talk.id, answer, ...(talk.method && { method: talk.method }), ...(talk.budget && { budget: talk.budget }) },
  };
}

/** Let the model answer; more: continue the last answer. */
function answer(talk, more = false) {
  const message = more ? talk.messages.at(-1) : { id: random(), role: "assistant", content: "" };
  const name = random(), body = request(talk, more, name);
  change(() => {
    if (!more) talk.messages.push(message);
    Object.assign(message, { running: name, from: message.content.length });
    delete message.ended;
  });
  receive(talk, message, (signal) => stream(body, signal));
}

/** Receive an answer that began before this tab was loaded, or in another one. */
const proceed = (talk, message) => receive(talk, message, null);

/** Receive an answer. start: requests it; null: it was requested before. While the server completes it, a broken
    connection is only made again. */
async function receive(talk, message, start) {
  const run = { control: new AbortController(), message, reading: null, draw: () => {} };
  running.set(talk.id, run);
  received.add(message);
  notice("");
  if (talk === here) {
    messages(talk);
    by("log").scrollTop = by("log").scrollHeight;
  }
  buttons();
  list();
  looking(talk);
  const got = {}, { signal } = run.control;
  let wrong = null;
  for (const wait of [...AGAIN_MS, null]) {
    try {
      await take(start ? start(signal) : follow(talk.id, message.running, signal), run, got, start !== null);
      wrong = null;
    } catch (error) { wrong = signal.aborted ? null : error; }
    if (wrong === null || wait === null || !(wrong.broken || (wrong.status === 404 && !start))) break;
    start = null;
    await new Promise((done) => setTimeout(done, wait));
  }
  ended(talk, message, got, wrong);
  if (!talks.includes(talk)) return;  // it was deleted meanwhile
  if (talk.messages.length === 1 && wrong?.status === 400) {  // as by a wrong budget: it has not begun
    remove(talk);
    if (talk === here) again(talk, said(wrong));
    list();
    return;
  }
  if (talk === here) {
    if (!talk.messages.includes(message)) messages(talk);
    if (wrong) notice(wrong.status === 404 ? "The answer broke off." : said(wrong), message.ended === CUT ? null : message.content ? () => anew(talk) : () => answer(talk));
    else if (talk.messages.at(-1)?.role === "user") notice("This message has no answer.", () => answer(talk));
    if (wrong?.status === 401) askKey();
  }
  run.draw();
  by("status").textContent = wrong ? "" : `The answer has ${message.ended === STOPPED ? "been stopped" : "ended"}.`;
  buttons();
  list();
  const held = await look(talk === here, talk, true);
  if (held) change(() => { message.held = held; });
  run.draw();
  server();
}

/** Take what arrives of an answer into its message and into ``got``. */
async function take(events, run, got, timed) {
  const { message } = run, before = { content: message.content.slice(0, message.from), reasoning: "", calls: [] };
  if (message.from) Object.assign(before, { reasoning: message.reasoning ?? "", calls: message.calls ?? [] });  // it is continued
  let first = 0, began = null, fresh = true;
  for await (const event of events) {
    if (fresh) Object.assign(got, before);  // not before: what is known might be all there is
    fresh = false;
    if (event.reading) {
      began ??= { at: performance.now(), tokens: event.reading[0] };
      reading(run, event.reading, began);
      run.tells = true;
      continue;
    }
    const choice = event.choices?.[0], { content: text = "", reasoning_content: thought = "", tool_calls: calls = [] } = choice?.delta ?? {};
    if (text || thought || calls?.length) {
      first ||= performance.now();
      got.content += text ?? "";
      got.reasoning += thought ?? "";
      for (const call of calls ?? []) {
        const known = got.calls[call.index] ??= { name: "", arguments: "" };
        known.name += call.function?.name ?? "";
        known.arguments += call.function?.arguments ?? "";
      }
      Object.assign(message, { content: got.content, reasoning: got.reasoning, calls: got.calls });
      run.draw();
    }
    if (choice?.finish_reason === "length") got.ended = CUT;
    if (event.usage) got.usage = event.usage;
    if (event.kvkeep?.reuse) got.reuse = event.kvkeep.reuse;
  }
  if (first && timed) got.seconds = (performance.now() - first) / 1000;
}

/** Note how far a prompt is read: [tokens, of]. began: when this was first noted, and with how many. */
function reading(run, found, began) {
  const [tokens, prompt] = found, seconds = (performance.now() - began.at) / 1000;
  run.reading = found;
  run.left = tokens > began.tokens ? (prompt - tokens) * seconds / (tokens - began.tokens) : 0;
  run.draw();
}

/** Keep what an answer has at its end, or nothing if it has nothing. wrong: the error that ended it. */
function ended(talk, message, got, wrong) {
  const stopped = message.ended === STOPPED;
  running.delete(talk.id);
  received.delete(message);
  const more = message.from > 0, written = (got.content ?? "").length > message.from || got.reasoning || got.calls?.length;
  const space = change(() => {
    Object.assign(message, got.content === undefined ? {} : got);
    delete message.running;
    delete message.from;
    if (stopped) message.ended = STOPPED;
    else if (wrong) message.ended = more && !written ? CUT : BROKEN;
    const at = talk.messages.indexOf(message);
    if (at >= 0 && !message.content && !written) talk.messages.splice(at, 1);
  });
  if (!space) notice("This browser has no space left for conversations; delete one.");
}

/** Back to where a conversation begins, with what was written and chosen. */
function again(talk, why) {
  const [message] = talk.messages;
  open(null);
  showSettings(talk, false);
  by("prompt").value = message.content;
  attach((message.files ?? []).map(({ name, text }) => new File([text], name)));
  grow();
  buttons();
  notice(why);
}

// -- what it remembers ------------------------------------------------------------------------------------

/** Ask what a conversation's cache holds: how far its prompt is read, and what to show. Returns what to note beside an
    answer, if it is asked for (noted). */
async function look(texts = false, talk = here, noted = false) {
  if (!talk) return null;
  const panel = !by("memory").hidden && talk === here;
  if (!panel && !noted) return null;
  try {
    const found = await get(`/v1/sessions/${talk.id}/cache?columns=${COLUMNS}${texts && panel ? "&texts=true" : ""}`);
    const run = running.get(talk.id);
    if (run && !run.tells && found.prompt !== null) reading(run, [found.tokens, found.prompt], run.began ??= { at: performance.now(), tokens: found.tokens });
    if (talk === here && !by("memory").hidden) show(found);
    if (found.prompt !== null) return null;
    const memory = Object.entries(found.bytes).filter(([kind]) => kind !== "checkpoint_disk").reduce((sum, [, count]) => sum + count, 0);
    return { entries: found.entries, bytes: memory, where: found.where };
  } catch (error) {
    if (error instanceof Refused && error.status === 404 && talk === here) show(null);
    return null;
  }
}

async function looking(talk) {
  for (let wait = FIRST_LOOK_MS; running.has(talk.id); wait = LOOK_MS) {
    await new Promise((done) => setTimeout(done, wait));
    const run = running.get(talk.id);
    if (!run || document.visibilityState !== "visible") continue;
    run.message.held = await look(false, talk, !run.tells || run.message.content) ?? run.message.held;
    run.draw();
  }
}

function remember(open) {
  by("memory").hidden = !open;
  by("memory-open").setAttribute("aria-expanded", String(open));
  if (open) { look(true); by("memory-close").focus(); } else by("memory-open").focus();
}

async function server() {
  try {
    const found = await get("/v1/memory"), used = found.held / found.total;
    by("meter").firstElementChild.style.width = `${Math.min(100, 100 * used)}%`;
    by("meter").setAttribute("aria-valuemax", found.total);
    by("meter").setAttribute("aria-valuenow", found.held);
    const busy = found.running ? `, ${found.running} answering` : "", waits = found.waiting ? `, ${found.waiting} waiting` : "";
    by("server").textContent = `${bytes(found.held)} of ${bytes(found.total)} for ${number(found.sessions)} ${found.sessions === 1 ? "session" : "sessions"}${busy}${waits}`;
  } catch { by("server").textContent = "The server does not respond."; }
}
setInterval(() => { if (document.visibilityState === "visible" && model) server(); }, SERVER_MS);

// -- controls ---------------------------------------------------------------------------------------------

function buttons() {
  const busy = here !== null && running.has(here.id);
  by("stop").hidden = !busy;
  by("send").hidden = busy;
  by("send").disabled = !(by("prompt").value.trim() || attached().length) || !model;
  by("export").hidden = by("settings-open").hidden = here === null;
}
/** Keep what is written so far: the server might not complete it. */
const keepRunning = () => { if (running.size) change(); };
addEventListener("pagehide", keepRunning);
document.addEventListener("visibilitychange", keepRunning);
function grow() {
  const box = by("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
  sessionStorage.setItem(DRAFT, box.value);
}

function send() {
  if (by("send").disabled || (here && running.has(here.id))) return;
  notice("");
  const message = written();
  if (here) change(() => here.messages.push(message));
  else open(begin({ ...settings(), title: title(message.content || message.files[0].name) }, message));
  grow();
  answer(here);
}

async function attachAll(files) {
  const why = await attach(files);
  if (why) notice(why);
  by("prompt").focus();
}

function stop() {
  const run = running.get(here?.id);
  if (!run) return;
  change(() => { run.message.ended = STOPPED; });
  cancel(here.id, run.message.running).catch(() => {});  // it may have ended
  run.control.abort();
  by("prompt").focus();
}

/** Show the settings, or not. */
function toggleSettings(shown) {
  by("settings").hidden = !shown;
  by("settings-open").setAttribute("aria-expanded", String(shown));
}

by("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
by("prompt").addEventListener("input", () => { grow(); buttons(); });
by("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
by("stop").addEventListener("click", stop);
by("attach").addEventListener("click", () => by("chosen").click());
by("chosen").addEventListener("change", async () => { await attachAll([...by("chosen").files]); by("chosen").value = ""; });
by("main").addEventListener("dragover", (event) => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); });
by("main").addEventListener("drop", (event) => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  attachAll([...event.dataTransfer.files]);
});
by("export").addEventListener("click", () => download(`${here.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}.md`, exported(here)));
by("settings-open").addEventListener("click", () => {
  toggleSettings(by("settings").hidden);
  if (!by("settings").hidden) by("log").scrollTop = 0;
});
onSampling(() => { if (here) change(() => { here.sampling = sampling(); }); });
by("new").addEventListener("click", () => {
  by("prompt").value = "";
  clear();
  open(null);
  grow();
});

function sideways(shown) {
  by("side").classList.toggle("shown", shown);
  by("side-open").setAttribute("aria-expanded", String(shown));
  if (shown) by("side-close").focus();
}
by("side-open").addEventListener("click", () => sideways(true));
by("side-close").addEventListener("click", () => { sideways(false); by("side-open").focus(); });
by("shade").addEventListener("click", () => sideways(false));
by("memory-open").addEventListener("click", () => remember(by("memory").hidden));
by("memory-close").addEventListener("click", () => remember(false));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (by("side").classList.contains("shown")) { sideways(false); by("side-open").focus(); }
  else if (here && running.has(here.id)) stop();
  else if (!by("memory").hidden) remember(false);
});
addEventListener("storage", (event) => {  // another tab wrote
  if (event.key !== "kvkeep.talks") return;
  const before = JSON.stringify(here);
  takeOver();
  if (here && !talks.includes(here)) open(null);
  else if (here && !running.has(here.id) && JSON.stringify(here) !== before) {
    messages(here);
    const last = here.messages.at(-1);
    if (last?.running) proceed(here, last);
    buttons();
  }
  list();
});

come();
