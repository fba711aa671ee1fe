"""Races between the streams of a pretended GPU: two accesses to the same memory, of which one writes, on two streams
that do not wait for each other. The host is a stream, too.

    with PretendedGpu() as gpu, watched_streams() as races:
        ...
    assert not races

Watched is memory that a stream other than the default one has used. New memory may still be in use: by operators of
the stream on which it is allocated, for a tensor that was freed. The pretended GPU runs each operator at once, so a
race gives the right numbers there. A GPU would give others, now and then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pretended_gpu import GPU, GpuTensor, _running
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[int, int]
"""By stream, the number of its operators that surely have ended."""


class _Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device, self.clock = GPU, Clock()

    def tick(self) -> int:
        self.clock[id(self)] = self.clock.get(id(self), 0) + 1
        return self.clock[id(self)]

    def join(self, clock: Clock) -> None:
        self.clock = {one: max(clock.get(one, 0), self.clock.get(one, 0)) for one in {*clock, *self.clock}}

    def wait_event(self, event: _Event) -> None:
        self.join(event.clock)

    def wait_stream(self, stream: _Stream) -> None:
        self.join(stream.clock)

    def synchronize(self) -> None:
        _running().waited("synchronize")
        _Watch.running.host.join(self.clock)


class _Event:
    def __init__(self, **options: Any) -> None:
        self.clock = Clock()

    def record(self, stream: _Stream | None = None) -> None:
        self.clock = dict((stream or _Watch.running.current).clock)


class _Watch(TorchDispatchMode):
    running: _Watch

    def __init__(self) -> None:
        super().__init__()
        self.host, self.default = _Stream(), _Stream()
        self.current = self.default
        self.races: list[str] = []
        self._known: dict[int, dict[tuple[_Stream, int, int, bool], int]] = {}
        self._alive: list[Any] = []  # watched storages, so that their addresses stay theirs
        self._made: dict[int, tuple[_Stream, int]] = {}  # by address, the stream that memory is made for, and when

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        on_gpu = any(isinstance(one, GpuTensor) for one in given)
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if given and not is_view:
            stream = self.current if on_gpu else self.host
            if on_gpu:
                stream.join(self.host.clock)  # the host begins the operator
            time = stream.tick()
            for argument, value in zip(func._schema.arguments, args, strict=False):
                writes = argument.alias_info is not None and argument.alias_info.is_write
                for one in tree_leaves(value):
                    if isinstance(one, Tensor):
                        self._use(one, stream, time, writes, str(func))
        result = func(*args, **(kwargs or {}))
        if not is_view:
            before = {one.untyped_storage().data_ptr() for one in given}
            for one in tree_leaves(result):
                if isinstance(one, GpuTensor) and (at := one.untyped_storage().data_ptr()) not in before:
                    self._made[at] = self.current, self.current.tick()
        return result

    def _use(self, tensor: Tensor, stream: _Stream, time: int, writes: bool, name: str) -> None:
        inner = tensor.inner if isinstance(tensor, GpuTensor) else tensor
        storage = inner.untyped_storage()
        known = self._known.get(storage.data_ptr())
        if known is None:
            if stream in (self.host, self.default) or not inner.numel():
                return
            known = self._known[storage.data_ptr()] = {}
            self._alive.append(storage)
            if (made := self._made.get(storage.data_ptr())) is not None:
                known[made[0], 0, storage.nbytes(), True] = made[1]
        low = inner.storage_offset() * inner.itemsize
        high = low + inner.itemsize * (
            1 + sum((size - 1) * step for size, step in zip(inner.shape, inner.stride(), strict=True))
        )
        for use, then in [*known.items()]:
            other, first, stop, wrote = use
            if other is stream:
                if low <= first and stop <= high and writes >= wrote:
                    del known[use]  # what waits for this use waits for that one
            elif (writes or wrote) and first < high and low < stop and stream.clock.get(id(other), 0) < then:
                self.races.append(f"{name} does not wait")
        known[stream, low, high, writes] = time


class _StreamBlock:
    def __init__(self, stream: _Stream) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before, _Watch.running.current = _Watch.running.current, self.stream

    def __exit__(self, *error: Any) -> None:
        _Watch.running.current = self.before


@contextmanager
def watched_streams() -> Iterator[list[str]]:
    """Watch streams that are made in the block. Yields the races that were found."""
    watch = _Watch.running = _Watch()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(torch.cuda, "Stream", _Stream)
        patches.setattr(torch.cuda, "Event", _Event)
        patches.setattr(torch.cuda, "current_stream", lambda device=None: watch.current)
        patches.setattr(torch.cuda, "stream", _StreamBlock)
        with watch:
            yield watch.races
