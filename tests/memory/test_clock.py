"""The clock's tensors stay where they are while the token changes."""

from __future__ import annotations

import torch

from kvkeep.memory.clock import Clock


def test_numbers_near_the_tokens_slot_are_read_from_its_memory() -> None:
    clock = Clock(torch.device("cpu"))
    addresses = set()
    for slot in (7, 8, 300):
        clock.set(slot)
        assert clock.positions.tolist() == [[slot]]
        assert [int(clock.of(slot + more)) for more in (-2, 0, 1, 5)] == [slot - 2, slot, slot + 1, slot + 5]
        addresses.add((clock.positions.data_ptr(), clock.of(slot).data_ptr(), clock.of(slot + 1).data_ptr()))
    assert len(addresses) == 1
