"""Files of scores that a user names: rows of numbers as text."""

from __future__ import annotations

from typing import Literal

import numpy
import torch
from torch import Tensor

from kvkeep.errors import UsageError, reason_of


def numbers(path: str, axes: Literal[1, 2]) -> Tensor:
    """Return the numbers of a text file as a tensor of at least ``axes`` axes. Raises UsageError for a file that cannot
    be read; the message never has its contents."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return torch.from_numpy(numpy.loadtxt(file, ndmin=axes))
    except OSError as error:
        reason = reason_of(error)
    except ValueError:
        reason = "it is not a table of numbers"
    raise UsageError(f"Scores cannot be read from '{path}': {reason}.")
