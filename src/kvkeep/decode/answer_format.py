"""The format of a model's answers: how it writes calls of tools and its reasoning.

A call is written as ``head``, the tool's name, ``named``, its arguments and ``tail``; with ``between`` instead of the
tail of one call and the head of the next. All of these are literals that the model's chat template writes
(:mod:`kvkeep.decode.recognition`), so one description holds for the formats of most families:

* Hermes, Qwen: ``<tool_call>\\n{"name": "NAME", "arguments": {...}}\\n</tool_call>``;
* Mistral: ``[TOOL_CALLS]NAME[ARGS]{...}``, Granite: ``<|tool_call|>[{"name": "NAME", "arguments": {...}}]``, DeepSeek,
  Kimi and more, Llama: ``{"name": "NAME", "parameters": {...}}``;
* Qwen3-Coder, GLM, MiniMax: each argument by itself, as ``<parameter=KEY>\\nVALUE\\n</parameter>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ID, NUMBER = "\uf8f0", "\uf8f1"
"""In literals: the place of a call's id, and of its number in the answer."""
HOLES = {ID: "[a-zA-Z0-9]{9}", NUMBER: "[0-9]{1,4}"}
"""What may stand there, as a regular expression. Mistral's ids have nine characters."""
_MARK = re.compile(r"<[^<>\s\"]+>?|\[[A-Z_]+\]|[^\s\"{]+")


@dataclass(frozen=True)
class FieldFormat:
    """Literals around the arguments of a call, where each is written by itself: ``before``, its name, ``text`` (or
    ``other``, if its value is no text), its value and ``after``. A text is written as it is, and other values as
    JSON."""

    before: str
    text: str
    other: str
    after: str
    none: str = ""
    """What a call without arguments has in their place."""


@dataclass(frozen=True)
class CallFormat:
    """Literals around the calls of an answer."""

    head: str
    """Before the name of the first call."""
    named: str
    """Between a name and its arguments, which are a JSON object."""
    tail: str
    """After the last call."""
    between: str | None = None
    """Between the arguments of a call and the name of the next one; None: an answer has one call."""
    fields: FieldFormat | None = None
    """How arguments are written by themselves; None: as a JSON object."""

    @property
    def mark(self) -> str:
        """The first literal of a call, which begins no text; empty: a call is JSON without a mark, and an answer that
        begins so is one."""
        hit = _MARK.match(self.head)
        return hit[0] if hit else ""

    @property
    def quoted(self) -> bool:
        """Whether a name is a JSON string."""
        return re.search(r'[:{,\[]\s*"$', self.head) is not None

    def name(self, name: str) -> str:
        """Return a tool's name as calls write it."""
        return json.dumps(name, ensure_ascii=False)[1:-1] if self.quoted else name

    def literals(self) -> Iterator[str]:
        """Yield all literals."""
        yield from (self.head, self.named, self.tail, self.between or "")
        if self.fields is not None:
            yield from (self.fields.before, self.fields.text, self.fields.other, self.fields.after)

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Return an answer that consists of these calls."""
        text = ""
        for number, (name, arguments) in enumerate(calls):
            joint = self.tail + "\n" + self.head if self.between is None else self.between
            begin = (joint if number else self.head).replace(ID, f"{number:09}").replace(NUMBER, str(number))
            text += begin + self.name(name) + self.named.replace(ID, f"{number:09}").replace(NUMBER, str(number))
            text += self._arguments(arguments)
        return text + self.tail.replace(ID, f"{len(calls):09}").replace(NUMBER, str(len(calls)))

    def _arguments(self, arguments: Mapping[str, Any]) -> str:
        if self.fields is None:
            return json.dumps(arguments, ensure_ascii=False)
        text = "" if arguments else self.fields.none
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            text += self.fields.before + key + (self.fields.text if is_text else self.fields.other)
            text += (value if is_text else json.dumps(value, ensure_ascii=False)) + self.fields.after
        return text


HERMES = CallFormat(
    '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", '}\n</tool_call>\n<tool_call>\n{"name": "'
)
"""The plain format of models whose templates know none."""
GRANITE = CallFormat('<|tool_call|>[{"name": "', '", "arguments": ', "}]", '}, {"name": "')
"""That of templates which tell the model to write it, and leave the calls of messages out."""


@dataclass(frozen=True)
class ReasoningFormat:
    """Marks around the reasoning at the beginning of an answer."""

    begin: str
    end: str


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes answers, and how its template takes them back."""

    calls: CallFormat | None = HERMES
    """None: the format of gpt-oss (:mod:`kvkeep.decode.harmony`)."""
    reasoning: ReasoningFormat | None = None
    """None: the model writes none."""
    plain: bool = True
    """Whether the template knows no calls: they and their results are texts of messages."""
    writes: bool = False
    """Whether the template writes calls of messages; otherwise they are texts in :attr:`calls`' format."""
    describes: bool = False
    """Whether the template describes tools; otherwise the system prompt does."""
    arguments_as_text: bool = False
    """Whether the template takes the arguments of a call as a text, which is JSON."""
    empty: str | None = ""
    """The content of a message with nothing but calls."""
    takes_system: bool = True
    """Whether the template takes a system prompt."""
    reasoning_key: str | None = None
    """The field of a message whose text the template writes as reasoning; None: it writes none."""

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Return an answer that consists of these calls."""
        assert self.calls is not None  # harmony's template writes calls
        return self.calls.written(calls)
