"""What leaves is merged into what stays: nothing is lost, chance decides by the numbers it says, a rollback forgets."""

from __future__ import annotations

import pytest
import torch
from families import tiny
from helpers import bounded, prompt, step, stock
from single import site

from kvkeep import EntryState, KeepCache
from kvkeep.contracts import Evicted
from kvkeep.policies.fates.cam import Cam
from kvkeep.policies.fates.merge import Merge
from kvkeep.stores.banks import Bank


@pytest.mark.parametrize(
    "method", ["h2o+merge", "window+merge:slot", "tova+merge", "random+merge", "streaming-llm+merge"]
)
def test_keys_and_values_add_up_to_all_that_came(method: str) -> None:
    """Counts times entries, in the first layer, where they depend on the tokens alone; and the counts to the tokens."""
    ids = prompt(2, 80)
    cache, whole = KeepCache(tiny("llama"), method, 20, chunk=16), stock("llama")
    for low, high in ((0, 50), (50, 57), *((at, at + 1) for at in range(57, 80))):
        for each in (cache, whole):
            step("llama", each, ids[:, low:high])
        (bank,) = bounded(cache)[0].resident.banks
        assert bank.used <= 20 and bank.extra is not None
        counts = (1 + bank.extra[:, : bank.used])[..., None]
        assert (counts.sum(1) == high).all()
        for rows, expected in ((bank.keys, whole.layers[0].keys), (bank.values, whole.layers[0].values)):
            ours = (counts * rows[:, : bank.used]).sum(1).unflatten(0, (2, -1))
            torch.testing.assert_close(ours, expected.sum(2), atol=1e-3, rtol=1e-3)


def test_what_leaves_joins_its_like_and_weighs_by_its_count() -> None:
    keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]])
    bank = Bank(None, 3, keys.clone(), keys.clone(), torch.tensor([[4, 9, 2]]), None, used=3)
    one, seven = torch.ones(1, 1), torch.tensor([[7]])
    left = Evicted(keys[:, 1:2] * 3, keys[:, 1:2], torch.tensor([[6]]), None, one, seven)  # it stands for two
    Merge().store(site(1, 2, 3), None).merge(bank, left)
    assert bank.extra is not None and bank.newest is not None
    assert bank.extra.tolist() == [[0, 2, 0]] and bank.newest.tolist() == [[0, 7, 0]]
    torch.testing.assert_close(bank.keys[0, 1], torch.tensor([0.0, 7 / 3]))
    torch.testing.assert_close(bank.values, keys)
    Merge("slot").store(site(1, 2, 3), None).merge(bank, left)
    assert bank.extra.tolist() == [[2, 2, 0]]  # slot 4 is nearer to 6 than 9 is


@pytest.mark.parametrize("score", [0.0, 0.4, 5.0])
def test_chance_is_the_ratio_of_attention(score: float) -> None:
    """Of many lanes alike, the share whose value goes into the next two is the entry's attention over the mean of
    theirs; then it goes in whole, and keys and counts stay."""
    lanes = 4000
    slots = torch.tensor([[30, 5, 12, 20]]).expand(lanes, -1).contiguous()
    bank = Bank(None, 4, torch.ones(lanes, 4, 2), torch.zeros(lanes, 4, 2), slots, used=4)
    bank.scores = torch.tensor([[9.0, 9.0, 0.5, 1.5]]).expand(lanes, -1).contiguous()
    extra, newest = bank.counted()
    value, gone = torch.randn(lanes, 1, 2), torch.full((lanes, 1), 10)
    left = Evicted(value, value, gone, torch.full((lanes, 1), score))
    Cam(into=2).store(site(lanes, 2, 4), None).merge(bank, left)
    went = bank.values.abs().sum((1, 2)) > 0
    assert float(went.float().mean()) == pytest.approx(min(1.0, score), abs=0.04)
    for column in (2, 3):
        torch.testing.assert_close(bank.values[went][:, column], value[went, 0] / 2)
    assert (bank.values[:, :2] == 0).all() and (bank.keys == 1).all() and (extra == 0).all()
    assert (newest[went][:, 2:] == 10).all() and (newest[~went] == 0).all()


def test_a_rollback_takes_what_a_forgotten_entry_has_joined() -> None:
    cache, ids = KeepCache(tiny("llama"), "tova+merge", 20, chunk=16), prompt(1, 60)
    step("llama", cache, ids[:, :50])
    banks = [layer.resident.banks.banks[0] for layer in bounded(cache)]
    newest = [torch.maximum(bank.newest, bank.slots) for bank in banks]
    assert any((bank.slots < 42)[rows >= 42].any() for bank, rows in zip(banks, newest, strict=True))
    cache.crop(-8)
    for bank, rows, codes in zip(banks, newest, cache.entry_states(), strict=True):
        assert (bank.slots[rows >= 42] == -1).all() and (bank.slots[rows < 42] >= 0).all()
        assert bank.extra is not None and (bank.extra[bank.slots < 0] == 0).all()
        assert set(codes.flatten().tolist()) <= {EntryState.RESIDENT, EntryState.MERGED}
    for at in range(50, 60):
        assert step("llama", cache, ids[:, at : at + 1]).isfinite().all()
