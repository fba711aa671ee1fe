// Blocks of code: their language, a button that copies them, and colours.

import { copy, make } from "./dom.js";

const HASH = /^(py|python|sh|bash|shell|zsh|console|rb|ruby|r|ya?ml|toml|ini|make|makefile|dockerfile|perl|pl|nix|elixir|ex|julia|jl)$/;
const DASHES = /^(sql|lua|hs|haskell|elm|ada|vhdl)$/;
const MARKUP = /^(html|xml|svg|vue)$/;
const PLAIN = /^(|text|txt|plain|plaintext|md|markdown|output|log|csv|diff)$/;
const KEYWORDS = new Set((
  "abstract and as assert async await begin bool boolean break byte case catch char class const constexpr continue crate def default del delete "
  + "do double elif else elseif elsif end enum esac except export extends extern false False fi final finally float fn for foreach from func "
  + "function global go goto if impl implements import in include inline instanceof int interface is lambda let local long loop match mod module "
  + "mut namespace new nil None nonlocal not null nullptr of operator or override package pass private protected pub public raise ref require "
  + "return self Self short signed sizeof static str string struct super switch template then this throw throws trait true True try type typedef "
  + "typename typeof union unsafe unsigned until use using val var virtual void volatile when where while with yield").split(" "));
const SQL = new Set((
  "add all alter and as asc between by case column create cross default delete desc distinct drop else end exists foreign from full group having "
  + "in index inner insert into is join key left like limit not null offset on or order outer primary references right select set table then union "
  + "unique update values view when where with").split(" "));

const STRING = '"""[^]*?(?:"""|$)|\'\'\'[^]*?(?:\'\'\'|$)|"(?:\\\\.|[^"\\\\\\n])*"?|\'(?:\\\\.|[^\'\\\\\\n])*\'?|`(?:\\\\.|[^`\\\\])*`?';
const NUMBER = "(?<![\\w.])(?:0[xX][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)";

function rules(language) {
  const comment = HASH.test(language) ? "(?<![^\\s;])#[^\\n]*" : DASHES.test(language) ? "--[^\\n]*|/\\*[^]*?(?:\\*/|$)"
    : "//[^\\n]*|/\\*[^]*?(?:\\*/|$)";
  if (MARKUP.test(language)) return `(?<comment><!--[^]*?(?:-->|$))|(?<string>(?<==)"[^"]*"?)|(?<keyword></?[\\w:-]+|/?>)`;
  return `(?<comment>${comment})|(?<string>${STRING})|(?<number>${NUMBER})|(?<word>[A-Za-z_$][\\w$]*)(?=(?<call>\\()?)`;
}

/** The parts of a text of code, as text and elements. */
function coloured(text, language) {
  if (PLAIN.test(language)) return [text];
  const found = [], sql = language === "sql";
  let at = 0;
  for (const match of text.matchAll(new RegExp(rules(language), "g"))) {
    const { comment, string, number, keyword, word, call } = match.groups;
    const known = word !== undefined && (sql ? SQL.has(word.toLowerCase()) : KEYWORDS.has(word));
    const kind = comment ? "comment" : string ? "string" : number ? "number" : keyword || known ? "keyword" : call !== undefined ? "call" : "";
    if (!kind) continue;
    found.push(text.slice(at, match.index), make("span", kind, match[0]));
    at = match.index + match[0].length;
  }
  return [...found, text.slice(at)];
}

/** A block of code. language: the word after its fence. */
export function block(text, language) {
  const box = make("div", "code"), bar = make("div", "code-bar"), pre = make("pre"), code = make("code"), button = make("button", "copy", "Copy");
  button.type = "button";
  button.title = "Copy this code";
  button.addEventListener("click", async () => {
    button.textContent = await copy(text) ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  bar.append(make("span", "", language), button);
  code.append(...coloured(text, language.toLowerCase()));
  pre.append(code);
  pre.tabIndex = 0;
  box.append(bar, pre);
  return box;
}
