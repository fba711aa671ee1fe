// The chat page: conversations, their answers, and the panel of what the model remembers.

import { get, remove as removed, Refused, setKey, stream } from "./api.js";
import { attach, attached, withFiles } from "./attachments.js";
import { by, download, make } from "./dom.js";
import { after, content, CUT, editor, element, exported, written } from "./messages.js";
import { bytes, number, show } from "./memory.js";
import { fill, settings, showSettings } from "./settings.js";
import { begin, keep, remove, reread, talks, title } from "./talks.js";

const HERE = "kvkeep.here", DRAFT = "kvkeep.draft";  // of this tab: the open conversation, and the text that is not sent
const FIRST_LOOK_MS = 400, LOOK_MS = 1000, SERVER_MS = 5000, COLUMNS = 320;

let here = null;                // the conversation that is shown; null: a new one
let model = "";
const running = new Map();      // conversations that are being answered: id to { control, message, reading, draw }

// -- coming in --------------------------------------------------------------------------------------------

async function come() {
  try {
    const found = await get("/v1/methods");
    model = (await get("/v1/models")).data[0].id;
    fill(found.data, found.default);
    by("prompt").value ||= sessionStorage.getItem(DRAFT) ?? "";
    const last = location.hash.slice(1) || sessionStorage.getItem(HERE);
    open(talks.find((talk) => talk.id === last) ?? null);
    grow();
    server();
  } catch (error) {
    if (error.status === 401) askKey();
    else notice(error.message, come);
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
    const line = make("li", `${talk === here ? "here" : ""} ${running.has(talk.id) ? "busy" : ""}`);
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
  removed(`/v1/sessions/${talk.id}`).catch(() => {});  // its cache would go by itself, later
  remove(talk);
  if (talk === here) open(null); else list();
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
  else if (last?.ended === "broke off") notice("The answer broke off.", () => anew(talk));
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
      message.content = text;
      talk.messages.splice(talk.messages.indexOf(message) + 1);
      if (talk.messages.length === 1) talk.title = title(text);
      keep();
      open(talk);
      answer(talk);
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
  talk.messages.pop();
  open(talk);
  answer(talk);
}

function request(talk, more) {
  const messages = talk.messages.map((message) => ({ role: message.role, content: withFiles(message) }));
  if (talk.system) messages.unshift({ role: "system", content: talk.system });
  return {
    model, messages, stream: true, stream_options: { include_usage: true }, temperature: talk.temperature ?? 0.7, continue_final_message: more,
    ...(talk.length && { max_tokens: talk.length }),
    kvkeep: { session: talk.id, ...(talk.method && { method: talk.method }), ...(talk.budget && { budget: talk.budget }) },
  };
}

/** Let the model answer; more: continue the last answer. */
async function answer(talk, more = false) {
  const message = more ? talk.messages.at(-1) : { role: "assistant", content: "" }, before = message.content;
  const run = { control: new AbortController(), message, reading: null, draw: () => {} }, body = request(talk, more);
  running.set(talk.id, run);
  if (!more) talk.messages.push(message);
  message.running = true;
  delete message.ended;
  notice("");
  if (talk === here) {
    messages(talk);
    by("log").scrollTop = by("log").scrollHeight;
  }
  buttons();
  list();
  looking(talk);
  let first = 0, wrong = null;
  try {
    for await (const event of stream(body, run.control.signal)) {
      const choice = event.choices[0];
      if (choice?.delta.content) {
        first ||= performance.now();
        message.content += choice.delta.content;
        run.draw();
      }
      if (choice?.finish_reason === "length") message.ended = CUT;
      if (event.usage) message.usage = event.usage;
    }
    message.seconds = first && (performance.now() - first) / 1000;
  } catch (error) {
    if (run.control.signal.aborted) message.ended = "stopped";
    else wrong = error;
  }
  running.delete(talk.id);
  delete message.running;
  if (!message.content && (wrong || message.ended === "stopped")) talk.messages.splice(talk.messages.indexOf(message), 1);
  else if (wrong) message.ended = more && message.content === before ? CUT : "broke off";
  if (!talks.includes(talk)) return;  // it was deleted meanwhile
  if (!keep()) notice("This browser has no space left for conversations; delete one.");
  if (wrong?.status === 400 && talk.messages.length === 1) {  // as by a wrong budget: it has not begun
    remove(talk);
    if (talk === here) again(talk, wrong.message);
    list();
    return;
  }
  if (wrong && talk === here) {
    if (!message.content) by("messages").lastElementChild?.remove();
    notice(wrong.message, message.ended === CUT ? null : message.content ? () => anew(talk) : () => answer(talk));
    if (wrong.status === 401) askKey();
  } else if (!message.content && talk === here) open(talk);
  run.draw();
  by("status").textContent = wrong ? "" : `The answer has ${message.ended === "stopped" ? "been stopped" : "ended"}.`;
  buttons();
  list();
  await look(talk === here, talk, message);
  run.draw();
  keep();
  server();
}

/** Back to where a conversation begins, with what was written and chosen. */
function again(talk, why) {
  const [message] = talk.messages;
  open(null);
  for (const name of ["method", "system"]) by(name).value = talk[name];
  by("method").dispatchEvent(new Event("change"));
  by("prompt").value = message.content;
  attach((message.files ?? []).map(({ name, text }) => new File([text], name)));
  grow();
  buttons();
  notice(why);
}

// -- what it remembers ------------------------------------------------------------------------------------

/** Ask what a conversation's cache holds: how far its prompt is read, what to note beside an answer, and to show. */
async function look(texts = false, talk = here, message = null) {
  if (!talk) return;
  const panel = !by("memory").hidden && talk === here;
  if (!panel && !message) return;
  try {
    const found = await get(`/v1/sessions/${talk.id}/cache?columns=${COLUMNS}${texts && panel ? "&texts=true" : ""}`);
    const run = running.get(talk.id);
    if (run) run.reading = found.prompt === null ? null : found;
    if (message && found.prompt === null) {
      const memory = Object.entries(found.bytes).filter(([kind]) => kind !== "checkpoint_disk").reduce((sum, [, count]) => sum + count, 0);
      message.held = { entries: found.entries, bytes: memory, where: found.where };
    }
    if (talk === here && !by("memory").hidden) show(found);
  } catch (error) {
    if (error instanceof Refused && error.status === 404 && talk === here) show(null);
  }
}

async function looking(talk) {
  for (let wait = FIRST_LOOK_MS; running.has(talk.id); wait = LOOK_MS) {
    await new Promise((done) => setTimeout(done, wait));
    const run = running.get(talk.id);
    if (!run || document.visibilityState !== "visible") continue;
    await look(false, talk, run.message);
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
/** Keep what is written so far of answers that break off when the page goes. */
const keepRunning = () => { if (running.size) keep(); };
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
  if (!here) {
    const talk = begin(settings());
    talk.title = title(message.content || message.files[0].name);
    open(talk);
  }
  here.messages.push(message);
  grow();
  keep();
  answer(here);
}

async function attachAll(files) {
  const why = await attach(files);
  if (why) notice(why);
  by("prompt").focus();
}

function stop() {
  running.get(here?.id)?.control.abort();
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
for (const name of ["temperature", "length"]) by(name).addEventListener("change", () => {
  if (!here) return;
  const { temperature, length } = settings();
  Object.assign(here, { temperature, length });
  keep();
});
by("new").addEventListener("click", () => open(null));

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
  if (event.key !== "kvkeep.talks" || running.size) return;
  reread();
  if (here) open(talks.find((talk) => talk.id === here.id) ?? null); else list();
});

come();
