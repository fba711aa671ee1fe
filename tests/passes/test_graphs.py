"""Steps in graphs, on a pretended GPU with pretended graphs: the bits of steps without a graph, for every method and
family that is captured, and whatever comes between two tokens.

What is compared is another cache, whose tokens the model reads as in ``model(ids, cache=cache)``, which never uses a
graph. A pretended graph computes nothing while it is captured, and a replay repeats the numbers of the capture.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from answering import NEW as ANSWER
from answering import Client, run, text
from captured import CAPTURED, CAPTURED_FAMILIES, LENGTH
from conftest import tokenizer
from families import FAMILIES, tiny
from graph_twins import BEFORE, BETWEEN, Twins, full, model_of
from helpers import prompt
from pretended_gpu import GPU, PretendedGpu, on_gpu
from pretended_graphs import CapturedGraph
from torch import Tensor

import kvkeep
from kvkeep import KeepCache
from kvkeep.contracts.selector import Candidates
from kvkeep.engine.answer import forward_one
from kvkeep.engine.batch import Read
from kvkeep.memory.clock import Clock
from kvkeep.models.loading import Loaded
from kvkeep.passes.graphs import StepGraph
from kvkeep.passes.hooks import ForwardHooks
from kvkeep.passes.operators import Operators
from kvkeep.policies import registry
from kvkeep.policies.selectors.window import Window
from kvkeep.serve.engine import Engine

pytestmark = pytest.mark.usefixtures("graphs")
NOT_CAPTURED = {
    "full": None, "kv-direct": 16, "h2o+checkpoint": 16, "snapkv+verified": 32, "h2o+merge": 16, "quantized": 80,
    "h2o+quantize:4": 80, "kvreviver": 80,
}  # fmt: skip
PIN = 5


# -- what is captured -------------------------------------------------------------------------------------


@pytest.mark.turns(3)
@pytest.mark.parametrize("method", CAPTURED)
def test_replays_have_the_bits_of_steps(method: str, gpu: PretendedGpu, graphs: list[CapturedGraph]) -> None:
    twins = Twins(method, CAPTURED[method])
    twins.read(twins.next(LENGTH))
    twins.step(BEFORE + 12)
    assert twins.captured and len(graphs) == 1 and graphs[0].replays >= 12
    gpu.clear()
    forward_one(twins.model, Read(twins.with_graphs, twins.next()))
    assert not gpu.waits and not gpu.copies and gpu.kernels == {"fill_": 1, "arange": 1, "clone": 1}


@pytest.mark.turns(3)
@pytest.mark.parametrize("method", CAPTURED)
def test_replays_evict_no_pinned_entry(method: str) -> None:
    twins = Twins(method, CAPTURED[method] + PIN, pin=PIN)
    twins.read(twins.next(LENGTH))
    twins.step(BEFORE + 12)
    assert twins.captured
    for layer in twins.with_graphs.stream.bounded:
        assert layer.resident.resident_slots()[:, :PIN].cpu().all()


def test_a_conversation_pins_its_system_prompt_in_replays(
    monkeypatch: pytest.MonkeyPatch, graphs: list[CapturedGraph]
) -> None:
    def talk() -> list[list[int]]:
        cache = KeepCache(model_of(), "window", 24)
        chat = kvkeep.Conversation(cache.model, tokenizer(), cache, system="the of and to in", pin="system")
        found = [chat.answer(text, max_new_tokens=16).tokens for text in ("a b c " * 9, "d e")]
        pinned = cache.method.pin
        assert pinned and all(layer.resident.resident_slots()[:, :pinned].cpu().all() for layer in cache.stream.bounded)
        return found

    found = talk()
    assert graphs and graphs[-1].replays
    monkeypatch.setattr(StepGraph, "read", lambda *given: None)
    assert found == talk()


@pytest.mark.turns(3)
@pytest.mark.parametrize("method", NOT_CAPTURED)
def test_methods_that_are_not_captured_run_as_before(method: str, graphs: list[CapturedGraph]) -> None:
    twins = Twins(method, NOT_CAPTURED[method])
    twins.read(twins.next(LENGTH))
    for _ in range(8):
        twins.read(twins.next())
    assert not graphs


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, graphs: list[CapturedGraph]) -> None:
    twins = Twins("h2o", 16, model_of(family))
    twins.read(twins.next(LENGTH))
    for _ in range(8):
        twins.read(twins.next())
    assert bool(graphs) == (family in CAPTURED_FAMILIES)


@pytest.mark.parametrize("method", ["window", "snapkv"])
def test_bfloat16_uses_the_flash_kernel(method: str) -> None:
    twins = Twins(method, 16, model_of("llama", torch.bfloat16))
    twins.read(twins.next(LENGTH))
    twins.step(12)
    assert twins.captured


def test_a_budget_that_is_not_full_is_not_captured(graphs: list[CapturedGraph]) -> None:
    twins = Twins("h2o", 64)
    twins.read(twins.next(40))
    twins.step(20)
    assert not graphs
    twins.step(20)
    assert twins.captured


def test_entries_that_the_cache_has_moved_are_freed() -> None:
    twins = Twins("h2o", 300)
    twins.read(twins.next(120))
    (bank,) = twins.with_graphs.stream.bounded[0].resident.banks
    columns, keys = bank.columns, weakref.ref(bank.keys)
    while twins.with_graphs.stream.bounded[0].resident.banks.columns == columns:
        twins.read(twins.next())
    del bank
    assert keys() is None


def test_positions_within_the_cache_begin_again_before_the_models_end(graphs: list[CapturedGraph]) -> None:
    twins = Twins("streaming-llm", 16, on_gpu(copy.deepcopy(tiny("llama", positions=64))), chunk=16)
    twins.read(twins.next(40))
    twins.step(140)
    assert twins.captured and len(graphs) == 4


# -- what comes between two tokens ------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.turns(2)
@pytest.mark.parametrize("method", ["h2o", "streaming-llm", "knorm"])
@pytest.mark.parametrize("between", BETWEEN)
def test_a_graph_is_used_only_where_nothing_has_changed(between: str, method: str, tmp_path: Path) -> None:
    twins = full(method)
    if between == "a crop of all" and method == "streaming-llm":
        pytest.skip("sinks that have moved are not removed")
    BETWEEN[between](twins, tmp_path)
    twins.step(24)
    assert twins.captured


@torch.no_grad()
def test_rows_are_read_without_a_graph(graphs: list[CapturedGraph]) -> None:
    twins = full()
    twins.each(lambda cache: cache.batch_repeat_interleave(2))
    ids = torch.tensor([[5], [6]]).to(GPU)
    ours, theirs = (twins.model(ids, cache=one).logits for one in twins.both)
    assert torch.equal(ours, theirs)
    twins.each(lambda cache: cache.batch_select_indices(torch.tensor([1], device=GPU)))
    twins.step(10)
    assert twins.captured and len(graphs) == 2


# -- what a pass may not do -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadsLength(Window):
    """Its ranks need the length on the host."""

    leaves: ClassVar[str] = "oldest"

    def rank(self, entries: Candidates) -> Tensor:
        return entries.slots - int(entries.length)


@dataclass(frozen=True)
class Counts(Window):
    """Its ranks need a number that changes with every call."""

    leaves: ClassVar[str] = "oldest"
    calls: ClassVar[list[int]] = []

    def rank(self, entries: Candidates) -> Tensor:
        self.calls.append(1)
        return entries.slots + len(self.calls)


@pytest.mark.parametrize("selector", [ReadsLength, Counts])
def test_a_selector_that_needs_the_host_is_not_captured(
    selector: type, monkeypatch: pytest.MonkeyPatch, graphs: list[CapturedGraph]
) -> None:
    monkeypatch.setitem(registry.SELECTORS, "of-the-host", selector)
    twins = Twins("of-the-host")
    twins.read(twins.next(LENGTH))
    twins.step(12)
    assert not graphs


def test_a_number_of_the_host_is_seen(monkeypatch: pytest.MonkeyPatch, graphs: list[CapturedGraph]) -> None:
    """By the comparison of passes; and replays would be wrong without it."""
    monkeypatch.setattr(Clock, "of", lambda clock, slots: slots)
    twins = Twins("h2o")
    twins.read(twins.next(LENGTH))
    twins.step(BEFORE + 2)
    assert not graphs
    monkeypatch.setattr(Operators, "notes", property(lambda seen: [], lambda seen, notes: None), raising=False)
    twins.each(KeepCache.reset)
    twins.read(twins.next(30))
    with pytest.raises(AssertionError):
        twins.step(20)
    assert graphs


def test_hooks_run_and_weights_are_those_of_the_model(graphs: list[CapturedGraph]) -> None:
    twins = full(model=on_gpu(copy.deepcopy(tiny("llama"))))
    norm, calls = twins.model.model.norm, list[int]()
    with torch.no_grad():
        norm.weight.mul_(2)
        twins.step(2)
        assert len(graphs) == 1
        handle = norm.register_forward_hook(lambda *given: calls.append(1))
        twins.step(3)
        assert len(calls) == 6
        handle.remove()
        twins.model.model.norm = copy.deepcopy(norm)
        twins.model.model.norm.weight = torch.nn.Parameter(norm.weight / 3, requires_grad=False)
        twins.step(10)
        assert twins.captured and len(graphs) == 2
        forward = twins.model.model.norm.forward
        twins.model.model.norm.forward = lambda hidden: forward(hidden) / 2
        twins.step(10)
    assert twins.captured and len(graphs) == 3


def test_hooks_of_kvkeep_and_of_transformers_do_not_prevent_a_graph() -> None:
    """A copy of a bound model has them, and a model that was asked for its hidden states."""
    model = copy.deepcopy(tiny("llama"))
    KeepCache(model, "h2o", 16)
    with torch.no_grad():
        model(prompt(1, 5), output_hidden_states=True)
    assert any(layer._forward_hooks for layer in model.model.layers)
    twins = Twins("h2o", 16, on_gpu(copy.deepcopy(model)))
    twins.read(twins.next(LENGTH))
    twins.step(BEFORE + 2)
    assert twins.captured


@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_a_capture_that_fails_changes_nothing(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twins, captured, attend = Twins("h2o"), torch.cuda.graph, ForwardHooks.attend
    twins.read(twins.next(LENGTH))
    capturing = False

    def fail(here: str) -> None:
        if capturing and when == here:
            raise torch.OutOfMemoryError("no memory for a graph")

    @contextmanager
    def failing(graph: Any, **options: Any) -> Iterator[None]:
        nonlocal capturing
        try:
            with captured(graph, **options):
                capturing = True
                fail("before")
                yield
            fail("after")
        finally:
            capturing = False

    def attended(hooks: Any, module: Any, *given: Any) -> Any:
        if module.layer_idx == 2:
            fail("within")
        return attend(hooks, module, *given)

    monkeypatch.setattr(torch.cuda, "graph", failing)
    monkeypatch.setattr(ForwardHooks, "attend", attended)
    with pytest.warns(UserWarning, match="did not capture a step of 'h2o' \\(OutOfMemoryError\\)") as found:
        twins.step(10)
    assert len(found) == 1 and not twins.captured
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twins.step(10)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_replay_is_undone(when: str) -> None:
    twins = full()
    twins.interrupt(when)
    assert twins.with_graphs.get_seq_length() == twins.without.get_seq_length()
    with pytest.warns(UserWarning, match="was undone"):
        if when == "before":
            twins.step(10)
        else:
            assert torch.isfinite(forward_one(twins.model, Read(twins.with_graphs, [5])).cpu()).all()


def test_an_answer_is_the_one_without_graphs(monkeypatch: pytest.MonkeyPatch, graphs: list[CapturedGraph]) -> None:
    ids, model = prompt(1, LENGTH)[0].tolist(), model_of()

    def answer() -> list[int]:
        return kvkeep.generate(model, None, ids, cache=KeepCache(model, "snapkv", 16), max_new_tokens=24).tokens

    found = answer()
    assert graphs[0].replays >= 24 - 1 - BEFORE
    monkeypatch.setattr(StepGraph, "read", lambda *given: None)
    assert found == answer()


def test_a_server_with_one_session_uses_them(graphs: list[CapturedGraph]) -> None:
    model, ids = model_of(), text(LENGTH, 1)
    engine = Engine(Loaded(model, tokenizer(), "tiny", "tiny"), 10**8, method="h2o", budget=16)
    client = Client(engine, ids)
    run(engine)
    alone = kvkeep.generate(model, None, ids, cache=KeepCache(model, "h2o", 16), max_new_tokens=ANSWER)
    assert client.text.split() == tokenizer().decode(alone.tokens).split()
    assert bool(graphs) == (ANSWER > BEFORE + 1)
