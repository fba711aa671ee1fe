"""Chat templates are code of a model: they are compiled and filled here, in a budget of steps.

transformers' sandbox keeps a template from files and modules, and lets it run for years, or write 10 GB. Here each
thing that a template can do takes steps from a :class:`~kvkeep.models.template_costs.StepBudget` *before* it is done:

* **statements**: the parts of the body of a loop, a macro or a block, at each turn and call of it. What stands outside
  runs once, and a template has at most :data:`LONGEST` characters.
* **operators, comparisons, slices, joined and written texts, calls, filters and tests**: by the sizes of what they are
  given. No constants are folded while a template is compiled.
* Numbers have at most :data:`~kvkeep.models.template_costs.MAX_BITS` bits.

Names, filters and extensions are transformers' own; texts are those of ``apply_chat_template``. Not there are
``lipsum``, ``striptags``, ``urlize`` and ``wordwrap``, whose time is not bounded by the sizes of their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import _PassArg

from kvkeep.errors import ModelError
from kvkeep.models.template_costs import ITEM, NODE, STEP, StepBudget, listed

LONGEST = 1 << 16
"""Characters of a template. The longest of llama.cpp's 70 has 16,714; a million take half a minute to compile."""

_BUDGET: ContextVar[StepBudget] = ContextVar("budget")
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


@pass_context
def _finalized(context: Context, value: Any) -> Any:
    return _BUDGET.get().join(value)


@pass_context
def _weighed(context: Context, value: Any) -> Any:
    _BUDGET.get().sum(value)
    return value


@pass_context
def _passed(context: Context, value: Any) -> Any:
    return _BUDGET.get().shallow(value)


@pass_context
def _step(context: Context, cost: int) -> bool:
    _BUDGET.get().take(cost)
    return True


def _passing(budget: StepBudget, items: Iterator[Any]) -> Iterator[Any]:
    for one in items:
        budget.take(ITEM)
        yield one


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or a test that takes its steps first. It asks for the context, so that it is not called while a
    template is compiled."""
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
    elif name == "round":  # it computes a power of ten
        budget.operate("**", 10, max((abs(one) for one in given if isinstance(one, int)), default=0))
        budget.product(value, *given)
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
        finalize=_finalized,
    )
    made.globals = {name: one for name, one in theirs.globals.items() if name != "lipsum"}
    filters = {name: one for name, one in theirs.filters.items() if name not in _ABSENT}
    made.filters = {name: _bounded(name, one) for name, one in filters.items()}
    made.filters |= {
        "kvkeep_weighed": _weighed, "kvkeep_joined": _finalized, "kvkeep_passed": _passed, "kvkeep_step": _step
    }  # fmt: skip
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
