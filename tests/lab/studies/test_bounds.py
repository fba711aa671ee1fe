"""The looseness of bounds, on attention made by hand and by models."""

from __future__ import annotations

import pytest
import torch
from families import VOCABULARY
from kvkeep_lab.studies.bounds import BoundsStudy, loose
from measuring import measured

from kvkeep.models.watching import Attended
from kvkeep.stores.bounds import PAGE, Bounds

IDS = torch.randint(0, VOCABULARY, (1, 80), generator=torch.Generator().manual_seed(7))


def made(keys: torch.Tensor, queries: torch.Tensor) -> Attended:
    return Attended(0, queries, keys, keys, None, 0.5, queries)


def test_pages_of_one_key_are_known_exactly() -> None:
    generator = torch.Generator().manual_seed(1)
    keys, queries = torch.randn(1, 2, 20, 8, generator=generator), torch.randn(1, 4, 20, 8, generator=generator)
    excess, may, have = loose(made(keys, queries), 5, 1, 0.05)
    assert excess == pytest.approx(0, abs=1e-5) and may == have > 0


def test_by_hand() -> None:
    """Two channels whose largest values are of different keys: the bound adds them up, no key does."""
    keys = torch.tensor([[4.0, 0.0], [0.0, 4.0], [0.0, 0.0]]).view(1, 1, 3, 2)
    queries = torch.ones(1, 1, 3, 2)
    excess, may, have = loose(made(keys, queries), 1, 2, 0.9)
    assert excess == pytest.approx(2.0)  # (4 + 4) / 2 for the page, 4 / 2 for its best key
    assert may == have == 1.0  # of one page


def test_as_the_store_keeps_them() -> None:
    generator = torch.Generator().manual_seed(2)
    keys, queries = torch.randn(1, 2, 70, 8, generator=generator), torch.randn(1, 2, 70, 8, generator=generator)
    kept = Bounds()
    kept.extend(keys[0, :, :64])
    upper = 0.5 * kept.upper(queries[:, :, -6:].flatten(0, 1)[:, None])[:, 0]
    scores = 0.5 * (queries[0, :, -6:] @ keys[0].transpose(1, 2))[..., :64].unflatten(-1, (2, PAGE)).amax(-1)
    assert loose(made(keys, queries), 6, PAGE, 0.01)[0] == pytest.approx(float((upper - scores).mean()), abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_of_a_model(family: str) -> None:
    found = measured(BoundsStudy(pages=[16, 4], queries=8), family, IDS)
    assert found.pages == [4, 16] and 0 <= found.mean(4, "excess") <= found.mean(16, "excess")
    for row in found.rows:
        assert 0 <= row.have <= row.may <= 1
