"""Analyses of made-up attention and of models: bounds, reactivation, spectra, ranks and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from families import VOCABULARY, tiny
from kvkeep_lab.attention_inputs import Attended
from kvkeep_lab.head_weights import head_weights
from kvkeep_lab.published.page_bounds import PAGE, Bounds
from kvkeep_lab.studies.alignment import MEASURES, AlignmentStudy, backward
from kvkeep_lab.studies.bounds import BoundsStudy, loose
from kvkeep_lab.studies.effective_rank import EffectiveRank, Ranks, layer_ranks, product_singular_values, score_errors
from kvkeep_lab.studies.reactivation import ReactivationStudy, reactivated
from kvkeep_lab.studies.spectra import SpectraStudy, contributed, modes
from kvkeep_lab.studies.truncation import WAYS, Truncation, best_scores, scored_by, truncated, truncations
from measuring import measured, quiet

from kvkeep.errors import UsageError

IDS = torch.randint(0, VOCABULARY, (1, 80), generator=torch.Generator().manual_seed(7))
SHORT = IDS[:, :40]
PROMPT = IDS[0, :60].tolist()


def made(keys: torch.Tensor, queries: torch.Tensor) -> Attended:
    return Attended(0, queries, keys, keys, None, 0.5, queries)


def test_bounds_of_pages_of_one_key_are_exact() -> None:
    generator = torch.Generator().manual_seed(1)
    keys, queries = torch.randn(1, 2, 20, 8, generator=generator), torch.randn(1, 4, 20, 8, generator=generator)
    excess, may, have = loose(made(keys, queries), 5, 1, 0.05)
    assert excess == pytest.approx(0, abs=1e-5) and may == have > 0


def test_the_bound_of_a_page_adds_the_maxima_of_channels() -> None:
    """The maxima of the two channels belong to different keys, so no key reaches the bound."""
    keys = torch.tensor([[4.0, 0.0], [0.0, 4.0], [0.0, 0.0]]).view(1, 1, 3, 2)
    queries = torch.ones(1, 1, 3, 2)
    excess, may, have = loose(made(keys, queries), 1, 2, 0.9)
    assert excess == pytest.approx(2.0)  # (4 + 4) / 2 for the page, 4 / 2 for its best key
    assert may == have == 1.0  # of one page


def test_bounds_equal_those_of_the_store() -> None:
    generator = torch.Generator().manual_seed(2)
    keys, queries = torch.randn(1, 2, 70, 8, generator=generator), torch.randn(1, 2, 70, 8, generator=generator)
    kept = Bounds()
    kept.extend(keys[0, :, :64])
    upper = 0.5 * kept.upper(queries[:, :, -6:].flatten(0, 1)[:, None])[:, 0]
    scores = 0.5 * (queries[0, :, -6:] @ keys[0].transpose(1, 2))[..., :64].unflatten(-1, (2, PAGE)).amax(-1)
    assert loose(made(keys, queries), 6, PAGE, 0.01)[0] == pytest.approx(float((upper - scores).mean()), abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_larger_pages_of_a_model_have_looser_bounds(family: str) -> None:
    found = measured(BoundsStudy(pages=[16, 4], queries=8), family, IDS)
    assert found.pages == [4, 16] and 0 <= found.mean(4, "excess") <= found.mean(16, "excess")
    for row in found.rows:
        assert 0 <= row.have <= row.may <= 1


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


def test_reactivation_shares_equal_those_computed_by_hand() -> None:
    found = {(rule, ratio): shares for rule, ratio, shares in reactivated(*by_hand(), 0.005, [0.2, 0.3], BINS)}
    assert set(found) == {(rule, ratio) for rule in ("h2o", "snapkv", "foresight") for ratio in (0.2, 0.3)}
    h2o = found["h2o", 0.2]  # keeps 0 and 1
    assert h2o["others"] == 8 and h2o["reactivated"] == pytest.approx(2 / 8)
    assert h2o["activations"] == pytest.approx(3 / 8)
    assert h2o["missed"] == pytest.approx(3 / 7)  # token 0 is active four times
    assert h2o["mass"] == pytest.approx((0.3 / 1 + 0.004 / 0.704 + 0.3 / 1 + 0.3 / 1) / 4)
    # 8 others, of which tokens 2-9 are 1 to 11 tokens back: all 32 pairs are in the first bin.
    assert h2o["by_distance"] == [pytest.approx(3 / 32), None]
    foresight = found["foresight", 0.2]  # keeps 0 and 5
    assert foresight["reactivated"] == pytest.approx(1 / 8) and foresight["missed"] == pytest.approx(1 / 7)
    assert found["foresight", 0.3]["missed"] == 0


def test_distances_are_counted_back_from_the_query() -> None:
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


def test_snapkv_pools_the_votes_of_the_last_queries() -> None:
    before, after = torch.zeros(1, 50, 60), torch.zeros(1, 10, 60)
    before[0, :10, 5] = 1  # long ago
    before[0, 40:, 30] = 0.3
    after[0, :, 33] = 1  # a neighbour of what the last ones voted for
    found = {rule: shares for rule, _, shares in reactivated(before, after, 0.1, [0.14], [(1, 64)])}
    assert found["snapkv"]["reactivated"] == 0 and found["h2o"]["reactivated"] == pytest.approx(1 / 43)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "deepseek_v3", "gemma4"])
def test_reactivation_is_measured_in_full_layers_of_every_family(family: str) -> None:
    found = measured(ReactivationStudy(threshold=0.01, ratios=[0.5, 0.1]), family, IDS[:, :48])
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


def test_modes_equal_numpys_singular_values() -> None:
    weight = torch.randn(3, 6, 20, generator=torch.Generator().manual_seed(1))
    weight[1, 3:] = weight[1, :3]  # of rank 3
    values, vectors = modes(weight)
    expected = numpy.linalg.svd(weight.numpy().astype("float64"), compute_uv=False) ** 2
    assert numpy.allclose(values.numpy(), expected, rtol=1e-5, atol=1e-4)
    # In these coordinates the projections of any inputs have W W^T's eigenvalues as their energies.
    coordinates = weight.transpose(1, 2) @ vectors
    assert torch.allclose(coordinates.square().sum(1), values, rtol=1e-4, atol=1e-3)


@torch.no_grad()
def test_contributions_follow_equation_8() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, x = torch.randn(1, 6, 20, generator=generator).double(), torch.randn(9, 20, generator=generator).double()
    w = weight[0].T.numpy()  # the paper's: y = x W
    u, s, _ = numpy.linalg.svd(w, full_matrices=False)
    p = x.numpy() @ u
    got = contributed((x @ weight[0].T.double()) @ modes(weight)[1].double())[0]
    for t in range(8):
        norms = numpy.sqrt((s**2 * p[t] ** 2).sum() * (s**2 * p[t + 1] ** 2).sum())
        assert numpy.allclose(got[t].numpy(), s**2 * p[t] * p[t + 1] / norms, atol=1e-4)
        y, z = x[t].numpy() @ w, x[t + 1].numpy() @ w
        assert got[t].sum().item() == pytest.approx(y @ z / numpy.sqrt((y @ y) * (z @ z)), abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "phi3", "gpt2", "gemma4"])
def test_spectra_of_every_family_add_up(family: str) -> None:
    progress_seen: list[int] = []
    found = measured(SpectraStudy(), family, SHORT, progress=lambda what, done, total: progress_seen.append(done))
    assert progress_seen == [1, 2, 3, 4] and {row.layer for row in found.rows} == {0, 1, 2, 3}
    for row in found.rows:
        assert sum(row.eigenvalues) == pytest.approx(1, abs=1e-5)
        assert row.eigenvalues == sorted(row.eigenvalues, reverse=True)
        assert sum(row.contributions) == pytest.approx(row.cosine, abs=1e-4)
        assert len(row.head_cosines) == row.heads and 0 < row.modes <= 1
        assert abs(row.cosine) <= 1 and abs(row.apart) <= 1
        if row.projection == "value" and family in ("llama", "phi3"):  # neither bias nor rotation nor norm
            assert row.attended == pytest.approx(row.cosine, abs=1e-4)
    shared = [row.projection for row in found.rows if row.layer == 3]
    assert shared == (["query"] if family == "gemma4" else ["query", "key", "value"])


def test_identical_tokens_have_a_cosine_of_one() -> None:
    found = measured(SpectraStudy(), ids=torch.full((1, 20), 7))
    for row in found.rows:
        assert row.cosine == pytest.approx(1, abs=1e-4) and row.apart == pytest.approx(1, abs=1e-4)
        if row.projection == "value":
            assert row.attended == pytest.approx(1, abs=1e-4)
        else:
            assert row.attended < 0.999  # rotated


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "deepseek_v3", "gemma4"])
def test_alignment_of_every_family_adds_up(family: str) -> None:
    found = measured(AlignmentStudy(queries=6), family, SHORT)
    assert len(found.rows) == 16 and len(found.queries) == 6 and min(found.queries) == 20 and max(found.queries) == 38
    assert found.loss > 0
    for row in found.rows:
        seen = sum(min(at, 7) if family.startswith("gemma") and row.layer % 2 == 0 else at for at in found.queries)
        assert row.pairs == seen
        assert all(-1 <= value <= 1 for value in (row.cos11, row.cos12, row.cos22, row.corr22, row.corr12))
        assert row.size >= abs(row.cos11)
        assert all(0 <= value <= 1 for value in (row.agree, row.agree_alike, row.convex, row.convex_closed))
    assert found.mean("cos11", 2) == pytest.approx(sum(row.cos11 for row in found.rows if row.layer == 2) / 4)
    assert set(MEASURES) <= set(vars(found.rows[0]))
    assert all(parameter.grad is None for parameter in tiny(family).parameters())


def test_gradients_equal_finite_differences() -> None:
    """Changes one head's output at one position and compares the loss."""
    model, layer, head, position = tiny("llama"), 1, 2, 30
    seen, gradients, _ = backward(model, SHORT, 20)
    assert [attended.layer for attended in seen] == [0, 1, 2, 3]
    step = torch.randn(8, generator=torch.Generator().manual_seed(1))
    output = model.model.layers[layer].self_attn.o_proj

    def loss(size: float) -> float:
        def move(module: Any, args: Any) -> Any:
            moved = args[0].clone()
            moved[0, position, 8 * head : 8 * head + 8] += size * step
            return (moved,)

        handle = output.register_forward_pre_hook(move)
        with torch.no_grad():
            logits = model(SHORT, use_cache=False).logits[0, :-1]
        handle.remove()
        return float(F.cross_entropy(logits.double(), SHORT[0, 1:], reduction="sum"))

    expected = (loss(1e-2) - loss(-1e-2)) / 2e-2
    gradient = gradients[layer]
    assert gradient is not None
    assert float(gradient[0, head, position] @ step) == pytest.approx(expected, rel=2e-2)


def test_frozen_weights_give_the_same_alignment() -> None:
    """Quantised or frozen weights have no gradients, but the loss has."""
    model = tiny("llama")
    expected = measured(AlignmentStudy(queries=4), ids=SHORT)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    try:
        assert measured(AlignmentStudy(queries=4), ids=SHORT) == expected
    finally:
        for parameter in model.parameters():
            parameter.requires_grad_(True)


@pytest.mark.parametrize("shape", [(20, 20), (12, 30)])
def test_singular_values_of_a_product_equal_numpys(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(2, rows, 6, generator=generator) for rows in shape)
    b[1, :, 4:] = 0  # a product of rank 4
    got = product_singular_values(a, b)
    for mine, left, right in zip(got, a, b, strict=True):
        expected = numpy.linalg.svd((left @ right.T).double().numpy(), compute_uv=False)[:6]
        assert numpy.allclose(mine.numpy(), expected, atol=1e-4)
    assert got[1, 4:].max() < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "phi3", "gpt2", "gemma4"])
def test_effective_ranks_follow_the_papers_definition(family: str) -> None:
    found = layer_ranks(tiny(family))
    weights = head_weights(tiny(family))
    assert [layer.layer for layer in found] == [0, 1, 2, 3]
    assert (found[0].turned is None) == (family in ("gpt2", "gemma4"))  # learned positions; rotates otherwise
    for layer, mine in zip(found, weights, strict=True):
        keys = mine.key if mine.key is not None else weights[layer.layer - 2].key
        assert keys is not None and len(layer.heads) == 4 and len(layer.groups) == len(keys)
        for head, got in enumerate(layer.heads):
            product = mine.query[head].T @ keys[head * len(keys) // 4]
            energy = numpy.cumsum(numpy.linalg.svd(product.numpy(), compute_uv=False) ** 2)
            assert got == 1 + int((energy < 0.9 * energy[-1]).sum())
        assert max(layer.fourth) <= max(layer.heads) and layer.fourth_energy[0] >= layer.energy[0]
        assert layer.energy[-1] == pytest.approx(1) and layer.energy == sorted(layer.energy)


def test_a_group_s_rank_is_of_all_that_asks() -> None:
    model = tiny("llama")
    weights = head_weights(model)[1]
    assert weights.key is not None
    stacked = torch.cat([weights.query[head].T @ weights.key[0] for head in (0, 1)])
    energy = numpy.cumsum(numpy.linalg.svd(stacked.numpy(), compute_uv=False) ** 2)
    assert layer_ranks(model)[1].groups[0] == 1 + int((energy < 0.9 * energy[-1]).sum())


@pytest.mark.parametrize(
    ("way", "family"), [*((truncated, family) for family in ("llama", "qwen2", "gemma3")), (scored_by, "qwen2")]
)
@torch.no_grad()
def test_truncation_to_the_full_rank_changes_nothing(way: Any, family: str) -> None:
    model, ids = tiny(family), torch.tensor([PROMPT])
    before = model(ids, use_cache=False).logits
    with way(model, head_weights(model)[0].query.shape[1]):
        assert torch.allclose(model(ids, use_cache=False).logits, before, atol=1e-3)
    with way(model, 1):
        assert not torch.allclose(model(ids, use_cache=False).logits, before, atol=1e-1)
    assert torch.equal(model(ids, use_cache=False).logits, before)  # the hooks are gone


def test_scores_of_a_rank_equal_the_truncated_svd() -> None:
    """Scores are those of M_r, the SVD of M cut to rank r (KV-Direct, Eq. 21), and within the bound of Eq. 22."""
    generator = torch.Generator().manual_seed(3)
    query, key = torch.randn(4, 6, 20, generator=generator), torch.randn(2, 6, 20, generator=generator)
    rows = torch.randn(9, 20, generator=generator)
    at_rank = torch.einsum("nk,hdk->hnd", rows, query) @ best_scores(query, key, 3)
    keys = torch.einsum("nk,hdk->hnd", rows, key).repeat_interleave(2, 0)
    m = query.transpose(1, 2) @ key.repeat_interleave(2, 0)
    u, s, v = torch.linalg.svd(m)
    truncated_m = u[..., :3] * s[:, None, :3] @ v[:, :3]
    found = at_rank @ keys.transpose(1, 2)
    torch.testing.assert_close(found, rows @ truncated_m @ rows.T, atol=1e-3, rtol=1e-3)
    norms = rows.norm(dim=1)
    off = (found - rows @ m @ rows.T).abs()
    assert bool((off <= s[:, 3, None, None] * norms[:, None] * norms + 1e-3).all()) and float(off.max()) > 1


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_no_error_of_a_score_exceeds_its_bound(family: str) -> None:
    """Eq. 22 of KV-Direct. Random weights come to about a third of it."""
    errors = score_errors(tiny(family), PROMPT, [1, 2, 4])
    assert list(errors) == [1, 2, 4] and all(0.2 < error < 0.5 for error in errors.values())


def truncate(family: str, ranks: list[int], new: int) -> list[Truncation]:
    return truncations(tiny(family), PROMPT, ranks, new=new, progress=quiet)


def test_a_small_rank_diverges_and_the_full_rank_does_not() -> None:
    by = {(row.way, row.rank): row for row in truncate("llama", [2, 8], 6)}
    assert list(by) == [(way, rank) for way in WAYS for rank in (2, 8)]
    for way in WAYS:
        small, full_rank = by[way, 2], by[way, 8]
        assert full_rank.match == 1 and full_rank.top1 == 1 and full_rank.kl is not None and full_rank.kl < 1e-6
        assert small.kl is not None and small.kl > 100 * full_rank.kl
    assert len({by[way, 2].kl for way in WAYS}) == len(WAYS)
    for wrong in (0, 9):
        with pytest.raises(UsageError, match="from 1"):
            truncate("llama", [wrong], 4)


def test_families_that_cannot_be_truncated_are_named() -> None:
    for family, count in (("phi3", 6), ("gemma3", 1)):
        errors = [row for row in truncate(family, [4], 3) if row.error]
        assert len(errors) == count and all(family in row.error for row in errors)


def test_ranks_are_drawn_without_a_text(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = Ranks(layer_ranks(tiny("llama")))
    EffectiveRank().draw(found, tmp_path / "rank.png", title="tiny")
    assert (tmp_path / "rank.png").stat().st_size > 5_000
    assert max(found.values("heads")) <= 8 and found.energy(8) == pytest.approx(1)
