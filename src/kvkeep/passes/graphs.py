"""Decoding steps as graphs of CUDA: the whole forward pass over a token is captured once, and replayed for the tokens
after it. On a GPU, a step of a small batch waits for Python and for launches, of which a replay has one.

A graph repeats operators with the numbers and the memory of the pass that was captured. So a pass is captured only
where nothing else changes from token to token:

* The numbers that do change lie on the device: the token, and its slot (:class:`~kvkeep.memory.clock.Clock`).
* The layout is what else decides a step: the tensors and numbers of all layers (``Reader.layout``), and the model's
  modules. With another layout (after a crop, with another row, in a restored text) a pass runs without the graph.
* Before, passes over single tokens are compared, operator by operator (:class:`~kvkeep.passes.operators.Operators`).
  Two of them must have the same operators, numbers and memory, and the host may not wait for the device. So there is no
  list of methods or models that can be captured.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from kvkeep.memory.clock import Clock
from kvkeep.models import binding
from kvkeep.models.adapter import processes
from kvkeep.models.forward import current_probe
from kvkeep.passes.operators import Operators
from kvkeep.passes.stream import CacheStream
from kvkeep.step.constants import Constants

TRIALS = 3
"""How many passes are compared, at most: the first one copies numbers to the device, which later ones find there."""


class StepGraph:
    """Reads single tokens for the cache of ``stream``, by a graph once there is one."""

    def __init__(self, stream: CacheStream) -> None:
        self._stream = stream
        self._windows: list[Any] = [stream.layers[layer.index] for layer in stream.geometry.sliding_layers]
        dropped = stream.checkpoint is None or stream.draft_passes is not None  # drafts leave nothing there
        dropped = dropped and not (stream.pass_hooks or stream.ledger.records)
        self._possible: bool = stream.streams and dropped and stream.geometry.steady(None)
        self.settled = True
        """Whether the last pass took as long as later ones will: it was neither compared nor captured."""
        self._model: ModelParts | None = None
        self._layout: StepLayout | None = None
        self._forget()

    def _forget(self) -> None:
        self._graph: Any = None
        self._logits: Tensor | None = None  # where the graph leaves them
        self._token: tuple[Tensor, Clock, Constants] | None = None  # what changes, and what does not
        self._seen: Operators | None = None  # what the pass before did, while passes are compared
        self._tried, self._ready = 0, False

    @property
    def possible(self) -> bool:
        """Whether the next step may be captured: full layers drop what they evict, or it is a draft."""
        passes = self._stream.draft_passes
        return self._possible and (passes is None or passes.active)

    @property
    def captured(self) -> bool:
        """Whether there is a graph."""
        return self._graph is not None

    def read(self, model: Any, cache: Any, token: int) -> Tensor | None:
        """Read the next token, and return its logits, (1, vocabulary). None: the caller reads it, without a graph.
        cache: the stream's. Raises what a pass of ``model`` raises."""
        if self.possible:
            self._stream.owner.check()
        self.settled = True
        before, self._layout = self._layout, self._layout_of(model)
        if before is None or self._layout is None or not before.is_that_of(self._layout):
            self._forget()
            return None
        if not (self._graph or self._ready or self._tried < TRIALS):
            return None
        if self._token is None:
            device = self._stream.device
            self._token = torch.zeros(1, 1, dtype=torch.int64, device=device), Clock(device), Constants()
        ids, clock, _ = self._token
        ids.fill_(token)
        clock.set(self._stream.length)
        if self._graph is not None:
            return self._replay(ids)
        self.settled = False
        return self._capture(model, cache) if self._ready else self._try(model, cache)

    def _layout_of(self, model: Any) -> StepLayout | None:
        """Return what decides the next pass; None if it cannot be captured."""
        stream = self._stream
        if not self.possible or stream.open or stream.rehearsing or stream.rereading is not None:
            return None
        if stream.ledger.batch != 1 or stream.ledger.visible is not None or current_probe() is not None:
            return None
        if self._model is None or self._model.model is not model or not self._model.unchanged():
            self._model = ModelParts(model)
        if self._model.refused:
            return None
        found = StepLayout(self._model)
        given = [layer.reader.layout(layer) for layer in stream.bounded]
        given += [one.layout() for one in (*self._windows, *stream.states.values())]
        if stream.positions is not None:
            given.append(stream.positions.layout(stream.length))
        for parts in given:
            if parts is None:
                return None
            found.add(parts)
        return found

    def _pass(self, model: Any, cache: Any) -> Tensor:
        """Run the pass over the token."""
        assert self._token is not None
        ids, clock, constants = self._token
        with self._stream.ledger.counting(clock), constants.used():
            given = {"input_ids": ids, "position_ids": clock.positions, "cache": cache, "use_cache": True}
            logits: Tensor = model(**given, logits_to_keep=1).logits[0]
        return logits

    def _try(self, model: Any, cache: Any) -> Tensor:
        """Run the pass, and compare it with the one before."""
        with Operators() as seen:
            logits = self._pass(model, cache)
        self._ready = self._seen is not None and not seen.waits and self._seen.notes == seen.notes
        self._tried += 1
        self._seen = seen if self._tried < TRIALS and not self._ready else None
        return logits

    def _capture(self, model: Any, cache: Any) -> Tensor | None:
        """Capture the pass, and run it. None, after a warning: that was not possible, and the token is unread."""
        device, length = self._stream.device, self._stream.length
        before = torch.cuda.current_stream(device)
        assert self._token is not None
        self._token[2].fixed = True
        try:
            graph = torch.cuda.CUDAGraph()
            # torch's own stream may be of another GPU
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"):
                logits = self._pass(model, cache)
            graph.replay()
        except BaseException as error:
            torch.cuda.set_stream(before)  # torch leaves the other one where a capture cannot be ended
            self._undo(length)
            if not isinstance(error, Exception):
                raise
            self._ready, self._tried = False, TRIALS
            warnings.warn(
                f"CUDA did not capture a step of '{self._stream.method.name}' ({type(error).__name__}), so steps run "
                "without a graph.",
                stacklevel=2,
            )
            return None
        self._graph, self._logits = graph, logits
        return logits.clone()

    def _undo(self, length: int) -> None:
        """Undo a pass that was captured, and has not run: only numbers of the host have changed."""
        stream = self._stream
        if stream.open:
            stream.roll_back(restoring=True, computed=False)
        elif (passes := stream.draft_passes) is not None:
            passes.forget_from(length)
        elif stream.length > length:
            for layer in stream.bounded:
                layer.truncate(length)
            stream.forget_from(length)
        for window in self._windows:
            window.arrived = length

    def _replay(self, ids: Tensor) -> Tensor:
        """Run the graph, and note on the host what the pass has done."""
        stream, completed = self._stream, False
        assert self._logits is not None
        stream.record.grow_to(stream.length + 1)
        stream.admit(1)
        stream.begin_forward(ids, None, None, None, replayed=True)
        try:
            self._graph.replay()
            for layer in (*stream.bounded, *self._windows):
                layer.commit()
            completed = True
        finally:
            stream.end_forward(completed)
            stream.owner.leave()
        return self._logits.clone()


class StepLayout:
    """Tensors and numbers that decide a pass. It does not keep the tensors alive: a cache may replace them."""

    def __init__(self, model: ModelParts) -> None:
        self._key, self._parts = [id(model)], [weakref.ref[Any](model)]

    def add(self, parts: Sequence[Any]) -> None:
        """Add more of them."""
        self._key += [one if isinstance(one, int) else id(one) for one in parts]
        self._parts += [weakref.ref(one) for one in parts if not isinstance(one, int)]

    def is_that_of(self, later: StepLayout) -> bool:
        """Return whether ``later`` has the same tensors and numbers."""
        return self._key == later._key and all(one() is not None for one in self._parts)


class ModelParts:
    """The modules of a model, its parameters and buffers: a graph has their memory, and runs none of their hooks, nor a
    ``forward`` that replaces that of a module."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        """The model."""
        modules = [*model.modules()]
        self._attributes = [vars(one) for one in modules]
        parts = [part for one in modules for part in (one._modules, one._parameters, one._buffers)]
        self._tables: list[dict[str, Any]] = [one for one in parts if one]
        self._hooks = [*chain.from_iterable((one._forward_hooks, one._forward_pre_hooks) for one in modules)]
        self._tensors = [*model.parameters(), *model.buffers()]
        compiled = any(one._compiled_call_impl is not None for one in modules) or hasattr(model, "_orig_mod")
        switched = any(hasattr(one, "_active_adapter") for one in modules)  # adapters of peft, by numbers of Python
        self.refused = compiled or switched or processes(model) > 1 or bool(self._hook_count())
        """Whether a graph would leave out what a pass of the model does."""
        self._before = self._parts()
        try:
            self._numbers = self._numbers_now()
        except RuntimeError:  # a tensor has no address
            self.refused, self._tensors = True, []
            self._numbers = self._numbers_now()

    def unchanged(self) -> bool:
        """Return whether modules, hooks and tensors are the same, and the modes of torch."""
        now = self._parts()
        same = len(now) == len(self._before) and all(map(is_, now, self._before))
        return same and self._numbers == self._numbers_now()

    def _parts(self) -> list[Any]:
        replaced = [one.get("forward") for one in self._attributes]  # by accelerate, for one
        return [*chain.from_iterable([one.values() for one in self._tables]), *replaced]

    def _numbers_now(self) -> list[int]:
        modes = torch.is_autocast_enabled("cuda"), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return [*modes, self.model.training, self._hook_count(), *[one.data_ptr() for one in self._tensors]]

    def _hook_count(self) -> int:
        hooks = chain.from_iterable(one.values() for one in self._hooks)
        return sum(map(_runs_with_each_token, hooks)) + bool(torch_modules._has_any_global_hook())


_WITHOUT_EFFECT = binding.__name__, "transformers.utils.output_capturing"
"""Modules with hooks that do nothing in a replay: kvkeep's own, which prepare the pass that is captured, and those by
which transformers collects what layers compute, which stay on a model that was asked for hidden states once."""


def _runs_with_each_token(hook: Any) -> bool:
    return getattr(getattr(hook, "func", hook), "__module__", "") not in _WITHOUT_EFFECT
