"""Rules of a form in the notation of llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvkeep.decode.answer_format import HOLES
from kvkeep.engine.forms import JSON_SPACE

TEXT = "TEXT"
"""The terminal of any text without special tokens."""


class Rules:
    """The rules of a form for one vocabulary, in which a mark may be one token."""

    def __init__(self, tokenizer: Any, vocabulary: Any) -> None:
        known = {one: token.content for one, token in tokenizer.added_tokens_decoder.items()}
        self._tokens = {text: one for one, text in known.items() if text and vocabulary.is_special_token(one)}
        self._lines, self._others, self._schemas = list[str](), list[dict[str, Any]](), dict[str, str]()

    def add(self, name: str, rule: str) -> None:
        """Add a rule with a name."""
        self._lines.append(f"{name}: {rule}")

    def new(self, kind: str, rule: str) -> str:
        """Add a rule, and return its name."""
        name = f"{kind}_{len(self._lines)}"
        self.add(name, rule)
        return name

    @staticmethod
    def plain(text: str) -> str:
        """Return a text of a request as a literal. Names of special tokens in it are spelt."""
        return json.dumps(text, ensure_ascii=False)

    def literal(self, text: str) -> str:
        """Return a literal, in which names of special tokens are these tokens."""
        return " ".join(self._parts(text))

    def _parts(self, text: str) -> list[str]:
        inside = sorted((one for one in self._tokens if one in text), key=len, reverse=True)
        split = re.split(f"({'|'.join(map(re.escape, [*inside, *HOLES]))})", text)
        return [
            f"<[{self._tokens[one]}]>"
            if one in self._tokens
            else f"/{HOLES[one]}/"
            if one in HOLES
            else json.dumps(one)
            for one in split
            if one
        ] or ['""']

    def until(self, text: str, mark: str) -> str:
        """Return the rule of a ``text`` (a terminal) up to a mark, and of the mark. No part of the text is the mark."""
        first, *more = self._parts(mark)
        if text != TEXT:
            self.add(name := f"TEXT_{len(self._lines)}", text)
            text = name
        if first.startswith("<"):  # a text has no special tokens
            return " ".join([text, first, *more])
        self.add(f"until_{len(self._lines)}[lazy]", f"{text} {first}")
        return " ".join([f"until_{len(self._lines) - 1}", *more])

    def schema(self, schema: Mapping[str, Any], lenient: bool = False) -> str:
        """Return the rule of JSON with a schema. lenient: whether words of it that llguidance does not know say
        nothing; otherwise they are errors."""
        text = json.dumps({**schema, "x-guidance": {**JSON_SPACE, "lenient": lenient}})
        if text not in self._schemas:
            self._schemas[text] = self.new("json", f"%json {text}")
        return self._schemas[text]

    def other(self, form: str) -> str:
        """Return the rule of another form."""
        grammars = json.loads(form)["grammars"]
        named = {one.get("name"): f"other_{number}" for number, one in enumerate(grammars)}
        self._others += [{**one, "name": named[one.get("name")]} for one in grammars]
        return "@other_0"

    def text(self, start: str) -> str:
        """Return the form whose first rule is ``start``."""
        lines = [
            "%llguidance {}", f"start: {start}", *self._lines,
            "TEXT: /(.|\\n)*/", "SPACE: /[ \\n]{0,4}/", "BARE_END: /\\s{0,8}\\}{1,2}\\s{0,8}(```)?\\s{0,8}/",
        ]  # fmt: skip
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *self._others]})
