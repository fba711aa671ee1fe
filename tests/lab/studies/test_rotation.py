"""Errors of codes with and without a rotation, against written-out attention, and where one must help or hurt."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from conftest import WORDS
from kvkeep_lab.attention_inputs import Attended
from kvkeep_lab.statistics import where
from kvkeep_lab.studies.rotation import ROTATED, RotationStudy, coding_errors, hadamard
from measuring import measured

from kvkeep.errors import UsageError
from kvkeep.stores.evicted.coded import CodedKeys, CodedValues, encode_keys, encode_values

BOTH_FORMS = pytest.mark.parametrize("form", ["quantize", "tiers"])


def layer(keys: float = 1.0, values: float = 1.0) -> Attended:
    """Random entries; the first channel of all keys or values is so many times as large."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 64, 32, generator=draw) for heads in (4, 2, 2))
    key[..., 0] *= keys
    value[..., 0] *= values
    return Attended(0, query, key, value, None, 32**-0.5, query)


@pytest.mark.parametrize("dim", [1, 8, 24, 64])
def test_a_rotation_is_its_own_inverse_with_blocks_of_one_size(dim: int) -> None:
    turn = hadamard(dim)
    torch.testing.assert_close(turn @ turn, torch.eye(dim))
    block = dim & -dim
    assert torch.equal((turn != 0).sum(1), torch.full((dim,), block))
    torch.testing.assert_close(turn[turn != 0].abs(), torch.full((dim * block,), 1 / math.sqrt(block)))


@pytest.mark.parametrize("rotated", ROTATED)
def test_errors_equal_their_definitions(rotated: str) -> None:
    one, at, bits = layer(), torch.tensor([40, 63]), 4
    turns = [hadamard(32) if rotated in (name, "both") else torch.eye(32) for name in ("keys", "values")]
    found = coding_errors(one, at, "quantize", bits, rotated)
    kl, outputs, errors = [], [], []
    for head in range(4):
        keys, values = one.key[0, head // 2], one.value[0, head // 2]
        decoded: list[torch.Tensor] = []
        for start in (0, 32):
            group = [(part @ turn)[None, start : start + 32] for part, turn in zip((keys, values), turns, strict=True)]
            coded = [part[:, None] for part in encode_keys(group[0], bits)]
            other = [part[:, None] for part in encode_values(group[1], bits)]
            decoded.append(CodedKeys(*coded, bits).dense(torch.float32)[0] @ turns[0])  # type: ignore[call-arg]
            decoded.append(CodedValues(*other, bits).dense(torch.float32)[0] @ turns[1])  # type: ignore[call-arg]
        new_keys, new_values = torch.cat(decoded[::2]), torch.cat(decoded[1::2])
        for position in at.tolist():
            query, stop = one.query[0, head, position], position + 1
            p = torch.softmax(keys[:stop] @ query * one.scaling, 0)
            q = torch.softmax(new_keys[:stop] @ query * one.scaling, 0)
            kl.append(float((p * (p / q).log()).sum()))
            outputs.append(p @ values[:stop])
            errors.append(q @ new_values[:stop] - outputs[-1])
    assert found.kl == pytest.approx(sum(kl) / len(kl), rel=1e-3)
    assert found.output == pytest.approx(float(torch.cat(errors).norm() / torch.cat(outputs).norm()), rel=1e-3)


@BOTH_FORMS
def test_a_large_channel_of_keys_costs_others_nothing_until_it_is_rotated_into_them(form: str) -> None:
    large = layer(keys=30)
    errors = {what: coding_errors(large, torch.arange(32, 64), form, 4, what) for what in ROTATED}
    assert errors["keys"].kl > 2 * errors["neither"].kl
    assert errors["keys"].values == errors["neither"].values and errors["values"].keys == errors["neither"].keys


def test_a_large_channel_of_values_costs_its_neighbours_less_where_it_is_rotated() -> None:
    large = layer(values=30)
    plain, turned = (coding_errors(large, torch.arange(32, 64), "quantize", 4, what) for what in ("neither", "values"))
    assert turned.values < 0.8 * plain.values and turned.kl == plain.kl


def test_other_bits_are_refused() -> None:
    with pytest.raises(UsageError, match="8, 4 or 2 bits, not 3"):
        RotationStudy(bits=[4, 3]).check([])


def test_it_measures_a_model_on_a_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(WORDS[(7 * number) % len(WORDS)] for number in range(200)))
    found = measured(RotationStudy(tokens=100, bits=[8, 4], queries=4), files=[text])
    assert found.tokens == 96 and len(found.rows) == 2 * 2 * len(ROTATED)
    for what in ROTATED:
        for form in ("quantize", "tiers"):
            fine, coarse = where(found.rows, rotated=what, form=form)
            assert fine.bits == 8 and fine.errors.output < coarse.errors.output
