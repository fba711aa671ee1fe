"""The connector's settings, from vLLM's ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvkeep.budget import bytes_of
from kvkeep.errors import UsageError, unknown
from kvkeep.models.folders import cache_folder
from kvkeep_vllm.codec import bits_of


@dataclass(frozen=True)
class ConnectorOptions:
    """Settings of one engine."""

    folder: Path
    """Folder of blocks; by default ``vllm`` in the user's cache folder for kvkeep."""
    quota: int
    """Maximum bytes of all blocks in the folder, from all engines."""
    codec: str
    """``exact``, ``int8`` or ``int4``."""
    queue: int
    """Maximum bytes that wait to be written."""

    def check(self, nbytes: int, stored: int) -> None:
        """Raise UsageError if one block does not fit. nbytes: bytes of a block in memory; stored: bytes of its file."""
        for name, size, block in (("quota", self.quota, stored), ("queue", self.queue, nbytes)):
            if size < block:
                raise UsageError(
                    f"KeepConnector's {name} of {size:,} bytes is smaller than one block ({block:,}); raise it."
                )

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> ConnectorOptions:
        """Read settings by name; each may be missing. Sizes are "10GB", or a number of bytes. Raises UsageError for an
        unknown name or value."""
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
