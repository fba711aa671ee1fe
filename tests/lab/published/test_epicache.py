"""EpiCache: its episodes where they are known, its scores against transformers, and the cache that a question gets."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from families import tiny
from helpers import assert_near, prompt, step
from kvkeep_lab.published.epicache import EpiCache, clusters
from kvkeep_lab.subject import ReadText
from measuring import subject

from kvkeep import KeepCache, UsageError

TEXT = torch.tensor([3, *[1, 2, 1, 1] * 3, *[8, 9, 9, 9] * 2, *[1, 1, 2, 1], *[9, 8, 9, 9] * 2])
"""A token, and eight segments of two topics."""
SMALL = {"episodes": 2, "medoids": 2, "segment": 4}


def embed(ids: torch.Tensor) -> torch.Tensor:
    """A direction for each of ten ids."""
    return torch.eye(10)[ids]


def test_clusters_are_groups_that_lie_apart_with_their_means() -> None:
    generator = torch.Generator().manual_seed(3)
    groups = torch.arange(60) % 3
    points = torch.eye(8)[groups] + 0.1 * torch.randn(60, 8, generator=generator)
    labels, centres = clusters(points, 3)
    assert {(int(label), int(group)) for label, group in zip(labels, groups, strict=True)} == {
        (int(labels[group]), group) for group in range(3)
    }
    assert_near(centres[labels[:3]], torch.stack([points[groups == group].mean(0) for group in range(3)]))


def test_equal_points_are_one_cluster() -> None:
    labels, centres = clusters(torch.ones(5, 2), 3)
    assert labels.tolist() == [0] * 5 and centres.tolist() == [[1.0, 1.0]]


def test_an_episode_reads_the_segments_nearest_to_its_centre_in_the_order_of_the_text() -> None:
    topics = [
        {int(TEXT[slot]) for slot in EpiCache(episode=episode, **SMALL).nearest(TEXT[None], None, embed)[0]}
        for episode in (1, 2)
    ]
    assert sorted(map(sorted, topics)) == [[1, 2], [8, 9]]
    (slots,) = EpiCache(**SMALL).nearest(TEXT[None], None, embed).tolist()  # of the last segment
    assert slots == sorted(slots) and slots[:4] == [13, 14, 15, 16] and set(TEXT[slots].tolist()) == {8, 9}


def test_a_small_episode_is_filled_with_the_segments_nearest_to_its_centre() -> None:
    text = torch.tensor([1] * 8 + [1, 1, 1, 9] + [9] * 4)
    (slots,) = EpiCache(episodes=2, medoids=2, segment=4).nearest(text[None], None, embed).tolist()
    assert slots == list(range(8, 16))


def test_padding_belongs_to_no_episode() -> None:
    rows = torch.stack([torch.cat([torch.zeros(14, dtype=torch.int64), TEXT[-19:]]), TEXT])
    real = torch.arange(33) >= torch.tensor([[14], [0]])
    slots = EpiCache(**SMALL).nearest(rows, real, embed)
    assert torch.equal(slots[0] - 14, EpiCache(**SMALL).nearest(TEXT[None, -19:], None, embed)[0])
    assert torch.equal(slots[1], EpiCache(**SMALL).nearest(TEXT[None], None, embed)[0])


def test_a_question_is_matched_to_the_episode_of_its_words() -> None:
    for word in (2, 8):
        chosen = EpiCache(**SMALL).matched(TEXT, torch.tensor([word, 5]), embed)
        assert word in TEXT[chosen.nearest(TEXT[None], None, embed)[0]]


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "gpt2"])
def test_scores_are_the_largest_weights_over_the_text(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[torch.Tensor] = []
    monkeypatch.setattr(EpiCache, "shares", lambda self, scores, rows, n: found.extend(scores) or [[n]] * len(scores))
    spec, ids = "epicache:sinks=0,segment=5,medoids=2,episodes=2", prompt(1, 32)
    cache = KeepCache(tiny(family), spec, 16, chunk=7)
    step(family, cache, ids)
    model = deepcopy(tiny(family))
    model.set_attn_implementation("eager")
    excerpt = cache.method.selector.nearest(ids, None, model.get_input_embeddings())
    with torch.no_grad():
        both = torch.cat([ids, ids.gather(1, excerpt)], 1)
        attentions = model(both, output_attentions=True, use_cache=False).attentions
    for ours, layer in zip(found, cache.geometry.full_layers, strict=True):
        weights = attentions[layer.index][0][:, 32:, :32]  # (heads, queries, text)
        weights = weights / weights.sum(2, keepdim=True)
        assert_near(ours, weights.unflatten(0, (layer.kv_heads, -1)).amax((1, 2)))


def test_every_layer_has_the_same_budget_which_goes_to_the_best_entries_of_its_heads() -> None:
    low, high = torch.rand(1, 40), 2 + torch.rand(1, 40)
    found = EpiCache(least=0.25).shares([torch.cat([low, high]), torch.cat([high, low]) + 5], 1, 16)
    assert found == [[4, 28], [28, 4]]


def test_a_question_gets_the_cache_of_its_episode_and_the_text_is_read_once() -> None:
    ids = prompt(1, 90)[0].tolist()
    text, spec = ReadText(tuple(ids), 110), "epicache:segment=8,medoids=2,episodes=3"
    one, chosen = subject(spec, "40"), set()
    for question in ([5, 6, 7], ids[:8], ids[40:48], ids[60:70]):
        found = one.examine_after(text, question, [1, 2], 3)
        method = one._matched(text, question)
        alone = subject(method, "40").examine_after(text, question, [1, 2], 3)
        assert found.logs == alone.logs and found.cost.entries == 40
        chosen.add(method)
    assert len(chosen) > 1 and all(method.startswith(f"{spec},episode=") for method in chosen)
    (readings,) = one.readings.values()
    assert len(readings.second) == len(chosen)


def test_what_cannot_be_is_refused() -> None:
    for wrong in ({"episodes": 0}, {"medoids": 0}, {"segment": 0}, {"episode": 5}, {"episode": -1}):
        with pytest.raises(UsageError, match="at least 1 episode"):
            EpiCache(**wrong)
