"""The kernels of a GPU, run by triton's interpreter where there is none: near the twin in plain operations, and with
the same bits wherever entries lie.

What no interpreter shows is how the hardware adds within a product. It is the same for all rows of a tile, and the
number of rows of a tile never changes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerator import DEVICE
from families import FAMILIES
from helpers import padded, prompt, step
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from kvkeep import KeepCache
from kvkeep.attention import attend
from kvkeep.native.structures import BLOCK_ENTRIES
from kvkeep.step import choice, native
from kvkeep.step import torch as plain
from kvkeep.step.plan import Destination, FullPages, JoinedSpans, LayerStep, Segment, Span
from kvkeep.step.scores import Scaling

pytest.importorskip("triton")

from kvkeep.step import triton as kernels
from kvkeep.step.triton import calls, steps, tables
from kvkeep.step.triton import kernels as compiled

DTYPES = torch.float32, torch.bfloat16, torch.float16
ERRORS = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""By type: how far a result in it may be from that of float32, relative to the largest value."""
SLOW = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True, "database": None}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


@pytest.fixture
def kernels_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels run, also without a GPU."""

    def kernels_of(device: torch.device) -> ModuleType:
        return kernels

    monkeypatch.setattr(choice, "kernels_of", kernels_of)


@pytest.fixture
def chosen(kernels_chosen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain operations do not run."""
    monkeypatch.setattr(plain, "run", lambda *_: pytest.fail("plain operations ran a step"))
    monkeypatch.setattr(plain, "partial", lambda *_: pytest.fail("plain operations attended"))


# -- a text, cut into pieces -----------------------------------------------------------------------------


def pieces(keys: Tensor, values: Tensor, stops: Sequence[int]) -> list[Span]:
    """Entries (lanes, n, dim), cut at ``stops``, each piece somewhere in a tensor of its own."""
    spans = []
    for number, (start, stop) in enumerate(itertools.pairwise([0, *stops, keys.shape[1]])):
        before = number % 3
        own = [torch.full_like(part[:, :1], 3.0).repeat(1, stop - start + before + 2, 1) for part in (keys, values)]
        for to, part in zip(own, (keys, values), strict=True):
            to[:, before : before + stop - start] = part[:, start:stop]
        spans.append(Span(*own, before, before + stop - start))
    return spans


def paged(keys: Tensor, values: Tensor, page: int, ring: int = 0) -> list[Span]:
    """The same entries in full pages, and the rest in one piece, or in a ring that begins at the row ``ring``."""
    full = (keys.shape[1] - 1) // page * page
    owned = [[*part[:, :full].split(page, 1)] for part in (keys, values)]
    owned = [[one.clone() for one in part] for part in owned]
    span = FullPages().span(*owned) if full else None
    rest, count = [part[:, full:] for part in (keys, values)], keys.shape[1] - full
    ring = min(ring, count)
    rolled = [part.roll(ring, 1).clone() for part in rest]
    found = [Span(*rolled, ring, count), Span(*rolled, 0, ring)]
    return [one for one in ([span] if span is not None else []) + found if one.entries]


def planned(spans: Sequence[Span], tokens: int = 1, **more: Any) -> LayerStep:
    """The step whose new entries are the last ones of these spans, and are there already."""
    last = next(span for span in reversed(spans) if span.entries)
    return LayerStep(Destination(last.keys, last.values, last.stop - tokens), attend=spans, tokens=tokens, **more)


class Text:
    """Entries of one layer, and the queries of its last tokens."""

    def __init__(
        self, entries: int, tokens: int = 1, lanes: int = 2, groups: int = 2, dim: int = 20, value_dim: int = 12,
        dtype: torch.dtype = torch.float32, seed: int = 0,
    ) -> None:  # fmt: skip
        torch.manual_seed(seed)
        self.keys, self.values = randn(lanes, entries, dim, dtype=dtype), randn(lanes, entries, value_dim, dtype=dtype)
        self.query = randn(1, lanes * groups, tokens, dim, dtype=dtype)
        self.tokens, self.groups = tokens, groups

    @property
    def given(self) -> tuple[Tensor, Tensor, Tensor]:
        new = [part[None, :, -self.tokens :].clone() for part in (self.keys, self.values)]
        return self.query, new[0], new[1]

    def attended(self, spans: Sequence[Span], **more: Any) -> Tensor:
        """The attention of its last tokens over its entries, where ``spans`` have them."""
        return kernels.run([planned(spans, self.tokens, **more)], [0], *self.given, 0.3)

    def wanted(self, sinks: Tensor | None = None, seen: Tensor | None = None, scaling: float = 0.3) -> Tensor:
        """The same by plain operations, in float32."""
        spans = [Span(self.keys.float(), self.values.float(), 0, self.keys.shape[1])]
        one = planned(spans, self.tokens, seen=seen)
        return plain.run([one], [0], *(part.float() for part in self.given), scaling, sinks)

    def assert_near(self, found: Tensor, wanted: Tensor) -> None:
        assert found.dtype == self.query.dtype
        assert (found.float() - wanted).abs().max() <= ERRORS[found.dtype] * self.values.abs().max().float()


# -- near the twin ---------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    entries = draw(st.sampled_from([1, 2, 17, 64, 65, 130, 511, 513]))
    tokens = draw(st.integers(1, min(entries, 5)))
    stops = draw(st.lists(st.integers(0, entries - tokens), max_size=6).map(sorted))
    shape = {"lanes": draw(st.integers(1, 2)), "groups": draw(st.sampled_from([1, 3, 17]))}
    shape |= {"dim": draw(st.sampled_from([8, 16, 20])), "value_dim": draw(st.sampled_from([8, 12, 33]))}
    return {
        "text": Text(entries, tokens, dtype=draw(st.sampled_from(DTYPES)), seed=draw(st.integers(0, 9)), **shape),
        "stops": stops, "sinks": draw(st.booleans()), "seen": draw(st.booleans()), "joined": draw(st.integers(0, 3)),
        "scaling": draw(st.sampled_from([0.3, Scaling(0.3, 0.7)])),
    }  # fmt: skip


@given(case=cases())
@settings(max_examples=25, **SLOW)
def test_a_step_is_near_the_twin(case: dict[str, Any]) -> None:
    """In any shapes and types, with any pieces, sinks, caps and empty places; the new entries are written."""
    text, spans = case["text"], pieces(case["text"].keys, case["text"].values, case["stops"])
    lanes, entries = text.keys.shape[:2]
    sinks = randn(lanes * text.groups) if case["sinks"] else None
    seen = None
    if case["seen"]:
        seen = torch.rand(lanes, entries + 3, device=DEVICE) < 0.6
        seen[:, entries - text.tokens : entries] = True
    one = planned(spans, text.tokens, seen=seen)
    for part in one.append[:2]:
        part[:, one.append.row : one.append.row + text.tokens] = float("nan")
    if 0 < case["joined"] < len(spans) and all(span.entries for span in spans):
        joined = JoinedSpans(spans[: case["joined"]])
        one = one._replace(attend=[Span(joined, joined.values, 0, joined.shape[2]), *spans[case["joined"] :]])
    scaling = case["scaling"]
    text.assert_near(kernels.run([one], [0], *text.given, scaling, sinks), text.wanted(sinks, seen, scaling))
    for part, new in zip(one.append[:2], text.given[1:], strict=True):
        assert torch.equal(part[:, one.append.row : one.append.row + text.tokens], new[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entries", [1, 512, 513])
def test_a_first_entry_and_the_edge_of_a_block(entries: int, dtype: torch.dtype) -> None:
    text = Text(entries, dtype=dtype)
    found = text.attended(pieces(text.keys, text.values, []))
    text.assert_near(found, text.wanted())
    if entries == 1:
        assert torch.equal(found[0, 0].view(2, 2, -1), text.values.expand(-1, 2, -1))


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    """Whether every place is empty, or every score is -inf."""
    text = Text(70)
    spans = pieces(text.keys, text.values, [30])
    empty = torch.zeros(2, 70, dtype=torch.bool, device=DEVICE)
    assert not text.attended(spans, seen=empty).any()
    text.keys[:], text.query[:] = float("-inf"), 1.0
    assert not text.attended(pieces(text.keys, text.values, [30])).any()


@pytest.mark.parametrize("count", [5, 40])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.usefixtures("chosen")
def test_segments_are_attended_in_one_order(count: int, masked: bool) -> None:
    """Those of a chunk, also where some of them are formed for the attention, masked, or its own."""
    torch.manual_seed(3)
    query, keys, values = randn(2, 2, count, 16), randn(2, 600 + count, 16), randn(2, 600 + count, 8)
    mask = torch.rand(2, 1, 1, 600, device=DEVICE) < 0.7 if masked else None

    def segments(*stops: int, formed: bool = False) -> Iterator[Segment]:
        for start, stop in itertools.pairwise([0, *stops, 600]):
            own = None if mask is None else mask[..., start:stop]
            yield Segment(keys[:, None, start:stop], values[:, None, start:stop], own, formed=formed)
        yield Segment(keys[:, None, 600:], values[:, None, 600:], causal=True)

    sinks = randn(2)
    output, lse = attend(query, segments(), 0.3, sinks)
    seen = torch.ones(2, 1, count, 600 + count, dtype=torch.bool, device=DEVICE).tril(600)
    if mask is not None:
        seen[..., :600] &= mask
    scores = (query @ keys[:, None].transpose(-1, -2) * 0.3).masked_fill(~seen, float("-inf"))
    parts = torch.cat([scores, sinks.view(1, 2, 1, 1).expand(2, -1, count, -1)], -1)
    torch.testing.assert_close(output, parts.softmax(-1)[..., :-1] @ values[:, None], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, parts.logsumexp(-1), atol=1e-5, rtol=1e-5)
    for stops, formed in (((512,), True), ((100, 300, 301, 590), False), ((100, 530), True)):
        again = attend(query, segments(*stops, formed=formed), 0.3, sinks)
        assert torch.equal(output, again[0]) and torch.equal(lse, again[1])


@pytest.mark.usefixtures("chosen")
def test_padding_changes_no_bit() -> None:
    """Blocks are counted from the first entry that a row sees."""
    query, keys, values = randn(1, 4, 3, 16), randn(1, 2, 530, 16), randn(1, 2, 530, 8)
    alone = kernels.attend_all(query, [(keys, values)], None, 0.3, 0, None)
    assert alone is not None
    before = [torch.cat([torch.full_like(part[:, :, :70], 7.0), part], 2) for part in (keys, values)]
    rows = [torch.cat([part, torch.randn_like(part)]) for part in before]
    first = torch.tensor([70, 3], device=DEVICE)
    together = kernels.attend_all(torch.cat([query, torch.randn_like(query)]), [tuple(rows)], None, 0.3, 0, first)
    assert together is not None and torch.equal(together[:1], alone)
    slots = torch.arange(600, device=DEVICE)
    mask = (slots <= slots[-3:, None])[None] & (slots >= first[:, None, None])
    masked = kernels.attend_all(torch.cat([query, query]), [tuple(rows)], mask[:, None], 0.3, 0, first)
    assert masked is not None and torch.equal(masked[:1], alone)


# -- the same bits ---------------------------------------------------------------------------------------


@given(stops=st.lists(st.integers(0, 695), max_size=7).map(sorted), tokens=st.sampled_from([1, 3]))
@settings(max_examples=5, **SLOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_change_no_bit(dtype: torch.dtype, stops: list[int], tokens: int) -> None:
    text = Text(700, tokens, dtype=dtype)
    whole = text.attended(pieces(text.keys, text.values, []))
    assert torch.equal(text.attended(pieces(text.keys, text.values, stops)), whole)


@pytest.mark.turns(2)
@pytest.mark.parametrize(("page", "ring"), [(512, 0), (64, 0), (64, 9), (100, 41), (3, 0), (699, 0)])
def test_pages_and_a_ring_change_no_bit(page: int, ring: int) -> None:
    text = Text(700, dtype=torch.bfloat16)
    whole = text.attended(pieces(text.keys, text.values, []))
    assert torch.equal(text.attended(paged(text.keys, text.values, page, ring)), whole)


def test_sessions_of_a_launch_change_no_bit() -> None:
    """Of any lengths, in any order, with one token or several, in the entries' own types and pieces."""
    texts = [Text(entries, tokens, dtype=torch.bfloat16, seed=entries) for entries, tokens in SESSIONS]
    spans = [paged(text.keys, text.values, 128, 5 if text.tokens < 5 else 0) for text in texts]
    alone = [text.attended(own) for text, own in zip(texts, spans, strict=True)]
    order = 3, 1, 0, 2
    row = [torch.cat([texts[at].given[part] for at in order], 2) for part in range(3)]
    starts = [sum(texts[at].tokens for at in order[:number]) for number in range(len(order))]
    together = kernels.run([planned(spans[at], texts[at].tokens) for at in order], starts, *row, 0.3)
    assert torch.equal(together, torch.cat([alone[at] for at in order], 1))


SESSIONS = ((700, 1), (20, 3), (513, 1), (90, 16))
"""Entries and tokens of each session."""


def test_several_tokens_have_the_bits_of_single_ones() -> None:
    """As drafts need it."""
    text = Text(530, 16, dtype=torch.bfloat16)
    together = text.attended(pieces(text.keys, text.values, []))
    for token in range(16):
        keys, values = (part[:, : 515 + token] for part in (text.keys, text.values))
        one, new = planned(pieces(keys, values, [])), [part[None, :, -1:] for part in (keys, values)]
        alone = kernels.run([one], [0], text.query[:, :, token : token + 1], *new, 0.3)
        assert torch.equal(alone[0, 0], together[0, token])


def test_lanes_with_other_numbers_of_entries_are_parts_of_a_step() -> None:
    long, short = Text(600, lanes=1, seed=1), Text(70, lanes=2, seed=2)
    first = planned(pieces(long.keys, long.values, [100]))
    other = planned(pieces(short.keys, short.values, []))._replace(first_lane=1)
    row = [torch.cat(parts, 1) for parts in zip(long.given, short.given, strict=True)]
    found = kernels.run([first._replace(others=[other])], [0], *row, 0.3)
    assert torch.equal(found[:, :, :2], long.attended(first.attend))
    assert torch.equal(found[:, :, 2:], short.attended(other._replace(first_lane=0).attend))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("chosen")
def test_full_and_kv_direct_have_the_same_bits(dtype: torch.dtype) -> None:
    """A whole model, from the prompt on: in chunks, over full pages, in a ring that wraps, with drafts taken back."""
    torch.manual_seed(0)
    config = FAMILIES["llama"]()
    config.num_hidden_layers, config.max_position_embeddings = 2, 1024
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval().to(DEVICE)
    ids = prompt(1, 540, seed=4).to(DEVICE)

    def read(spec: str, budget: int | None) -> Tensor:
        cache = KeepCache(model, spec, budget, **({} if budget is None else {"checkpoint": "kv", "chunk": 256}))
        given = [step(model, cache, part) for part in ids[:, :530].split(256, 1)]
        given.append(step(model, cache, ids[:, 530:533]))
        cache.crop(-2)
        return torch.cat([*given, *(step(model, cache, token) for token in ids[:, 531:].split(1, 1))], 1)

    whole = read("full", None)
    with torch.no_grad():
        wanted = model(ids[:, :530]).logits[:, [255, 511, 529]].float()
    assert (whole[:, :3].float() - wanted).abs().max() <= 10 * ERRORS[dtype] * wanted.abs().max()
    for budget in (40, 256):
        assert torch.equal(read("kv-direct", budget), whole), budget


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen3", "deepseek_v3"])
@pytest.mark.usefixtures("kernels_chosen")
def test_a_model_reads_as_with_transformers(family: str) -> None:
    """With sliding windows, sinks, heads of keys and values of other widths; and two rows, one of them padded."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]()).eval().to(DEVICE)
    ids, mask = (part.to(DEVICE) for part in padded([24, 9]))
    for texts, rows in ((ids[:1], None), (ids, mask)):
        stock = DynamicCache(config=model.config)
        caches = [stock, KeepCache(model, "full"), KeepCache(model, "h2o", 60)]
        outputs = [
            torch.cat([
                step(model, cache, texts[:, start:stop], None if rows is None else rows[:, :stop], logits_to_keep=1)
                for start, stop in ((0, 20), (20, 22), (22, 23), (23, 24))
            ], 1)
            for cache in caches
        ]  # fmt: skip
        for found in outputs[1:]:
            torch.testing.assert_close(found, outputs[0], atol=2e-5, rtol=1e-4)


# -- what it does not attend to, and what it writes ------------------------------------------------------


@pytest.mark.parametrize("evicts", [1, 2])
def test_evicted_entries_are_copied_before_their_rows_are_written(evicts: int) -> None:
    text = Text(30, 3, dtype=torch.float16)

    def both(run: Any) -> tuple[Tensor, ...]:
        keys, values = text.keys.clone(), text.values.clone()
        pages = [part.new_zeros(2, 9, part.shape[2]) for part in (keys, values)]
        evict, spans = Destination(pages[0], pages[1], 4), [Span(keys, values, 0, 30)]
        one = LayerStep(Destination(keys, values, 11), evict=evict, attend=spans, tokens=3, evicts=evicts)
        run([one], [0], *text.given, 0.3)
        return keys, values, *pages

    for ours, theirs in zip(both(kernels.run), both(plain.run), strict=True):
        assert torch.equal(ours, theirs)


def test_steps_with_ranks_or_recorded_attention_are_left_to_plain_operations() -> None:
    text = Text(30)

    def both(run: Any, reduce: str) -> tuple[Tensor, ...]:
        keys, values = text.keys.clone(), text.values.clone()
        slots = torch.arange(30, dtype=torch.int32, device=DEVICE).repeat(2, 1)
        received = torch.empty(2, 30, device=DEVICE)
        one = LayerStep(
            Destination(keys, values, 0, slots), 30, (slots - 9).abs().float(), attend=[Span(keys, values, 0, 30)],
            reduce=reduce, received=received if reduce else None,
        )  # fmt: skip
        return run([one], [0], *text.given, 0.3), keys, values, slots, received[: bool(reduce)]

    for reduce in ("", "sum"):
        (output, *ours), (wanted, *theirs) = both(kernels.run, reduce), both(plain.run, reduce)
        text.assert_near(output, wanted)
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_a_row_that_is_a_tensor_is_written_as_its_number() -> None:
    text, results = Text(30), []
    for row, place in ((11, None), (0, torch.tensor([11], device=DEVICE))):
        keys, values = text.keys.clone(), text.values.clone()
        one = LayerStep(Destination(keys, values, row), attend=[Span(keys, values, 0, 30)], place=place)
        results.append((kernels.run([one], [0], *text.given, 0.3), keys, values))
    assert all(map(torch.equal, *results))


def test_the_twin_would_see_another_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests compare are two computations: if the table names a wrong row, they differ."""
    text = Text(530)
    spans, right = pieces(text.keys, text.values, [100]), tables.piece
    text.assert_near(text.attended(spans), text.wanted())

    def wrong(span: Span, start: int) -> list[int]:
        keys, values, row, *others = right(span, start)
        return [keys + row, values, row, *others]

    monkeypatch.setattr(calls, "piece", wrong)
    with pytest.raises(AssertionError):
        text.assert_near(text.attended(spans), text.wanted())


# -- what a step costs -----------------------------------------------------------------------------------


def test_a_layer_takes_three_launches_and_one_copy_for_any_number_of_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the table of full pages is made once."""
    launched = Counter[str]()

    def watched(name: str) -> Any:
        class Watched:
            def __getitem__(self, grid: Any) -> Any:
                launched[name] += 1
                return lambda *given, **options: None

        return Watched()

    for name in ("attend_block", "combine", "attend_chunk", "write_entries"):
        monkeypatch.setattr(compiled, name, watched(name))
    made = tables.table
    monkeypatch.setattr(tables, "table", lambda spans: launched.update(table=1) or made(spans))
    texts = [Text(entries, tokens, seed=entries) for entries, tokens in SESSIONS]
    run = [planned(paged(text.keys, text.values, 128), text.tokens) for text in texts]
    row = [torch.cat([text.given[part] for text in texts], 2) for part in range(3)]
    starts = [*itertools.accumulate([text.tokens for text in texts[:-1]], initial=0)]
    for _ in range(2):
        kernels.run(run, starts, *row, 0.3)
    with_pages = sum(isinstance(one.attend[0].keys, JoinedSpans) for one in run)
    assert launched == {"write_entries": 2, "attend_block": 2, "combine": 2, "table": with_pages}


# -- where they are chosen -------------------------------------------------------------------------------


def test_neither_a_cpu_nor_a_device_without_a_driver_has_them() -> None:
    assert choice.kernels_of(torch.device("cpu")) is native
    if not torch.cuda.is_available():
        assert choice.kernels_of(torch.device("cuda")) is native


def test_as_many_tokens_as_are_planned_are_read_in_blocks() -> None:
    from kvkeep.passes.stream import MAX_PLANNED

    assert steps.MAX_FEW == MAX_PLANNED
    assert compiled.BLOCK_ENTRIES == BLOCK_ENTRIES
    assert compiled.BLOCK_ENTRIES % compiled.TILE_ENTRIES == 0
