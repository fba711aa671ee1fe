"""Forms of answers: which texts, reasoning and calls an answer may have, in the notation of llguidance's Lark.

A form allows what the model's format (:mod:`kvkeep.decode.answer_format`) means, with the arguments of each tool's
schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.decode import harmony
from kvkeep.decode.answer_format import AnswerFormat, CallFormat, FieldFormat
from kvkeep.decode.answer_reader import BARE, BARE_KEYS, AnswerReader, MarkedReader
from kvkeep.decode.lark import TEXT, Rules
from kvkeep.decode.recognition import answer_format
from kvkeep.decode.schemas import branches, is_text, resolved
from kvkeep.engine.pieces import token_texts
from kvkeep.errors import UsageError

Schema = Mapping[str, Any]
_END_TOKENS = 32
"""Tokens at the end of a prompt, with the mark of reasoning if there is one."""
_UNIONS = ("$ref", "anyOf", "oneOf", "allOf", "not", "if")
"""Words of a schema of arguments that describe more than its properties."""


@dataclass(frozen=True)
class Calls:
    """Which calls an answer may have."""

    tools: Sequence[tuple[str, Schema]] = ()
    """The name of each tool, and the JSON Schema of its arguments."""
    required: bool = False
    """The answer is a call."""
    several: bool = True
    """The answer may have several calls."""
    content: Schema | None = None
    """The JSON Schema of an answer without a call; None: any text, which may also precede the first call."""


@dataclass(frozen=True)
class Answers:
    """The format of a model's answers to one prompt."""

    format: AnswerFormat
    tokenizer: Any
    opened: bool = False
    """Whether the prompt ends within the reasoning."""

    def named(self, calls: Calls) -> frozenset[int]:
        """Return the special tokens that are marks of reasoning and of these calls: the reader needs their names."""
        marks, reasoning = list[str](), self.format.reasoning
        if self.format.calls is None:
            marks += harmony.MARKS
        elif calls.tools:
            marks += [*self.format.calls.literals(), "" if self.format.calls.mark else "<|python_tag|>"]
        marks += [] if reasoning is None else [reasoning.begin, reasoning.end]
        known = self.tokenizer.added_tokens_decoder.items() if any(marks) else ()
        return frozenset(
            number
            for number, one in known
            if one.special and one.content and any(one.content in mark for mark in marks)
        )

    def reader(self, calls: Calls) -> AnswerReader:
        """Return a new reader of an answer that may have these calls."""
        tools = dict(calls.tools)
        if self.format.calls is None:
            return harmony.HarmonyReader(tools)
        return MarkedReader(self.format.calls, tools, self.format.reasoning, self.opened)

    def form(self, calls: Calls, vocabulary: Any) -> str:
        """Return the form of an answer with these calls for :class:`~kvkeep.engine.grammar.Grammar`. vocabulary:
        llguidance's. Raises UsageError for a schema that the format cannot write."""
        rules = Rules(self.tokenizer, vocabulary)
        if self.format.calls is None:
            return rules.text(harmony.rules_of(rules, calls.tools, calls.required, calls.content))
        return rules.text(self._after_reasoning(rules, _answer(rules, self.format.calls, calls)))

    def after_reasoning(self, form: str, vocabulary: Any) -> str:
        """Return the form of an answer with another ``form`` after its reasoning, if it has some."""
        rules = Rules(self.tokenizer, vocabulary)
        if self.format.calls is None:
            return rules.text(harmony.rules_of(rules, (), False, form))
        if self.format.reasoning is None:
            return form
        return rules.text(self._after_reasoning(rules, rules.other(form)))

    def _after_reasoning(self, rules: Rules, answer: str) -> str:
        marks = self.format.reasoning
        if marks is None:
            return answer
        rules.add("answer", answer)
        reasoning = f"{rules.until(TEXT, marks.end)} SPACE"
        return f"{reasoning} answer" if self.opened else f"(SPACE {rules.literal(marks.begin)} {reasoning})? answer"


def answers_to(tokenizer: Any, prompt: Sequence[int]) -> Answers:
    """Return the format of the answers to a prompt, whose end tells whether they begin within the reasoning."""
    found = answer_format(tokenizer)
    end = "".join(token_texts(tokenizer, prompt[-_END_TOKENS:])).rstrip()
    return Answers(found, tokenizer, found.reasoning is not None and end.endswith(found.reasoning.begin))


def _answer(rules: Rules, written: CallFormat, calls: Calls) -> str:
    """Return the alternatives of an answer."""
    if not calls.tools:
        return TEXT if calls.content is None else rules.schema(calls.content)
    each = [_Call(rules, written, number, *tool) for number, tool in enumerate(calls.tools)]
    call = f"({' | '.join(one.rule for one in each)})"
    bare = [rule for rule in (one.bare() for one in each) if rule]
    if not written.mark:
        first, more, text = " | ".join(bare), "", TEXT
    else:
        more = "" if written.between is None else f" ({rules.literal(written.between)} {call})*"
        more = f"{call}{more if calls.several else ''} {rules.literal(written.tail)} SPACE"
        first = f"SPACE {rules.literal(written.head)} {more}"
    if calls.required:
        return first
    if calls.content is not None:
        return f"{rules.schema(calls.content)} | {first}"
    if not written.mark:
        return f"{text} | {first}"
    rest = rules.literal(written.head[len(written.mark) :])
    marked = f"{rules.until(TEXT, written.mark)} {rest} {more}"
    return " | ".join([TEXT, marked, *bare])


class _Call:
    """The rules of one tool's calls."""

    def __init__(self, rules: Rules, written: CallFormat, number: int, name: str, schema: Schema) -> None:
        self._rules, self._number, self._name = rules, number, name
        self.rule = f"call_{number}"
        begin = f"{rules.plain(written.name(name))} {rules.literal(written.named)}"
        if written.fields is None:
            self._arguments = rules.schema({"type": "object", **schema}, lenient=True)
            rules.add(self.rule, f"{begin} {self._arguments}")
        else:
            rules.add(self.rule, f"{begin} {self._fields(written.fields, schema)}")
        self._quoted = written.quoted

    def bare(self) -> str:
        """Return the rule of a call without marks; empty: there is none."""
        if not self._quoted:
            return ""
        name = re.escape(json.dumps(self._name, ensure_ascii=False)[1:-1]).replace("/", "\\/")
        self._rules.add(f"begun_{self._number}[lazy]", f"/{BARE % (name, BARE_KEYS)}/")
        self._rules.add(f"bare_{self._number}", f"begun_{self._number} SPACE {self._arguments} BARE_END")
        return f"bare_{self._number}"

    def _fields(self, fields: FieldFormat, schema: Schema) -> str:
        """Return the rules of arguments that are written one by one, in the order of the schema."""
        root, schema = schema, resolved(schema, schema)
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            return self._rules.schema({"type": "object", **schema}, lenient=True)  # llguidance says what is wrong
        if any(one in schema for one in _UNIONS):
            raise UsageError(
                f"The model writes each argument by itself, and the schema of the tool '{self._name[:100]}' describes "
                "them by unions or conditions; describe them by 'properties'."
            )
        missing = [one for one in required if one not in properties]
        rules = [
            (_field(self._rules, fields, key, one, root), "" if key in required else "?")
            for key, one in {**properties, **dict.fromkeys(missing, True)}.items()
        ]
        return " ".join(rule + optional for rule, optional in rules) or self._rules.literal(fields.none)


def _field(rules: Rules, fields: FieldFormat, key: str, schema: Any, root: Schema) -> str:
    """Return the rule of one argument."""
    begin, after = f"{rules.literal(fields.before)} {rules.plain(key)}", rules.literal(fields.after)
    text, other = rules.literal(fields.text), rules.literal(fields.other)
    known = {name: root[name] for name in ("$defs", "definitions") if name in root}
    texts, patterns, values = list[str](), list[str](), list[Any]()
    for one in branches(schema, root):
        if not is_text(one):
            values.append(one)
        elif isinstance(one, Mapping) and "const" in one:
            texts.append(rules.plain(one["const"]))
        else:
            patterns.append(_text(one))
    found = [f"{begin} {text} ({' | '.join(texts)}) {after}"] if texts else []
    found += [f"{begin} {text} {rules.until(one, fields.after)}" for one in dict.fromkeys(patterns)]
    found += [f"{begin} {other} {rules.schema({'anyOf': values, **known}, lenient=True)} {after}"] if values else []
    return rules.new("field", " | ".join(found))


def _text(schema: Any) -> str:
    """Return the regular expression of a text with a schema."""
    limits = schema if isinstance(schema, Mapping) else {}
    least, largest = limits.get("minLength", 0), limits.get("maxLength", "")
    found = f"/(.|\\n){{{least},{largest}}}/" if least or largest != "" else TEXT
    pattern = limits.get("pattern")
    if not isinstance(pattern, str):
        return found
    open_, close = ("" if pattern.startswith("^") else "(.|\\n)*"), ("" if pattern.endswith("$") else "(.|\\n)*")
    inner = re.sub(r"(?<!\\)/", r"\\/", pattern.removeprefix("^").removesuffix("$"))
    matched = f"/{open_}({inner}){close}/"
    return matched if found == TEXT else f"{matched} & {found}"
