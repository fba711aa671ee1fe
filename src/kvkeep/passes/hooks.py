"""What a model's hooks (:mod:`kvkeep.models.binding`) call in a forward pass of one cache, or of several.

A single cache takes the whole input. The tokens of several caches follow one another in one row
(:mod:`kvkeep.engine.batch`). Before the pass, each session with a single token, or with few, plans its steps
(:class:`~kvkeep.step.plan.LayerStep`). An executor runs the steps of all sessions that planned a layer in one call; if
every layer is planned, all layers are one call (:class:`~kvkeep.models.fused.FusedLayers`). All other layers run
session by session, each through its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.inference import outside_inference_mode
from kvkeep.models.forward import current_probe
from kvkeep.passes.stream import MAX_PLANNED, CacheStream
from kvkeep.step import choice, native
from kvkeep.step import torch as plain
from kvkeep.step.plan import NO_STEPS, LayerStep, MovedSteps, Planned, Writes
from kvkeep.step.sinks import attend_beyond_sdpa, sinks_of

T = TypeVar("T")


@dataclass(eq=False)
class SessionPass:
    """A cache in a forward pass."""

    stream: CacheStream
    """The cache's forward passes."""
    cache: Any = None
    """The cache itself; None where it is the only one."""
    span: slice = field(default_factory=lambda: slice(None))
    """The columns of its tokens."""
    cut: bool = False
    """More of the same text follows."""
    error: Exception | None = None
    """The exception that ended its part in this pass."""
    steps: MovedSteps = NO_STEPS
    """The planned steps of its tokens."""
    entries: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By layer, the keys and values that attention reads."""

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions of its tokens, (1, tokens)."""
        first = self.stream.length
        return torch.arange(first, first + self.span.stop - self.span.start, device=device)[None]


class ForwardHooks:
    """What a model's hooks call in a forward pass of some sessions.

    packed: the sessions' tokens follow one another in one row; an error of one session does not change the others.
    """

    def __init__(self, sessions: Sequence[SessionPass], geometry: ModelGeometry, packed: bool = False) -> None:
        self.sessions, self.geometry, self.packed = sessions, geometry, packed
        self.ran = 0
        """The number of the decoder's first layers that calls for several layers have run in this pass."""
        self.writes = Writes()
        """Which planned steps of this pass have written their entries."""
        self._open = False
        self._planned: list[tuple[MovedSteps, int]] = []
        self._layers: dict[int, tuple[list[LayerStep], list[int]]] = {}  # the same by layer
        self._tokens = 0  # of the row
        self._residuals: list[SessionPass] = []
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}  # masks of this pass
        self._readers = {layer.source: layer.index for layer in geometry.layers}
        self._executor: Any = native
        self._outputs: tuple[list[Tensor], int] = [], 0

    @property
    def single(self) -> CacheStream | None:
        """The stream of the only cache; None if the input is a row of several sessions."""
        return None if self.packed else self.sessions[0].stream

    @property
    def streams(self) -> bool:
        """Whether any layer attends through these hooks."""
        return self.packed or self.sessions[0].stream.streams

    @property
    def windows(self) -> set[int | None]:
        """The windows of the sliding layers."""
        return {layer.window for layer in self.geometry.sliding_layers}

    @property
    def masks_itself(self) -> bool:
        """Whether attention needs no mask, because it is causal and skips padding by itself, or because the windows of
        a single token are planned."""
        windows = self.geometry.sliding_layers
        if self.packed or self.sessions[0].stream.masks_itself:
            return True
        return bool(windows) and self._tokens == 1 and all(self.plans(layer.index) for layer in windows)

    # -- a forward pass -----------------------------------------------------------------------------

    def begin_forward(
        self, ids: Tensor | None, embeddings: Tensor | None, positions: Tensor | None, mask: Any
    ) -> Tensor | None:
        """Begin the pass of each session. Return the positions of all tokens, (1, row); None: the model sets them."""
        self._close()
        if not self.packed:
            positions = self.sessions[0].stream.begin_forward(ids, embeddings, positions, mask)
            new = embeddings if ids is None else ids
            assert new is not None
            self._tokens = new.shape[1]
            self._plan(self.sessions if new.shape[0] == 1 and self._tokens <= MAX_PLANNED else ())
            return positions
        assert ids is not None
        self._open, found = True, []
        for session in self.sessions:
            positions_of_session = session.positions(ids.device)
            moved = self._attempt(session, self._begin, session, ids[:, session.span])
            found.append(positions_of_session if moved is None else moved.expand(1, -1))
        self._tokens = ids.shape[1]
        self._plan([one for one in self.sessions if one.span.stop - one.span.start <= MAX_PLANNED])
        return torch.cat(found, 1)

    def _begin(self, session: SessionPass, ids: Tensor) -> Tensor | None:
        session.stream.owner.take()
        session.stream.record.expect_more(session.cut)
        session.stream.admit(ids.shape[1])
        return session.stream.begin_forward(ids, None, None, None)

    def _plan(self, sessions: Sequence[SessionPass]) -> None:
        """Plan the steps of ``sessions``, which have few tokens each."""
        for session in sessions:
            if session.error is None:
                first = session.span.start or 0
                count = (self._tokens if session.span.stop is None else session.span.stop) - first
                session.steps = self._attempt(session, session.stream.plan, count, self.wrote) or NO_STEPS
                if session.steps is not NO_STEPS:
                    self._planned.append((session.steps, first))
        self._residuals = [one for one in self.sessions if one.error is None and one.stream.wants_residuals]
        exact = all(session.stream.exact for session in self.sessions if session.steps is not NO_STEPS)
        device = self.sessions[0].stream.device
        self._executor, self.writes = choice.kernels_of(device) if exact else plain, Writes()

    def wrote(self, step: LayerStep) -> bool:
        """Return whether a planned step of the last pass has written its entry."""
        return bool(self._executor.wrote(step, self.writes))

    def every_layer(self) -> Planned:
        """Return the steps of each session in all layers. Return nothing if any layer or session has work besides
        planned steps."""
        count = len(self.geometry.layers)
        complete = all(len(session.steps.planned.by_layer) == count for session in self.sessions)
        if not complete or self._residuals or self._executor is not native or current_probe() is not None:
            return ()
        return self._planned

    def _of_layer(self, layer: int) -> tuple[list[LayerStep], list[int]]:
        """Return the steps that are planned in a layer, and the first tokens of their sessions."""
        if layer not in self._layers:
            found = [(step, first) for steps, first in self._planned if (step := steps.of(layer)) is not None]
            self._layers[layer] = [step for step, _ in found], [first for _, first in found]
        return self._layers[layer]

    def plans(self, layer: int) -> bool:
        """Return whether the steps of all tokens are planned in a layer."""
        steps = self._of_layer(layer)[0]
        return bool(steps) and sum(step.tokens for step in steps) == self._tokens

    def enter_layer(self, layer_idx: int, hidden: Tensor) -> None:
        """Pass the residuals of its tokens to each session whose checkpoint stores them."""
        for session in self._residuals:
            if session.error is None:
                self._attempt(session, session.stream.enter_layer, layer_idx, hidden[:, session.span])

    def recur(
        self, layer_idx: int, run: Callable[..., Tensor], hidden: Tensor, cache: Any, mask: Tensor | None
    ) -> Tensor:
        """Return the output of a layer's recurrent module, (batch, new, hidden_size), which runs session by session.
        A session that fails gets zeros, which no other token sees."""
        if not self.packed:
            return self.sessions[0].stream.recur(layer_idx, run, hidden, cache, mask)
        row = torch.zeros_like(hidden)
        for session in self.sessions:
            if session.error is None:
                given = layer_idx, run, hidden[:, session.span], session.cache, None
                output = self._attempt(session, session.stream.recur, *given)
                if output is not None:
                    row[:, session.span] = output
        return row

    def attends(self, layer_idx: int) -> bool:
        """Return whether a layer's attention is computed here."""
        return self.packed or self.plans(layer_idx) or self.sessions[0].stream.attends(layer_idx)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        """Return attention (batch, heads, queries, value_dim); None: transformers computes it."""
        layer, row = self.geometry.layers[int(module.layer_idx)], None  # type: ignore[arg-type]
        if self._of_layer(layer.index)[0]:
            run: Callable[..., Tensor] = self._executor.run
            if self._executor is not native:  # which writes to memory, not to tensors
                run = outside_inference_mode(run)
            row = run(*self._of_layer(layer.index), query, key, value, scaling, sinks_of(module), self.writes)
            if self.plans(layer.index):
                return row.transpose(1, 2)
        if not self.packed:
            return self.sessions[0].stream.attend(module, query, key, value, mask, scaling)
        return self._attend_packed(module, layer, row, query, key, value, scaling)

    def _attend_packed(
        self,
        module: nn.Module,
        layer: LayerGeometry,
        row: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
    ) -> Tensor:
        """Attend for the sessions that did not plan this layer, and write the results into ``row``, (1, tokens, heads,
        dim). A session that fails gets zeros, which no other token sees."""
        for session in self.sessions:
            if session.steps.of(layer.index) is not None:
                continue
            output, span = None, session.span
            if session.error is None:
                parts = [part[:, :, span] for part in (query, key, value)]
                output = self._attempt(session, self._attend_one, module, session, layer, scaling, *parts)
            if row is None and output is not None:
                row = output.new_zeros(1, query.shape[2], query.shape[1], output.shape[3])
            if row is not None:
                row[:, span] = 0 if output is None else output.transpose(1, 2)
        if row is None:
            raise NoSessionLeft
        return row.transpose(1, 2)

    def _attend_one(
        self,
        module: nn.Module,
        session: SessionPass,
        layer: LayerGeometry,
        scaling: float,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        stream, mask = session.stream, None
        if not stream.streamed(layer.index):  # a streamed layer receives only new entries
            keys, values = session.entries[layer.source]
            if (expand := getattr(module, "expand_kv", None)) is not None:  # latent attention caches less than it reads
                keys, values = expand(keys, values)
        if self._readers[layer.source] == layer.index:
            del session.entries[layer.source]
        if not stream.masks_itself and query.shape[2] > 1:
            shape = query.shape[2], keys.shape[2], layer.window
            if shape not in self._masks:
                self._masks[shape] = _causal(*shape, query.device)
            mask = self._masks[shape]
        output: Tensor | None = None
        if stream.attends(layer.index):
            output = stream.attend(module, query, keys, values, mask, scaling)
        if output is None:
            output = attend_beyond_sdpa(module, query, keys, values, mask, scaling)
        if output is None:
            output = sdpa_attention_forward(module, query, keys, values, mask, scaling=scaling)[0].transpose(1, 2)
        return output

    def update(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Pass its part of a layer's keys and values, (1, kv_heads, row, dim), to each session of the row."""
        for session in self.sessions:
            if session.error is None and session.steps.of(layer_idx) is None:
                parts = (part[:, :, session.span] for part in (keys, values))
                found = self._attempt(session, session.cache.update, *parts, layer_idx)
                if found is not None:
                    session.entries[layer_idx] = found

    def keep_outputs(self, earlier: list[Tensor], last: int) -> None:
        """Keep what the outputs of a prompt's last chunk need, until :meth:`take_outputs`. earlier: the outputs of the
        chunks before it, (batch, n, hidden_size); last: the number of its last positions that are used; 0: all."""
        self._outputs = earlier, last

    def take_outputs(self) -> tuple[list[Tensor], int]:
        """Return what :meth:`keep_outputs` was given last, and forget it."""
        kept, self._outputs = self._outputs, ([], 0)
        return kept

    def end_forward(self, completed: bool) -> None:
        """End the pass of each session, and undo that of one that failed."""
        self._forget_steps()  # they hold ranks, and memory is counted below
        for session in self.sessions:
            if not session.stream.owner.mine:  # another thread's pass
                continue
            try:
                self._attempt(session, self._end, session, completed and session.error is None)
            finally:
                if self.packed:
                    session.stream.record.expect_more(False)
                    session.stream.owner.leave()
        self._close()

    def _end(self, session: SessionPass, completed: bool) -> None:
        session.stream.commit(completed)
        session.stream.end_forward(completed)
        if self.packed and completed and session.stream.must_reread:
            session.cache.compress()

    def _close(self) -> None:
        self._open, self.ran = False, 0
        self._masks = {}
        self._forget_steps()

    def _forget_steps(self) -> None:
        self._planned, self._layers = [], {}
        for session in self.sessions:
            session.steps = NO_STEPS

    def abandon(self) -> None:
        """Undo a pass whose failure the model's hooks did not see."""
        if self._open:
            self.end_forward(completed=False)

    def _attempt(self, session: SessionPass, act: Callable[..., T], *given: Any) -> T | None:
        """Call ``act``. In a row of several sessions, record an exception as this session's error, and return None."""
        if not self.packed:
            return act(*given)
        try:
            return act(*given)
        except Exception as error:
            session.error = session.error or error
            return None


class NoSessionLeft(Exception):
    """Every session of the pass has failed."""


def _causal(queries: int, entries: int, window: int | None, device: torch.device) -> Tensor:
    """Return which entries each query sees, (1, 1, queries, entries) bool. The last entries belong to the queries."""
    slots = torch.arange(entries, device=device)
    queried = slots[entries - queries :, None]
    seen = slots <= queried
    if window is not None:
        seen &= slots > queried - window
    return seen[None, None]
