import { get, remove as removed, Refused, setKey, stream } from "./api.js";
import { by, make } from "./dom.js";
import { render } from "./markdown.js";
import { bar, bytes, number, said, show } from "./memory.js";
import { begin, keep, remove, reread, talks, title } from "./talks.js";

const BUDGETS = "A budget is entries of each layer (512), bytes (64MB) or a share of the text (25%).";
const HERE = "kvkeep.here", DRAFT = "kvkeep.draft";  // of this tab: the conversation that is open, and what is not sent
const CUT = "cut off at its length";
const LOOK_MS = 1000, SERVER_MS = 5000, COLUMNS = 320;

let here = null;                // the conversation that is shown; null: a new one
let model = "", methods = [];
const running = new Map();      // conversations that are being answered: id to { control, draw }

// -- coming in --------------------------------------------------------------------------------------------

async function come() {
  try {
    const found = await get("/v1/methods");
    model = (await get("/v1/models")).data[0].id;
    methods = found.data;
    fillMethods(found.default);
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
  const dialog = by("door");
  by("door-wrong").hidden = !sessionStorage.getItem("kvkeep.key");
  if (!dialog.open) dialog.showModal();
}
by("door").addEventListener("cancel", (event) => event.preventDefault());
by("door-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(by("key").value.trim());
  by("key").value = "";
  by("door").close();
  come();
});

/** Say what went wrong, and offer to do it again. A key that is not taken any more is asked for. */
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

// -- method and budget ------------------------------------------------------------------------------------

function fillMethods(standard) {
  const select = by("method"), groups = new Map();
  select.replaceChildren();
  for (const method of methods) {
    if (!groups.has(method.exactness)) {
      const group = make("optgroup");
      group.label = { exact: "exact: forgets nothing", reversible: "reversible: can look again", lossy: "lossy: forgets" }[method.exactness] ?? method.exactness;
      groups.set(method.exactness, group);
    }
    const option = make("option", "", method.name);
    option.value = method.name;
    groups.get(method.exactness).append(option);
  }
  select.append(...groups.values());
  select.value = standard.method;
  by("budget").value = standard.budget ?? "";
  aboutMethod();
}
function aboutMethod() {
  const method = methods.find((one) => one.name === by("method").value);
  by("about-method").textContent = method?.summary ?? "";
  by("budget").disabled = !method?.budgeted;
  by("about-budget").textContent = method?.budgeted ? BUDGETS : "It keeps everything, and has no budget.";
  if (!method?.budgeted) by("budget").value = "";
  else if (!by("budget").value) by("budget").value = "512";
}
by("method").addEventListener("change", aboutMethod);

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
  if (!confirm(`Delete "${talk.title}"? Its text is kept in this browser alone.`)) return;
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
  by("messages").replaceChildren(...(talk?.messages ?? []).map((message) => element(message, talk)));
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

function element(message, talk) {
  const box = make("article", `message ${message.role}`), body = make("div", "body");
  box.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
  if (message.role === "user") body.textContent = message.content;
  else body.replaceChildren(...render(message.content));
  box.append(body);
  if (message.role === "assistant") box.append(after(message));
  if (running.get(talk.id)?.message === message) draws(talk, box);
  return box;
}

/** What an answer cost, and what its cache holds now. */
function after(message) {
  const line = make("div", "after"), { usage, seconds, held, ended } = message;
  if (held) {
    const button = make("button", "holds"), part = make("span", "bar");
    button.type = "button";
    button.title = "Show what it remembers";
    part.append(...bar(held.entries));
    button.append(part, make("span", "", `${said(held.entries, held.where)} (${bytes(held.bytes)})`));
    button.addEventListener("click", () => remember(true));
    line.append(button);
  }
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const speed = seconds > 0 && usage.completion_tokens > 1 ? `, ${(usage.completion_tokens / seconds).toFixed(0)} a second` : "";
    line.append(make("span", "", `${number(usage.completion_tokens)} tokens${speed}; read ${number(usage.prompt_tokens - cached)}, knew ${number(cached)}`));
  }
  if (ended) line.append(make("span", "", ended));
  if (ended === CUT && here?.messages.at(-1) === message) {
    const button = make("button", "more", "Continue"), talk = here;
    button.type = "button";
    button.addEventListener("click", () => { if (!running.has(talk.id) && talk.messages.at(-1) === message) answer(talk, true); });
    line.append(button);
  }
  return line;
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
      const log = by("log"), follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
      body.replaceChildren(...render(run.message.content));
      box.classList.toggle("waiting", running.get(talk.id) === run);
      box.querySelector(".after").replaceWith(after(run.message));
      if (follows) log.scrollTop = log.scrollHeight;
    });
  };
  run.draw();
}

/** Write the last answer once more. */
function anew(talk) {
  talk.messages.pop();
  open(talk);
  answer(talk);
}

/** Let the model answer; more: go on with the last answer. */
async function answer(talk, more = false) {
  const message = more ? talk.messages.at(-1) : { role: "assistant", content: "" }, before = message.content, run = { control: new AbortController(), message, draw: () => {} };
  const messages = talk.messages.map(({ role, content }) => ({ role, content }));
  running.set(talk.id, run);
  if (!more) talk.messages.push(message);
  message.running = true;
  delete message.ended;
  notice("");
  if (talk === here) {
    if (more) by("messages").lastElementChild.remove();
    by("messages").append(element(message, talk));
  }
  buttons();
  list();
  looking(talk);
  const own = { session: talk.id, ...(talk.method && { method: talk.method }), ...(talk.budget && { budget: talk.budget }) };
  const body = { model, messages, stream: true, stream_options: { include_usage: true }, temperature: talk.temperature ?? 0.7, continue_final_message: more, kvkeep: own };
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
  if (!keep()) notice("This browser has no room left for texts: delete a conversation.");
  if (wrong?.status === 400 && talk.messages.length === 1) {  // as by a budget that is none: it has not begun
    remove(talk);
    if (talk === here) again(talk.messages[0].content, wrong.message);
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

/** Back to where a conversation begins, with what was written. */
function again(text, why) {
  open(null);
  by("prompt").value = text;
  grow();
  buttons();
  notice(why);
}

// -- what it remembers ------------------------------------------------------------------------------------

/** Ask what a conversation's cache holds; show it if it is open, and note it beside an answer. */
async function look(texts = false, talk = here, message = null) {
  if (!talk) return;
  const shown = !by("memory").hidden && talk === here;
  if (!shown && !message) return;
  try {
    const found = await get(`/v1/sessions/${talk.id}/cache?columns=${COLUMNS}${texts && shown ? "&texts=true" : ""}`);
    if (message) {
      const memory = Object.entries(found.bytes).filter(([kind]) => kind !== "checkpoint_disk").reduce((sum, [, count]) => sum + count, 0);
      message.held = { entries: found.entries, bytes: memory, where: found.where };
    }
    if (talk === here && !by("memory").hidden) show(found);
  } catch (error) {
    if (error instanceof Refused && error.status === 404 && talk === here) show(null);
  }
}

async function looking(talk) {
  while (running.has(talk.id)) {
    await new Promise((done) => setTimeout(done, LOOK_MS));
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
  } catch { by("server").textContent = "The server does not answer."; }
}
setInterval(() => { if (document.visibilityState === "visible" && model) server(); }, SERVER_MS);

// -- controls ---------------------------------------------------------------------------------------------

function buttons() {
  const busy = here !== null && running.has(here.id);
  by("stop").hidden = !busy;
  by("send").hidden = busy;
  by("send").disabled = !by("prompt").value.trim() || !model;
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
  const text = by("prompt").value.trim();
  if (!text || !model || (here && running.has(here.id))) return;
  notice("");
  if (!here) {
    const settings = { method: by("method").value, budget: by("budget").value.trim(), temperature: Number(by("temperature").value) };
    const talk = begin(settings);
    talk.title = title(text);
    open(talk);
  }
  document.querySelector(".more")?.remove();
  const message = { role: "user", content: text };
  here.messages.push(message);
  by("messages").append(element(message, here));
  by("prompt").value = "";
  grow();
  keep();
  answer(here);
  by("log").scrollTop = by("log").scrollHeight;
}

by("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
by("prompt").addEventListener("input", () => { grow(); buttons(); });
by("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
by("stop").addEventListener("click", () => { running.get(here?.id)?.control.abort(); by("prompt").focus(); });
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
  else if (!by("memory").hidden) remember(false);
});
addEventListener("storage", (event) => {  // another tab wrote
  if (event.key !== "kvkeep.talks" || running.size) return;
  reread();
  if (here) open(talks.find((talk) => talk.id === here.id) ?? null); else list();
});

come();
