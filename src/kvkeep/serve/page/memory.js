// The picture of a cache: what became of each token in every layer, as `kvkeep inspect` shows it.

import { by, make } from "./dom.js";

export const number = (count) => count.toLocaleString("en-GB");
export const bytes = (count) => {
  for (const [unit, scale] of [["GB", 1e9], ["MB", 1e6], ["KB", 1e3]]) {
    if (count >= scale) return `${(count / scale).toFixed(count < 10 * scale ? 1 : 0)} ${unit}`;
  }
  return `${count} B`;
};
const percent = (part, whole) => whole ? `${(100 * part / whole).toFixed(part && part < whole ? 1 : 0)} %` : "0 %";

const ORDER = ["resident", "quantised", "merged", "sketched", "checkpointed", "dropped"];
export const named = (state, where) => ({
  resident: "in memory", quantised: "in fewer bits", merged: "merged into others", sketched: "in a summary",
  checkpointed: where === "disk" ? "on disk" : "kept aside", dropped: "forgotten",
})[state] ?? state;

/** The parts of a stacked bar. entries: how many entries are in each state. */
export function bar(entries) {
  const whole = Object.values(entries).reduce((sum, count) => sum + count, 0);
  return ORDER.filter((state) => entries[state] && state !== "dropped").map((state) => {
    const part = make("i", state);
    part.style.width = `${100 * entries[state] / whole}%`;
    return part;
  });
}

/** "12 % in memory, 88 % on disk" */
export function said(entries, where) {
  const whole = Object.values(entries).reduce((sum, count) => sum + count, 0);
  const part = (count) => count < whole / 100 ? "less than 1 %" : `${Math.round(100 * count / whole)} %`;
  return ORDER.filter((state) => entries[state]).map((state) => `${part(entries[state])} ${named(state, where)}`).join(", ");
}

const unpacked = (text) => Uint8Array.from(atob(text), (one) => one.charCodeAt(0));

function colours() {
  const style = getComputedStyle(document.documentElement), probe = make("canvas").getContext("2d", { willReadFrequently: true });
  return Object.fromEntries(ORDER.map((state) => {
    probe.fillStyle = style.getPropertyValue(`--${state}`).trim();
    probe.fillRect(0, 0, 1, 1);
    return [state, probe.getImageData(0, 0, 1, 1).data];
  }));
}

let spans = [], texts = [], session = "", last = null;

/** Show what a cache holds, or that there is nothing to show (null). */
export function show(found) {
  last = found;
  by("memory-empty").hidden = found !== null;
  by("memory-full").hidden = found === null;
  if (found === null) { session = ""; return; }
  facts(found);
  strip(found);
  words(found);
}

function facts(found) {
  const memory = Object.entries(found.bytes).filter(([kind]) => kind !== "checkpoint_disk").reduce((sum, [, count]) => sum + count, 0);
  const disk = found.bytes.checkpoint_disk;
  const list = [make("b", "", found.method), `, ${found.exactness}. `, make("b", "", number(found.tokens)), " tokens read, "];
  list.push(make("b", "", bytes(memory)), disk ? ` in memory and ${bytes(disk)} on disk.` : " in memory.");
  if (found.budget !== null) list.push(` The budget is ${number(found.budget)} entries per layer.`);
  by("facts").replaceChildren(...list);
  by("shares").replaceChildren(...bar(found.entries));
  const whole = Object.values(found.entries).reduce((sum, count) => sum + count, 0);
  by("legend").replaceChildren(...ORDER.filter((state) => found.entries[state]).map((state) => {
    const line = make("li");
    line.append(make("i", state), make("span", "", named(state, found.where)), make("span", "", percent(found.entries[state], whole)));
    return line;
  }));
  by("strip").setAttribute("aria-label", `Every layer from top to bottom, every token from left to right: ${said(found.entries, found.where)}`);
}

function strip(found) {
  const canvas = by("strip"), palette = colours();
  canvas.width = Math.max(1, found.columns);
  canvas.height = Math.max(1, found.layers);
  canvas.style.height = `${Math.min(180, Math.max(60, found.layers * 6))}px`;
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
  for (const [state, packed] of Object.entries(found.map)) {
    const shares = unpacked(packed), [red, green, blue] = palette[state];
    for (let at = 0; at < shares.length; at++) {
      const share = shares[at] / 255;
      image.data[4 * at] += share * red;
      image.data[4 * at + 1] += share * green;
      image.data[4 * at + 2] += share * blue;
      image.data[4 * at + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
}

/** Shade the text token by token. Texts come once an answer has ended; until then those that are known are shaded. */
function words(found) {
  const box = by("words");
  if (session !== found.session || found.tokens < spans.length) { spans = []; texts = []; box.replaceChildren(); }
  session = found.session;
  if (found.texts) {
    const same = found.texts.slice(0, texts.length).every((text, at) => text === texts[at]);
    if (!same) { spans = []; box.replaceChildren(); }
    texts = found.texts;
    const special = new Set(found.special);
    while (spans.length < texts.length) {
      const span = make("span", "t", special.has(spans.length) ? "" : texts[spans.length]);
      spans.push(span);
      box.append(span);
    }
  }
  const kept = Object.entries(found.kept).map(([state, packed]) => [state, unpacked(packed)]);
  const resident = found.kept.resident ? unpacked(found.kept.resident) : null;
  for (let slot = 0; slot < Math.min(spans.length, found.tokens); slot++) {
    const share = resident ? resident[slot] : 0;
    let other = "resident", most = 0;
    for (const [state, shares] of kept) {
      if (state !== "resident" && shares[slot] > most) { most = shares[slot]; other = state; }
    }
    const tenths = share === 0 ? 0 : Math.max(1, Math.round(share / 25.5)), name = `t ${other} s${tenths}`;
    if (spans[slot].className !== name) spans[slot].className = name;
  }
}

by("strip").addEventListener("click", (event) => {
  if (!last || !spans.length) return;
  const box = event.target.getBoundingClientRect();
  const slot = Math.min(spans.length - 1, Math.floor((event.clientX - box.left) / box.width * last.tokens));
  for (const one of by("words").querySelectorAll(".found")) one.classList.remove("found");
  spans[slot].classList.add("found");
  spans[slot].scrollIntoView({ block: "center" });
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (last) strip(last); });
