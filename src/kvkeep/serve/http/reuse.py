"""What the server remembers of its answers, so that their tokens are read once (:mod:`kvkeep.decode.replay`), and what
it tells of the tokens that a prompt did not have to read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvkeep.blocks.records import OwnerRecords
from kvkeep.decode.answer_format import AnswerFormat
from kvkeep.decode.replay import Generated, answer_key, reasoning_tokens, spoken_after
from kvkeep.engine.pieces import token_texts
from kvkeep.models.fingerprint import fingerprint_of_tokenizer
from kvkeep.serve.session import Finished


class AnswerRecords:
    """The answers of a model, as records of their owners. Any thread may use them. size: the number of the model's
    tokens. ends: ids that end an answer."""

    def __init__(self, tokenizer: Any, size: int, ends: Sequence[int]) -> None:
        self._tokenizer, self._size, self._ends = tokenizer, size, frozenset(ends)
        self._space = fingerprint_of_tokenizer(tokenizer)

    def remember(
        self, records: OwnerRecords, message: Mapping[str, Any], answer: Finished, format: AnswerFormat
    ) -> Finished:
        """Remember the tokens of an answer in this ``format``, whose ``message`` is as chat templates take it. One that
        a stop string ended has tokens that no message has. Return the answer, with the tokens of its reasoning."""
        ids = [*answer.tokens[:-1]] if {*answer.tokens[-1:]} & self._ends else [*answer.tokens]
        record: dict[str, Any] = {"ids": ids, "key": answer_key(message)}
        if (reasoning := message.get("reasoning_content")) and format.reasoning is not None:
            texts, end = token_texts(self._tokenizer, ids), format.reasoning.end
            record |= {"spoken": spoken_after(texts, reasoning, end), "reasoning": reasoning}
            answer = replace(answer, reasoning=reasoning_tokens(texts, reasoning, end))
        for name in (record["key"], *(one["id"] for one in message.get("tool_calls", ()))):
            if ids and answer.stop is None:
                records.put(f"{self._space} {name}", record)
        return answer

    def find(self, records: OwnerRecords, message: Mapping[str, Any]) -> Generated | None:
        """Return an answer as it was generated: by the id of a call, or by what it says."""
        key = answer_key(message)
        for name in (*(one["id"] for one in message.get("tool_calls", ())), key):
            found = records.get(f"{self._space} {name}")
            if found is not None and found.get("key") == key and max(found["ids"]) < self._size:
                return Generated(found["ids"], found.get("spoken", 0), found.get("reasoning", ""))
        return None


def reused(tokenizer: Any, prompt: Sequence[int], messages: Sequence[tuple[int, str]], answer: Finished) -> str:
    """Return how many of an answer's ``prompt`` tokens were not read again, and which message differs from the text
    that was read before, if one does. messages: for each, the number of characters before it, and its number and role;
    empty: that is not known."""
    found = f"reused {answer.cached:,} of {len(prompt):,} tokens"
    if answer.diverged is None or not messages:
        return found
    characters = len(tokenizer.decode(prompt[: answer.diverged + 1]))
    number = bisect_right([start for start, _ in messages], characters - 1) - 1
    which = "the beginning" if number < 0 else f"message {messages[number][1]}"
    return f"{found}; {which} differs from what was read before"
