"""Grammars: which tokens may come next in an answer that must have a form, by the library llguidance."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers.generation import LogitsProcessor

from kvkeep.engine.forms import llguidance
from kvkeep.errors import UsageError
from kvkeep.plugins import optional


class Grammar:
    """The form of an answer, compiled for a vocabulary. It never changes: each answer has a state of its own."""

    def __init__(self, vocabulary: Any, text: str) -> None:
        """text: in one of llguidance's forms. Raises UsageError, whose sentence ends with its reason, for a form that
        llguidance does not compile."""
        LLMatcher = llguidance().LLMatcher
        failed, said = LLMatcher.validate_grammar_with_warnings(text, vocabulary)
        matcher = LLMatcher(vocabulary, text, log_level=0)
        if failed or matcher.is_error():
            reason = said[0] if failed and said else matcher.get_error()
            raise UsageError(f"The form of the answer cannot be compiled: {_sentence(reason)}")
        self.ignored = sorted({word for line in said for word in re.findall(r'"([^"]+)"', line)})
        """Words of JSON Schemas that the form does not obey."""
        first = matcher.deep_copy()
        first.compute_logit_bias()
        if first.is_error():
            raise UsageError(f"No answer can have this form: {_sentence(first.get_error())}")
        self._matcher, self._vocabulary = matcher, vocabulary

    def processor(self, prompt: int) -> GrammarProcessor:
        """Return what removes all tokens that the form does not allow from the scores of one answer. prompt: the number
        of tokens before it."""
        return GrammarProcessor(self._matcher.deep_copy(), self._vocabulary, prompt)


def _sentence(reason: str) -> str:
    """Return what an error of several lines says as the end of a sentence: its first line, and that of an error in
    it."""
    if reason.startswith("panic") or "too many expressions" in reason:
        return "it has more parts than llguidance can take; make it simpler, or send fewer tools."
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    said = lines[:1] + [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    return f"{' '.join(said)[:300].rstrip('.')}."


_ONE_AT_A_TIME = Lock()


def vocabulary(tokenizer: Any, size: int, ends: Sequence[int]) -> Any:
    """Return the tokens of a model as llguidance takes them; this takes some seconds the first time. size: the number
    of the model's tokens. ends: ids that end an answer. Raises UsageError for a tokenizer that llguidance cannot
    read."""
    with _ONE_AT_A_TIME:  # so that none is made twice
        return _vocabulary(tokenizer, size, tuple(ends))


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Any, size: int, ends: Sequence[int]) -> Any:
    try:
        return optional("llguidance.hf", "serve").from_tokenizer(tokenizer, n_vocab=size, eos_token=[*ends] or None)
    except ValueError as error:
        raise UsageError(f"llguidance cannot read the model's tokenizer ({str(error)[:100]}).") from None


class GrammarProcessor(LogitsProcessor):
    """Gives every token that a form does not allow the score -inf."""

    def __init__(self, matcher: Any, vocabulary: Any, prompt: int) -> None:
        self._matcher, self._vocabulary, self._prompt = matcher, vocabulary, prompt
        self._read: list[int] = []  # tokens of the answer that the matcher has read

    def forced(self, written: Sequence[int]) -> Sequence[int]:
        """Return the tokens that have to follow the answer's tokens. The model may spell the same text otherwise."""
        return self._matcher.compute_ff_tokens() if self.follow([*written]) else ()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores (1, vocabulary) of the token after ``input_ids`` (1, tokens), as changed by the form."""
        if not self.follow(input_ids[0, self._prompt :].tolist()):  # after a draft that will be rejected
            return scores
        bias = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        if self._matcher.is_error():  # llguidance bounds the work for one token
            raise UsageError(f"The form of the answer cannot be followed: {_sentence(self._matcher.get_error())}")
        if int(bias.count_nonzero()) == 1:
            self._spell(bias)
        return scores.masked_fill((bias[: scores.shape[-1]] == 0).to(scores.device), -torch.inf)

    def follow(self, written: list[int]) -> bool:
        """Let the matcher read the answer's tokens; return whether it takes all of them."""
        read, shared = self._read, len(self._read)
        if written[:shared] != read:  # drafts that were rejected
            shared = next(
                (n for n, pair in enumerate(zip(written, read, strict=False)) if pair[0] != pair[1]), len(written)
            )
            self._matcher.rollback(len(read) - shared)
        fresh = written[shared:]
        allowed = self._matcher.validate_tokens(fresh)
        self._matcher.consume_tokens(fresh[:allowed])
        self._read = written[: shared + allowed]
        return allowed == len(fresh)

    def _spell(self, bias: Tensor) -> None:
        """Replace the only token that may come next, if it is a special token in the place of a text with its name:
        llguidance encodes a text that has to follow, and then does not take this token. Raises UsageError if the name
        cannot be spelt."""
        (only,) = bias.nonzero()[0].tolist()
        if self._matcher.is_accepting() or self._matcher.validate_tokens([only]):
            return
        name = self._vocabulary.decode_bytes([only])
        first = next(
            (one for one in self._vocabulary.tokenize_bytes(name[:1]) if self._matcher.validate_tokens([one])), None
        )
        if first is None:
            sentence = (
                "The form of the answer contains the name of a special token, which this model cannot spell; rename it."
            )
            raise UsageError(sentence)
        bias[only], bias[first] = 0, bias[only].item()
