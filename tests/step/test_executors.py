"""The two executors of a step: whatever the native library does in any case of the contract, plain operations do.

A model in bfloat16 reads and writes by every case, and each call of the library is repeated by :mod:`kvkeep.step.torch`
on copies of what it was given: entries are written and evicted to the same bits; attention, and what entries receive of
it, agree up to rounding. What the library promises exactly, one layer or all, one session or many, is compared in
``tests/serve/test_together.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from cases import CASES, TURN, covering_names, taken
from families import FAMILIES
from helpers import NEW, prompt, step
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvkeep import KeepCache
from kvkeep.passes.hooks import ForwardHooks
from kvkeep.step import native
from kvkeep.step import torch as plain
from kvkeep.step.native import calls as native_calls
from kvkeep.step.native import entries as native_entries
from kvkeep.step.native import steps as native_steps
from kvkeep.step.plan import Destination, JoinedSpans, LayerStep, Segment, Span

pytestmark = pytest.mark.usefixtures("kernels")
PLANNED = ("full", "static", "kv", "window", "h2o", "snapkv", "tova", "h2o+quantize:8", "kvzip")
"""Cases whose single tokens are told before the pass."""
WRITTEN = ("keys", "values", "slots", "scores", "extra", "newest")


@cache
def model_of(family: str) -> Any:
    """A tiny model in bfloat16, with heads of whole vectors where its family lets them be."""
    torch.manual_seed(0)
    config = FAMILIES[family]()
    if family in ("llama", "mistral", "qwen2", "qwen3"):
        config.head_dim = 16  # of codes the library reads whole vectors
    return AutoModelForCausalLM.from_config(config).bfloat16().eval()


# -- copies of what the library is given -----------------------------------------------------------------


class Copies:
    """Copies of tensors, one of each storage: views of one tensor stay views of one."""

    def __init__(self) -> None:
        self.storages: dict[int, Tensor] = {}

    def of(self, part: Tensor | None) -> Any:
        """A tensor of the same numbers, shape and strides."""
        if part is None:
            return None
        place = part.untyped_storage().data_ptr()
        if place not in self.storages:
            self.storages[place] = torch.empty(0, dtype=part.dtype).set_(part.untyped_storage().clone())  # type: ignore[call-overload]
        whole = torch.empty(0, dtype=part.dtype)
        return whole.set_(self.storages[place].untyped_storage(), part.storage_offset(), part.shape, part.stride())  # type: ignore[call-overload]

    def coded(self, part: Any) -> Any:
        """The same of codes, which are dataclasses of tensors."""
        if isinstance(part, Tensor):
            return self.of(part)
        parts = {field.name: getattr(part, field.name) for field in fields(part)}
        return replace(part, **{name: self.of(one) for name, one in parts.items() if isinstance(one, Tensor)})

    def destination(self, one: Destination | None) -> Destination | None:
        return None if one is None else one._replace(**{name: self.of(getattr(one, name)) for name in WRITTEN})

    def span(self, one: Span) -> Span:
        if isinstance(one.keys, JoinedSpans):
            keys = JoinedSpans([self.span(part) for part in one.keys.spans])
            return Span(keys, keys.values, one.start, one.stop)
        return Span(self.coded(one.keys), self.coded(one.values), one.start, one.stop)

    def step(self, one: LayerStep) -> LayerStep:
        append = self.destination(one.append)
        assert append is not None
        spans = [self.span(span) for span in one.attend]
        own: dict[str, Any] = {
            name: self.of(getattr(one, name)) for name in ("ranks", "new_scores", "seen", "received")
        }
        own |= {"evict": self.destination(one.evict), "others": [self.step(other) for other in one.others]}
        return one._replace(append=append, attend=spans, **own)


def assert_same_writes(one: LayerStep, other: LayerStep) -> None:
    """Both wrote the same bits in the same places."""
    for ours, theirs in ((one.append, other.append), (one.evict, other.evict)):
        for name in WRITTEN:
            mine, yours = getattr(ours, name, None), getattr(theirs, name, None)
            assert (mine is None) == (yours is None)
            if mine is not None:
                assert torch.equal(mine.view(torch.uint8), yours.view(torch.uint8)), name


def dense(values: Any) -> Tensor:
    """Values as numbers, coded or not."""
    return values if isinstance(values, Tensor) else values.dense(torch.bfloat16)


def assert_near(ours: Tensor, theirs: Tensor, values: Sequence[Tensor]) -> None:
    """Equal up to rounding to bfloat16, of weights and of the output."""
    room = 2**-6 * max(float(part.abs().max()) for part in values if part.numel())
    assert (ours.float() - theirs.float()).abs().max() <= room


# -- the library, watched --------------------------------------------------------------------------------


class WatchedRun(native.CollectedAttention):
    """Attention over segments, repeated by plain operations."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.given: list[Segment] = []

    def add(self, key: Any, value: Any, mask: Tensor | None, causal: bool, formed: bool) -> None:
        parts = [part if isinstance(part, Tensor) else part.dense(torch.bfloat16) for part in (key, value)]
        lanes = len(self.query) // len(parts[0])  # fewer lanes are read in turns
        keys, values = (part.repeat(lanes, 1, 1)[:, None].clone() for part in parts)
        segment = Segment(keys, values, None if mask is None else mask[:, None].clone(), causal)
        if keys.shape[2]:
            self.given.insert(len(self.given) if causal else 0, segment)
        super().add(key, value, mask, causal, formed)

    def output(self) -> tuple[Tensor, Tensor]:
        output, lse = super().output()
        wanted, wanted_lse = plain.combined(self.query, self.given, self.scaling, self.sinks)
        assert_near(output, wanted, [segment.value for segment in self.given])
        seen = ~wanted_lse.isinf()
        assert torch.equal(lse.isinf(), ~seen) and ((lse - wanted_lse)[seen].abs() < 0.02).all()
        return output, lse

    def received(self, lse: Tensor, last: int | None, greatest: bool) -> Tensor:
        found = super().received(lse, last, greatest)
        (segment,) = self.given
        reduce = "max" if greatest else "sum"
        wanted = plain.received(self.query, segment, lse, self.scaling, last, reduce)
        torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
        return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How often each entry point of the library was compared."""
    counts = {"insert": 0, "run": 0, "attend": 0}
    insert, run, output = native.insert, native.run, WatchedRun.output

    def inserted(one: LayerStep, keys: Tensor, values: Tensor) -> None:
        other, counts["insert"] = Copies().step(one), counts["insert"] + 1
        insert(one, keys, values)
        plain.insert(other, keys, values)
        assert_same_writes(one, other)

    def ran(steps: Sequence[LayerStep], *given: Any) -> Tensor:
        others, counts["run"] = [Copies().step(one) for one in steps], counts["run"] + 1
        found, wanted = run(steps, *given), plain.run(others, *given)
        parts = [part for planned in steps for part in planned.parts]
        for one, other in zip(parts, [part for planned in others for part in planned.parts], strict=True):
            assert_same_writes(one, other)
            if one.received is not None and other.received is not None:
                torch.testing.assert_close(one.received, other.received, atol=2e-2, rtol=2e-2)
        assert_near(found, wanted, [dense(span.segment().value) for part in parts for span in part.attend])
        return found

    def attended(self: WatchedRun) -> tuple[Tensor, Tensor]:
        counts["attend"] += 1
        return output(self)

    monkeypatch.setattr(native, "insert", inserted)
    monkeypatch.setattr(native, "run", ran)
    for module in (native, native_calls):
        monkeypatch.setattr(module, "CollectedAttention", WatchedRun)
    monkeypatch.setattr(WatchedRun, "output", attended)
    monkeypatch.setattr(ForwardHooks, "every_layer", lambda self: [])  # all layers in one call are not watched
    yield counts


FAMILIES_HERE = ("llama", "mistral", "qwen2", "gpt2", "gemma3", "gpt_oss")


def family_of(name: str) -> str:
    """The first family that takes a case, beginning at another one for each KVKEEP_TURN."""
    row = list(CASES).index(name) + TURN
    turned = [FAMILIES_HERE[(row + number) % len(FAMILIES_HERE)] for number in range(len(FAMILIES_HERE))]
    return next(family for family in turned if taken(name, family))


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", covering_names(name for name in CASES if "published" not in name))
def test_executors_agree_in_every_case(name: str, calls: dict[str, int]) -> None:
    case, model = CASES[name], model_of(family_of(name))
    given = {"budget": case.budget, "chunk": case.chunk} | dict(case.options)
    if case.method.oneshot:
        del given["chunk"]
    one = KeepCache(model, case.spec, **given)
    ids = prompt(1, case.length, seed=TURN)
    model.generate(
        ids, attention_mask=torch.ones_like(ids), cache=one, max_new_tokens=NEW, do_sample=False,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    assert sum(calls.values()) or name == "paged"
    assert calls["run"] or name not in PLANNED


@pytest.mark.turns(2)
@pytest.mark.parametrize("crop", [False, True])
def test_codes_are_read_in_planned_steps_where_lanes_evict_different_numbers(crop: bool, calls: dict[str, int]) -> None:
    """Empty places lie in groups, and among waiting entries: of lanes that evict fewer, and of cropped entries."""
    model = model_of("llama")
    cache = KeepCache(model, "kvzip:sinks=2+quantize:4", 140, chunk=32)
    ids = prompt(1, 260, seed=2)
    step(model, cache, ids[:, :150])
    assert not cache.reading
    stores = [bank.store for layer in cache.layers for bank in layer.evicted.banks]
    assert any(store.gaps or store.waiting_gaps for store in stores)
    for at in range(150, 250):
        if crop and at == 200:
            cache.crop(-10)
        step(model, cache, ids[:, cache.get_seq_length() :][:, :1])
    assert calls["run"] > 250


def test_steps_are_planned_where_heads_have_different_numbers_of_codes_only(calls: dict[str, int]) -> None:
    """Their exact entries are in one bank, and their codes in several."""
    model, ids = model_of("llama"), prompt(1, 430, seed=2)
    cache = KeepCache(model, "kvzip:least=0.8+quantize:4", 100, chunk=32)
    step(model, cache, ids[:, :400])
    layers = [layer for layer in cache.layers if len(layer.evicted.banks) > len(layer.resident.banks) == 1]
    assert layers
    for at in range(400, 430):
        step(model, cache, ids[:, at : at + 1])
    assert calls["run"] > 20 * len(cache.layers)


@pytest.mark.parametrize("given", [{"method": "full"}, {"method": "kv-direct", "budget": 64, "checkpoint": "kv"}])
def test_several_tokens_of_a_text_are_written_before_the_first_attends(
    given: dict[str, Any], calls: dict[str, int]
) -> None:
    """Some of them evict an entry each: not those that take the place of a token that was taken back."""
    model, ids = model_of("llama"), prompt(1, 200, seed=2)
    cache = KeepCache(model, **given)
    step(model, cache, ids[:, :70])
    for count in (7, 1, 16, 3, 12, 2):
        before = calls["run"]
        step(model, cache, ids[:, cache.get_seq_length() :][:, :count])
        if count > 2:
            cache.crop(-(count // 3))
        assert calls["run"] == before + len(cache.layers), count


@pytest.mark.parametrize("oldest", [False, True])
@pytest.mark.parametrize("ranks", [None, torch.float32, torch.int32])
def test_an_entry_is_written_alike(ranks: torch.dtype | None, oldest: bool) -> None:
    """Into a row, or over the lowest rank, an empty row first; what was there is copied, with all beside it."""
    lanes, rows = 3, 7
    generator = torch.Generator().manual_seed(int(oldest))

    def place(count: int, slots: Tensor) -> Destination:
        keys, values = (torch.randn(lanes, count, dim, generator=generator).bfloat16() for dim in (6, 4))
        scores, extra = (torch.randn(slots.shape, generator=generator) for _ in "ab")
        return Destination(keys, values, count // 2, slots, scores, extra, slots.clone())

    for seed in range(20):
        slots = torch.stack([torch.randperm(40, generator=generator)[:rows] for _ in range(lanes)]).int()
        if seed % 3 == 0:
            slots[seed % lanes, seed % rows] = -1
        rank = None if ranks is None else torch.randint(-3, 3, (lanes, rows), generator=generator).to(ranks)
        fresh = torch.randn(lanes, generator=generator) if seed % 2 else None
        evict = place(4, torch.zeros(lanes, 1, dtype=torch.int32)) if seed % 5 else None
        one = LayerStep(place(rows, slots), 50, rank, oldest, fresh, evict)
        other = Copies().step(one)
        keys, values = (torch.randn(lanes, dim, generator=generator).bfloat16() for dim in (6, 4))
        native.insert(one, keys, values)
        plain.insert(other, keys, values)
        assert_same_writes(one, other)


@pytest.mark.parametrize("sinks", [None, torch.arange(6.0) - 3])
def test_lanes_of_a_token_may_have_different_entries(sinks: Tensor | None) -> None:
    """Lanes 0 and 2 have 5 entries, lane 1 has 3; the other session has one step for all its lanes."""
    generator = torch.Generator().manual_seed(3)

    def part(first: int, lanes: int, rows: int, reduce: str = "", others: Sequence[LayerStep] = ()) -> LayerStep:
        keys, values = (torch.randn(lanes, rows + 1, 8, generator=generator).bfloat16() for _ in "kv")
        slots = torch.arange(rows + 1, dtype=torch.int32).repeat(lanes, 1)
        received = torch.empty(lanes, rows + 1) if reduce else None
        return LayerStep(Destination(keys, values, rows, slots), rows, attend=[Span(keys, values, 0, rows + 1)],
                         reduce=reduce, received=received, first_lane=first, others=others)  # fmt: skip

    one, whole = part(0, 1, 5, others=[part(1, 1, 3), part(2, 1, 5)]), part(0, 3, 4, "sum")
    others = [Copies().step(step) for step in (one, whole)]
    query = torch.randn(1, 6, 2, 8, generator=generator).bfloat16()
    key, value = torch.randn(2, 1, 3, 2, 8, generator=generator).bfloat16()
    found = native.run([one, whole], [0, 1], query, key, value, 0.3, sinks)
    assert_near(found, plain.run(others, [0, 1], query, key, value, 0.3, sinks), [value])
    for mine, theirs in zip((one, whole), others, strict=True):
        for ours, copied in zip(mine.parts, theirs.parts, strict=True):
            assert_same_writes(ours, copied)
    assert others[1].received is not None
    torch.testing.assert_close(whole.received, others[1].received, atol=2e-2, rtol=2e-2)
    alone = native.run([others[1]], [1], query, key, value, 0.3, sinks)  # writes the same entries again
    assert torch.equal(alone[:, 1], found[:, 1])


@pytest.mark.parametrize("window", [0, 4, 300])
@pytest.mark.parametrize(("before", "tokens"), [(3, 2), (500, 16), (1030, 5)])
def test_a_step_of_several_tokens_is_a_step_of_each(before: int, tokens: int, window: int) -> None:
    """To the bit, in any blocks; entries that are written get slots and scores."""
    bank, empty = torch.randn(2, 2, before + tokens, 16).bfloat16(), torch.full((2, before + tokens), -1)
    query, key, value = torch.randn(1, 6, tokens + 3, 16).bfloat16(), *torch.randn(2, 1, 2, tokens + 3, 16).bfloat16()
    sinks, seen = torch.randn(6), torch.rand(2, before + tokens) < 0.9

    def planned(way: int, place: int, count: int) -> LayerStep:
        keys, values, slots, scores = places[way]
        spans = [Span(keys, values, 0, 2), Span(keys, values, 2, before + place + count)]
        append, new_scores = Destination(keys, values, before + place, slots, scores), torch.tensor([0.5, 2.0])
        return LayerStep(
            append, 9 + place, attend=spans, seen=seen, new_scores=new_scores, tokens=count, window=window, first=77
        )

    places = [(*bank.clone(), empty.int(), empty.float()) for _ in range(3)]
    whole, other = (planned(way, 0, tokens) for way in (0, 1))
    found = native.run([whole], [2], query, key, value, 0.3, sinks)[:, 2 : 2 + tokens]
    near = plain.run([other], [2], query, key, value, 0.3, sinks)[:, 2 : 2 + tokens]
    assert_near(found, near, [bank[1], value])
    assert_same_writes(whole, other)
    for place in range(tokens):
        one = planned(2, place, 1)
        alone = native.run([one], [2 + place], query, key, value, 0.3, sinks)
        assert torch.equal(alone[:, 2 + place], found[:, place])
    assert_same_writes(whole, one)
    assert places[0][2][:, before:].tolist() == [[*range(9, 9 + tokens)]] * 2


def test_a_query_does_not_see_an_empty_place() -> None:
    """Entries that are left out of ``seen`` change nothing, whatever lies there."""
    keys, values = (torch.randn(2, 40, 8).bfloat16() for _ in "kv")
    seen = torch.rand(2, 50) < 0.6
    seen[:, 39:] = True
    query, key, value = torch.randn(1, 4, 1, 8).bfloat16(), *torch.randn(2, 1, 2, 1, 8).bfloat16()

    def planned() -> LayerStep:
        spans = [Span(keys, values, 0, 30), Span(keys, values, 30, 40)]
        return LayerStep(Destination(keys, values, 39), attend=spans, seen=seen)

    found = native.run([planned()], [0], query, key, value, 0.3)
    assert_near(found, plain.run([planned()], [0], query, key, value, 0.3), [values])
    keys[~seen[:, :40]], values[~seen[:, :40]] = 5, -7
    assert torch.equal(found, native.run([planned()], [0], query, key, value, 0.3))
    for lane in range(2):
        kept = (part[lane : lane + 1, seen[lane, :40]] for part in (keys, values))
        own_keys, own_values = (part.clone() for part in kept)
        rows = own_keys.shape[1]
        alone = LayerStep(Destination(own_keys, own_values, rows - 1), attend=[Span(own_keys, own_values, 0, rows)])
        of_lane = query[:, 2 * lane : 2 * lane + 2], key[:, lane : lane + 1], value[:, lane : lane + 1]
        wanted = plain.run([alone], [0], *of_lane, 0.3)
        assert_near(found[:, :, 2 * lane : 2 * lane + 2], wanted, [values])


@pytest.mark.parametrize(
    ("method", "most"), [("kvzip", 2), ("kvzip+quantize:4", 10), ("h2o", 2), ("snapkv+quantize:4", 4)]
)
def test_a_step_is_compiled_once_for_the_same_tensors(method: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of 30 steps find what was compiled for the one before: codes have other tensors with each group. most: the
    parts of steps that a layer compiles; with ``kvzip`` each KV head may be one."""
    model, made = model_of("llama"), list[LayerStep]()
    cache, ids = KeepCache(model, method, 120, chunk=32), prompt(1, 260, seed=2)
    step(model, cache, ids[:, :158])
    form = native_steps._Form
    monkeypatch.setattr(native_steps, "_Form", lambda one: made.append(one) or form(one))
    for at in range(158, 188):
        step(model, cache, ids[:, at : at + 1])
    assert 0 < len(made) <= most * len(cache.layers)


def test_tensors_that_were_compiled_serve_later_steps() -> None:
    """Rows and spans differ from token to token, and the tensors stay."""
    keys, values = torch.randn(2, 9, 8).bfloat16(), torch.randn(2, 9, 8).bfloat16()
    for row in (0, 1, 2, 5, 3):
        one = LayerStep(Destination(keys, values, row), row, attend=[Span(keys, values, max(0, row - 2), row + 1)])
        other = Copies().step(one)
        query, key, value = torch.randn(1, 4, 1, 8).bfloat16(), *torch.randn(2, 1, 2, 1, 8).bfloat16()
        found = native.run([one], [0], query, key, value, 0.3)
        assert_near(found, plain.run([other], [0], query, key, value, 0.3), [values])
        assert_same_writes(one, other)


@pytest.mark.slow
def test_a_method_gives_the_same_by_either_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the prompt on, entries stay that stay by the other; nothing of the library is used in the second run."""

    def run(spec: str, budget: int) -> tuple[Tensor, dict[str, Tensor]]:
        cache = KeepCache(model_of("llama"), spec, budget, chunk=32)
        ids = prompt(1, 200, seed=4)
        given = [step(model_of("llama"), cache, part) for part in ids[:, :130].split(32, 1)]
        given += [step(model_of("llama"), cache, token) for token in ids[:, 130:170].split(1, 1)]
        cache.reorder_cache(torch.tensor([0]))  # everything lies elsewhere now
        given += [step(model_of("llama"), cache, token) for token in ids[:, 170:].split(1, 1)]
        layers = [layer for layer in cache.layers if hasattr(layer, "resident")]
        states = {f"{layer.index}.{key}": part for layer in layers for key, part in layer.state().items()}
        return torch.cat(given, 1).float(), states

    methods = [
        ("window", 40),
        ("h2o", 40),
        ("kvzip", 40),
        ("quantized:8", 200),
        ("snapkv+quantize:4", 120),
        ("kvzip+quantize:4", 120),
        ("revive", 100),
    ]
    by_library = [run(*method) for method in methods]
    for module, names in (
        (native, ("can_attend", "can_read", "can_insert")),
        (native_calls, ("can_attend",)),
        (native_entries, ("can_read",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, lambda *_: False)
    monkeypatch.setattr("kvkeep.policies.assembly._exact", lambda *_: False)
    for module in (native_calls, native_steps):
        monkeypatch.setattr(module, "kernels", lambda: pytest.fail("the library was called"))
    for method, (logits, states) in zip(methods, by_library, strict=True):
        plainly, others = run(*method)
        torch.testing.assert_close(logits, plainly, atol=0.05, rtol=0.05)
        assert states.keys() == others.keys()
        assert method[0] != "window" or all(torch.equal(states[key], others[key]) for key in states if "slots" in key)
