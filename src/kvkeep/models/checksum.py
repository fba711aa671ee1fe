"""Checksums of files, remembered so that large files are read once."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from kvkeep.files import make_folder, write_whole
from kvkeep.models.folders import cache_folder


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_sha256(path: Path) -> str:
    """Return the SHA-256 of a file. The file is read again only if its metadata changed. Archives and copies keep the
    modification time, so the time of the last change and the inode number count, too."""
    memory, key, stat = cache_folder() / "gguf" / "checksums.json", str(path.resolve()), path.stat()
    facts = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    known = _known(memory)
    match known.get(key):
        case [*before, str(checksum)] if before == facts:
            return checksum
    checksum = sha256(path)
    kept = {name: value for name, value in known.items() if Path(name).is_file()} | {key: [*facts, checksum]}
    with suppress(OSError):  # a cache folder prepared by someone else may be read-only
        make_folder(memory.parent)
        write_whole(memory, lambda file: file.write(json.dumps(kept, indent=1).encode()))
    return checksum


def _known(memory: Path) -> dict[str, object]:
    try:
        known = json.loads(memory.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
