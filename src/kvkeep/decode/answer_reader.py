"""Readers of answers: texts, reasoning and calls in the text of an answer that arrives in parts."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import regex

from kvkeep.decode.answer_format import HOLES, CallFormat, ReasoningFormat
from kvkeep.decode.schemas import admits, branches
from kvkeep.engine.stops import begun

BARE = r'\s*(?:<\|python_tag\|>)?(?:```(?:json)?\s*)?\{{1,2}\s*(?:"type":\s*"function",\s*)?"name":\s*"%s",\s*"%s":'
"""The beginning of an answer that is a call without marks. Small models double its braces, as templates of texts do."""
BARE_KEYS = "(?:arguments|parameters)"


@dataclass(frozen=True)
class Reasoning:
    """A part of the reasoning before an answer."""

    text: str


@dataclass(frozen=True)
class CallPart:
    """A part of a call."""

    index: int
    """The number of the call in the answer, from 0."""
    name: str
    """The tool's name in the first part of a call; then empty."""
    arguments: str
    """The next characters of the arguments, which are JSON."""


Part = str | Reasoning | CallPart
Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON Schema of each tool's arguments, by its name."""


class AnswerReader:
    """Finds the parts of an answer in its text."""

    def __init__(self) -> None:
        self.complete = 0
        """The number of complete calls."""
        self._waiting, self._index, self._object = "", -1, _JsonObject()
        self._state: Callable[[bool], Part | None] = self._begin

    def add(self, text: str) -> list[Part]:
        """Return the next parts of the answer."""
        self._waiting += text
        return self._parts(False)

    def rest(self) -> list[Part]:
        """Return what remains of an answer that ends here."""
        return self._parts(True)

    def _parts(self, ended: bool) -> list[Part]:
        found = list[Part]()
        while (part := self._state(ended)) is not None:
            found += [part] if part != "" else []
        return found

    @abstractmethod
    def _begin(self, ended: bool) -> Part | None:
        """The first state. A state returns the next part; an empty text: another state goes on; None: more text has to
        arrive. ended: none will."""

    def _to(self, state: Callable[[bool], Part | None], rest: str | None = None) -> str:
        """Go to another state, with the rest of the text that has arrived. Return an empty part."""
        self._state = state
        self._waiting = self._waiting if rest is None else rest
        return ""

    def _next_call(self, name: str) -> CallPart:
        self._index, self._object = self._index + 1, _JsonObject()
        return CallPart(self._index, name, "")

    def _json(self, following: Callable[[bool], Part | None], ended: bool) -> Part | None:
        """The arguments of a call, which are a JSON object. following: the state after it."""
        text = self._waiting.lstrip() if self._object.begins else self._waiting
        end = self._object.end(text)
        found, self._waiting = text[:end], "" if end is None else text[end:]
        if end is not None:
            self._state = following
        return CallPart(self._index, "", found) if found else None

    def _last_arguments(self, ended: bool) -> Part | None:
        """The arguments of a call that ends the answer."""
        return self._json(self._after_last, ended)

    def _after_last(self, ended: bool) -> Part | None:
        self.complete += 1
        return self._to(self._end)

    def _end(self, ended: bool) -> Part | None:
        """After the last call: a form allows nothing more."""
        self._waiting = ""
        return None

    def _text_until(self, mark: str, ended: bool) -> tuple[str, str | None]:
        """Return the next text before a ``mark``, without spaces just before it, and what follows it; None: the mark
        has not arrived. What could begin the mark keeps waiting."""
        text = self._waiting
        before, found, after = text.partition(mark) if mark else (text, "", "")
        if found:
            return before.rstrip(), after
        if ended or not mark:
            self._waiting = ""
            return text, None
        certain = len(text[: len(text) - begun(text, mark)].rstrip())
        self._waiting = text[certain:]
        return text[:certain], None


class MarkedReader(AnswerReader):
    """Reads answers with reasoning and calls between marks."""

    def __init__(
        self, calls: CallFormat, tools: Schemas, reasoning: ReasoningFormat | None = None, opened: bool = False
    ) -> None:
        """tools: those that the answer may call. opened: whether the prompt ends within the reasoning."""
        super().__init__()
        self._tools, self._reasoning, self._mark = tools, reasoning, calls.mark if tools else ""
        self._fields, self._schema, self._seen = calls.fields, dict[str, Any](), 0
        names = "|".join(re.escape(calls.name(name)) for name in sorted(tools, key=len, reverse=True))
        self._names = {calls.name(name): name for name in tools}
        call = f"(?P<name>{names})" + _pattern(calls.named)
        if calls.fields is not None and not calls.named.strip():  # another name may begin with this one
            first = re.escape(calls.fields.before.strip()[:1] + calls.tail.strip()[:1])
            call += f"(?=[\\s{first}])"
        self._head = regex.compile(_pattern(calls.head) + call)
        self._between = None if calls.between is None else regex.compile(_pattern(calls.between) + call)
        self._tail = regex.compile(_pattern(calls.tail))
        self._bare_names = {json.dumps(name, ensure_ascii=False)[1:-1]: name for name in tools}
        bare = "|".join(map(re.escape, self._bare_names))
        self._bare = regex.compile(BARE % (f"(?P<name>{bare})", BARE_KEYS)) if tools and calls.quoted else None
        if calls.fields is not None:
            exact = (re.escape(one) for one in dict.fromkeys((calls.fields.text, calls.fields.other)))
            self._field = regex.compile(_pattern(calls.fields.before) + f"(?P<key>.+?)(?:{'|'.join(exact)})", regex.S)
        if opened:
            self._state = self._reasons_begin

    # -- reasoning and content ------------------------------------------------------------------------------

    def _begin(self, ended: bool) -> Part | None:
        text = self._waiting.lstrip()
        mark = "" if self._reasoning is None else self._reasoning.begin
        if mark and text.startswith(mark):
            return self._to(self._reasons_begin, text[len(mark) :])
        return None if mark and mark.startswith(text) and not ended else self._to(self._opening)

    def _reasons_begin(self, ended: bool) -> Part | None:
        text = self._waiting.lstrip()
        return self._to(self._reasons, text) if text or ended else None

    def _reasons(self, ended: bool) -> Part | None:
        assert self._reasoning is not None
        text, after = self._text_until(self._reasoning.end, ended)
        if after is not None:
            self._to(self._reasons_end, after)
        return Reasoning(text) if text else None if after is None else ""

    def _reasons_end(self, ended: bool) -> Part | None:
        text = self._waiting.lstrip()
        return self._to(self._opening, text) if text or ended else None

    def _opening(self, ended: bool) -> Part | None:
        """The beginning of the answer, which may be a call without marks."""
        hit = None if self._bare is None else self._bare.match(self._waiting, partial=True)
        if hit is None or hit.partial:
            return self._to(self._content) if hit is None or ended else None
        self._to(self._last_arguments, self._waiting[hit.end() :])
        return self._next_call(self._bare_names[hit["name"]])

    def _content(self, ended: bool) -> Part | None:
        text, after = self._text_until(self._mark, ended)
        if after is not None:
            self._to(self._calls, self._mark + after)
        return text if text or after is not None else None

    # -- calls ----------------------------------------------------------------------------------------------

    def _calls(self, ended: bool) -> Part | None:
        hit = self._head.match(self._waiting, partial=True)
        if hit is None:  # a text with the mark of a call
            text, self._waiting = self._waiting[: len(self._mark)], self._waiting[len(self._mark) :]
            self._state = self._content
            return text
        return self._named(hit, ended)

    def _named(self, hit: Any, ended: bool) -> Part | None:
        """Begin the call whose literals and name were found, if they are complete."""
        if hit.partial:
            return self._to(self._end) if ended else None
        name = self._names[hit["name"]]
        self._schema, self._seen = dict(self._tools[name]), 0
        self._to(self._arguments if self._fields is None else self._between_fields, self._waiting[hit.end() :])
        return self._next_call(name)

    def _arguments(self, ended: bool) -> Part | None:
        return self._json(self._after_call, ended)

    def _after_call(self, ended: bool) -> Part | None:
        following = None if self._between is None else self._between.match(self._waiting, partial=not ended)
        if following is not None:
            if not following.partial:
                self.complete += 1
            return self._named(following, ended)
        hit = self._tail.match(self._waiting, partial=not ended)
        if hit is not None and hit.partial:
            return None
        self.complete += hit is not None
        return self._to(self._end)

    # -- fields ---------------------------------------------------------------------------------------------

    def _between_fields(self, ended: bool) -> Part | None:
        text = self._waiting
        if (hit := self._field.match(text, partial=True)) is not None:
            if not hit.partial:
                self._key = hit["key"]
                return self._to(self._value, text[hit.end() :])
            if not ended:
                return None
        ends = [one.match(text, partial=True) for one in (self._between, self._tail) if one is not None]
        if any(one is not None and not one.partial for one in ends):
            self._to(self._after_call)
            return CallPart(self._index, "", "}" if self._seen else "{}")
        return None if any(ends) and not ended else self._to(self._end)

    def _value(self, ended: bool) -> Part | None:
        assert self._fields is not None
        text, mark, start = self._waiting, self._fields.after, 0
        while (place := text.find(mark, start)) >= 0:
            rest = text[place + len(mark) :]
            known = [one for one in (self._field, self._tail, self._between) if one is not None]
            hits = [hit for one in known if (hit := one.match(rest, partial=True)) is not None]
            if any(not hit.partial for hit in hits) or (ended and hits):
                self._to(self._between_fields, rest)
                begin, self._seen = ", " if self._seen else "{", self._seen + 1
                value = self._value_of(text[:place])
                return CallPart(self._index, "", f"{begin}{_dumped(self._key)}: {value}")
            if hits and not ended:
                return None
            start = place + 1
        return self._to(self._end) if ended else None

    def _value_of(self, text: str) -> str:
        """Return the JSON of an argument: of a text, unless its schema admits what the text is as JSON."""
        properties = self._schema.get("properties")
        known = branches(properties.get(self._key, True) if isinstance(properties, Mapping) else True, self._schema)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return _dumped(text)
        if isinstance(value, str) or not any(admits(one, value) for one in known):
            return _dumped(text)
        return text


def _dumped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(literal: str) -> str:
    """Return the regular expression of a literal. Between its words may be other spaces, or none."""
    parts = re.split(f"(\\s+|[{''.join(HOLES)}])", literal)
    return "".join(HOLES.get(one, r"\s*+" if one.isspace() else re.escape(one)) for one in parts)


class _JsonObject:
    """Finds the end of a JSON object in a text that arrives in parts."""

    def __init__(self) -> None:
        self.begins = True
        """Whether nothing of it has arrived."""
        self._depth, self._within, self._escaped = 0, False, False

    def end(self, text: str) -> int | None:
        """Return the place after the object in the next part of the text; None: it does not end there."""
        self.begins = self.begins and not text
        for place, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._within:
                self._escaped, self._within = letter == "\\", letter != '"'
            elif letter == '"':
                self._within = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "]}":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None
