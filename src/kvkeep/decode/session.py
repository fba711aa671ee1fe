"""Sessions: a cache saved to a file, to be continued another day without reading its tokens again.

The file is safetensors: the resident entries of every layer, the checkpoint's rows, ids and positions; and in its
header, as JSON, the method, the budget, the lengths and the fingerprint of the model.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvkeep import transfer
from kvkeep.cache import KeepCache
from kvkeep.errors import SessionError, UsageError
from kvkeep.models.fingerprint import fingerprint

FORMAT = 2


@dataclass
class Session:
    """A cache, the token ids it has processed, and what the program wants to remember with it (``notes``, JSON)."""

    cache: KeepCache
    ids: list[list[int]]
    notes: dict[str, Any] = field(default_factory=dict)


def save_session(path: str | os.PathLike[str], session: Session) -> None:
    """Write ``session`` to ``path``, at once or not at all.

    Raises SessionError where the file cannot be written; what was there before is then still there.
    """
    cache = session.cache
    if any(len(row) != cache.get_seq_length() for row in session.ids):
        raise UsageError(f"A session is saved with the ids of the cache's {cache.get_seq_length()} tokens.")
    tensors = {name: tensor.contiguous() for name, tensor in transfer.state(cache).items()}
    tensors["session.ids"] = torch.tensor(session.ids, dtype=torch.int32)
    header = {
        "format": FORMAT,
        "fingerprint": fingerprint(cache.model),
        "family": cache.geometry.model_type,
        "method": cache.method.name,
        "budget": None if cache.request.budget is None else str(cache.request.budget),
        "options": cache.request.options(),
        "past": transfer.header(cache),
        "notes": session.notes,
    }
    _write(Path(path), tensors, {"kvkeep": json.dumps(header)})


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        save_file(tensors, temporary, metadata=metadata)
        os.replace(temporary, path)
        temporary = None
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise SessionError(f"The session cannot be written to '{path}': {reason.lower()}.") from error
    finally:
        if temporary is not None:
            os.unlink(temporary)


def load_session(path: str | os.PathLike[str], model: Any) -> Session:
    """Return the session saved at ``path``, ready to be continued with ``model``.

    Raises SessionError for a file that is not a session, is damaged, or was saved with another model.
    """
    if not Path(path).is_file():
        raise SessionError(f"There is no session at '{path}': no such file.")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("kvkeep", "null"))
            if not isinstance(header, dict) or header.get("format") != FORMAT:
                raise SessionError(f"'{path}' is not a session of this version of kvkeep; start a new one.")
            if header["fingerprint"] != fingerprint(model):
                raise SessionError(
                    f"The session '{path}' was saved with another model (a '{header['family']}' model with other "
                    "weights or dtype); load that one, or start a new session."
                )
            cache = KeepCache(model, header["method"], header["budget"], **header["options"])
            names = set(file.keys()) - {"session.ids"}
            transfer.restore(cache, names, file.get_tensor, header["past"])
            return Session(cache, file.get_tensor("session.ids").tolist(), header["notes"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is damaged or cut short"
        raise SessionError(f"The session '{path}' cannot be read: {reason.lower()}.") from error
