"""Reactivation, on attention made by hand and by models."""

from __future__ import annotations

import pytest
import torch
from families import VOCABULARY
from kvkeep_lab.studies.reactivation import ReactivationStudy, reactivated
from measuring import measured
from pydantic import ValidationError

IDS = torch.randint(0, VOCABULARY, (1, 48), generator=torch.Generator().manual_seed(7))
BINS = [(1, 16), (17, 32)]


def by_hand() -> tuple[torch.Tensor, torch.Tensor]:
    """One head, ten tokens of a prompt and four later queries. Tokens 0 and 1 are heavy in the prompt; later token 0
    stays so, token 5 is needed twice, token 7 once."""
    before, after = torch.zeros(1, 10, 14), torch.zeros(1, 4, 14)
    before[0, :, 0], before[0, :, 1] = 0.6, 0.4
    after[0, :, 0] = 0.7
    after[0, 0, 5], after[0, 2, 5], after[0, 3, 7] = 0.3, 0.3, 0.3
    after[0, 1, 3] = 0.004  # below the threshold
    after[0, 1, 10] = 0.29  # a token that came later
    return before, after


def test_by_hand() -> None:
    found = {(rule, ratio): shares for rule, ratio, shares in reactivated(*by_hand(), 0.005, [0.2, 0.3], BINS)}
    assert set(found) == {(rule, ratio) for rule in ("h2o", "snapkv", "foresight") for ratio in (0.2, 0.3)}
    h2o = found["h2o", 0.2]  # keeps 0 and 1
    assert (
        h2o["others"] == 8 and h2o["reactivated"] == pytest.approx(2 / 8) and h2o["activations"] == pytest.approx(3 / 8)
    )
    assert h2o["missed"] == pytest.approx(3 / 7)  # token 0 is active four times
    assert h2o["mass"] == pytest.approx((0.3 / 1 + 0.004 / 0.704 + 0.3 / 1 + 0.3 / 1) / 4)
    # 8 others, of which tokens 2-9 are 1 to 11 tokens back: all 32 pairs are in the first bin.
    assert h2o["by_distance"] == [pytest.approx(3 / 32), None]
    foresight = found["foresight", 0.2]  # keeps 0 and 5
    assert foresight["reactivated"] == pytest.approx(1 / 8) and foresight["missed"] == pytest.approx(1 / 7)
    assert found["foresight", 0.3]["missed"] == 0


def test_distances_are_from_the_query_back() -> None:
    before, after = torch.zeros(1, 20, 40), torch.zeros(1, 20, 40)
    before[..., 0] = 1
    after[0, 4, 8] = 1  # the query at 24, 16 tokens back
    after[0, 5, 8] = 1  # 17
    _, _, shares = reactivated(before, after, 0.5, [0.05], [(1, 16), (17, 32), (33, 64)])[0]
    pairs = [0, 0, 0]
    for query in range(20, 40):
        for token in range(1, 20):
            pairs[0 if query - token <= 16 else 1 if query - token <= 32 else 2] += 1
    assert shares["by_distance"] == [pytest.approx(1 / pairs[0]), pytest.approx(1 / pairs[1]), 0]


def test_pooling_spreads_votes_of_the_last_queries() -> None:
    before, after = torch.zeros(1, 50, 60), torch.zeros(1, 10, 60)
    before[0, :10, 5] = 1  # long ago
    before[0, 40:, 30] = 0.3
    after[0, :, 33] = 1  # a neighbour of what the last ones voted for
    found = {rule: shares for rule, _, shares in reactivated(before, after, 0.1, [0.14], [(1, 64)])}
    assert found["snapkv"]["reactivated"] == 0 and found["h2o"]["reactivated"] == pytest.approx(1 / 43)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "deepseek_v3", "gemma4"])
def test_models(family: str) -> None:
    found = measured(ReactivationStudy(threshold=0.01, ratios=[0.5, 0.1]), family, IDS)
    sliding = family in ("gemma3", "gemma4")
    assert list(found.active) == ([1, 3] if sliding else [0, 1, 2, 3])
    assert found.prompt == 24 and found.distances == [(1, 16), (17, 32), (33, 64)]
    for row in found.rows:
        assert row.others == 24 - max(1, round(row.ratio * 24))
        assert all(0 <= value <= 1 for value in (row.reactivated, row.missed, row.mass))
        assert row.activations <= 24
    for ratio in (0.1, 0.5):
        assert found.mean("foresight", ratio, "mass") <= found.mean("h2o", ratio, "mass")  # nobody can know better
    assert found.mean("h2o", 0.5, "missed") <= found.mean("h2o", 0.1, "missed")


def test_refusals() -> None:
    for wrong in ({"threshold": 0.0}, {"ratios": [1.5]}, {"ratios": []}, {"tokens": 5}):
        with pytest.raises(ValidationError):
            ReactivationStudy.model_validate(wrong)
