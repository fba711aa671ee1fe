"""Effects of a sketch on attention, against written-out sums, and against the formulas where they are exact."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median

import pytest
import torch
from conftest import WORDS
from kvkeep_lab.attention_inputs import Attended
from kvkeep_lab.studies.sketch_attention import NORMAL, PUBLISHED, SketchAttention, effects
from measuring import measured

from kvkeep.stores.evicted.sketch import places

SLOTS = 3


def sketched(vectors: list[list[float]], signed: bool) -> list[list[float]]:
    """Each of ``vectors`` as the median of its three cells, cell by cell."""
    at = places(torch.arange(len(vectors)), 3, SLOTS, 5).tolist()
    cells: dict[int, list[float]] = {}
    size = 3 * SLOTS
    for row in at:
        for place, vector in zip(row, vectors, strict=True):
            sign = -1 if signed and place >= size else 1
            cell = cells.setdefault(place % size, [0.0] * len(vector))
            cells[place % size] = [old + sign * new for old, new in zip(cell, vector, strict=True)]
    found = []
    for index in range(len(vectors)):
        mine = [[(-1 if signed and row[index] >= size else 1) * x for x in cells[row[index] % size]] for row in at]
        found.append([median(column) for column in zip(*mine, strict=True)])
    return found


def softmax(scores: list[float]) -> list[float]:
    parts = [math.exp(score - max(scores)) for score in scores]
    return [part / sum(parts) for part in parts]


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("signed", [False, True])
def test_effects_equal_their_definitions(signed: bool) -> None:
    draw, n, dim = torch.Generator().manual_seed(1), 10, 4
    query = torch.randn(1, 2, n, dim, generator=draw) / 2
    key, value = (torch.randn(1, 1, n, dim, generator=draw) / 2 for _ in range(2))
    at = torch.tensor([6, 9])
    found = effects(Attended(0, query, key, value, None, 0.5, query), at, SLOTS, signed, 5)
    keys, values = key[0, 0].tolist(), value[0, 0].tolist()
    wrong_keys, wrong_values = sketched(keys, signed), sketched(values, True)
    pairs, sums, size = 0, dict.fromkeys(("score", "share", "weight", "first"), 0.0), 0.0
    parts = dict.fromkeys(("output", "by_weights", "by_values", "together", "linear"), 0.0)
    for head in range(2):
        for position in at.tolist():
            query_of, seen = query[0, head, position].tolist(), range(position + 1)
            scores = [0.5 * dot(query_of, keys[j]) for j in seen]
            error = [0.5 * dot(query_of, wrong_keys[j]) - scores[j] for j in seen]
            p = softmax(scores)
            q = softmax([score + off for score, off in zip(scores, error, strict=True)])
            mean = dot(p, error)
            pairs += position + 1
            sums["score"] += sum(off**2 for off in error)
            sums["share"] += sum(x**2 for x in p)
            sums["weight"] += sum((x - y) ** 2 for x, y in zip(p, q, strict=True))
            for i in seen:
                sums["first"] += p[i] ** 2 * (1 - p[i]) ** 2 + sum(p[j] ** 2 * p[i] ** 2 for j in seen if j != i)
            for c in range(dim):
                v, dv = [values[j][c] for j in seen], [wrong_values[j][c] - values[j][c] for j in seen]
                dp = [y - x for x, y in zip(p, q, strict=True)]
                size += dot(p, v) ** 2
                parts["output"] += (dot(q, [a + b for a, b in zip(v, dv, strict=True)]) - dot(p, v)) ** 2
                parts["by_weights"] += dot(dp, v) ** 2
                parts["by_values"] += dot(p, dv) ** 2
                parts["together"] += dot(dp, dv) ** 2
                parts["linear"] += sum(p[j] * (error[j] - mean) * v[j] for j in seen) ** 2
    for name, total in parts.items():
        assert getattr(found, name) == pytest.approx(total / size, rel=1e-3), name
    for name in ("score", "share", "weight"):
        assert getattr(found, name) == pytest.approx(sums[name] / pairs, rel=1e-3), name
    assert found.weight_first == pytest.approx(found.score * sums["first"] / pairs, rel=1e-3)
    spread = float(query.square().mean() * key.square().mean())  # times 0.5^2 * 4, which is 1 as in the paper
    assert found.score_bound == pytest.approx(spread * math.pi * (n - 1) / (3 * SLOTS), rel=1e-3)


def test_small_errors_of_normal_vectors_follow_lemma_3(tmp_path: Path) -> None:
    """Few entries share a slot and queries are weak, so that first order is exact."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 8, 400, 32, generator=draw) for _ in range(3))
    weak = Attended(0, query * 0.05, key, value, None, 32**-0.5, query)
    found = effects(weak, torch.arange(200, 400, 10), 100, True, 0)
    assert found.score < 0.01 and found.weight == pytest.approx(found.weight_first, rel=0.1)
    assert found.score < found.score_bound
    assert found.by_weights == pytest.approx(found.linear, rel=0.05)
    assert found.output == pytest.approx(found.by_weights + found.by_values, rel=0.1)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(WORDS[(7 * number) % len(WORDS)] for number in range(200)))
    study = SketchAttention(tokens=100, loads=[1, 5], queries=4)
    rows = measured(study, files=[text])
    assert {row.sort for row in rows.rows} >= {NORMAL, PUBLISHED} and rows.centred > 1
