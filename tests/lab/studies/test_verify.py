"""The checks of verify hold on honest models and fail on faulty ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from conftest import tokenizer
from families import FAMILIES, tiny
from kvkeep_lab.prompts import TEXT, built_in
from kvkeep_lab.reading import greedy
from kvkeep_lab.studies import held_bytes, windows
from kvkeep_lab.studies.base import Trial
from kvkeep_lab.studies.held_bytes import Bytes, HeldBytesStudy
from kvkeep_lab.studies.patching import PatchingStudy
from kvkeep_lab.studies.rebuilt import reconstruction
from kvkeep_lab.studies.same_tokens import SameTokens
from kvkeep_lab.studies.verify import DTYPES, LENGTHS, Verify
from kvkeep_lab.studies.windows import beyond_the_window
from measuring import measured
from transformers import AutoModelForCausalLM, MistralConfig

from kvkeep.errors import UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import Adapter
from kvkeep.models.binding import bind
from kvkeep.stores.checkpoints import replay
from kvkeep.stores.checkpoints.residuals import ResidualCheckpoint

IDS = torch.randint(2, 97, (1, 400), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("family", "quick"), [("llama", True), ("gpt2", True), ("gemma3", False)])
def test_every_claim_holds_on_tiny_models(family: str, quick: bool) -> None:
    shares: list[float] = []
    report = measured(Verify(quick=quick), family, progress=lambda what, done, total: shares.append(done / total))
    assert report.failures == 0
    assert not report.refused
    assert {row.kind for row in report.memory} == {"kv", "residual", "tokens"}
    measured_sizes = {(160, 64)} if quick else {(96, 0), (96, 64), (256, 0), (256, 64)}
    assert {(row.tokens, row.entries) for row in report.memory} == measured_sizes
    rebuilt = {("float32", 256)} if quick else set(product(DTYPES, LENGTHS))
    assert {(row.dtype, row.length) for row in report.reconstruction} == rebuilt
    assert len(report.tokens) == (6 if quick else 8) and len(report.patching) == 4
    assert next(tiny(family).parameters()).dtype == torch.float32  # as it was
    assert (report.windows is None) == (family != "gemma3")
    assert shares == sorted(shares) and shares[-1] < 1
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain["holds"] and all(row["holds"] for row in plain["reconstruction"])


def test_a_checkpoint_kind_that_a_family_refuses_is_reported() -> None:
    """Gemma 4 reads an embedding and other layers' keys in every layer: the residual is not its complete state."""
    report = measured(Verify(quick=True), "gemma4")
    assert not report.failures
    assert set(report.refused) == {"tokens"} and "gemma4" in report.refused["tokens"]
    assert {row.kind for row in report.memory} == {"kv", "residual"}
    assert any(row.also_reads and row.kl != 0 for row in report.patching)


def test_recomputing_without_a_window_differs_and_kvkeep_does_not() -> None:
    """KV-Direct, section 5.4: recomputing Gemma 3's sliding layers without their window breaks it."""
    found = beyond_the_window(tiny("gemma3"), IDS)
    assert found.holds and found.matching == {"residual": found.of, "tokens": found.of}
    assert found.text_tokens > 2 * found.window
    assert found.blind_matching < found.of
    assert found.blind.keys > 1e-3 and found.blind.values > 1e-3 and found.blind_logits > 1e-3


def test_a_model_of_sliding_layers_only_is_checked() -> None:
    """Its config has a window but no layer types."""
    torch.manual_seed(0)
    options = {"sliding_window": 8, "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 512}
    model = AutoModelForCausalLM.from_config(MistralConfig(**options, **heads)).eval()
    found = beyond_the_window(model, IDS, kinds=())
    assert found.holds and found.blind.keys > 0


def test_a_text_within_the_window_is_refused() -> None:
    with pytest.raises(UsageError, match="beyond"):
        beyond_the_window(tiny("gemma3"), IDS[:, :8])
    few = ModelGeometry.from_config(FAMILIES["gemma3"]().__class__(sliding_window=4096, max_position_embeddings=4096))
    assert windows.text_length(few) == 0
    many = ModelGeometry.from_config(FAMILIES["gemma3"]().__class__(sliding_window=4096, max_position_embeddings=9999))
    assert windows.text_length(many) == 4096 + 512 + 64


def off_by(part: int, amount: float) -> Callable[..., Any]:
    """Return an ``Adapter.project`` whose keys (part 0) or values (part 1) are a little wrong."""
    honest = Adapter.project

    def project(self: Any, *arguments: Any) -> Any:
        rebuilt = list(honest(self, *arguments))
        rebuilt[part] = rebuilt[part] + amount
        return tuple(rebuilt)

    return project


@pytest.mark.parametrize("part", [0, 1])
def test_wrong_entries_are_detected(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adapter, "project", off_by(part, 1e-3))
    for family in ("llama", "gemma3"):  # what the adapter finds meanwhile is not for later tests
        monkeypatch.setattr(bind(tiny(family)), "_checked", {})
    for family in ("llama", "gemma3"):
        rows = list(reconstruction(tiny(family), IDS, (16,), "float32"))
        assert rows and not any(row.holds or row.pages.none or row.rows.none for row in rows)
    assert not beyond_the_window(tiny("gemma3"), IDS, kinds=()).holds


def test_wrong_entries_make_verify_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the adapter's own check refuses the checkpoint kind before its use."""
    monkeypatch.setattr(Adapter, "project", off_by(0, 1e-3))
    monkeypatch.setattr(bind(tiny("llama")), "_checked", {})
    study = Verify(quick=True)
    report = measured(study)
    assert report.failures and not report.as_dict()["holds"]
    assert "contradict a claim" in (study.problem(report) or "")


def test_wrong_tokens_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ResidualCheckpoint._projected

    def projected(self: Any, *arguments: Any) -> Any:
        for piece in honest(self, *arguments):
            yield piece._replace(values=-piece.values)

    monkeypatch.setattr(ResidualCheckpoint, "_projected", projected)
    rows = {row.way: row for row in measured(SameTokens(kinds=["kv", "residual"], prompt=80)).rows}
    assert rows["kv-direct B=64, kv"].holds and rows["no cache"].holds
    wrong = rows["kv-direct B=64, residual"]
    assert not wrong.holds and wrong.differs_at is not None and wrong.gap is not None and wrong.gap > 0


def test_greedy_continues_after_an_end_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    first, _ = greedy(model, IDS[:, :20], 8)
    monkeypatch.setattr(model.generation_config, "eos_token_id", first[2])
    assert greedy(model, IDS[:, :20], 8)[0] == first


def test_a_recompute_without_the_window_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window is removed inside kvkeep's own recompute."""
    honest = replay._Scratch.__init__
    monkeypatch.setattr(
        replay._Scratch, "__init__", lambda self, slots, visible, window: honest(self, slots, visible, None)
    )
    found = beyond_the_window(tiny("gemma3"), IDS, new=24)
    assert not found.holds and found.matching["tokens"] < found.of


def account(kinds: list[str], **sizes: Any) -> list[Bytes]:
    rows: list[Bytes] = measured(HeldBytesStudy.model_validate({"kinds": kinds, **sizes})).rows
    return rows


def test_a_surplus_byte_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(row.holds for row in account(["kv", "residual"]))
    nothing = held_bytes.nbytes
    monkeypatch.setattr(held_bytes, "nbytes", lambda *tensors: nothing(*tensors) + 1)
    assert not any(row.holds for row in account(["kv", "residual"]))


def test_predicted_bytes_follow_equation_28() -> None:
    """With the tiny model's sizes in place of Table 1's."""
    (row,) = account(["residual"], lengths=[96], budgets=[64])
    entry, vector = 4 * 2 * 2 * 8 * 4, 32 * 4  # layers, keys and values, heads, width, bytes; hidden size, bytes
    assert (row.stock, row.paper) == (96 * entry, 64 * entry + 32 * vector)
    # Residuals of all 96 tokens at three layers, ids at the first: Eq. 28 leaves out both that and the others.
    assert row.used == row.predicted == 64 * entry + 96 * (3 * vector + 4)


def test_a_layer_with_hidden_state_is_detected() -> None:
    model = tiny("llama")
    seen: list[torch.Tensor] = []

    def leak(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(output)
        return output + 0.01 * len(seen)

    handle = model.model.norm.register_forward_hook(leak)
    try:
        assert not all(row.holds for row in measured(PatchingStudy()).rows)
    finally:
        handle.remove()


def test_the_built_in_text_is_long_enough() -> None:
    assert len(TEXT.split()) > max(LENGTHS)  # none of Table 2's lengths repeats it
    assert built_in(tokenizer(), 1000).shape == (1, 1000)


@pytest.mark.real
@pytest.mark.slow
def test_every_claim_holds_on_smollm2(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep_lab.studies.verify.LENGTHS", (96,))
    report = Verify(quick=True).measure(Trial(smollm2))
    assert not report.failures
