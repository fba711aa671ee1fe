"""A reconstruction: a cache reads its text a second time, and the attention of this reading chooses the entries.

KVzip (arXiv:2505.23416): after the prompt the model gets a request to repeat it, and the answer in pieces. One pass
over each piece shows which entries the repetition needs. The first reading is that of ``kv-direct``, exact and within
the budget; the entries of the repetition are discarded. A selector may have an excerpt read in place of the whole text.

The score of an entry is the maximum attention that it receives from any query of the repeated text, in any head that
shares the entry. A long text is repeated in pieces. The attention of a piece's queries is then normalised over the
first entries of the text, and over the piece's entries from the first and from the second reading.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.attention import Segment, attend, received
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.entries import EvictedEntries, Piece, gathered
from kvkeep.contracts.hook import ReadingHook
from kvkeep.contracts.resident import WorkingSet
from kvkeep.contracts.selector import ReconstructionPieces
from kvkeep.contracts.store import EvictedStore
from kvkeep.errors import UsageError
from kvkeep.memory.meter import Meter, nbytes
from kvkeep.memory.rows import up
from kvkeep.models.chat_templates import filled
from kvkeep.stores.evicted.groups import GROUP
from kvkeep.stores.layer import Layer
from kvkeep.stores.readers.rehearsal import Rehearsal, rehearsing
from kvkeep.stores.sliding import noted, sliding_layers
from kvkeep.transfer import copy_ledger, last_token_state, restore_last

POSITIONS = 64
"""The minimum number of positions for a piece of the text and its introduction."""
CUE = 8
"""Tokens of the previous piece that introduce a later one."""
NEWEST = 128
"""How many of the newest slots come first in a store that has places for some of the evicted entries."""

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"


@dataclass(frozen=True)
class Rereading:
    """When the text of a cache is read a second time, and what the first reading must leave for it."""

    method: str
    """The name of the cache's method."""
    entries: int
    """The budget of a layer. A text of no more tokens is kept as it is."""
    positions: int | None
    """The model's positions; None: no limit."""

    def check_length(self, tokens: int) -> None:
        """Raise UsageError if a text of so many tokens leaves too few positions."""
        if self.positions is not None and tokens > max(self.entries, self.positions - POSITIONS):
            raise _too_long(self.method, tokens, self.positions, f" to {self.positions - POSITIONS} tokens")

    def check_ids(self, ids: Tensor | None) -> None:
        """Raise UsageError for tokens without ``ids``."""
        if ids is None:
            raise UsageError(
                f"'{self.method}' reads the text a second time by its token ids, and embeddings have none; pass "
                "input_ids."
            )


class Pass(NamedTuple):
    """One pass of the second reading."""

    piece: tuple[int, int]
    """The slots whose entries are scored."""
    said: list[int]
    """Ids that precede the text."""
    cue: Tensor
    """Slots of the text that belong to the instruction, (rows, n)."""
    slots: Tensor
    """Slots of the text that is read, (rows, n)."""


class Words(NamedTuple):
    """Token ids around a piece of the text."""

    first: list[int]
    """Ids before the first piece."""
    later: list[int]
    """Ids before the cue of a later piece."""
    then: list[int]
    """Ids of the end of the user's message and the beginning of the model's."""


def compress(cache: Any, readers: list[ReconstructionReader] | None = None) -> list[ReconstructionReader]:
    """Let ``cache`` read its text a second time and choose its entries; then its method applies. Return the reader of
    each full layer, with the scores of the entries. readers: what this function returned for another cache with the
    same text, which is then not read again."""
    begin = time.perf_counter()
    cache.stream.roll_back()
    rows, old, meter, record = cache.rows, cache.made, cache.meter, cache.stream.record
    readers, length = readers or _read_again(cache), cache.ledger.length
    method, geometry = cache.method, cache.geometry
    entries = method.division(geometry, cache.entries).resident
    scores = [reader.scores for reader in readers]
    with meter.holding(*(part for reader in readers for part in reader.tensors)):
        shares, state = _shares(cache, scores, rows, entries), last_token_state(cache)
        windows = noted(sliding_layers(cache))
        recording = any(getattr(layer, "record_past", False) for layer in cache.layers)
        cache.reset(shares)
        if recording:
            cache.activate_past_recording()
        cache.stream.record.tell(record.on_progress, record.on_block)
        cache.stream.record.begin_with(record.plain)
        try:
            copy_ledger(old.ledger, cache.ledger, length, rows)
            restore_last(cache, state, length)
            for window, layer in zip(windows, sliding_layers(cache), strict=True):  # with recorded entries
                replace(window, layer=layer).restore()
            _hand_over(cache, old, readers, rows)
        except BaseException:  # some entries are lost, so the cache is cleared
            cache.reset()
            raise
    meter.reconstruction_s += time.perf_counter() - begin
    return readers


def _shares(cache: Any, scores: list[Tensor], rows: int, entries: int) -> list[list[int]]:
    """Return the entries of each full layer's lanes by the scores of the second reading, ``entries`` on average. The
    selector divides those that are not pinned."""
    pinned, scores = cache.method.reserved, _with_pinned(cache, scores, float("-inf"))
    shares = cache.method.selector.shares(scores, rows, entries - pinned)
    return [[pinned + count for count in layer] for layer in shares]


def _with_pinned(cache: Any, scores: list[Tensor], score: float) -> list[Tensor]:
    """Return the scores (lanes, slots) of each full layer, ``score`` for the pinned entries."""
    if not (pinned := cache.method.reserved):
        return scores
    slots = torch.arange(cache.ledger.length, device=scores[0].device)
    firsts = [cache.ledger.first_by(layer.geometry.kv_heads) for layer in cache.stream.bounded]
    places = [slots if first is None else slots - first for first in firsts]  # negative for padding
    return [
        part.masked_fill((place >= 0) & (place < pinned), score) for part, place in zip(scores, places, strict=True)
    ]


def _read_again(cache: Any) -> list[ReconstructionReader]:
    """Read the text a second time. Return the reader of each full layer, whose scores are the highest for sinks, and
    -inf for padding."""
    ledger, pieces = cache.ledger, cache.method.selector.reconstruction
    length, visible = ledger.length, ledger.visible
    ids, positions = (part.long() for part in ledger.span(0, length))
    first_words = FIRST if pieces.excerpt is None else pieces.excerpt.instruction
    words = _words(getattr(cache.model, "kvkeep_tokenizer", None), first_words)
    passes = list(_passes(cache, pieces, words, ids))
    count = sum(one.slots.shape[1] + CUE + len(words.later) + len(words.then) for one in passes)
    make, fate = pieces.reader or ReconstructionReader, cache.method.store_fate
    readers = [make(layer, pieces.sinks, fate.reading_hook(count)) for layer in cache.stream.bounded]
    with rehearsing(cache, readers) as forget:
        for piece, said, cue, slots in passes:
            for reader in readers:
                reader.piece = piece
            before, then = (ids.new_tensor(part).expand(len(ids), -1) for part in (said, words.then))
            tokens = torch.cat([before, ids.gather(1, cue), then, ids.gather(1, slots)], 1)
            mask, real = None, torch.ones_like(tokens)
            if visible is not None:
                seen = visible.long()
                parts = torch.ones_like(before), seen.gather(1, cue), torch.ones_like(then), seen.gather(1, slots)
                real = torch.cat(parts, 1)
                mask = torch.cat([seen, real], 1)
            with nullcontext() if pieces.during is None else pieces.during(cache, readers):
                _read(cache, tokens, mask, positions[:, -1:] + real.cumsum(1))
            forget()
    first = 0 if ledger.first is None else ledger.first[:, None]
    slots = torch.arange(length, device=ids.device)
    for reader in readers:
        reader.finish()
    highest = max(1.0, *(float(reader.scores.max()) for reader in readers))  # weights are at most 1
    for layer, reader in zip(cache.stream.bounded, readers, strict=True):
        by_row = reader.scores.unflatten(0, (-1, layer.heads))
        by_row.masked_fill_((slots < first + pieces.sinks).expand(len(ids), -1)[:, None], highest)
        if visible is not None:
            by_row.masked_fill_(~visible[:, None], float("-inf"))
    return readers


def _passes(cache: Any, pieces: ReconstructionPieces, words: Words, ids: Tensor) -> Iterator[Pass]:
    """Yield the passes over the text ``ids`` (rows, slots), or the one over an excerpt. The method chooses the length
    of a piece, and the model's positions limit it."""
    length, limit, piece = ids.shape[1], cache.geometry.max_positions, pieces.piece
    if limit is not None:
        piece = min(piece, limit - length - CUE - max(len(words.first), len(words.later)) - len(words.then))
    if piece < 1:
        raise _too_long(cache.method.name, length, limit)
    every = torch.arange(length, device=ids.device).expand(len(ids), -1)
    if pieces.excerpt is not None:
        slots = pieces.excerpt.slots(ids, cache.ledger.visible, cache.model.get_input_embeddings())
        yield Pass((0, length), words.first, every[:, :0], slots[:, :piece])
        return
    for start in range(0, length, piece):
        span = start, min(start + piece, length)
        said = words.later if start else words.first
        yield Pass(span, said, every[:, max(0, start - CUE) : start], every[:, slice(*span)])


def _too_long(method: str, tokens: int, positions: int | None, remedy: str = "") -> UsageError:
    return UsageError(
        f"'{method}' reads the text a second time, at the positions after it. {tokens} tokens leave too few of the "
        f"model's {positions} positions; shorten the text{remedy}."
    )


def _read(cache: Any, tokens: Tensor, mask: Tensor | None, positions: Tensor) -> None:
    cache.made.decoder(input_ids=tokens, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True)


def _hand_over(cache: Any, old: Any, readers: list[ReconstructionReader], rows: int) -> None:
    """Give the entries of the layers of ``old`` to those of ``cache``, in order, with their scores, and free them layer
    by layer."""
    chunk, places = cache.stream.chunk, _places(cache, readers, rows)
    for layer, reader, of_layer in zip(cache.geometry.full_layers, readers, places, strict=True):
        source, target, scores = old.layers[layer.index], cache.layers[layer.index], reader.scores
        best = [
            BestEvicted(store, lanes, scores, cache.meter)
            for lanes, store in (target.evicted.divide(of_layer) if of_layer else ())
        ]
        for piece in chain(source.evicted.pages(), source.resident.pieces()):
            keys, values = (part[:, 0].split(chunk, 1) for part in (piece.keys, piece.values))
            first = piece.first
            for key, value in zip(keys, values, strict=True):
                target.take(*(part.unflatten(0, (rows, -1)) for part in (key, value)))
                target.resident.score_arriving(scores[:, first : first + key.shape[1]])
                target.settle(take=partial(_take, best) if best else None)
                first += key.shape[1]
        for part in best:
            part.give(target.resident)
        if reader.hook is not None:
            reader.hook.chosen(source, target)
        resident_bytes = [layer.resident_bytes for layer in (source, *cache.stream.bounded)]
        cache.meter.cache(sum(resident_bytes) + sum(one.compressed_bytes for one in cache.made.holdings))
        old.checkpoint.truncate(layer.index, 0)
        source.resident = None  # released now, even if the layer is still referenced


def _places(cache: Any, readers: list[ReconstructionReader], rows: int) -> list[Sequence[int]]:
    """Return the number of places for evicted entries of each full layer's lanes: a group, and a share of the others as
    the selector divides a budget, by the scores of the entries that are not resident. Nothing where a store has no
    number of places."""
    limits = [layer.evicted.max_entries for layer in cache.stream.bounded]
    if not all(limits):
        return [()] * len(limits)
    mean, scores = limits[0] - GROUP, [reader.scores for reader in readers]
    if not mean or len(set(limits)) > 1:  # nothing to divide, or other bytes a place
        return [[limit] * len(part) for limit, part in zip(limits, scores, strict=True)]
    left = [_without_best(*pair) for pair in zip(_with_pinned(cache, scores, float("inf")), cache.shares, strict=True)]
    divided = cache.method.selector.shares(left, rows, mean)
    return [
        [GROUP + count for count in share] * (len(part) // len(share))
        for share, part in zip(divided, scores, strict=True)
    ]


def _without_best(scores: Tensor, counts: Sequence[int]) -> Tensor:
    """Return ``scores`` (lanes, slots), -inf for the ``counts`` highest of each lane, or of each KV head where all rows
    agree. Of equal scores, the newer ones are the higher ones."""
    number = torch.tensor(counts, device=scores.device).repeat(len(scores) // len(counts))[:, None]
    ranks = torch.arange(scores.shape[1], 0, -1, device=scores.device).expand(scores.shape)
    best = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.argsort(dim=1, stable=True), ranks <= number)
    return scores.masked_fill(best, float("-inf"))


def _take(best: Sequence[BestEvicted], left: EvictedEntries) -> None:
    for part in best:
        part.take(left)


class BestEvicted:
    """For each lane of ``store``, the evicted entries with the highest ``scores`` (all lanes, slots), up to the store's
    limit; of equal scores, the newer ones. Those of the last :data:`NEWEST` slots of the batch come first, or of half
    as many slots as the limit: scores come from repeating the text, and its end matters more to what follows. lanes:
    those of the store; None: all."""

    def __init__(self, store: EvictedStore, lanes: Tensor | None, scores: Tensor, meter: Meter) -> None:
        assert store.max_entries is not None
        self.store, self.lanes, self.meter, self.count = store, lanes, meter, store.max_entries
        self.scores = scores if lanes is None else scores[lanes]
        self.first_newest = scores.shape[1] - min(NEWEST, self.count // 2)
        self.entries: EvictedEntries | None = None

    def take(self, left: EvictedEntries) -> None:
        """Take evicted entries of all lanes, and drop those that are too many."""
        left = left if self.lanes is None else left.each(lambda rows: rows[self.lanes])
        entries = left if self.entries is None else self.entries.joined(left)
        by_slot = entries.slots.argsort(1)
        order = by_slot.gather(1, self._scored(entries.slots.gather(1, by_slot)).argsort(dim=1, stable=True))
        with self.meter.holding(*entries[:2]):
            kept = entries.at(order[:, max(0, order.shape[1] - self.count) :])
        self._hold(kept)

    def give(self, resident: WorkingSet) -> None:
        """Let the store take the entries in groups of neighbours, which lose less in few bits: first the groups whose
        best scores are the lowest, because a store that keeps this order replaces the first ones first. A lane with
        fewer entries than others gets empty places, empty groups first. Which of its entries share a group does not
        depend on other lanes."""
        if self.entries is None:
            return
        slots = self.entries.slots
        number = (slots >= 0).sum(1, keepdim=True)
        if not (columns := up(int(number.max()), GROUP)):
            self._hold(None)
            return
        by_slot = slots.masked_fill(slots < 0, torch.iinfo(slots.dtype).max).argsort(1)[:, :columns]
        scores = self._scored(slots.gather(1, by_slot))
        scores = torch.nn.functional.pad(scores, (0, columns - scores.shape[1]), value=float("-inf"))
        places = torch.arange(columns, device=slots.device).expand(len(slots), -1).unflatten(1, (-1, GROUP))
        order = gathered(places, scores.unflatten(1, (-1, GROUP)).amax(2).argsort(dim=1, stable=True)).flatten(1)
        # An empty place has a copy of the lane's last entry, which does not widen the range of their group.
        found = self.entries.at(by_slot.gather(1, order.minimum(number - 1).clamp(min=0)))
        found = found._replace(slots=found.slots.masked_fill(order >= number, -1), gaps=True)
        with self.meter.holding(*found[:2]):
            self.store.take(found, resident)
        self._hold(None)

    def _hold(self, entries: EvictedEntries | None) -> None:
        """Keep ``entries`` in place of those before."""
        before, now = (0 if one is None else nbytes(*one[:2]) for one in (self.entries, entries))
        self.meter.hold(now - before)
        self.entries = entries

    def _scored(self, slots: Tensor) -> Tensor:
        """Return the scores of the entries of ``slots`` (lanes, n); -inf for an empty place."""
        scores = self.scores.gather(1, slots.clamp(min=0).long())
        return scores.masked_fill(slots >= self.first_newest, float("inf")).masked_fill(slots < 0, float("-inf"))


def _words(tokenizer: Any, first: str) -> Words:
    """Return the words for a model, in its chat template; none without a tokenizer, where a text is simply repeated."""
    if tokenizer is None:
        return Words([], [], [])
    then, mark = "\n", "TEXT"
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": mark}]
        then = filled(tokenizer, messages).rpartition(mark)[2]
    return Words(*(tokenizer.encode(text, add_special_tokens=False) for text in (first, LATER, then)))


class ReconstructionReader(Rehearsal):
    """Attends exactly to all entries of a layer and to the new ones, which are discarded afterwards.

    sinks: first entries of the text, which take part in the attention of every piece. hook: that of the fate.
    """

    def __init__(self, layer: Layer, sinks: int, hook: ReadingHook | None = None) -> None:
        self.sinks, self.hook = sinks, hook
        self.piece = 0, layer.length
        """The slots that are repeated in this pass."""
        self.scores = torch.zeros(layer.ledger.batch * layer.heads, layer.length, device=layer.device)
        """(lanes, slots) float32."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors that it holds."""
        return [self.scores, *(() if self.hook is None else self.hook.tensors)]

    def attended(self, layer: Layer, step: AttentionInputs) -> Tensor:
        """Return attention over all entries and the new ones, and score the entries by it."""
        past = (segment for _, segment in self.past_segments(layer, step))
        output, lse = attend(step.query, chain(past, [step.arriving()]), step.scaling, step.sinks, layer.origin)
        self.score(layer, step, lse)
        if self.hook is not None:
            self.hook.attended(layer, step)
        return output

    def score(self, layer: Layer, step: AttentionInputs, lse: Tensor) -> None:
        """Raise scores to the weights of a pass. lse: the log-sum-exp over all entries and the new ones."""
        start, stop = self.piece
        if start or stop < layer.length:
            lse = self.of_piece(layer, step)
        lse = layer.ledger.unpadded(lse, layer.heads)
        for piece, segment in self.past_segments(layer, step, [self.piece]):
            weights = received(step.query, segment, lse, step.scaling, None, "max")
            scores = self.scores[:, piece.first : piece.first + weights.shape[1]]
            torch.maximum(scores, weights, out=scores)

    def of_piece(self, layer: Layer, step: AttentionInputs) -> Tensor:
        """Return the log-sum-exp over the sinks, the piece and the new entries."""
        spans = [(0, min(self.sinks, self.piece[0])), self.piece]
        compared = (segment for _, segment in self.past_segments(layer, step, spans))
        return attend(step.query, chain(compared, [step.arriving()]), step.scaling, step.sinks)[1]

    def finish(self) -> None:
        """Called after the last pass."""

    def past_segments(
        self, layer: Layer, step: AttentionInputs, spans: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[tuple[Piece, Segment]]:
        """Yield all entries, or those of the slots in ``spans``."""
        wide = step.wide(layer.length)
        evicted = layer.evicted.pieces(step.query, layer.resident, layer.length)
        for piece in chain(evicted, layer.resident.pieces()):
            parts = [piece] if spans is None else [piece.between(*span) for span in spans]
            yield from ((part, layer.segment(part, step, wide)) for part in parts if part is not None)
