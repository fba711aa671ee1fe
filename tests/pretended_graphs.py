"""Graphs of a pretended GPU: a capture notes the operators of its block, and a replay runs them again, in the same
memory.

    with PretendedGpu() as gpu, pretended_graphs() as graphs:
        ...
    graphs[0].replays

A capture computes nothing: memory that was there before keeps its numbers, and new memory has arbitrary ones. It
refuses what a stream that is captured refuses, with an error that begins with "GPU:": that the host waits, or copies
between host and device. A replay refuses memory that was there before the capture, and is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pretended_gpu import GpuTensor, Refused, _facts, _running
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ARBITRARY = 77
"""What new memory of a capture has: no number that a tiny model computes, and too large as an index."""


class CapturedGraph:
    """A ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.replays = 0
        self.calls: list[tuple[Any, Any, dict[str, Any], list[GpuTensor | None]]] = []
        """Each operator with its arguments, and its results that are no views."""
        _made.append(self)

    def replay(self) -> None:
        kernels = _running().kernels.copy()
        self.replays += 1
        for func, args, options, results in self.calls:
            found = func(*_each(args, _alive), **{name: _each(one, _alive) for name, one in options.items()})
            for new, old in zip(tree_leaves(found), results, strict=True):
                if old is not None and new is not old:
                    old.inner.copy_(new.inner)
        _running().kernels = kernels  # the host launches none of them


_made: list[CapturedGraph] = []


class _Given:
    """A tensor that was there before the capture. A graph does not keep it alive."""

    def __init__(self, tensor: GpuTensor) -> None:
        self.tensor = weakref.ref(tensor)


def _alive(value: Any) -> Any:
    if not isinstance(value, _Given):
        return value
    if (tensor := value.tensor()) is None:
        raise Refused("a graph uses memory that is freed")
    return tensor


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    return type(value)([_each(one, change) for one in value]) if type(value) in (list, tuple) else change(value)


class _Capture(TorchDispatchMode):
    def __init__(self, graph: CapturedGraph) -> None:
        super().__init__()
        self.graph, self._counted = graph, self._count()
        self._before: dict[int, tuple[Tensor, Any]] = {}  # by address, a tensor and what its memory had
        self._new: dict[int, GpuTensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(value)
        self._keep(options.get("out"))
        result = func(*args, **options)
        self.check()
        results = [one if isinstance(one, GpuTensor) else None for one in tree_leaves(result)]
        given = {id(one) for one in tree_leaves((args, options))}
        self._new |= {id(one): one for one in results if one is not None and id(one) not in given}
        named = {name: _each(one, self._weakly) for name, one in options.items()}
        computed = [None if _facts(func)[1] else one for one in results]
        if any(one is not None for one in results):
            self.graph.calls.append((func, _each(args, self._weakly), named, computed))
        return result

    @staticmethod
    def _count() -> tuple[int, int]:
        return _running().waits.total(), _running().copies.total()

    def check(self) -> None:
        """Refuse what the host may not do."""
        if self._count() != self._counted:
            raise Refused("the host waits for the device or copies, while a graph is captured")

    def _weakly(self, value: Any) -> Any:
        return _Given(value) if isinstance(value, GpuTensor) and id(value) not in self._new else value

    def _keep(self, value: Any) -> None:
        if isinstance(value, GpuTensor):
            storage = value.inner.untyped_storage()
            self._before.setdefault(storage.data_ptr(), (value.inner, storage.clone()))

    def undo(self) -> None:
        """Give memory the numbers that it had."""
        leaves = tree_leaves([(args, options) for _, args, options, _ in self.graph.calls])
        given = [one.tensor() for one in leaves if isinstance(one, _Given)]
        old = {one.inner.untyped_storage().data_ptr() for one in given if one is not None}
        for one in self._new.values():
            if one.inner.untyped_storage().data_ptr() not in old:
                one.inner.fill_(ARBITRARY)
        for inner, numbers in self._before.values():
            if inner.untyped_storage().data_ptr() in old:
                inner.untyped_storage().copy_(numbers)


@contextmanager
def _captured(graph: CapturedGraph, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    capture = _Capture(graph)
    try:
        with capture:
            yield
            capture.check()
    finally:
        capture.undo()


@contextmanager
def pretended_graphs() -> Iterator[list[CapturedGraph]]:
    """Within the block, in that of a pretended GPU, graphs are pretended. Yields those that were made."""
    _made.clear()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(torch.cuda, "CUDAGraph", CapturedGraph)
        patches.setattr(torch.cuda, "graph", _captured)
        patches.setattr(torch.cuda, "set_stream", lambda stream: None)
        yield _made
