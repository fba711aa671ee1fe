"""One forward pass for many sessions: their new tokens packed into one row, attention by each session's own cache.

Weights are read once for all of them. Everything but attention treats tokens one by one, and attention goes by spans.
Where the CPU kernel keeps and attends a session's single token (:class:`~kvkeep.attention.together.Arrival`), it does
so for all such sessions in one call a layer, which caches prepare before the pass and note after it; a row of nothing
but such tokens goes through all layers in one call. The queries, keys and values of any other session are handed to its
cache as if the model ran for it alone. Where products do not depend on the number of rows, as with the CPU kernels in
bfloat16, logits are those of each alone to the last bit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvkeep.attention.together import Arrival, Together
from kvkeep.cache import KeepCache
from kvkeep.errors import KvkeepError
from kvkeep.geometry import LayerGeometry
from kvkeep.models.binding import bind
from kvkeep.models.forward import current_probe

CHUNK = 512
"""Tokens of a prompt read in a pass where the method itself sets no limit and does not mind."""
PART = 128
"""Those beside sessions that write, which wait for them: in fewer, a token of a prompt costs more."""


@dataclass(eq=False)
class Read:
    """Tokens that a session's model is to read next, after all that its cache holds.

    ids: their ids. keep: of how many of the last ones logits are wanted. cut: more of the same text follows. first: the
    position of the first one, by default the cache's next.
    """

    cache: KeepCache
    ids: Sequence[int]
    keep: int = 1
    cut: bool = False
    first: int | None = None


@dataclass(eq=False)
class _Span:
    """A read's place in the row, and the entries that its attention is given."""

    read: Read
    start: int
    stop: int
    error: Exception | None = None
    entries: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # keys and values by layer
    arrivals: dict[int, Arrival] = field(default_factory=dict)  # what the kernel does, by layer

    @property
    def stream(self) -> Any:
        return self.read.cache.stream

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions of its tokens, (1, tokens)."""
        first = self.stream.length if self.read.first is None else self.read.first
        return torch.arange(first, first + self.stop - self.start, device=device)[None]


class _NobodyLeft(Exception):
    """Every session of the pass has failed."""


class Batch(Cache):
    """The caches of some reads as the one cache of a row in which their tokens follow one another. latent: the model
    caches less than its attention multiplies. arrivals: by layer, where the kernel finds what it does for all
    ``sessions``; empty where that is not all there is to do in every layer. passed: so all layers ran at once
    (:class:`~kvkeep.models.fused.FusedLayers`)."""

    arrivals: Sequence[int] = ()
    passed = False

    def __init__(self, reads: Sequence[Read], latent: bool) -> None:
        super().__init__(layers=[])
        self.spans, start = [], 0
        for read in reads:
            self.spans.append(_Span(read, start, start + len(read.ids)))
            start += len(read.ids)
        self.geometry = reads[0].cache.geometry
        self.stream = _BatchStream(self, latent)

    @property
    def sessions(self) -> int:
        """How many there are."""
        return len(self.spans)

    @property
    def is_sliding(self) -> list[bool]:
        """By layer, as masks are chosen by it."""
        return [layer.kind == "sliding" for layer in self.geometry.layers]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: every token of the row has a position of its own."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return that masks cover the row alone; none is used."""
        return query_length, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Give each session its keys and values, (1, kv_heads, row, dim) of all."""
        for span in self.spans:
            if span.error is None and layer_idx not in span.arrivals:
                keys, values = (part[:, :, span.start : span.stop] for part in (key_states, value_states))
                try:
                    span.entries[layer_idx] = span.read.cache.update(keys, values, layer_idx)
                except Exception as error:  # one session's fault is no other's
                    span.error = error
        return key_states, value_states


class _BatchStream:
    """How the caches of a batch take part in a forward pass; see :class:`~kvkeep.models.forward.Taking`."""

    streams = True
    observes = False  # no part of a row is left out anyway
    last_outputs = 0
    decoder = None
    chunk = sys.maxsize
    cut = due = False
    hooks = ()
    packed = True
    length = rows = 0
    text = None

    def __init__(self, batch: Batch, latent: bool) -> None:
        self.batch, self.earlier_outputs = batch, list[Tensor]()
        self._latent, self._open = latent, False
        self._residuals: list[_Span] = []
        self._shared: dict[int, Together] = {}  # by layer
        self._kept: list[int] = []  # the layers of these that have run
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}  # of this pass
        self._readers = {layer.source: layer.index for layer in batch.geometry.layers}

    def admit(self, tokens: int) -> None:
        """What a session has room for it tells when its span begins."""

    def prepare(self, layers: Any) -> None:
        """:meth:`begin_forward` has prepared all sessions."""

    def begin_forward(self, ids: Tensor | None, embeddings: Any, positions: Tensor | None, mask: Any) -> Tensor:
        """Begin the pass of each session; return the positions of all tokens, (1, row)."""
        assert ids is not None
        self._open = True
        every = []
        for span in self.batch.spans:
            own = span.positions(ids.device)
            try:
                span.stream.cut = span.read.cut
                span.stream.admit(own.shape[1])
                moved = span.stream.begin_forward(ids[:, span.start : span.stop], None, own, None)
                own = own if moved is None else moved.expand(1, -1)
            except Exception as error:
                span.error = error
            every.append(own)
        self._prepare()
        return torch.cat(every, 1)

    def _prepare(self) -> None:
        """Ask caches what the kernel is to do for their single tokens."""
        spans = [span for span in self.batch.spans if span.error is None]
        self._residuals = [span for span in spans if span.stream.wants_residuals]
        for span in spans:
            if span.stop - span.start == 1 and not self._latent:
                try:
                    span.arrivals = span.stream.arrivals()
                except Exception as error:
                    span.error = error
        for index in range(len(self.batch.geometry.layers)):
            own = [span for span in spans if span.error is None and index in span.arrivals]
            if own:
                self._shared[index] = Together([one.arrivals[index] for one in own], [one.start for one in own])
        every = all(len(span.arrivals) == len(self.batch.geometry.layers) for span in self.batch.spans)
        if every and not self._residuals and current_probe() is None:
            self.batch.arrivals = [one.address for one in self._shared.values()]

    def enter_layer(self, layer_idx: int, hidden: Tensor) -> None:
        """Hand each session that asks for them the residuals of its tokens."""
        for span in self._residuals:
            if span.error is None:
                span.stream.enter_layer(layer_idx, hidden[:, span.start : span.stop])

    def attends(self, layer_idx: int) -> bool:
        return True

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float) -> Tensor:
        """Return attention (1, heads, row, value_dim), each span's by its own cache. A session that fails gets zeros,
        which no other token sees."""
        layer = self.batch.geometry.layers[int(module.layer_idx)]  # type: ignore[arg-type]
        shared, row = self._shared.get(layer.index), None
        if shared is not None:
            row = shared.attend(query, key, value, scaling)
            self._kept.append(layer.index)
        for span in self.batch.spans:
            if layer.index in span.arrivals:
                continue
            own = None
            if span.error is None:
                parts = [part[:, :, span.start : span.stop] for part in (query, key, value)]
                try:
                    own = self._attend(module, span, layer, scaling, *parts).transpose(1, 2)
                except Exception as error:
                    span.error = error
            if row is None and own is not None:
                row = own.new_zeros(1, query.shape[2], *own.shape[2:])
            if row is not None:
                row[:, span.start : span.stop] = 0 if own is None else own
        if row is None:
            raise _NobodyLeft
        return row.transpose(1, 2)

    def _attend(
        self,
        module: nn.Module,
        span: _Span,
        layer: LayerGeometry,
        scaling: float,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        stream, mask = span.stream, None
        if not stream.streamed(layer.index):  # all its entries, where a stream is given the new ones
            keys, values = span.entries[layer.source]
            if (expand := getattr(module, "expand_kv", None)) is not None:  # latent attention caches less than it reads
                keys, values = expand(keys, values)
        if self._readers[layer.source] == layer.index:
            del span.entries[layer.source]
        if not (stream.masks_itself and layer.kind != "sliding") and query.shape[2] > 1:
            shape = query.shape[2], keys.shape[2], layer.window
            if shape not in self._masks:
                self._masks[shape] = _causal(*shape, query.device)
            mask = self._masks[shape]
        output: Tensor | None = None
        if stream.attends(layer.index):
            output = stream.attend(module, query, keys, values, mask, scaling)
        if output is None:
            output = sdpa_attention_forward(module, query, keys, values, mask, scaling=scaling)[0].transpose(1, 2)
        return output

    def end_forward(self, completed: bool) -> None:
        """End the pass of each session, and undo that of one that failed."""
        self._open = False
        if self.batch.passed:
            self._kept = [*self._shared]
        for span in self.batch.spans:
            try:
                whole = completed and span.error is None
                if span.arrivals:
                    span.stream.took([index for index in self._kept if index in span.arrivals], whole)
                span.stream.end_forward(whole)
                if whole and span.stream.due:
                    span.read.cache.compress()
            except Exception as error:
                span.error = span.error or error
            finally:
                span.stream.cut = False

    def abandon(self) -> None:
        """Undo a pass that failed before the hooks of the model could know of it."""
        if self._open:
            self.end_forward(completed=False)


def _causal(queries: int, entries: int, window: int | None, device: torch.device) -> Tensor:
    """Return which of ``entries``, the last of them their own, so many queries see: (1, 1, queries, entries) bool."""
    slots = torch.arange(entries, device=device)
    own = slots[entries - queries :, None]
    seen = slots <= own
    if window is not None:
        seen &= slots > own - window
    return seen[None, None]


def packs(cache: KeepCache) -> bool:
    """Return whether a cache's tokens can be packed into a row with others': not where it runs the model itself, or
    where layers have a state that is not keys and values."""
    again = cache.checkpoint is not None and cache.checkpoint.replays
    return not (again or cache.stream.hooks) and not cache.geometry.other_layers


@torch.no_grad()
def forward(model: Any, reads: Sequence[Read]) -> list[Tensor | Exception]:
    """Run the model once over all ``reads``, and return of each the logits (keep, vocabulary) of its last tokens, or
    what it failed by: then its cache is as it was before. Where the model itself fails for want of memory, or by some
    other RuntimeError, so does each. Raises what else it raises, and torch.AcceleratorError: a device is lost."""
    batch = Batch(reads, bind(model).latent)
    ids = torch.tensor([[one for read in reads for one in read.ids]], device=next(model.parameters()).device)
    kept = [number for span in batch.spans for number in range(span.stop - span.read.keep, span.stop)]
    rows = torch.tensor(kept or [0], device=ids.device)
    try:
        logits = model(input_ids=ids, past_key_values=batch, use_cache=True, logits_to_keep=rows).logits[0]
    except _NobodyLeft:
        return [span.error or RuntimeError("no attention") for span in batch.spans]
    except torch.AcceleratorError:
        raise
    except (MemoryError, RuntimeError) as error:
        batch.stream.abandon()
        return [span.error or _of_all(error, len(reads)) for span in batch.spans]
    parts = logits[: len(kept)].split([read.keep for read in reads])
    return [part if span.error is None else span.error for span, part in zip(batch.spans, parts, strict=True)]


def _of_all(error: Exception, sessions: int) -> KvkeepError:
    """Return what each of so many sessions is told of an error that ended their pass."""
    short = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate" in str(error)
    why = "there was not enough memory" if short else type(error).__name__  # its words may be those of a prompt
    told = KvkeepError(f"The answer failed with the step that read for {sessions} sessions ({why}); ask again.")
    told.__cause__ = error
    return told


@torch.no_grad()
def alone(model: Any, read: Read) -> Tensor | Exception:
    """Run the model over one read by itself; the same as :func:`forward` of it, whatever it fails by. Raises
    torch.AcceleratorError alone."""
    cache, ids = read.cache, torch.tensor([[*read.ids]], device=next(model.parameters()).device)
    first = cache.get_seq_length() if read.first is None else read.first
    positions = torch.arange(first, first + ids.shape[1], device=ids.device)[None]
    cache.stream.cut = read.cut
    try:
        keep = max(1, read.keep)
        given = {"position_ids": positions, "past_key_values": cache, "use_cache": True, "logits_to_keep": keep}
        logits: Tensor = model(input_ids=ids, **given).logits[0]
        return logits
    except torch.AcceleratorError:
        raise
    except Exception as error:
        return error
    finally:
        cache.stream.cut = False


def chunk_of(cache: KeepCache) -> int:
    """Return how many tokens of a prompt a cache is given in one pass."""
    own: int = cache.stream.chunk
    free = own > CHUNK and cache.method.exactness == "exact" and not cache.method.oneshot
    return CHUNK if free else own


def part_of(cache: KeepCache) -> int:
    """Return how many it is given beside sessions that write: fewer, where neither its answer depends on how a text is
    cut, nor every pass rebuilds what left."""
    stored = cache.checkpoint
    cut = cache.method.exactness == "exact" and not cache.method.oneshot and cache.round is None
    kept = stored is None or not (stored.capacity or stored.by_token or stored.replays)
    return min(PART, chunk_of(cache)) if cut and kept else chunk_of(cache)
