"""LLMLingua (Jiang et al., arXiv:2310.05736): the model under test compresses the prompt instead of the cache."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import BatchEncoding, DynamicCache

from kvkeep.errors import BudgetError, KvkeepError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.meter import Memory, nbytes
from kvkeep.stock import account
from kvkeep_lab.peers.base import Peer, PeerReader, entries_of, installed

_TRIES = 6
_SIZE = 200


@dataclass(frozen=True)
class LLMLingua(Peer):
    """A prompt without its least surprising tokens, read into transformers' default cache.

    The budget is the length of the compressed prompt. Generated tokens are added to it.
    """

    about: ClassVar[str] = "LLMLingua: the prompt's least surprising tokens left out before it is read"
    needs: ClassVar[str] = "llmlingua"

    edge: int = 48
    """Number of tokens at each end that are not compressed, because templates, instructions and questions are there."""

    @property
    def takes(self) -> tuple[str, ...]:
        return ("budget",)

    @property
    def versions(self) -> dict[str, str]:
        return installed("llmlingua")

    def open(self, model: Any, budget: str | None, context: int) -> PeerReader:
        if find_spec("llmlingua") is None:
            raise UsageError("'peer-llmlingua' needs the package llmlingua, which is missing: pip install llmlingua.")
        entries = entries_of(model, budget or "0", context)
        if entries <= 2 * self.edge:
            raise BudgetError(
                f"A prompt of {entries} tokens is too small: {self.edge} tokens at each end always stay; give a "
                "larger budget, or a smaller edge (peer-llmlingua:edge=16)."
            )
        return _Compressed(model, entries, self.edge)


class _Compressed(PeerReader):
    def __init__(self, model: Any, entries: int, edge: int) -> None:
        self.model, self.entries, self.edge = model, entries, edge
        self._cache = DynamicCache(config=model.config)
        self._peak = 0  # bytes used by the compression

    @torch.no_grad()
    def step(self, ids: Tensor) -> tuple[Tensor, float]:
        spent = 0.0
        if not self._cache.get_seq_length():
            short, spent = self._shortened(ids[0].tolist())
            ids = ids.new_tensor([short])
        start = time.perf_counter()
        output = self.model(ids, cache=self._cache, use_cache=True, logits_to_keep=1)
        return output.logits[0, -1].float().cpu(), spent + time.perf_counter() - start

    def memory(self) -> Memory:
        found = account(self._cache)
        peak = max(found.peak_cache_bytes, self._peak)
        return Memory(found.resident_bytes, peak_cache_bytes=peak, peak_workspace_bytes=found.peak_workspace_bytes)

    def _shortened(self, ids: list[int]) -> tuple[list[int], float]:
        """Return at most :attr:`entries` tokens, and the seconds of the last compression. The package may exceed its
        target number of tokens; the target is then lowered by the excess and the compression repeated."""
        assert self.entries is not None
        if len(ids) <= self.entries:
            return ids, 0.0
        wanted, end = self.entries - 2 * self.edge, len(ids) - self.edge
        model, target = _Model(self.model), wanted
        for _ in range(_TRIES):
            start = time.perf_counter()
            kept = _compressed(model, ids[self.edge : end], target)
            seconds, self._peak = time.perf_counter() - start, model.peak
            if len(kept) <= wanted:
                return [*ids[: self.edge], *kept, *ids[end:]], seconds
            target = max(1, target - len(kept) + wanted)
        raise KvkeepError(f"LLMLingua kept {len(kept)} tokens, but the budget is {wanted}; give a larger budget.")


def _compressed(model: _Model, ids: list[int], target: int) -> list[int]:
    """Return the tokens that LLMLingua keeps, about ``target``."""
    from llmlingua import PromptCompressor

    # The constructor is skipped: it would load the model again and download a tokenizer for OpenAI's models.
    compressor = PromptCompressor.__new__(PromptCompressor)
    compressor.model, compressor.tokenizer, compressor.device = model, _Tokenized(ids), model.device
    compressor.max_position_embeddings, compressor.cache_bos_num = model.positions, 10
    # LLMLingua compresses pieces of 200 tokens by default and leaves an incomplete last piece uncompressed. Pieces of
    # this size divide the tokens almost evenly.
    size = len(ids) // math.ceil(len(ids) / _SIZE)
    kept, _ = compressor.iterative_compress_prompt([""], target, iterative_size=size, dynamic_ratio=[0.0])
    return [int(token) for token in kept[0]]


class _Model:
    """The model with LLMLingua's interface: entries are passed and returned as a list of pairs of tensors."""

    def __init__(self, model: Any) -> None:
        self.model, self.device = model, next(model.parameters()).device
        self.positions = ModelGeometry.from_config(model.config).max_positions or 2**31
        self.peak = 0

    def __call__(self, ids: Tensor, attention_mask: Tensor, past_key_values: Any, use_cache: bool) -> Any:
        cache = DynamicCache() if past_key_values is None else DynamicCache(past_key_values)
        output = self.model(ids, attention_mask=attention_mask, cache=cache, use_cache=use_cache)
        pairs = [(layer.keys, layer.values) for layer in cache.layers]
        self.peak = max(self.peak, sum(nbytes(*pair) for pair in pairs))
        return SimpleNamespace(logits=output.logits, past_key_values=pairs)


class _Tokenized:
    """A tokenizer that returns the ids of one text that is already tokenized."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __call__(self, text: str, return_tensors: str | None = None, add_special_tokens: bool = True) -> BatchEncoding:
        ids = self.ids if return_tensors is None else torch.tensor([self.ids])
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones(1, len(self.ids), dtype=torch.int64)})
