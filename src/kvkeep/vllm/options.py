"""What a user asks of the connector: ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvkeep.budget import bytes_of
from kvkeep.errors import UsageError, unknown
from kvkeep.models.folders import cache_folder
from kvkeep.vllm.codec import bits_of


@dataclass(frozen=True)
class Options:
    """folder: of the blocks, by default in the user's cache folder; quota: bytes of all blocks in it, of all engines
    together; codec: "exact", "int8" or "int4"; queue: bytes that wait to be written at most."""

    folder: Path
    quota: int
    codec: str
    queue: int

    def check(self, held: int, stored: int) -> None:
        """Raise UsageError where a block of ``held`` bytes, of ``stored`` in the folder, has no room."""
        for name, room, block in (("quota", self.quota, stored), ("queue", self.queue, held)):
            if room < block:
                raise UsageError(f"KeepConnector's {name} of {room:,} bytes holds no block of {block:,}; give it more.")

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Options:
        """Read ``folder``, ``quota`` and ``queue`` ("10GB", or bytes), and ``codec``, each of which may be missing.
        Raises UsageError for what cannot be understood."""
        known = {field.name for field in fields(cls)}
        for name in given:
            if name not in known:
                raise unknown("setting of KeepConnector", name, known)
        codec, folder = str(given.get("codec", "exact")), given.get("folder")
        bits_of(codec)
        return cls(
            cache_folder() / "vllm" if folder is None else Path(folder).expanduser().absolute(),
            bytes_of(given.get("quota", "10GB"), "quota"),
            codec,
            bytes_of(given.get("queue", "256MB"), "queue"),
        )
