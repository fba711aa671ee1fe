"""A long conversation, turn by turn: what each cache holds and how long each turn takes.

The KV-Direct paper's Fig. 3 (arXiv:2603.19664): its system prompt, 30 tokens a turn. Its appendix A names subjects of
the questions ("France, the Eiffel Tower, etc.") and not the questions, so these are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.cache import STOCK, KeepCache, new_cache
from kvkeep.decode.chat import Conversation
from kvkeep.errors import UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.policies.methods import resolve
from kvkeep.stores.meter import Memory

METHODS = (STOCK, "kv-direct", "snapkv+verified")
"""What is compared unless something else is asked for."""

SYSTEM = "You are a helpful, concise AI assistant."

QUESTIONS = (
    "Tell me about France.",
    "Describe the Eiffel Tower.",
    "Tell me how it was built.",
    "Tell me about the engineer who designed it.",
    "Describe Paris to somebody who has never been there.",
    "Tell me about the river Seine.",
    "Describe the Louvre.",
    "Tell me about the Mona Lisa.",
    "Describe the countries around France.",
    "Tell me about Lyon.",
    "Tell me about the French language.",
    "Describe French cuisine.",
    "Explain how cheese is made.",
    "Tell me about the French Revolution.",
    "Tell me about Napoleon.",
    "Describe Mont Blanc.",
    "Tell me about the wines of Bordeaux.",
    "Plan a day in Paris for me.",
    "Describe Versailles.",
    "Summarise what we have talked about.",
)
"""Asked in this order, and again from the first when they run out."""


@dataclass(frozen=True)
class Turn:
    """One answer of one method.

    turn: from 1. context: tokens in the cache afterwards. read: tokens that were new to the cache before the answer,
    written: the answer's. prefill_s, decode_s: seconds for reading, the first token included, and for the other tokens.
    same: whether the answer's tokens are the first method's of the same turn (a method that once differed is in another
    conversation from then on). memory: bytes, afterwards.
    """

    method: str
    turn: int
    context: int
    read: int
    written: int
    prefill_s: float
    decode_s: float
    same: bool
    memory: Memory
    text: str

    @property
    def seconds(self) -> float:
        """The whole turn."""
        return self.prefill_s + self.decode_s


def caches(model: Any, methods: Sequence[str], **options: Any) -> dict[str, Any]:
    """Return a cache for each method; ``options`` (budget, checkpoint, where: KeepCache's) go to those that take them.

    Raises UsageError for a name twice, and whatever the caches raise.
    """
    if len(set(methods)) < len(methods):
        raise UsageError("A method was named twice; each is one conversation.")
    made = {}
    for name in methods:
        taken = () if name == STOCK else resolve(name).options
        made[name] = new_cache(model, name, **{key: value for key, value in options.items() if key in taken})
    return made


def converse(
    model: Any,
    tokenizer: Any,
    listed: dict[str, Any],
    *,
    turns: int = 20,
    max_new_tokens: int = 30,
    questions: Sequence[str] = QUESTIONS,
    progress: Callable[[str, int, int], None] = lambda method, done, total: None,
) -> Iterator[Turn]:
    """Hold one conversation with each cache of ``listed`` (by name), all of them a turn at a time, so that they share
    whatever else the machine is doing; yield each turn as it ends.

    The first cache is the reference of ``same``. Raises UsageError before a turn that would go past the model's
    positions; what was yielded until then stands.
    """
    talks = {name: Conversation(model, tokenizer, cache, system=SYSTEM) for name, cache in listed.items()}
    for number in range(turns):
        question = questions[number % len(questions)]
        reference: list[int] | None = None
        for place, (name, talk) in enumerate(talks.items()):
            progress(f"{name}, turn {number + 1}", number * len(talks) + place, turns * len(talks))
            prompt = talk.prompt(question)
            _check_room(model, talk.cache, len(prompt) + max_new_tokens, number + 1)
            result = talk.answer(question, prompt, max_new_tokens=max_new_tokens)
            reference = result.tokens if reference is None else reference
            yield Turn(
                name,
                number + 1,
                talk.cache.get_seq_length(),
                result.timing.prefill_tokens,
                len(result.tokens),
                result.timing.prefill_s,
                result.timing.decode_s,
                result.tokens == reference,
                result.memory,
                result.text,
            )


def _check_room(model: Any, cache: Any, tokens: int, turn: int) -> None:
    positions = ModelGeometry.from_config(model.config).max_positions
    endless = isinstance(cache, KeepCache) and cache.positions is not None
    if positions is not None and tokens > positions and not endless:
        raise UsageError(
            f"Turn {turn} would take the conversation to {tokens:,} tokens, and the model has {positions:,} positions."
        )
