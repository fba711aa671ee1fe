"""Chat templates are code of a model: they are compiled and filled here, in a budget of steps.

transformers' sandbox keeps a template from files and modules, and lets it run for years, or write 10 GB. Here each
thing that a template can do takes steps from a :class:`StepBudget` *before* it is done:

* **statements**: the parts of the body of a loop, a macro or a block, at each turn and call of it. What stands outside
  runs once, and a template has at most :data:`LONGEST` characters.
* **operators, comparisons, slices, joined and written texts, calls, filters and tests**: by the sizes of what they are
  given. No constants are folded while a template is compiled.
* Numbers have at most :data:`MAX_BITS` bits.

A step is about 10 ns, or four bytes of memory: a character or an item that a filter touches, a part of a text that is
joined. The same template and conversation cost the same on every machine, so no answer depends on the time of day.

Names, filters and extensions are transformers' own; texts are those of ``apply_chat_template``. Not there are
``lipsum``, ``striptags``, ``urlize`` and ``wordwrap``, whose time is not bounded by the sizes of their arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextvars import ContextVar
from functools import lru_cache, wraps
from itertools import chain
from string import Formatter
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg

from kvkeep.errors import ModelError, UsageError

LONGEST = 1 << 16
"""Characters of a template. The longest of llama.cpp's 70 has 16,714; a million take half a minute to compile."""
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
_ABSENT = ("striptags", "urlize", "wordwrap")
_SHALLOW = {
    "attr", "count", "length", "d", "default", "first", "last", "list", "items", "map", "reject", "rejectattr",
    "select", "selectattr", "reverse", "random",
}  # fmt: skip
"""Filters that pass over the items of a value. What they apply to each, a filter or a test, takes its own steps."""
_LINEAR = {
    "e", "escape", "forceescape", "lower", "upper", "capitalize", "title", "string", "safe", "int", "float", "abs",
    "unique", "sort", "dictsort", "min", "max", "groupby", "urlencode", "wordcount", "filesizeformat", "pprint",
    "xmlattr",
}  # fmt: skip
"""Filters whose costs are the sum of their arguments' weights. Others may repeat one argument within another."""
_SLOW = 10
"""Steps for each weight of a filter in Python, whose text may also be longer than what it is given."""
_TESTS = {
    "in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=", "<", "lt", "lessthan", "<=", "le",
    "lower", "upper",
}  # fmt: skip
_READING = {"get", "keys", "values", "items"}
_SEARCHING = {
    "startswith", "endswith", "find", "index", "count", "split", "partition", "lower", "upper", "title", "capitalize",
    "casefold", "swapcase", "splitlines", "removeprefix", "removesuffix", "encode",
}  # fmt: skip
"""Methods of a text that pass over it and their arguments once."""


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

    def take(self, steps: int) -> bool:
        """Take steps, and return True. Raises TemplateTooCostly if there are not so many."""
        self.left -= steps
        if self.left < 0:
            raise TemplateTooCostly(f"takes more than {self.allowed:,} steps")
        return True

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

    def weighed(self, value: Any) -> Any:
        """Return ``value``, after its weight was taken."""
        self.take(self.weigh(value))
        return value

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


_BUDGET: ContextVar[StepBudget] = ContextVar("budget")


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' sandbox, in a budget."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _counted(super()._parse(source, name, filename))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _BUDGET.get().operate(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):  # it is hashed with all that it contains
            _BUDGET.get().sum(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        made = super().wrap_str_format(value)
        if made is None:
            return None

        def written(*args: Any, **named: Any) -> str:
            _BUDGET.get().format(value.__self__, args, named)
            return made(*args, **named)

        return written

    def call(__self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:
        budget = _BUDGET.get()
        given = [*args, *(one for name, one in named.items() if name not in ("_loop_vars", "_block_vars"))]
        budget.take(STEP + ITEM * len(given))
        subject, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if type(subject).__module__ not in ("builtins", "markupsafe") or subject is None or name in _READING:
            if not isinstance(__obj, Macro):  # which takes steps for its body
                budget.sum(*given)
        elif name in _SEARCHING:
            budget.sum(subject, *given)
        else:
            budget.product(subject, *map(listed, given))
        made = super().call(__context, __obj, *args, **named)
        return budget.join(made) if isinstance(made, str) else made


def _counted(tree: nodes.Template) -> nodes.Template:
    """Return a template in which whatever is not a call, an operator or a filter takes its steps, too."""
    kinds: Any = (nodes.Compare, nodes.Concat, nodes.Getitem, nodes.Dict)
    for node in [*tree.find_all(kinds)]:
        if isinstance(node, nodes.Compare):
            node.expr, sides = _taking("kvkeep_weighed", node.expr), node.ops
            for side in sides:
                side.expr = _taking("kvkeep_weighed", side.expr)
        elif isinstance(node, nodes.Concat):
            node.nodes = [_taking("kvkeep_joined", one) for one in node.nodes]
        elif isinstance(node, nodes.Dict):
            for pair in node.items:
                pair.key = _taking("kvkeep_weighed", pair.key)
        elif isinstance(node.arg, nodes.Slice):
            node.node = _taking("kvkeep_passed", node.node)
    costs: dict[int, int] = {}
    bodies: list[Any] = [*tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))]
    for body in bodies:
        costs[id(body)] = STEP + sum(_cost(one) for one in body.find_all(nodes.Node))
    for body in bodies:
        step = nodes.Filter(nodes.Const(costs[id(body)]), "kvkeep_step", [], [], None, None, lineno=body.lineno)
        if isinstance(body, nodes.For) and body.test is not None:
            body.test = nodes.And(step, body.test, lineno=body.lineno)
        body.body.insert(0, nodes.ExprStmt(step, lineno=body.lineno))
    return tree


def _cost(node: nodes.Node) -> int:
    text = node.data if isinstance(node, nodes.TemplateData) else node.value if isinstance(node, nodes.Const) else ""
    return NODE + (len(text) if isinstance(text, str) else 0)


def _taking(name: str, node: nodes.Expr) -> nodes.Expr:
    """Return an expression whose value takes its steps. What stands in the template itself is counted with it."""
    if isinstance(node, nodes.Const | nodes.TemplateData):
        return node
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _passing(budget: StepBudget, items: Iterator[Any]) -> Iterator[Any]:
    for one in items:
        budget.take(ITEM)
        yield one


def _filter(take: Callable[[StepBudget, Any], Any]) -> Callable[..., Any]:
    """Return ``take`` as a filter. It asks for the context, so that it is not called while a template is compiled."""

    @pass_context
    def filtered(context: Context, value: Any) -> Any:
        return take(_BUDGET.get(), value)

    return filtered


_FINALIZE = _filter(lambda budget, value: budget.join(value))
_OWN_FILTERS = {
    "kvkeep_weighed": _filter(lambda budget, value: budget.weighed(value)),
    "kvkeep_joined": _FINALIZE,
    "kvkeep_passed": _filter(lambda budget, value: budget.shallow(value)),
    "kvkeep_step": _filter(lambda budget, cost: budget.take(cost)),
}
"""Filters that :func:`_counted` writes into a template: they take steps and return the value, or True."""


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or a test that takes its steps first."""
    passed = _PassArg.from_obj(function)

    @pass_context
    @wraps(function, assigned=(), updated=())
    def bounded(context: Context, value: Any, *args: Any, **named: Any) -> Any:
        value = _paid(_BUDGET.get(), name, value, [*args, *named.values()])
        first = {_PassArg.context: context, _PassArg.eval_context: context.eval_ctx}
        leading = [] if passed is None else [first.get(passed, context.environment)]
        return function(*leading, value, *args, **named)

    return bounded


def _paid(budget: StepBudget, name: str, value: Any, given: list[Any]) -> Any:
    """Return the value for a filter or a test that is given other values, too, after it took its steps."""
    budget.take(STEP)
    if name in _SHALLOW:
        budget.sum(*given)
        return _passing(budget, value) if isinstance(value, Iterator) else budget.shallow(value)
    value = listed(value)
    if name == "format":
        budget.percent(str(budget.join(value)), given)
    elif name in _LINEAR or name in _TESTS:
        budget.take(_SLOW * sum(map(budget.weigh, [value, *given])))
        budget.take(0 if isinstance(value, str) or not hasattr(value, "__len__") else 5 * STEP * len(value))
    elif name == "sum":  # sums of lists copy them again and again
        budget.product(value, *given, *([value] if given else []))
    else:
        budget.product(value, *given, *([_SLOW] if name == "tojson" else []))
    return value


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    theirs = _compile_jinja_template("").environment
    made = _Environment(
        trim_blocks=theirs.trim_blocks,
        lstrip_blocks=theirs.lstrip_blocks,
        extensions=[type(one) for one in theirs.extensions.values()],
        optimized=False,
        finalize=_FINALIZE,
    )
    made.globals = {name: one for name, one in theirs.globals.items() if name != "lipsum"}
    filters = {name: one for name, one in theirs.filters.items() if name not in _ABSENT}
    made.filters = {name: _bounded(name, one) for name, one in filters.items()}
    made.filters |= _OWN_FILTERS
    made.tests = {**theirs.tests, **{name: _bounded(name, theirs.tests[name]) for name in (*_TESTS, "divisibleby")}}
    return made


@lru_cache(maxsize=16)
def compiled(template: str) -> Template:
    """Return a compiled chat template. Raises ModelError, whose message is a part of a sentence, for one that is too
    long or that jinja does not compile."""
    if len(template) > LONGEST:
        raise ModelError(f"it has {len(template):,} characters, and kvkeep compiles at most {LONGEST:,}")
    try:
        return _environment().from_string(template)
    except (TemplateError, RecursionError, MemoryError, OverflowError, ValueError, SyntaxError) as error:
        raise ModelError(str(error).splitlines()[0][:120] if str(error) else type(error).__name__) from None


def filled(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a conversation up to its answer, as transformers' ``apply_chat_template`` writes it.

    Raises TemplateTooCostly for a template that takes too many steps, and whatever else a template raises.
    """
    template = compiled(tokenizer.get_chat_template())
    budget = StepBudget(len(messages), sum(map(_characters, messages)))
    before = _BUDGET.set(budget)
    try:
        context = template.new_context(
            {**tokenizer.special_tokens_map, "messages": [dict(one) for one in messages], "tools": None}
            | {"documents": None, "add_generation_prompt": True}
        )
        return "".join(template.root_render_func(context))
    finally:
        _BUDGET.reset(before)


def _characters(message: Mapping[str, Any]) -> int:
    parts = message["content"] if isinstance(message["content"], list) else [{"text": message["content"]}]
    return sum(len(part["text"]) for part in parts)
