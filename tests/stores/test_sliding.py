"""A layer with a sliding window holds what its next tokens see, in memory of the planned size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from conftest import saved
from families import COMMON, FAMILIES
from helpers import allocated, counted, prompt, step
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import KeepCache, UsageError
from kvkeep.geometry import window_rows
from kvkeep.memory.ledger import Ledger
from kvkeep.models.loading import load
from kvkeep.stores.sliding import SlidingLayer, noted

KEYS = torch.arange(600.0).view(1, 1, 600, 1).expand(1, 2, 600, 3).contiguous()

ACTS = ("read", "run", "taken back", "noted", "saved")


def read(layer: SlidingLayer, count: int) -> None:
    """Take the next entries, all at once, and check what their tokens see."""
    start, stop = layer.arrived, layer.arrived + count
    found = layer.update(KEYS[:, :, start:stop], -KEYS[:, :, start:stop])
    check(found, layer, start)
    assert layer.get_seq_length() == stop


def of(window: int, uniform: bool) -> SlidingLayer:
    return SlidingLayer(window, Ledger(records=False) if uniform else None, uniform)


def run_uniformly(layer: SlidingLayer) -> None:
    """Take the next entry by a step whose row is a tensor."""
    start, step = layer.arrived, layer.plan()
    assert step is not None and step.place is not None and step.seen is not None and layer.plan(2) is None
    (span,), row = step.attend, int(step.place)
    assert (span.start, span.stop) == (0, step.append.keys.shape[2])
    step.append.keys[:, :, row], step.append.values[:, :, row] = KEYS[:, :, start], -KEYS[:, :, start]
    layer.commit()
    assert torch.isfinite(span.keys).all() and torch.equal(step.seen[0], step.seen[1])
    check([part[:, :, step.seen[0]] for part in (span.keys, span.values)], layer, start)


def run(layer: SlidingLayer, count: int) -> None:
    """Take the next entries by a planned step."""
    if layer.uniform:
        for _ in range(count):
            run_uniformly(layer)
        return
    start = layer.arrived
    step = layer.plan(count)
    assert step is not None and step.slot == start and layer.follows(step) == 0
    (span,), rows = step.attend, slice(step.append.row, step.append.row + count)
    step.append.keys[:, :, rows], step.append.values[:, :, rows] = (
        sign * KEYS[:, :, start : start + count] for sign in (1, -1)
    )
    for _ in range(count):
        layer.commit()
    seen = [part[:, :, span.start : span.stop] for part in (span.keys, span.values)]
    first = max(0, start - layer.sliding_window + 1)
    assert step.window == layer.sliding_window and step.first <= first
    check([part[:, :, first - step.first :] for part in seen], layer, start)


def check(found: Any, layer: SlidingLayer, start: int) -> None:
    """What the tokens from ``start`` on see."""
    first = max(0, start - layer.sliding_window + 1)
    for part, sign in zip(found, (1, -1), strict=True):
        assert torch.equal(part, sign * KEYS[:, :, first : layer.arrived])


@settings(max_examples=150, deadline=None)
@given(
    window=st.sampled_from([1, 2, 8, 40, 300]),
    uniform=st.booleans(),
    acts=st.lists(st.tuples(st.sampled_from(ACTS), st.integers(1, 90)), max_size=12),
)  # fmt: skip
def test_tokens_see_their_window_whatever_came_before(window: int, uniform: bool, acts: list[tuple[str, int]]) -> None:
    layer = of(window, uniform)
    read(layer, 3)
    for act, count in acts:
        count = min(count, 600 - layer.arrived - 20)
        if count < 1:
            break
        start = layer.arrived
        if act == "read":
            read(layer, count)
        elif act == "run":
            run(layer, min(count, 16))
        elif act == "taken back":
            layer.record_past = True
            read(layer, count)
            run(layer, 2)
            layer.crop(-2 - count // 2)
            assert layer.record_past
            layer.record_past = False
            layer.trim()
            assert layer.arrived == start + count - count // 2
        elif act == "noted":
            (before,) = noted([layer])
            read(layer, count)
            for _ in range(20):
                run(layer, 1)
            before.restore()
            assert layer.arrived == start
        else:
            state, other = {name: part.clone() for name, part in layer.state().items()}, of(window, uniform)
            other.restore(state, layer.arrived)
            layer = other
        assert layer._memory is not None
        assert layer._memory[0].shape[2] <= window_rows(window)
        check((layer.keys, layer.values), layer, layer.arrived)
    read(layer, 1)


@pytest.mark.parametrize("chunks", [[40] * 10, [1] * 400, [399, 1], [7] * 50])
def test_memory_is_as_planned(chunks: list[int]) -> None:
    layer = SlidingLayer(100)
    for count in chunks:
        read(layer, count)
        assert layer.resident_bytes == 2 * 2 * 3 * 4 * window_rows(100, layer.arrived)


def test_discarded_entries_are_not_there_to_go_back_to() -> None:
    layer = SlidingLayer(8)
    read(layer, 7)
    layer.check_crop(-7)
    read(layer, 1)
    for count in (1, 5):
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            layer.crop(-count)
    assert layer.arrived == 8
    layer.activate_past_recording()
    read(layer, 30)
    layer.crop(-30)
    with pytest.raises(RuntimeError, match="7 of 8 entries, and cannot go back 1"):
        layer.crop(-1)


def test_a_step_is_the_next_one_as_long_as_the_memory_is_the_same() -> None:
    layer = SlidingLayer(64)
    read(layer, 200)
    step = layer.plan(2)
    assert step is not None
    for count in range(15):
        assert layer.follows(step) == count
        run(layer, 1)
    assert layer.follows(step) is None
    read(layer, 20)
    assert layer.follows(step) is None and (again := layer.plan(2)) is not None
    assert again.append.keys is not step.append.keys


def test_several_rows_and_a_gpu_plan_no_steps() -> None:
    several, empty = SlidingLayer(8), SlidingLayer(8)
    several.update(*(KEYS[:, :, :5].expand(2, -1, -1, -1) for _ in "kv"))
    assert several.plan() is None and empty.plan() is None
    before = several.keys.clone()
    several.select(torch.tensor([1, 1, 0]))
    assert several.rows == 3 and torch.equal(several.keys[:2], before)


def test_uniform_steps_have_the_same_memory_unless_it_is_noted() -> None:
    """While the entries move within it. Their rows follow from their slots."""
    layer, other = of(100, True), of(100, True)
    assert layer.layout() is None and layer.bookkeeping_bytes == 0
    read(layer, 60)
    assert layer.layout() is None
    read(layer, 140)
    (keys, values, slots), place = layer.layout() or (), layer.plan().place
    assert layer.bookkeeping_bytes == slots.nbytes == 4 * window_rows(100)
    for count in [1] * 60 + [30, 1]:
        read(layer, count) if count > 1 else run(layer, 1)
        assert all(one is two for one, two in zip(layer.layout() or (), (keys, values, slots), strict=True))
    other.restore(layer.state(), layer.arrived)
    assert int(place) == 200 - 100 and torch.equal(layer.plan().place, other.plan().place)
    (before,) = noted([layer])
    run(layer, 60)
    assert layer._memory is not None and layer._memory[0] is not keys
    before.restore()
    check((layer.keys, layer.values), layer, layer.arrived)


# -- in a cache -------------------------------------------------------------------------------------------


def loaded(config: Any, folder: Path) -> Any:
    """A tiny model with packed weights, whose steps the library runs."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config)
    return load(saved(model, folder), weights="bfloat16", device="cpu").model


def gemma3(folder: Path) -> Any:
    config = FAMILIES["gemma3"]()
    config.intermediate_size = 64
    return loaded(config, folder)


@pytest.mark.usefixtures("kernels")
def test_steps_may_be_planned_within_inference_mode_and_after_it(tmp_path: Path) -> None:
    model, ids = gemma3(tmp_path), prompt(1, 60)
    cache, other = KeepCache(model, "full"), KeepCache(model, "full")
    step(model, cache, ids[:, :20])
    with torch.inference_mode():
        model(ids[:, 20:21], cache=cache)
    with torch.no_grad():
        found = model(ids[:, 21:22], cache=cache).logits
    step(model, other, ids[:, :20])
    step(model, other, ids[:, 20:21])
    assert torch.equal(found, step(model, other, ids[:, 21:22]))


@pytest.mark.usefixtures("kernels")
def test_memory_that_a_window_has_left_is_freed(tmp_path: Path) -> None:
    """Also where steps of other numbers of tokens were planned in it."""
    model, ids, stop = gemma3(tmp_path), prompt(1, 400), 40
    cache = KeepCache(model, "full")
    step(model, cache, ids[:, :stop])
    for count in (*range(2, 17), *[1] * 40):
        step(model, cache, ids[:, stop : stop + count])
        stop += count
        assert allocated(cache) == counted(cache), count


@pytest.mark.usefixtures("kernels")
def test_a_mask_of_other_entries_than_a_window_has_is_refused(tmp_path: Path) -> None:
    model, ids = gemma3(tmp_path), prompt(1, 40)
    cache, causal = KeepCache(model, "full"), torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    step(model, cache, ids[:, :30])
    with pytest.raises(UsageError, match="covers 40 entries; in layer 0 it has to cover 17"):
        step(model, cache, ids[:, 30:], causal[:, :, 30:])


@pytest.mark.usefixtures("kernels")
def test_a_window_of_which_the_layers_say_nothing_stays_masked(tmp_path: Path) -> None:
    """In one pass: the model masks with a window, and its layers keep all entries."""
    config = hf.Phi3Config(**COMMON | {"intermediate_size": 64}, sliding_window=8, layer_types=["full_attention"] * 4)
    model, ids = loaded(config, tmp_path), prompt(1, 40)
    found = step(model, KeepCache(model, "full"), ids, logits_to_keep=0)
    wanted = model(ids, use_cache=False).logits
    assert torch.cosine_similarity(found.float(), wanted.float(), dim=-1).min() > 0.999


def test_gradients_flow_through_several_passes() -> None:
    model, ids = hf.AutoModelForCausalLM.from_config(hf.MistralConfig(**COMMON, sliding_window=8)), prompt(1, 40)
    cache, loss = KeepCache(model, "full"), torch.zeros(())
    for part in ids.split([20, 1, 1, 1, 17], 1):
        loss = loss + model(part, cache=cache).logits.float().square().mean()
    (gradient,) = torch.autograd.grad(loss, [model.model.layers[0].self_attn.k_proj.weight])
    assert torch.isfinite(gradient).all() and gradient.any()
