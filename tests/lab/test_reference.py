"""Comparing methods with a reference: equalities, numbers computed by hand, and figures."""

from __future__ import annotations

import copy
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, tiny
from kvkeep_lab import reading
from kvkeep_lab import reference as lab
from kvkeep_lab.comparisons import Comparisons, Passage
from kvkeep_lab.figures import check_figure
from kvkeep_lab.reference import Comparison, ReferenceCase, ReferenceRow, cases, compare, judge
from kvkeep_lab.studies.compare import Compare

from kvkeep.cache import KeepCache
from kvkeep.errors import StoreError, UsageError

PROMPT = [(7 * number + 3) % 97 for number in range(60)]


def test_exact_methods_equal_the_reference() -> None:
    listed = cases(["kv-direct", "full", "stock", "paged"], ["16", "50%"])
    found = compare(tiny("llama"), PROMPT, listed, new=12)
    assert [(row.method, row.budget) for row in found.rows] == [
        ("full", None), ("stock", None), ("paged", None), ("kv-direct", "16"), ("kv-direct", "50%"),
    ]  # fmt: skip
    for row in found.rows:
        assert (row.error, row.exactness, row.match, row.differs_at, row.top1) == ("", "exact", 1.0, None, 1.0)
        assert row.tokens == found.reference.tokens and len(row.kl) == 12
        assert row.kl_max is not None and 0 <= row.kl_max < 1e-8
        assert row.perplexity == pytest.approx(found.reference.perplexity, rel=1e-5)
        assert row.prefill_s and row.tokens_per_s
    assert found.rows[1].kl == [0.0] * 12  # the same cache again: the same bits
    assert (found.context, found.rows[3].entries, found.rows[4].entries) == (72, 16, 36)
    bytes_of_rows = [row.held_bytes for row in found.rows]
    assert bytes_of_rows[3] < bytes_of_rows[4] < found.reference.held_bytes


@pytest.mark.parametrize("method", ["h2o", "streaming-llm", "window"])
def test_a_lossy_method_differs_until_its_budget_holds_the_text(method: str) -> None:
    small, large = compare(tiny("llama"), PROMPT, cases([method], ["16", "80"]), new=12).rows
    assert (small.error, small.exactness, small.entries, len(small.kl)) == ("", "lossy", 16, 12)
    assert small.match is not None and small.match < 1 and small.kl_mean is not None and small.kl_mean > 1e-3
    assert small.kl_mean <= (small.kl_max or 0) and small.differs_at is not None and len(small.tokens) == 12
    assert large.match == 1.0 and large.kl_max is not None and large.kl_max < 1e-8


def test_free_running_and_teacher_forced_kl_part_where_the_texts_part() -> None:
    model = tiny("llama")
    found = compare(model, PROMPT, [ReferenceCase("window", "16")], new=12)
    reference, row = found.reference, found.rows[0]
    assert row.differs_at is not None and row.differs_at < 10
    same = row.differs_at + 1  # the first different token was chosen after the same text
    assert row.kl_free[:same] == row.kl[:same] and row.kl_free[same:] != row.kl[same:]
    ids, cache = torch.tensor([PROMPT]), KeepCache(model, "window", 16, context=72)
    complete = torch.tensor([PROMPT + reference.tokens])
    with torch.no_grad():
        expected = model(complete[:, :-1], use_cache=False).logits[0, 59:].double().log_softmax(-1)
        for position, token in enumerate(row.tokens):
            q = model(ids, cache=cache).logits[0, -1].double().log_softmax(-1)
            by_hand = float((expected[position].exp() * (expected[position] - q)).sum())
            assert row.kl_free[position] == pytest.approx(by_hand, rel=1e-3, abs=1e-6) and int(q.argmax()) == token
            ids = torch.tensor([[token]])
    assert row.kl_free_mean == pytest.approx(sum(row.kl_free) / 12)
    assert reference.kl_free == reference.kl == [0.0] * 12


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_equals_transformers_generate(family: str) -> None:
    model = tiny(family)
    found = compare(model, PROMPT, [ReferenceCase("kv-direct", "16")], new=6)
    ids = torch.tensor([PROMPT])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert found.reference.tokens == expected[0, 60:].tolist()
    assert found.rows[0].match == 1.0


def test_kl_and_likelihood_equal_those_computed_by_hand() -> None:
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    found = judge(torch.tensor(p).log() + 3.0, torch.tensor(q).log() - 1.0, 0)  # logits: any constant may be added
    assert found.kl == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert found.nll == pytest.approx(math.log(4)) and not found.agrees
    same = judge(torch.tensor(p), torch.tensor(p), 0)
    assert (same.kl, same.agrees) == (0.0, True)


class _Scripted(torch.nn.Module):
    """A model of four words, whose next one depends only on how many tokens its cache believes to have seen."""

    def __init__(self, table: dict[int, list[float]]) -> None:
        super().__init__()
        self.table = table
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config, self.dtype = tiny("llama").config, torch.float32

    def forward(self, ids: torch.Tensor, cache: Any = None, **kwargs: Any) -> Any:
        if cache is not None:
            cache.seen += ids.shape[1]
        logits = self.table.get(cache.seen if cache is not None else 0, [0.0, 1.0, 2.0, 3.0])
        return type("Output", (), {"logits": torch.tensor([[logits]])})()


class _Counting:
    layers: tuple[()] = ()

    def __init__(self, lag: int = 0) -> None:
        self.seen = -lag


def test_numbers_of_a_row_equal_those_computed_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text has three tokens, and three are written. The method's cache lags by one position, so it writes another
    token there."""
    a, b, c = [4.0, 0.0, 0.0, 0.0], [0.0, 2.0, 1.0, 0.0], [0.0, 0.0, 5.0, 0.0]
    made: list[_Counting] = []

    def counting(model: Any, method: str, **options: Any) -> _Counting:
        made.append(_Counting(0 if method == "stock" else 1))
        return made[-1]

    monkeypatch.setattr(reading, "new_cache", counting)
    monkeypatch.setattr(lab, "ModelGeometry", type("Any", (), {"from_config": lambda config: _Counting}))
    monkeypatch.setattr(_Counting, "max_positions", None, raising=False)
    found = compare(_Scripted({2: a, 3: a, 4: b, 5: c}), [1, 2, 3], [ReferenceCase("full")], new=3)
    # The reference sees 3, 4, 5 entries: a, b, c. The case sees 2, 3, 4: a, a, b.
    row = found.rows[0]
    assert found.reference.tokens == [0, 1, 2] and row.tokens == [0, 0, 1]
    assert (row.match, row.differs_at, row.top1) == (pytest.approx(1 / 3), 1, pytest.approx(1 / 3))
    p, q = (torch.tensor(one).double().log_softmax(0) for one in (b, a))
    assert row.kl[0] == 0.0 and row.kl[1] == pytest.approx(float((p.exp() * (p - q)).sum()))
    nll = [-float(torch.tensor(one).double().log_softmax(0)[token]) for one, token in ((a, 0), (a, 1), (b, 2))]
    assert row.perplexity == pytest.approx(math.exp(sum(nll) / 3))
    assert (row.kl_mean, row.kl_max) == (pytest.approx(sum(row.kl) / 3), max(row.kl))
    assert row.kl_free == row.kl  # what this model says does not depend on its words
    assert len(made) == 3  # the reference, freely, and forced, because it went its own way


def test_in_16_bits_the_reference_is_the_full_method() -> None:
    model = copy.deepcopy(tiny("llama")).to(torch.bfloat16)
    found = compare(model, PROMPT, cases(["full", "stock", "kv-direct"], ["24"]), new=6)
    assert found.reference.method == "full" and found.rows[0].kl == found.rows[0].kl_free == [0.0] * 6
    assert compare(tiny("llama"), PROMPT, [ReferenceCase("full")], new=2).reference.method == "stock"


def test_the_reference_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    honest = reading.new_cache

    def noted(model: Any, method: str, **options: Any) -> Any:
        made.append(method)
        return honest(model, method, **options)

    monkeypatch.setattr(reading, "new_cache", noted)
    compare(tiny("llama"), PROMPT, [ReferenceCase("kv-direct", "16")], new=4)
    assert made == ["stock", "kv-direct"]


def test_the_chunk_is_passed_to_methods_that_take_one() -> None:
    found = compare(tiny("llama"), PROMPT, cases(["full", "kv-direct"], ["16"]), new=3, chunk=8)
    assert [row.error for row in found.rows] == ["", ""]
    assert found.rows[1].memory["peak_cache_bytes"] < 60 * KeepCache(tiny("llama")).geometry.kv_bytes_per_token


def test_one_token_has_no_decoding_speed_and_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        compare(tiny("llama"), [], [ReferenceCase("full")])
    row = compare(tiny("llama"), PROMPT, [ReferenceCase("full")], new=1).rows[0]
    assert row.tokens_per_s is None and row.match == 1.0 and row.prefill_s


def row(number: int, budget: str | None, kl: float) -> ReferenceRow:
    memory = {"resident_bytes": 10**6 * (number + 1), "compressed_bytes": 0}
    exactness = "lossy" if number else "exact"
    cost = {"memory": memory, "prefill_s": 1.0, "tokens_per_s": 1.0}
    free = {"kl_free": [3 * kl] * 8, "kl_free_mean": 3 * kl}
    forced = {"kl": [kl] * 8, "kl_mean": kl, "kl_max": 2 * kl, "top1": 0.5, "perplexity": 3.0}
    return ReferenceRow(f"method-{number}", budget, exactness, 64, 0.5, 3, **free, **forced, **cost)


@pytest.mark.parametrize(("methods", "passages"), [(1, 1), (9, 1), (4, 3)])
@pytest.mark.parametrize("budgets", [[None], ["64"], ["12.5%", "25%", "50%"]])
def test_the_figure_is_drawn_for_few_and_many_methods(
    tmp_path: Path, methods: int, passages: int, budgets: list[str | None]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "compare.png"

    def one(seed: int) -> Passage:
        kl = [(1 + seed) * 1e-11 * 50.0**n if methods > 1 else 0.0 for n in range(methods)]
        rows = [row(n, budget, kl[n]) for n in range(methods) for budget in budgets]
        refused = ReferenceRow("static", budgets[0], error="refused")
        return Passage("a", seed, Comparison(100, 8, rows[0], [*rows, refused], 10**7))

    Compare().draw(Comparisons([one(seed) for seed in range(passages)], passages), path, title="tiny")
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1600 and 300 <= height <= 2000 and 10_000 < len(data) < 1_000_000


def test_an_unwritable_figure_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    for path, sentence in ((tmp_path / "nowhere" / "compare.png", "no folder"), (tmp_path / "folder.png", "written")):
        with pytest.raises(StoreError, match=sentence):
            check_figure(path)


def test_a_pinned_method_stands_beside_the_method_itself() -> None:
    """Both hold as many entries, but others. An exact method is exact with pins, too."""
    prompt = list(range(5, 69))
    found = compare(tiny("llama"), prompt, cases(["window", "window+pinned", "full+pinned"], ["32"]), new=6, pinned=16)
    exact, free, pinned = found.rows
    assert [row.method for row in found.rows] == ["full+pinned", "window", "window+pinned"]
    assert exact.kl_mean == pytest.approx(0, abs=1e-9)
    assert free.entries == pinned.entries == 32 and free.kl_mean != pinned.kl_mean
    (refused,) = compare(tiny("llama"), prompt, cases(["window+pinned"], ["16"]), new=2, pinned=16).rows
    assert "16 pinned tokens leave no room" in refused.error
    for given in ({"pin": 3}, {"methods": ["h2o+pinned"]}):
        with pytest.raises(UsageError, match="belong together"):
            Compare.model_validate({"prompt": "the of", **given}).check([])
    Compare(prompt="the of", methods=["h2o", "h2o+pinned"], pin=3).check([])
