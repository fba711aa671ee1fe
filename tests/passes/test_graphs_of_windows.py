"""Steps in graphs of models with sliding windows and recurrent states, on a pretended GPU with pretended graphs: the
bits of steps without a graph, wherever a window is, and whatever comes between two tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import LENGTH, MOVING_FAMILIES
from graph_twins import BEFORE, BETWEEN, Twins, full, model_of
from pretended_gpu import PretendedGpu
from pretended_graphs import CapturedGraph
from torch import Tensor

from kvkeep import KeepCache
from kvkeep.engine.answer import forward_one
from kvkeep.engine.batch import Read
from kvkeep.errors import KvkeepError
from kvkeep.geometry import spare_rows, window_rows
from kvkeep.passes.hooks import ForwardHooks
from kvkeep.stores.sliding import noted, sliding_layers
from kvkeep.transfer import last_token_state, rewind

pytestmark = pytest.mark.usefixtures("graphs")
FAMILIES = sorted(MOVING_FAMILIES)
METHODS = ("window", "h2o", "snapkv", "knorm", "streaming-llm")
REPLAY = {"fill_": 1, "arange": 1, "clone": 1}


def of(family: str, method: str = "h2o") -> Twins:
    """Return caches with a graph, whose budget and windows are full."""
    return full(method, model=model_of(family))


@pytest.mark.turns(4)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_replays_have_the_bits_of_steps(family: str, method: str, graphs: list[CapturedGraph]) -> None:
    """While windows move twice within their memory."""
    twins = of(family, method)
    twins.step(40)
    assert len(graphs) == 1 and graphs[0].replays > 40


def test_bfloat16(graphs: list[CapturedGraph]) -> None:
    for family in "gemma3", "qwen3_next":
        twins = full("window", model=model_of(family, torch.bfloat16))
        twins.step(20)
    assert len(graphs) == 2 and graphs[1].replays > 20


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_a_replay_is_three_launches_and_windows_move_seldom(
    family: str, gpu: PretendedGpu, graphs: list[CapturedGraph]
) -> None:
    twins, moves = of(family), 0
    for _ in range(3 * spare_rows(8)):
        gpu.clear()
        forward_one(twins.model, Read(twins.with_graphs, twins.next()))
        assert not gpu.waits and not gpu.copies
        moves += gpu.kernels != REPLAY
    assert moves == (0 if family == "qwen3_next" else 3) and len(graphs) == 1


def test_a_window_that_is_not_full_is_not_captured(graphs: list[CapturedGraph]) -> None:
    twins = Twins("h2o", 16, model_of("gemma3"))
    (window, *_) = sliding_layers(twins.with_graphs)
    twins.read(twins.next(10))
    for _ in range(30):
        twins.step()
        if window._memory[0].shape[2] < window_rows(window.sliding_window):
            assert not graphs
    assert twins.captured


def test_rows_without_an_entry_have_finite_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their weight is 0, and 0 times NaN would be NaN."""
    new_empty = Tensor.new_empty

    def arbitrary(own: Tensor, *given: Any, **options: Any) -> Tensor:
        made = new_empty(own, *given, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(Tensor, "new_empty", arbitrary)
    twins = of("gemma3")
    assert torch.isfinite(forward_one(twins.model, Read(twins.with_graphs, [5])).cpu()).all()


# -- what comes between two tokens ------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.turns(3)
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen3_next", "lfm2", "falcon_h1"])
@pytest.mark.parametrize("between", [name for name in BETWEEN if "crop" not in name])
def test_a_graph_is_used_only_where_nothing_has_changed(between: str, family: str, tmp_path: Path) -> None:
    twins = of(family)
    BETWEEN[between](twins, tmp_path)
    twins.step(24)
    assert twins.captured


@torch.no_grad()
def test_a_crop_of_recorded_windows(graphs: list[CapturedGraph]) -> None:
    twins = of("gemma3")
    for _ in range(3):
        twins.each(KeepCache.activate_past_recording)
        twins.step(6)
        twins.each(lambda cache: cache.crop(-4))
        for layer in (one for cache in twins.both for one in sliding_layers(cache)):
            layer.record_past = False
            layer.trim()
        twins.step(BEFORE + 6)
        assert twins.captured


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_a_prompt_leaves_the_graph(family: str, graphs: list[CapturedGraph]) -> None:
    """In a conversation one graph serves several answers: windows stay where they are, unless somebody noted them."""
    twins = of(family)
    twins.read(twins.next(40))
    twins.step(10)
    assert len(graphs) == 1
    if windows := noted(sliding_layers(twins.with_graphs)):
        twins.step(20)
        assert windows[0].layer._memory[0] is not windows[0].memory[0] and len(graphs) == 2


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_a_cache_goes_back_to_a_kept_place(family: str) -> None:
    twins = of(family)
    kept = [{name: one.clone() for name, one in last_token_state(cache).items()} for cache in twins.both]
    length = twins.without.get_seq_length()
    twins.step(20)
    for cache, state in zip(twins.both, kept, strict=True):
        rewind(cache, length, state)
    twins.step(20)
    assert twins.captured


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_an_interrupted_replay_is_an_interrupted_pass(family: str) -> None:
    """It cannot be undone, but the cache can go back to a place that was kept."""
    twins = of(family)
    kept = [{name: one.clone() for name, one in last_token_state(cache).items()} for cache in twins.both]
    length = twins.without.get_seq_length()
    twins.interrupt()
    refused = forward_one(twins.model, Read(twins.with_graphs, [5]))
    assert isinstance(refused, KvkeepError) and "call reset()" in str(refused)
    rewind(twins.with_graphs, length, kept[0])
    assert twins.with_graphs.get_seq_length() == length
    with pytest.warns(UserWarning, match="was undone"):
        assert torch.isfinite(forward_one(twins.model, Read(twins.with_graphs, [5])).cpu()).all()
    twins.each(KeepCache.reset)
    twins.read(twins.next(LENGTH))
    twins.step(12)
    assert twins.captured


@pytest.mark.parametrize("when", ["within", "after"])
@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_a_capture_that_fails_changes_nothing(family: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twins, captured, attend = Twins("h2o", 16, model_of(family)), torch.cuda.graph, ForwardHooks.attend
    twins.read(twins.next(LENGTH))
    capturing = False

    @contextmanager
    def failing(graph: Any, **options: Any) -> Iterator[None]:
        nonlocal capturing
        try:
            with captured(graph, **options):
                capturing = True
                yield
            raise torch.OutOfMemoryError("no memory for a graph")
        finally:
            capturing = False

    def attended(hooks: Any, module: Any, *given: Any) -> Any:
        if capturing and when == "within" and module.layer_idx == 3:
            raise torch.OutOfMemoryError("no memory for a graph")
        return attend(hooks, module, *given)

    monkeypatch.setattr(torch.cuda, "graph", failing)
    monkeypatch.setattr(ForwardHooks, "attend", attended)
    with pytest.warns(UserWarning, match="did not capture a step of 'h2o' \\(OutOfMemoryError\\)"):
        twins.step(24)
    assert not twins.captured
