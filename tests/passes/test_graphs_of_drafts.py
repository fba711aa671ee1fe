"""Drafts of a bounded cache in graphs, on a pretended GPU with pretended graphs: they have the bits of drafts without a
graph, one graph serves a whole answer, and each exact pass reads the host's entries once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache as memoised
from typing import Any

import pytest
import torch
from answering import Client, run, text
from conftest import tokenizer
from families import tiny
from helpers import Drafted, drafted, prompt
from pretended_gpu import PretendedGpu, on_gpu
from pretended_graphs import CapturedGraph
from torch import Tensor
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper

import kvkeep
from kvkeep import KeepCache
from kvkeep.engine import answer as scheduling
from kvkeep.engine.answer import forward_one
from kvkeep.engine.batch import Read
from kvkeep.engine.bounded_drafts import BoundedDrafts
from kvkeep.engine.pacing import Margins
from kvkeep.engine.sampling import Sampler, Sampling
from kvkeep.models.loading import Loaded
from kvkeep.passes.graphs import StepGraph
from kvkeep.serve.engine import Engine
from kvkeep.step import torch as plain

pytestmark = pytest.mark.usefixtures("graphs")
BUDGET, LENGTH, NEW, RUN = 40, 97, 48, 5
METHODS = {
    "snapkv:window=4,kernel=3+verified:6": {},
    "h2o+verified:5": {"where": "device"},
    "window+verified:6": {},
    "knorm+verified:5": {"where": "device"},
    "streaming-llm+verified:5": {},
    "duo-attention:sinks=2+verified:5": {},
    "tova+verified:5": {"pin": 4},
}
"""Drafting methods and the options of their caches: one bank and several, entries that are chosen again before drafts
and others that stay, with gaps where a draft was taken back."""
NOT_CAPTURED = {
    "h2o+quantize:8+verified:5": {"budget": 130},
    "h2o+merge+verified:5": {},
    "h2o+verified:4": {"checkpoint": "residual"},
    "adakv:window=4,kernel=3+verified:5": {},
}
WAYS = {"greedy": Sampling(), "sampled": Sampler(LogitsProcessorList([TemperatureLogitsWarper(0.7)]), sampled=True)}


@pytest.fixture(autouse=True)
def fixed_runs(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the number of drafts nor who makes them depends on times."""
    monkeypatch.setattr(BoundedDrafts, "_count", lambda drafts, longest: min(longest, RUN))
    monkeypatch.setattr(model_of().generation_config, "prompt_lookup_num_tokens", 0)


@memoised
def made(family: str) -> Any:
    return on_gpu(copy.deepcopy(tiny(family)))


def model_of(family: str = "llama") -> Any:
    return made(family)


def cache_of(method: str, family: str = "llama", **options: Any) -> KeepCache:
    return KeepCache(
        model_of(family), method, **{"budget": BUDGET, "checkpoint": "kv", "where": "host", "chunk": 32} | options
    )


def answer(cache: KeepCache, way: str = "greedy", ids: Tensor | None = None) -> Drafted:
    torch.manual_seed(4)
    return drafted(cache.model, cache, prompt(1, LENGTH) if ids is None else ids, NEW, WAYS[way], copies=False)


@contextmanager
def without_graphs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGraph, "read", lambda *given: None)
        yield


@contextmanager
def noted_drafts() -> Iterator[list[Tensor]]:
    """Yields the scores of all drafts."""
    seen, note = list[Tensor](), Margins.note
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Margins, "note", lambda own, scores: (seen.append(scores.cpu()), note(own, scores)))
        yield seen


@pytest.mark.turns(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_answers_and_drafts_have_the_bits_of_those_without_graphs(
    method: str, way: str, graphs: list[CapturedGraph]
) -> None:
    """One graph serves the drafts of all runs, whichever of them are wrong."""
    with noted_drafts() as ours:
        found = answer(cache_of(method, **METHODS[method]), way)
    assert len(graphs) == 1 and graphs[0].replays > found.drafted - RUN
    assert 0 < found.accepted < found.drafted - RUN
    with noted_drafts() as theirs, without_graphs():
        other = answer(cache_of(method, **METHODS[method]), way)
    assert found.tokens == other.tokens == answer(KeepCache(model_of()), way).tokens
    assert all(map(torch.equal, found.logits, other.logits))
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.turns(2)
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen3_next", "lfm2"])
def test_drafts_of_models_with_windows_and_recurrent_states(
    family: str, graphs: list[CapturedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_of(family).generation_config, "prompt_lookup_num_tokens", 0)
    with noted_drafts() as ours:
        found = answer(cache_of("h2o+verified:5", family))
    assert len(graphs) == 1 and graphs[0].replays > found.drafted - RUN
    with noted_drafts() as theirs, without_graphs():
        other = answer(cache_of("h2o+verified:5", family))
    assert found.tokens == other.tokens == answer(KeepCache(model_of(family))).tokens
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.turns(2)
@pytest.mark.parametrize("method", NOT_CAPTURED)
def test_other_drafts_run_without_a_graph(method: str, graphs: list[CapturedGraph]) -> None:
    found = answer(cache_of(method, **NOT_CAPTURED[method]))
    assert found.drafted and not graphs
    assert found.tokens == answer(KeepCache(model_of())).tokens


def test_drafts_that_are_not_planned_are_not_captured(
    monkeypatch: pytest.MonkeyPatch, graphs: list[CapturedGraph]
) -> None:
    """Not after runs of one draft either, whose passes are equal: the row of a later draft is another number."""
    model = model_of("deepseek_v3")  # with latent attention
    monkeypatch.setattr(model.generation_config, "prompt_lookup_num_tokens", 0)

    def scores() -> list[Tensor]:
        runs = iter([*[1] * 6, *[RUN] * NEW])
        monkeypatch.setattr(BoundedDrafts, "_count", lambda drafts, longest: min(longest, next(runs)))
        with noted_drafts() as found:
            answer(KeepCache(model, "h2o+verified:5", BUDGET, checkpoint="kv", where="host", chunk=32))
        return found

    ours = scores()
    with without_graphs():
        theirs = scores()
    assert not graphs and len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def test_drafts_are_not_captured_until_the_budget_is_full(graphs: list[CapturedGraph]) -> None:
    found = answer(cache_of("h2o+verified:5", budget=400))
    assert found.drafted and not graphs


def test_the_host_is_read_once_for_each_exact_pass(
    gpu: PretendedGpu, graphs: list[CapturedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts read nothing there, and neither does anything between two passes."""
    cache, ids = cache_of("h2o+verified:5", page=16), prompt(1, 300)
    entry_bytes, buffer = 2 * 2 * 8 * 4, 64
    exact = list[tuple[int, int]]()

    def host_rows() -> int:
        return gpu.copied_bytes["to device, pinned"] // entry_bytes

    def counted(model: Any, read: Read) -> Any:
        assert not exact or not host_rows()  # since the pass before
        length, drafts = cache.get_seq_length(), cache.draft_passes.active
        gpu.clear()
        captured = cache.graph.captured
        found = forward_one(model, read)
        if drafts:
            assert not host_rows() and not (captured and (gpu.copies or gpu.waits))
        elif length >= 300:
            exact.append((length, host_rows()))
            assert not [one for one in gpu.waits if "checkpoints/" in one or "memory/" in one]
        gpu.clear()
        return found

    monkeypatch.setattr(scheduling, "forward_one", counted)
    found = answer(cache, ids=ids)
    assert graphs[0].replays and 0 < found.accepted < found.drafted
    assert len(exact) == NEW - 1 - found.accepted
    for length, rows in exact[1:]:
        assert len(cache.layers) * length - buffer <= rows <= len(cache.layers) * length + buffer


def test_a_conversation_keeps_its_graph(graphs: list[CapturedGraph]) -> None:
    def talk() -> list[list[int]]:
        model = model_of()
        chat = kvkeep.Conversation(model, tokenizer(), cache_of("snapkv:window=4,kernel=3+verified:6"))
        return [chat.answer(text, max_new_tokens=24).tokens for text in ("a b c " * 30, "d e")]

    found = talk()
    assert len(graphs) == 1 and graphs[0].replays
    with without_graphs():
        assert found == talk()


def test_a_server_with_one_session_drafts_by_a_graph(graphs: list[CapturedGraph]) -> None:
    model, ids, cache = model_of(), text(LENGTH, 1), {"budget": BUDGET, "checkpoint": "kv", "where": "host"}
    engine = Engine(Loaded(model, tokenizer(), "tiny", "tiny"), 10**8, method="h2o+verified:5", **cache)
    client = Client(engine, ids, NEW)
    run(engine)
    wanted = kvkeep.generate(model, None, ids, cache=KeepCache(model), max_new_tokens=NEW)
    assert client.text.split() == tokenizer().decode(wanted.tokens, skip_special_tokens=True).split()
    assert len(graphs) == 1 and graphs[0].replays


@pytest.mark.parametrize("when", ["within", "after"])
def test_a_capture_that_fails_leaves_the_drafts_before(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, write = torch.cuda.graph, plain.write
    capturing, calls = False, list[int]()

    def fail(here: str) -> None:
        if capturing and when == here:
            calls.append(1)
            raise torch.OutOfMemoryError("no memory for a graph")

    @contextmanager
    def failing(graph: Any, **options: Any) -> Iterator[None]:
        nonlocal capturing
        try:
            with captured(graph, **options):
                capturing = True
                yield
            fail("after")
        finally:
            capturing = False

    monkeypatch.setattr(torch.cuda, "graph", failing)
    monkeypatch.setattr(plain, "write", lambda *given: (fail("within"), write(*given)))
    with noted_drafts() as ours, pytest.warns(UserWarning, match="did not capture a step of 'h2o\\+verified") as warned:
        found = answer(cache_of("h2o+verified:5"))
    assert len(warned) == len(calls) == 1
    with noted_drafts() as theirs, without_graphs():
        assert found.tokens == answer(cache_of("h2o+verified:5")).tokens
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def test_an_interrupted_draft_leaves_no_drafts(monkeypatch: pytest.MonkeyPatch, graphs: list[CapturedGraph]) -> None:
    cache, replay, ids = cache_of("h2o+verified:5"), CapturedGraph.replay, prompt(1, LENGTH)

    def interrupted(graph: CapturedGraph) -> None:
        replay(graph)
        if graph.replays == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(CapturedGraph, "replay", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answer(cache)
    assert cache.draft_passes is not None
    cache.stream.abandon()
    known, whole = cache.get_seq_length(), answer(KeepCache(model_of()))
    assert LENGTH < known < LENGTH + NEW and not cache.draft_passes.active
    text = torch.tensor([[*ids[0].tolist(), *whole.tokens]])
    again = drafted(cache.model, cache, text[:, : known + 1], LENGTH + NEW - known - 1, copies=False)
    assert [*text[0, LENGTH : known + 1].tolist(), *again.tokens] == whole.tokens
    assert len(graphs) == 1


def test_a_capture_does_not_count_for_the_price_of_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    prices, read = list[tuple[bool, float | None]](), StepGraph.read

    def noted(graph: StepGraph, *given: Any) -> Any:
        found = read(graph, *given)
        prices.append((graph.settled, drafts[-1]._seconds if drafts else None))
        return found

    drafts, begin = list[BoundedDrafts](), BoundedDrafts.__init__
    monkeypatch.setattr(BoundedDrafts, "__init__", lambda own, *given: (drafts.append(own), begin(own, *given))[1])
    monkeypatch.setattr(StepGraph, "read", noted)
    answer(cache_of("h2o+verified:5"))
    last = max(number for number, (settled, _) in enumerate(prices) if not settled)
    assert all(seconds is None for _, seconds in prices[: last + 1]) and prices[-1][1] is not None
