"""``verify``: checks KV-Direct's basic claims on the user's model: Tables 1-3, Fig. 8 and Eq. 28."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from kvkeep.geometry import ModelGeometry
from kvkeep.models.binding import bind
from kvkeep_lab.prompts import built_in
from kvkeep_lab.studies.base import Flag, Study, Trial, part
from kvkeep_lab.studies.held_bytes import Bytes, HeldBytes, HeldBytesStudy
from kvkeep_lab.studies.patching import Patches, Patching, PatchingStudy
from kvkeep_lab.studies.rebuilt import Differences, Rebuilt, RebuiltEntries, reconstruction
from kvkeep_lab.studies.same_tokens import SameTokens, Tokens, Ways, checkpoint_kinds
from kvkeep_lab.studies.windows import Windows, beyond_the_window, text_length
from kvkeep_lab.tables import Table

DTYPES = ("float32", "bfloat16", "float16")
LENGTHS = (16, 32, 64, 128, 256)
TABLE_1 = (
    ("the paper's SmolLM2-135M, bfloat16", "22.5", "1.1", "20.0"),
    ("the paper's Gemma 3 4B, bfloat16", "136.0", "5.0", "27.2"),
)


@dataclass(frozen=True)
class VerifyReport:
    """All measurements, and the row of Table 1 for this model."""

    model: str
    dtype: str
    kv_bytes: int
    """Bytes of a token's keys and values."""
    residual_bytes: int
    """Bytes of a token's residual."""
    rho: float
    reconstruction: list[RebuiltEntries]
    tokens: list[Tokens]
    patching: list[Patching]
    memory: list[Bytes]
    windows: Windows | None
    """None if the model has no sliding layers, or no positions beyond their windows."""
    refused: dict[str, str]
    """Checkpoint kinds from which this family cannot rebuild entries, with the reasons. They are not checked."""

    @property
    def claims(self) -> dict[str, list[Any]]:
        """The measurements by claim. Each has ``holds``."""
        found: dict[str, list[Any]] = {
            "keys and values are rebuilt to the bit (Table 2)": self.reconstruction,
            "greedy tokens are the stock cache's (Table 3)": self.tokens,
            "the residual determines what follows: KL = 0 (Fig. 8)": self.patching,
            "bytes are as predicted (Eq. 28)": self.memory,
        }
        return found if self.windows is None else found | {"windows change neither (section 5.4)": [self.windows]}

    @property
    def failures(self) -> int:
        """Number of measurements that contradict a claim."""
        return sum(not row.holds for rows in self.claims.values() for row in rows)

    def as_dict(self) -> dict[str, Any]:
        """Return plain types. Each measurement has ``holds``."""

        def plain(rows: list[Any]) -> list[dict[str, Any]]:
            return [asdict(row) | {"holds": row.holds} for row in rows]

        rows = {name: plain(getattr(self, name)) for name in ("reconstruction", "tokens", "patching", "memory")}
        windows = None if self.windows is None else plain([self.windows])[0]
        return asdict(self) | rows | {"windows": windows, "holds": not self.failures}


class Verify(Study):
    """All checks. The command fails if a claim does not hold."""

    name = "verify"
    about = "check the claims on your model: entries rebuilt to the bit, the same tokens, KL = 0, bytes as predicted"
    protocol = (
        "The study rebuilds keys and values and compares them, continues a text with and without a cache, "
        "patches residuals, and counts bytes. If the model has sliding windows, it does the same beyond them."
    )
    found = VerifyReport

    quick: Annotated[bool, Flag("--quick")] = Field(
        False, description="run a short version: one length, one dtype, fewer tokens, no decoding from token ids"
    )

    def measure(self, trial: Trial) -> VerifyReport:
        """Run all checks. Raises UnsupportedModelError if kv-direct does not support the model."""
        model, tokenizer, quick = trial.model, trial.tokenizer, self.quick
        bind(model)
        dtype = str(model.dtype).removeprefix("torch.")
        geometry = ModelGeometry.from_config(model.config, model.dtype.itemsize)
        kinds, refused = checkpoint_kinds(model)
        longest = min(LENGTHS[-1], geometry.max_positions or LENGTHS[-1])
        ids, lengths = built_in(tokenizer, longest), LENGTHS[-1:] if quick else LENGTHS
        rebuilt: list[RebuiltEntries] = []
        for name in (dtype,) if quick else DTYPES:
            trial.progress(f"rebuilding in {name}", 0, 5)
            rebuilt += reconstruction(model, ids, lengths, name)
        exact = [kind for kind in kinds if not quick or kind != "tokens"]
        tokens = SameTokens.model_validate({"kinds": exact, "new": 12 if quick else 30})
        texts = {"lengths": [min(160, longest)], "budgets": [64]} if quick else {"lengths": [96, longest]}
        counted = HeldBytesStudy.model_validate({"kinds": kinds, **texts})
        trials = [replace(trial, progress=part(trial.progress, place, 5)) for place in (1, 2, 3)]
        said, patched = tokens.measure(trials[0]).rows, PatchingStudy().measure(trials[1]).rows
        memory = counted.measure(trials[2]).rows
        windows, new = None, 6 if quick else 12
        if length := text_length(geometry, new):
            trial.progress("sliding windows", 4, 5)
            rebuilding = tuple(kind for kind in kinds if kind != "kv")
            windows = beyond_the_window(model, built_in(tokenizer, length), new=new, kinds=rebuilding)
        entry, residual = geometry.kv_bytes_per_token, geometry.residual_bytes_per_token
        sizes = entry, residual, entry / residual
        return VerifyReport(trial.loaded.name, dtype, *sizes, rebuilt, said, patched, memory, windows, refused)

    def problem(self, found: VerifyReport) -> str | None:
        return (
            (f"{found.failures} measurements contradict a claim; the table above shows them.")
            if found.failures
            else None
        )

    def as_json(self, found: VerifyReport) -> dict[str, Any]:
        return found.as_dict()

    def tables(self, found: VerifyReport) -> list[Table]:
        sizes = Table("KB a token (Table 1)", ["", "keys and values", "one residual", "ρ"])
        cells = (f"{found.kv_bytes / 1024:.1f}", f"{found.residual_bytes / 1024:.1f}", f"{found.rho:.1f}")
        sizes.rows = [[f"{found.model}, {found.dtype}", *cells], *TABLE_1]
        verdict = f"{found.failures} measurements contradict a claim." if found.failures else "Every claim held."
        claims = Table("Claims", ["", "measurements", "that hold"], notes=[verdict])
        for claim, rows in found.claims.items():
            claims.rows.append([claim, f"{len(rows)}", f"{sum(row.holds for row in rows)}"])
        return [
            sizes,
            *Rebuilt.model_validate({}).tables(Differences(found.reconstruction, found.windows)),
            *SameTokens.model_validate({}).tables(Ways(found.tokens, found.refused)),
            *PatchingStudy().tables(Patches(found.patching)),
            *HeldBytesStudy.model_validate({}).tables(HeldBytes(found.memory)),
            claims,
        ]
