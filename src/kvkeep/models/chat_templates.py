"""Chat templates are code of a model. They run in transformers' sandbox, which keeps them from files and modules.

The sandbox does not end them, and a template may look back from each message to all earlier ones, so that a
conversation of many short messages would take hours. Here the turns of loops and the calls of macros are counted, and
the same conversation is refused on every machine. What a single operation costs is not bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context

from kvkeep.errors import ModelError, UsageError

LONGEST = 1 << 16
"""Characters of a template. The longest of llama.cpp's 70 has 16,714; a million take half a minute to compile."""
TURNS = 2_000_000
"""Turns of loops for one conversation: some seconds."""
CALL = 10
"""Turns that a call of a macro counts."""


class TemplateTooCostly(UsageError):
    """A chat template does more than any conversation needs."""

    def __init__(self) -> None:
        super().__init__(
            f"The model's chat template takes more than {TURNS:,} turns of loops for this conversation, and kvkeep "
            "stops it there; give fewer messages, a plain prompt (--raw), or take another model."
        )


_TAKEN: ContextVar[list[int]] = ContextVar("turns")
"""The turns that the template has taken which is being filled: one number."""


@pass_context  # so that it is not called while a template is compiled
def _turn(context: Any, cost: int) -> bool:
    """The filter that :func:`compiled` writes into loops and macros: it takes turns, and returns True."""
    taken = _TAKEN.get()
    taken[0] += cost
    if taken[0] > TURNS:
        raise TemplateTooCostly
    return True


@pass_context
def _later(context: Any, value: Any) -> Any:
    """What a template writes, as it is. What depends on the context is computed when the template is filled."""
    return value


@lru_cache(maxsize=16)
def compiled(template: str) -> Template:
    """Return a compiled chat template. Raises ModelError, whose message is a part of a sentence, for one that is too
    long or that jinja does not compile."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    if len(template) > LONGEST:
        raise ModelError(f"it has {len(template):,} characters, and kvkeep compiles at most {LONGEST:,}")
    environment = _compile_jinja_template("").environment
    environment.filters["kvkeep_turn"] = _turn
    environment.optimized, environment.finalize = False, _later  # so that compiling computes nothing
    try:
        tree = environment.parse(template)
        for body in [*tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))]:
            cost = nodes.Const(1 if isinstance(body, nodes.For) else CALL)
            turn = nodes.Filter(cost, "kvkeep_turn", [], [], None, None, lineno=body.lineno)
            if isinstance(body, nodes.For) and body.test is not None:  # for those of its turns that are skipped
                body.test = nodes.And(turn, body.test, lineno=body.lineno)
            body.body.insert(0, nodes.ExprStmt(turn, lineno=body.lineno))
        return Template.from_code(environment, environment.compile(tree), environment.make_globals(None))
    except (TemplateError, RecursionError, MemoryError, OverflowError, ValueError, SyntaxError) as error:
        raise ModelError(str(error).splitlines()[0][:120] if str(error) else type(error).__name__) from None


def filled(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of a conversation up to its answer, as transformers' ``apply_chat_template`` writes it. tools:
    those that the answer may call, as OpenAI describes them. variables: more variables of the template.

    Raises TemplateTooCostly for a template that takes too many turns, and whatever else a template raises.
    """
    template = compiled(tokenizer.get_chat_template(tools=tools or None))
    given = {"messages": [dict(one) for one in messages], "tools": tools or None, "documents": None}
    given = dict(variables or {}) | given
    before = _TAKEN.set([0])
    try:
        return template.render(tokenizer.special_tokens_map | given, add_generation_prompt=True)
    finally:
        _TAKEN.reset(before)
