// Markdown as elements. Text of a model only ever becomes text nodes: nothing here reads HTML.

import { block } from "./code.js";

const make = (tag, ...children) => {
  const element = document.createElement(tag);
  element.append(...children);
  return element;
};

const INLINE = new RegExp([
  "(`+)(?<code>[^`]|[^`].*?[^`])\\1(?!`)",
  "\\*\\*(?<strong>\\S|\\S.*?\\S)\\*\\*",
  "\\*(?<em>[^\\s*]|[^\\s*].*?\\S)\\*",
  "(?<!\\w)_(?<under>[^\\s_]|[^\\s_].*?[^\\s_])_(?!\\w)",
  "\\[(?<label>[^\\]]+)\\]\\((?<target>[^()\\s]+)\\)",
  "(?<bare>https?://[^\\s<>()\"]*[^\\s<>()\".,;:!?'])",
].join("|"), "gs");

/** Links lead to the web and nowhere else. */
function link(target, children) {
  let url;
  try { url = new URL(target); } catch { return null; }
  if (!["https:", "http:", "mailto:"].includes(url.protocol)) return null;
  const element = make("a", ...children);
  element.href = url.href;
  element.target = "_blank";
  element.rel = "noopener noreferrer";
  return element;
}

function inline(text, depth = 0) {
  const found = [];
  let at = 0;
  if (depth < 5) for (const match of text.matchAll(INLINE)) {
    const { code, strong, em, under, label, target, bare } = match.groups;
    if (match.index > at) found.push(text.slice(at, match.index));
    if (code !== undefined) found.push(make("code", code));
    else if (strong !== undefined) found.push(make("strong", ...inline(strong, depth + 1)));
    else if (em !== undefined || under !== undefined) found.push(make("em", ...inline(em ?? under, depth + 1)));
    else if (bare !== undefined) found.push(link(bare, [bare]) ?? bare);
    else found.push(link(target, inline(label, depth + 1)) ?? match[0]);
    at = match.index + match[0].length;
  }
  if (at < text.length) found.push(text.slice(at));
  return found;
}

const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?: +|$)(.*)$/;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const HEADING = /^ {0,3}(#{1,6}) +(.*?)(?: +#+)? *$/;
const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
const divides = (line) => line !== undefined && /^[ |:-]*-[ |:-]*$/.test(line) && line.includes("|");

function blocks(lines, depth) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    let match;
    if (!line.trim()) at++;
    else if ((match = FENCE.exec(line))) {
      const end = lines.findIndex((other, index) => index > at && other.trim().startsWith(match[1]));
      const inside = lines.slice(at + 1, end < 0 ? undefined : end);
      found.push(block(inside.join("\n"), match[2]));
      at = end < 0 ? lines.length : end + 1;
    } else if (RULE.test(line)) { found.push(make("hr")); at++; }
    else if ((match = HEADING.exec(line))) { found.push(make(`h${Math.min(5, match[1].length + 2)}`, ...inline(match[2]))); at++; }
    else if (/^ {0,3}>/.test(line) && depth < 8) {
      const inside = [];
      while (at < lines.length && /^ {0,3}>/.test(lines[at])) inside.push(lines[at++].replace(/^ {0,3}> ?/, ""));
      found.push(make("blockquote", ...blocks(inside, depth + 1)));
    } else if (ITEM.test(line) && depth < 8) {
      const ordered = /\d/.test(ITEM.exec(line)[2]), list = make(ordered ? "ol" : "ul");
      if (ordered) list.start = parseInt(ITEM.exec(line)[2], 10);
      while (at < lines.length && (match = ITEM.exec(lines[at])) && /\d/.test(match[2]) === ordered) {
        const inside = [match[3]], indent = match[1].length + 2;
        for (at++; at < lines.length; at++) {
          const next = lines[at], deep = next.length - next.trimStart().length;
          if (next.trim() ? deep < indent : !lines[at + 1] || lines[at + 1].length - lines[at + 1].trimStart().length < indent) break;
          inside.push(next.slice(Math.min(deep, indent)));
        }
        const parts = blocks(inside, depth + 1);
        list.append(make("li", ...(parts[0]?.tagName === "P" ? [...parts[0].childNodes, ...parts.slice(1)] : parts)));
        while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at++;
      }
      found.push(list);
    } else if (line.includes("|") && divides(lines[at + 1])) {
      const row = (text, tag) => make("tr", ...cells(text).map((cell) => make(tag, ...inline(cell))));
      const table = make("table", make("thead", row(line, "th"))), body = make("tbody");
      for (at += 2; at < lines.length && lines[at].includes("|"); at++) body.append(row(lines[at], "td"));
      table.append(body);
      found.push(table);
    } else {
      const inside = [line];
      for (at++; at < lines.length; at++) {
        const next = lines[at];
        if (!next.trim() || FENCE.test(next) || HEADING.test(next) || /^ {0,3}>/.test(next) || ITEM.test(next) || RULE.test(next)) break;
        inside.push(next);
      }
      found.push(make("p", ...inline(inside.join("\n").trim())));
    }
  }
  return found;
}

/** Return the elements of a text. */
export const render = (text) => blocks(text.replaceAll("\r", "").replaceAll("\t", "    ").split("\n"), 0);
