"""What leaves and joins what stays: nothing is lost by merging, chance decides by the numbers it says, and a rollback
forgets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import VOCABULARY, tiny
from kvkeep.policies.fates.merged import Merge
from kvkeep.stores.joined import JoinedLayer, Leaving
from transformers import DynamicCache

from kvkeep import EntryState, KeepCache, UsageError
from kvkeep.memory.meter import Meter
from kvkeep.policies.fates.cam import Cam
from kvkeep.stores.banks import Bank


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(rows))


def step(cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tiny("llama")(ids, past_key_values=cache, logits_to_keep=1).logits


@pytest.mark.parametrize(
    "method", ["h2o+merge", "window+merge:slot", "tova+merge", "random+merge", "streaming-llm+merge"]
)
def test_keys_and_values_add_up_to_all_that_came(method: str) -> None:
    """Counts times entries, in the first layer, where they depend on the tokens alone; and the counts to the tokens."""
    ids = tokens(2, 80)
    cache, stock = KeepCache(tiny("llama"), method, 20, chunk=16), DynamicCache(config=tiny("llama").config)
    for low, high in ((0, 50), (50, 57), *((at, at + 1) for at in range(57, 80))):
        step(cache, ids[:, low:high])
        step(stock, ids[:, low:high])
        (bank,) = cache.layers[0].banks
        assert isinstance(cache.layers[0], JoinedLayer) and bank.used <= 20 and bank.extra is not None
        counts = (1 + bank.extra[:, : bank.used])[..., None]
        assert (counts.sum(1) == high).all()
        for rows, whole in ((bank.keys, stock.layers[0].keys), (bank.values, stock.layers[0].values)):
            ours = (counts * rows[:, : bank.used]).sum(1).unflatten(0, (2, -1))
            torch.testing.assert_close(ours, whole.sum(2), atol=1e-3, rtol=1e-3)


def test_equal_entries_join_without_a_trace() -> None:
    """A text of one token in a model without positions would be one entry; here: two keys alike, the one that leaves
    joins its like, and the count is its weight in attention."""
    keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]])
    bank = Bank(None, 3, keys.clone(), keys.clone(), torch.tensor([[4, 9, 2]]), None, torch.zeros(1, 3), used=3)
    bank.newest = torch.zeros(1, 3, dtype=torch.int64)
    left = Leaving(
        keys[:, 1:2] * 3, keys[:, 1:2], torch.tensor([[6]]), torch.tensor([[2.0]]), torch.tensor([[7]]), None
    )
    Merge().build(None, None, None).join(0, 1, bank, left)  # type: ignore[arg-type, attr-defined]
    assert bank.extra.tolist() == [[0, 2, 0]] and bank.newest.tolist() == [[0, 7, 0]]
    torch.testing.assert_close(bank.keys[0, 1], torch.tensor([0.0, 7 / 3]))
    torch.testing.assert_close(bank.values, keys)
    Merge("slot").build(None, None, None).join(0, 1, bank, left)  # type: ignore[arg-type, attr-defined]
    assert bank.extra.tolist() == [[2, 2, 0]]  # slot 4 is nearer to 6 than 9 is


@pytest.mark.parametrize("mark", [0.0, 0.4, 5.0])
def test_chance_is_the_ratio_of_attention(mark: float) -> None:
    """Of many lanes alike, the share whose value goes into the next two is the entry's attention over the mean of
    theirs; then it goes in whole, and keys and counts stay."""
    lanes = 4000
    slots = torch.tensor([[30, 5, 12, 20]]).expand(lanes, -1).contiguous()
    bank = Bank(None, 4, torch.ones(lanes, 4, 2), torch.zeros(lanes, 4, 2), slots, used=4)
    bank.extra, bank.newest = torch.zeros(lanes, 4), torch.zeros(lanes, 4, dtype=torch.int64)
    bank.scores = torch.tensor([[9.0, 9.0, 0.5, 1.5]]).expand(lanes, -1).contiguous()
    value, gone = torch.randn(lanes, 1, 2), torch.full((lanes, 1), 10)
    left = Leaving(value, value, gone, torch.ones(lanes, 1), gone, torch.full((lanes, 1), mark))
    Cam(into=2).build(None, None, Meter()).join(3, lanes, bank, left)  # type: ignore[arg-type, attr-defined]
    went = bank.values.abs().sum((1, 2)) > 0
    assert float(went.float().mean()) == pytest.approx(min(1.0, mark / 1.0), abs=0.04)
    torch.testing.assert_close(bank.values[went][:, 2], value[went, 0] / 2)
    torch.testing.assert_close(bank.values[went][:, 3], value[went, 0] / 2)
    assert (bank.values[:, :2] == 0).all() and (bank.keys == 1).all() and (bank.extra == 0).all()
    assert (bank.newest[went][:, 2:] == 10).all() and (bank.newest[~went] == 0).all()


def test_a_rollback_takes_what_a_forgotten_entry_has_joined() -> None:
    cache, ids = KeepCache(tiny("llama"), "tova+merge", 20, chunk=16), tokens(1, 60)
    step(cache, ids[:, :50])
    newest = [torch.maximum(layer.resident.banks[0].newest, layer.resident.banks[0].slots) for layer in cache.layers]
    assert any((layer.resident.banks[0].slots < 42)[rows >= 42].any() for layer, rows in zip(cache.layers, newest, strict=True))
    cache.crop(-8)
    for layer, rows, codes in zip(cache.layers, newest, cache.entry_states(), strict=True):
        (bank,) = layer.resident.banks
        assert (bank.slots[rows >= 42] == -1).all() and (bank.slots[rows < 42] >= 0).all()
        assert (bank.extra[bank.slots < 0] == 0).all()
        assert set(codes.flatten().tolist()) <= {EntryState.RESIDENT, EntryState.MERGED}
    for at in range(50, 60):
        assert step(cache, ids[:, at : at + 1]).isfinite().all()


def test_what_makes_no_sense_is_refused() -> None:
    for wrong, words in (
        ("window+cam", "no attention"),
        ("h2o+cam:0", "one entry at least"),
        ("h2o+merge:best", "'key' or by 'slot'"),
        ("h2o+merge+verified", "no recall"),
    ):
        with pytest.raises(UsageError, match=words):
            KeepCache(tiny("llama"), wrong, 20)
