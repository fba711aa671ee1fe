"""What a chat template may cost: a budget of steps for each conversation, taken before work is done.

A step is about 10 ns, or four bytes of memory: a character or an item that a filter touches, a part of a text that is
joined. A call and a turn of a loop are :data:`STEP` of them. The same template and conversation cost the same on every
machine, so no answer depends on the time of day.
"""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from itertools import chain
from string import Formatter
from typing import Any

from jinja2.utils import Namespace

from kvkeep.errors import UsageError

BASE, PER_CHARACTER, PER_PAIR, CEILING = 50_000_000, 100, 500, 1_000_000_000
"""Steps for any conversation, for each character of it, for each pair of messages (templates look back from each
message to earlier ones), and for the longest conversation: about ten seconds."""
STEP, NODE, ITEM = 100, 10, 20
"""Steps of a call or a turn of a loop; of a part of its body; of an item of a list."""
MAX_BITS = 16_384
"""Bits of a number. Python writes no number of more in decimals."""

_SEVERAL = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)
_PLAIN = (str, bytes, int, float, type(None))
_WIDTH = re.compile(r"%\([^()%]*[(%]|%(?:\([^()%]*\))?[-+ #.\d]*?(?:\d{4}|\*)")
_TIGHT = re.compile(r"\{|\d{4}")


class TemplateTooCostly(UsageError):
    """A chat template does more than its conversation allows."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"The model's chat template {what} for this conversation, and kvkeep stops it there; give a plain prompt "
            "(--raw) or take another model."
        )


class StepBudget:
    """The steps that are left to a template, for a conversation of so many messages and characters."""

    def __init__(self, messages: int, characters: int) -> None:
        self.allowed = min(BASE + PER_CHARACTER * characters + PER_PAIR * messages**2, CEILING)
        self.left = self.allowed

    def take(self, steps: int) -> None:
        """Take steps. Raises TemplateTooCostly if there are not so many."""
        self.left -= steps
        if self.left < 0:
            raise TemplateTooCostly(f"takes more than {self.allowed:,} steps")

    def weigh(self, value: Any) -> int:
        """Return the characters and items of a value with all that it contains, those that lie deeper counted more
        often (indentation). An item that occurs twice counts twice. Raises TemplateTooCostly if they are more than
        the steps that are left."""
        if isinstance(value, str):
            return len(value) + 1
        total, depth, level = 1, 0, [value]
        while level:
            depth += 1
            inner: list[Any] = []
            for one in level:
                total += ITEM + depth * _single(one)
                inner.extend(_inside(one))
                if total + len(inner) > self.left:
                    self.take(self.left + 1)
            level = inner
        return total

    def sum(self, *values: Any) -> None:
        """Take the weights of values."""
        self.take(sum(map(self.weigh, values)))

    def product(self, subject: Any, *others: Any) -> None:
        """Take the product of weights, which bounds whatever repeats one value within another: the text of ``center``,
        ``replace`` and ``join``. A number beside the subject is a width or a count."""
        cost = self.weigh(subject)
        for one in others:
            cost *= 1 + (abs(one) if isinstance(one, int) else self.weigh(one))
        self.take(min(cost, self.left + 1))

    def join(self, value: Any) -> Any:
        """Return ``value``, whose text is about to be joined with others."""
        self.take(value.__sizeof__() >> 2 if isinstance(value, str) else self.weigh(value))
        return value

    def shallow(self, value: Any) -> Any:
        """Return ``value``, whose items are about to be passed over, without what they contain."""
        count = len(value) if hasattr(value, "__len__") else 0
        self.take(count if isinstance(value, str) else ITEM * count)
        return value

    def operate(self, operator: str, left: Any, right: Any) -> None:
        """Take the cost of an operator."""
        for one in (left, right):
            if isinstance(one, int) and one.bit_length() > MAX_BITS:
                raise TemplateTooCostly(f"computes with numbers of more than {MAX_BITS:,} bits")
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(right, 0) > MAX_BITS:
                raise TemplateTooCostly(f"computes with numbers of more than {MAX_BITS:,} bits")
        elif operator == "%" and isinstance(left, str | bytes):
            self.percent(left, right)
        elif operator == "*" and not isinstance(left, int | float):
            self.product(left, right)
        elif operator == "*" and not isinstance(right, int | float):
            self.product(right, left)
        elif operator in "+*":
            self.join(left) if isinstance(left, str) else self.shallow(left)
            self.join(right) if isinstance(right, str) else self.shallow(right)

    def percent(self, text: Any, values: Any) -> None:
        """Take the cost of ``text % values``. Raises TemplateTooCostly for a width of four digits or a variable one."""
        written = text if isinstance(text, str) else text.decode("latin-1")
        if _WIDTH.search(written):
            raise TemplateTooCostly("writes a text of an unbounded width")
        self.take(1000 * written.count("%"))
        self.product(written, [values])

    def format(self, text: str, args: Any, named: Any) -> None:
        """Take the cost of ``text.format(*args, **named)``, as that of :meth:`percent`."""
        for _, name, spec, _ in Formatter().parse(text):
            if name is not None:
                self.take(1000)
            if spec and _TIGHT.search(spec):
                raise TemplateTooCostly("writes a text of an unbounded width")
        self.product(text, [args, named])


def _single(value: Any) -> int:
    """Return what a value counts without what it contains."""
    if isinstance(value, str | bytes | range):
        return 1 + len(value)
    return 1 + value.bit_length() // 8 if isinstance(value, int) else 1


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, _PLAIN):
        return ()
    if isinstance(value, Mapping):
        return chain(value.keys(), value.values())
    if isinstance(value, _SEVERAL):
        return value
    if isinstance(value, Namespace):  # its text has that of its values
        return object.__getattribute__(value, "_Namespace__attrs").values()
    return ()


def listed(value: Any) -> Any:
    """Return an iterator's items as a list, so that they can be weighed. The filters that made it weigh each."""
    return list(value) if isinstance(value, Iterator) else value
