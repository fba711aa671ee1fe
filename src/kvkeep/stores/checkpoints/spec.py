"""The kind and place of a checkpoint: ``kv``, ``tokens``, ``residual``, ``residual:STRIDE``."""

from __future__ import annotations

from dataclasses import dataclass

from kvkeep.errors import UsageError, unknown
from kvkeep.memory import PLACES

KINDS = ("tokens", "residual", "kv")


@dataclass(frozen=True)
class CheckpointSpec:
    """The kind and place of a checkpoint."""

    kind: str
    """The form of the data: "tokens", "residual" or "kv"."""
    where: str
    """The place: "device", "host" or "disk"."""
    stride: int = 1
    """Layers per residual, for kind "residual"."""
    capacity: int | None = None
    """Entries that a checkpoint of kind "kv" may hold; None: no limit. Beyond it the oldest are lost, and the cache is
    then lossy."""
    folder: str | None = None
    """The folder of a checkpoint on disk."""

    @staticmethod
    def parse(text: str, where: str, *, capacity: int | None = None, folder: str | None = None) -> CheckpointSpec:
        """Parse ``"kv"``, ``"tokens"``, ``"residual"`` or ``"residual:STRIDE"``. Raises UsageError for other texts."""
        kind, _, stride = text.partition(":")
        if kind not in KINDS:
            raise unknown("checkpoint kind", kind, KINDS)
        if where not in PLACES:
            raise unknown("place for checkpoints", where, PLACES)
        if stride and (kind != "residual" or not stride.isdigit() or int(stride) < 1):
            raise UsageError(
                f"Checkpoint '{text}' is not understood: only 'residual' takes a stride, a whole number of layers "
                "of at least 1 (residual:4)."
            )
        if capacity is not None and (capacity < 1 or kind != "kv"):
            raise UsageError(
                "A capacity is at least 1 entry, and only checkpoint kind 'kv' takes one; give that kind, or leave the "
                "capacity out."
            )
        if folder is not None and where != "disk":
            raise UsageError(
                f"A checkpoint folder works with '--where disk' only, not with '{where}'; leave one of the two out."
            )
        return CheckpointSpec(kind, where, int(stride or 1), capacity, folder)

    def __str__(self) -> str:
        return f"{self.kind}:{self.stride}" if self.kind == "residual" and self.stride > 1 else self.kind
