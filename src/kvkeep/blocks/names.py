"""The names of blocks: digests of everything that their content depends on.

A block has the entries of :data:`BLOCK` tokens in all full layers. Its name is a digest of the name of the block before
it and of its token ids; the first follows a digest of the model, of what computed the entries, and of their form. So a
name stands for a whole text, and equal texts have the same blocks.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvkeep.contracts.exactness import Exactness
from kvkeep.memory.rows import BLOCK
from kvkeep.models.fingerprint import fingerprint
from kvkeep.native.structures import NUMERICS_VERSION

if TYPE_CHECKING:
    from kvkeep.blocks.text import Forms
    from kvkeep.cache import KeepCache

_DIGEST_BYTES = 16


def origin(cache: KeepCache, forms: Forms) -> bytes | None:
    """Return the digest that the first block of a text follows; None if the entries of ``cache`` depend on more than
    its token ids. forms: those of the rows of a block."""
    if cache.exactness is not Exactness.EXACT or not cache.stream.record.plain or cache.rows > 1:
        return None
    rows = sorted((name, *shape, str(dtype)) for name, (shape, dtype) in forms.items())
    facts = (fingerprint(cache.model), _computed_by(cache), *rows)
    return blake2b(repr(facts).encode(), digest_size=_DIGEST_BYTES).digest()


def chain(first: bytes, ids: Sequence[int]) -> list[str]:
    """Return the names of all whole blocks of a text that begins after ``first`` (:func:`origin`)."""
    rows, name, names = np.array(ids, np.int32), first, []
    for start in range(0, len(ids) // BLOCK * BLOCK, BLOCK):
        name = blake2b(name + rows[start : start + BLOCK].tobytes(), digest_size=_DIGEST_BYTES).digest()
        names.append(name.hex())
    return names


def tail_key(before: str) -> str:
    """Return the key of the tail after the block ``before``: the last text that followed it and filled no block."""
    return blake2b(f"{before} tail".encode(), digest_size=_DIGEST_BYTES).hexdigest()


def state_key(before: str) -> str:
    """Return the key of what windows and recurrent states held at the end of the block ``before``."""
    return blake2b(f"{before} state".encode(), digest_size=_DIGEST_BYTES).hexdigest()


def session_key() -> str:
    """Return a new key of a block that no text gives: it belongs to the sessions that name it."""
    return f"x{secrets.token_hex(_DIGEST_BYTES)[1:]}"


def belongs_to_sessions(key: str) -> bool:
    """Return whether a key is one of :func:`session_key`."""
    return key.startswith("x")


def _computed_by(cache: KeepCache) -> tuple[object, ...]:
    """Return what the bits of entries depend on besides model and text. The kernels compute the same bits on every
    processor, in any chunks and with every exact method."""
    if cache.stream.exact:
        return ("kernels", NUMERICS_VERSION)
    device, request = cache.made.device.type, cache.request
    processor = torch.backends.cpu.get_cpu_capability() if device == "cpu" else torch.cuda.get_device_name()
    return (torch.__version__, device, processor, request.method.name, str(request.budget), request.options())
