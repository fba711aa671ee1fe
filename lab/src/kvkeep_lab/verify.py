"""Checks of the claims everything rests on, on the user's own model: KV-Direct's Tables 1-3, Fig. 8 and Eq. 28.

Each check is a function of a model and token ids (or a tokenizer) in a file of its own, and returns what it measured
and whether the claim held; :func:`verify` runs them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from kvkeep.cache import KeepCache
from kvkeep.errors import UnsupportedModelError
from kvkeep.geometry import CheckpointKind, ModelGeometry
from kvkeep.models.binding import bind
from kvkeep_lab.accounting import Bytes, account
from kvkeep_lab.generation import Tokens, same_tokens
from kvkeep_lab.patching import Patching, patching
from kvkeep_lab.reconstruction import Reconstruction, reconstruction
from kvkeep_lab.windows import Windows, beyond_the_window, text_length

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (16, 32, 64, 128, 256)
PROMPT = 96
"""Tokens of text before those compared in Table 3: with a budget of 64, some are evicted from the start."""

TEXT = (
    "A library keeps its books on shelves that a reader can reach, and the rest in a store below. When a shelf is "
    "full, the books that nobody has asked for leave it first; they are carried down, not thrown away, and "
    "whoever wants one of them later waits a moment while it is brought up again. The catalogue does not change: "
    "every book is still in the house, and the reader who asks for a page gets that page, word for word. What "
    "changes is only how long it takes, and how much room the shelves need. A good librarian knows which books "
    "are asked for every day, which are read once and then forgotten, and which are so thin that copying them "
    "anew is quicker than walking down the stairs. There are houses that keep every book within reach, and build "
    "another hall whenever the last one is full. There are houses that burn what does not fit, and hope that "
    "nobody will ask. And there are houses that write a short summary of what they burn, which serves well until "
    "somebody needs the very sentence that the summary left out. This house does none of these. It counts its "
    "shelves before the first reader comes in, and it tells the readers how many there are. It writes down, for "
    "every book that is carried below, from what it can be set again, letter by letter: from the author's "
    "manuscript, from the printer's plates, or from the book itself. In the evening, when the doors are closed, "
    "the librarian takes a few books at random, sets them again from the manuscript, and lays the new pages over "
    "the old ones, against the light. If a single letter differs, the house does not open in the morning."
)
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """Everything measured, and Table 1's row for this model (bytes a token).

    refused: checkpoint kinds that this family cannot rebuild entries from, and why; they are not checked.
    windows: None where the model has no sliding layers, or no positions beyond them.
    """

    model: str
    dtype: str
    kv_bytes: int
    residual_bytes: int
    rho: float
    reconstruction: list[Reconstruction]
    tokens: list[Tokens]
    patching: list[Patching]
    memory: list[Bytes]
    windows: Windows | None
    refused: dict[str, str]

    @property
    def holds(self) -> bool:
        """Every claim held."""
        return not self.failures()

    def failures(self) -> list[Any]:
        """Return the measurements that contradict a claim."""
        rows = [*self.reconstruction, *self.tokens, *self.patching, *self.memory, self.windows]
        return [row for row in rows if row is not None and not row.holds]

    def as_dict(self) -> dict[str, Any]:
        """Return plain types, each measurement with whether it ``holds``."""
        plain = asdict(self)
        for name in ("reconstruction", "tokens", "patching", "memory"):
            for row, found in zip(plain[name], getattr(self, name), strict=True):
                row["holds"] = found.holds
        if self.windows is not None:
            plain["windows"]["holds"] = self.windows.holds
        return plain | {"holds": self.holds}


def verify(
    model: Any, tokenizer: Any, name: str = "", *, quick: bool = False, progress: Progress | None = None
) -> Report:
    """Run all checks; ``quick`` takes one length, the model's own dtype, two kinds of checkpoint, and fewer tokens.

    Raises UnsupportedModelError where kv-direct does not serve the model at all.
    """
    tell: Progress = progress or (lambda text: None)
    bind(model)
    dtype = next(model.parameters()).dtype
    geometry = ModelGeometry.from_config(model.config, dtype.itemsize)
    tell("what the model can be asked for")
    kinds, refused = checkpoint_kinds(model)
    ids = text_ids(tokenizer, _limited(geometry, max(LENGTHS)))
    short = tuple(kind for kind in kinds if kind != "tokens") if quick else kinds
    lengths, dtypes = (LENGTHS[-1:], (dtype,)) if quick else (LENGTHS, DTYPES)
    rebuilt = [row for each in dtypes for row in reconstruction(model, ids, lengths, each, tell)]
    tell("greedy tokens")
    tokens = []
    for way in same_tokens(model, ids[:, :PROMPT], kinds=short, new=12 if quick else 30):
        tokens.append(way)
        tell(f"greedy tokens: after {way.way}")
    tell("residual patching")
    patched = list(patching(model, tokenizer))
    tell("memory")
    sizes: dict[str, Any] = {"lengths": (160,), "budgets": (64,)} if quick else {}
    memory = list(account(model, ids, kinds=kinds, **sizes))
    windows = None
    new = 6 if quick else 12
    if length := text_length(geometry, new):
        tell("sliding windows")
        rebuilding = tuple(kind for kind in kinds if kind != "kv")
        windows = beyond_the_window(model, text_ids(tokenizer, length), new=new, kinds=rebuilding)
    return Report(
        name,
        str(dtype).removeprefix("torch."),
        geometry.kv_bytes_per_token,
        geometry.residual_bytes_per_token,
        geometry.rho,
        rebuilt,
        tokens,
        patched,
        memory,
        windows,
        refused,
    )


def text_ids(tokenizer: Any, count: int) -> Tensor:
    """Return the first ``count`` tokens of the built-in text (over again if it is shorter), (1, count)."""
    ids = tokenizer(TEXT).input_ids
    return torch.tensor([(ids * (count // len(ids) + 1))[:count]])


def _limited(geometry: ModelGeometry, count: int) -> int:
    return count if geometry.max_positions is None else min(count, geometry.max_positions)


def checkpoint_kinds(model: Any) -> tuple[tuple[CheckpointKind, ...], dict[str, str]]:
    """Return the checkpoint kinds that the model's family can be used with, and the sentences of those refused. Raises
    UnsupportedModelError where there are none."""
    kinds: list[CheckpointKind] = []
    refused: dict[str, str] = {}
    for kind in reversed(get_args(CheckpointKind)):
        try:
            KeepCache(model, "kv-direct", 0, checkpoint=kind, where="device")
        except UnsupportedModelError as error:
            refused[kind] = str(error)
        else:
            kinds.append(kind)
    if not kinds:
        raise UnsupportedModelError(next(iter(refused.values())))
    return tuple(kinds), refused
