"""Which format a model's answers have: what its chat template writes for marked calls, results and reasoning.

A template is filled with calls whose names and arguments are marks, and the text around them is the format. Nothing is
taken from a model's name. A format is used only if the reader of answers finds the marked calls in what the template
wrote; otherwise the model gets the plain format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product, takewhile
from typing import Any

from kvkeep.decode import harmony
from kvkeep.decode.answer_format import GRANITE, ID, NUMBER, AnswerFormat, CallFormat, FieldFormat, ReasoningFormat
from kvkeep.decode.answer_reader import BARE, BARE_KEYS, CallPart, MarkedReader
from kvkeep.models.chat_templates import TemplateTooCostly, filled

_IDS = ("keptida01", "keptida02", "keptida03")
_NAMES = ("kept1qa", "kept1qb", "kept1qc")
_KEYS, _TEXT, _LIST = ("kept2qa", "kept2qb"), "kept3q", [70415]
_ARGUMENTS: Sequence[Mapping[str, Any]] = ({_KEYS[0]: _TEXT, _KEYS[1]: _LIST}, {}, {_KEYS[0]: _TEXT, _KEYS[1]: _LIST})
_CONTENT, _REASONING, _RESULT, _TOOL = "kept6q", "kept7q", "kept8q", "kept9q"
_ASK = {"role": "user", "content": "kept5q"}
_TOOLS = [
    {
        "type": "function",
        "function": {"name": one, "description": "-", "parameters": {"type": "object", "properties": {}}},
    }
    for one in (_TOOL, *_NAMES)
]
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_REASONING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_PAIR = re.compile(
    rf"(<[^<>\s]*(?i:think)[^<>\s]*>|<[^<>\s]+>thought|\[THINK\])\s*{_REASONING}\s*(<[^<>\s]+>|\[/?[A-Z_]+\])"
)

_CUT = r"(<[^<>]*|\[[A-Z_/]*)$"
"""The beginning of a mark at the end of a text that is shared with another one."""

Write = Callable[..., str | None]


def answer_format(tokenizer: Any) -> AnswerFormat:
    """Return the format of the answers that a tokenizer's chat template leads to."""
    template = getattr(tokenizer, "chat_template", None) and tokenizer.get_chat_template(tools=_TOOLS)
    return _recognised(tokenizer, template) if template else AnswerFormat()


@lru_cache(maxsize=16)
def _recognised(tokenizer: Any, template: str) -> AnswerFormat:
    def write(*messages: Mapping[str, Any], tools: Any = None) -> str | None:
        try:
            return filled(tokenizer, messages, tools)
        except TemplateTooCostly:
            raise
        except Exception:  # a template is the model's code and may raise anything
            return None

    start = write(_ASK, tools=_TOOLS) or write(_ASK) or ""
    system = write({"role": "system", "content": _CONTENT}, _ASK) or ""
    key, marks = _reasoning(write, start, tokenizer.get_added_vocab())
    found = replace(_calls(write, tokenizer.eos_token or "", marks), describes=_TOOL in start)
    if not found.writes and found.describes and GRANITE.mark in start:
        found = replace(found, calls=GRANITE, plain=False)
    if harmony.CALLED + _NAMES[0] in (write(_ASK, _message(1, False, "")) or ""):
        found = replace(found, calls=None, plain=False, writes=True)
        key, marks = "thinking", None
    return replace(found, reasoning=marks, reasoning_key=key, takes_system=_CONTENT in system)


# -- reasoning --------------------------------------------------------------------------------------------


def _reasoning(write: Write, start: str, tokens: Mapping[str, int]) -> tuple[str | None, ReasoningFormat | None]:
    """Return the field of messages that the template writes as reasoning, and the marks around it."""
    plain = write(_ASK, {"role": "assistant", "content": _CONTENT}) or ""
    for key in _REASONING_KEYS:
        answer = {"role": "assistant", "content": _CONTENT, key: _REASONING}
        calling = _message(1, False, "") | {key: _REASONING}
        for messages in ((_ASK, calling, *_results(1)), (_ASK, answer)):
            hit = _PAIR.search(write(*messages, tools=_TOOLS) or "")
            if hit is not None and ("think" in hit[2].lower() or hit[2] not in plain.rpartition(_CONTENT)[2]):
                return key, ReasoningFormat(hit[1], hit[2])
    for begin, end in _REASONING_MARKS:
        dropped = (
            write(_ASK, {"role": "assistant", "content": f"{begin}{_REASONING}{end}{_CONTENT}"}, _ASK) or _REASONING
        )
        opened = re.search(rf"{re.escape(begin)}\s*(?:{re.escape(end)})?\s*$", start)
        if opened or _REASONING not in dropped or {begin, end} <= tokens.keys():
            return None, ReasoningFormat(begin, end)
    return None, None


# -- calls ------------------------------------------------------------------------------------------------


def _message(count: int, as_text: bool, content: str | None) -> dict[str, Any]:
    """Return an answer with marked calls."""
    calls = [
        {"id": number, "type": "function",
         "function": {"name": name, "arguments": json.dumps(given) if as_text else dict(given)}}
        for number, name, given in zip(_IDS[:count], _NAMES, _ARGUMENTS, strict=False)
    ]  # fmt: skip
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _calls(write: Write, end: str, reasoning: ReasoningFormat | None) -> AnswerFormat:
    """Return how the template writes calls. end: the token that ends answers."""
    taken = False  # whether it takes arguments as an object, and writes them in a way of its own
    for as_text, count, empty in product((False, True), (3, 2, 1), ("", None)):
        if as_text and taken:
            break
        answer, results = _message(count, as_text, empty), _results(count)
        text = write(_ASK, answer, *results, _ASK, tools=_TOOLS) or write(_ASK, answer, *results, tools=_TOOLS)
        if text is None or not all(_RESULT + number in text for number in _IDS[:count]):
            continue
        found = _literals(write, answer, count, end, reasoning)
        if found is not None:
            return AnswerFormat(found, plain=False, writes=True, arguments_as_text=as_text, empty=empty)
        taken = taken or (not as_text and _NAMES[0] in text and _KEYS[0] in text)
    return AnswerFormat()


def _results(count: int) -> list[dict[str, Any]]:
    """Return the results of marked calls."""
    marked = zip(_IDS[:count], _NAMES, strict=False)
    return [{"role": "tool", "content": _RESULT + one, "tool_call_id": one, "name": name} for one, name in marked]


def _literals(
    write: Write, answer: Mapping[str, Any], count: int, end: str, reasoning: ReasoningFormat | None
) -> CallFormat | None:
    """Return the literals around the calls of an answer; None: there is no such format, or the reader does not find
    the calls in it."""
    text, said = write(_ASK, answer, tools=_TOOLS) or "", {"role": "assistant", "content": _CONTENT}
    if _NAMES[0] not in text.rpartition(_ASK["content"])[2]:  # it leaves an answer out at the end
        text = (write(_ASK, answer, *_results(count), tools=_TOOLS) or "").partition(_RESULT)[0]
    after = write(_ASK, said, tools=_TOOLS) or ""
    after = after if _CONTENT in after else write(_ASK, said, _ASK, tools=_TOOLS) or ""
    if _CONTENT not in after:
        return None
    begins, ends = after.rsplit(_CONTENT, 1)
    both = write(_ASK, {**answer, "content": _CONTENT}, tools=_TOOLS) or ""
    if _CONTENT in both and _NAMES[0] in (follows := both.rsplit(_CONTENT, 1)[1]):
        shown = follows
    else:
        shown = text[len(re.sub(_CUT, "", _shared(begins, text))) :]
    if reasoning is not None:
        shown = re.sub(rf"^\s*{re.escape(reasoning.begin)}\s*{re.escape(reasoning.end)}", "", shown)
    cut = shown.partition(end)[0] if end else shown
    shown = (cut if cut != shown else _without_end(shown, ends)).strip()
    made = _from_text(shown, count)
    if made is None or (write(_ASK, tools=_TOOLS) or "").endswith(made.head):  # the prompt has the first mark
        return None
    if not made.mark and re.match(BARE % ("", BARE_KEYS), made.head + made.named) is None:
        return None
    schema = {"properties": {_KEYS[0]: {"type": "string"}, _KEYS[1]: {"type": "array"}}}
    found, complete = _read(MarkedReader(made, dict.fromkeys(_NAMES, schema)), shown)
    return made if found == [*zip(_NAMES[:count], _ARGUMENTS, strict=False)] and complete == count else None


def _read(reader: MarkedReader, text: str) -> tuple[list[tuple[str, Any]] | None, int]:
    """Return the calls in a text, and how many are complete; None: it has other parts or arguments that are no
    JSON."""
    calls = list[list[str]]()
    for part in [*reader.add(text), *reader.rest()]:
        if not isinstance(part, CallPart):
            return None, 0
        calls += [[part.name, ""]] if part.name else []
        calls[-1][1] += part.arguments
    try:
        return [(name, json.loads(given)) for name, given in calls], reader.complete
    except ValueError:
        return None, 0


def _without_end(text: str, ends: str) -> str:
    """Return an answer without what ends a message (and begins the next one), which follows every answer."""
    shared = _shared(text[::-1], ends[::-1])[::-1]
    rest = text[: len(text) - len(shared)]
    return rest if len(shared) == len(ends) else re.sub(_CUT, "", rest)


def _shared(one: str, other: str) -> str:
    """Return the longest beginning of both texts."""
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _from_text(text: str, count: int) -> CallFormat | None:
    """Return the literals of calls from an answer that consists of them."""
    text = re.sub("|".join(_IDS), ID, text)
    parts = re.split("|".join(_NAMES[:count]), text)
    if len(parts) != count + 1 or not parts[0].strip():
        return None
    head, *others = parts
    if _KEYS[0] in head:
        return None
    objects = [re.compile(_spaced(given)).search(part) for given, part in zip(_ARGUMENTS, others, strict=False)]
    if all(objects):
        named = _merged([part[: hit.start()] for hit, part in zip(objects, others, strict=True) if hit])
        *between, tail = (part[hit.end() :] for hit, part in zip(objects, others, strict=True) if hit)
        joined = _merged(between) if between else None
        return None if named is None or (between and joined is None) else CallFormat(head, named, tail, joined)
    return _with_fields(head, others) if count == len(_NAMES) else None


def _spaced(given: Any) -> str:
    """Return the regular expression of a value as JSON, with any spaces."""
    words = re.findall(r'"[^"]*"|\d+|[^\s]', json.dumps(given))
    return r"\s*".join(map(re.escape, words))


def _merged(texts: Sequence[str]) -> str | None:
    """Return the literal that these texts are, with holes for the numbers in which they differ; None: they differ in
    something else."""
    if len({*texts}) == 1:
        return texts[0]
    split = [re.split(r"(\d+)", one) for one in texts]
    if len({tuple(one[::2]) for one in split}) != 1:
        return None
    return "".join(one[0] if len({*one}) == 1 else NUMBER for one in zip(*split, strict=True))


def _with_fields(head: str, parts: Sequence[str]) -> CallFormat | None:
    """Return the literals of calls whose arguments are written one by one. parts: what follows each name."""
    pattern = re.compile(rf"(.*){_KEYS[0]}(.*){_TEXT}(.*){_KEYS[1]}(.*)\[\s*{_LIST[0]}\s*\](.*)", re.DOTALL)
    first, last = pattern.fullmatch(parts[0]), pattern.fullmatch(parts[2])
    if first is None or last is None:
        return None
    opens, text, following, other, ends = first.groups()
    before = re.sub("^[^<>]*>", "", _shared(opens[::-1], following[::-1])[::-1])  # no end of a mark
    named, after = opens[: len(opens) - len(before)], following[: len(following) - len(before)]
    if not (before and after and text and other and ends.startswith(after) and last[5].startswith(after)):
        return None
    between, tail = ends[len(after) :], last[5][len(after) :]
    fits = parts[1].startswith(named) and parts[1].endswith(between)
    none = parts[1][len(named) : len(parts[1]) - len(between)] if fits else ""
    return CallFormat(head, named, tail, between, FieldFormat(before, text, other, after, none))
