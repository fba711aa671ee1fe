"""What kvkeep.h declares, in Python: the header is read when this module is imported, and nothing is declared twice.

library.py compares :data:`INTERFACE` with that of the library that it loads.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.errors import BadCall

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# ---- the header ----------------------------------------------------------------------------------

_HEADER = Path(__file__).with_name("kvkeep.h").read_text(encoding="utf-8")
_DECLARED = re.sub(r"/\*.*?\*/", "", _HEADER, flags=re.DOTALL)
_STRUCTURES = dict(re.findall(r"typedef struct (\w+) \{(.*?)\}", _DECLARED, re.DOTALL))
INTERFACE = hashlib.sha256("".join(_DECLARED.split()).encode()).hexdigest()
"""The SHA-256 of the header without comments and spaces; CMakeLists.txt gives the library the same."""


def _constants() -> dict[str, int]:
    """Return the constants by name: C counts up where it states no number."""
    found: dict[str, int] = {}
    for body in re.findall(r"enum \w* ?\{(.*?)\}", _DECLARED, re.DOTALL):
        number = -1
        for name, stated in re.findall(r"(KV_\w+)(?: = (\d+))?", body):
            found[name] = number = int(stated) if stated else number + 1
    return found


def _fields(structure: str) -> list[tuple[str, Any]]:
    """Return the fields of a structure, whose own structures are defined above it."""
    found = []
    for kind, pointer, name, count in re.findall(r"(\w+)([* ]+)(\w+)(?:\[(\d+)\])?;", _STRUCTURES[structure]):
        made = ctypes.c_void_p if "*" in pointer else _SIMPLE.get(kind) or globals()[kind]
        found.append((name, made * int(count) if count else made))
    return found


def functions() -> dict[str, tuple[Any, list[Any]]]:
    """Return the type of each function's result, and those of its arguments. A KvStatus is the string of its name: the
    caller makes a check of it."""
    found = {}
    for result, name, arguments in re.findall(
        r"^(\w[\w *]*?)(kvkeep_\w+)\((.*?)\);", _DECLARED, re.MULTILINE | re.DOTALL
    ):
        types = [argument.strip().rpartition(" ") for argument in arguments.split(",") if argument != "void"]
        found[name] = _type(result), [_type(kind + "*" * name.count("*")) for kind, _, name in types]
    return found


def _type(declared: str) -> Any:
    kind = declared.strip()
    if kind == "const char*":
        return ctypes.c_char_p
    if "*" in kind:
        return ctypes.c_void_p
    return kind if kind == "KvStatus" else _SIMPLE[kind] if kind in _SIMPLE else globals()[kind]


_SIMPLE: dict[str, Any] = {"int64_t": ctypes.c_int64, "int": ctypes.c_int, "float": ctypes.c_float, "void": None}

# ---- constants -----------------------------------------------------------------------------------

CONSTANTS = _constants()
"""All constants, by their names in kvkeep.h."""
NUMERICS_VERSION = CONSTANTS["KV_NUMERICS"]
"""Part of every receipt: raised whenever the bits that kernels, or methods on them, compute change."""
PANEL_OUTPUTS = CONSTANTS["KV_PANEL_OUTPUTS"]
"""Outputs of a matrix that lie in one panel."""
BLOCK_ENTRIES = CONSTANTS["KV_BLOCK_ENTRIES"]
"""Entries that attention combines at a time."""
TILE_ENTRIES = CONSTANTS["KV_TILE_ENTRIES"]
"""Entries of a tile of a block, and of a group of codes."""
MAX_DIM = CONSTANTS["KV_MAX_DIM"]
"""The largest width of a key or a value."""
_KINDS = (
    "BF16", "F16", "F32", "Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL",
    "IQ4_XS", "MXFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0",
)  # fmt: skip
KIND_NUMBERS = {kind: CONSTANTS[f"KV_{kind}"] for kind in _KINDS}
"""KvKind: how a matrix is stored."""
SILU, GELU_TANH, RELU2, GELU = (CONSTANTS[f"KV_{name}"] for name in ("SILU", "GELU_TANH", "RELU2", "GELU"))
"""KvActivation: the activation of an MLP."""
SOFTMAX, SIGMOID = CONSTANTS["KV_SOFTMAX"], CONSTANTS["KV_SIGMOID"]
"""KvScores: what a router makes of its products."""
HALVES, PAIRS = CONSTANTS["KV_HALVES"], CONSTANTS["KV_PAIRS"]
EXACT_PAIRS, SPREAD_PAIRS = CONSTANTS["KV_EXACT_PAIRS"], CONSTANTS["KV_SPREAD_PAIRS"]
"""KvRotation: which of the rotated channels are rotated together."""
IN_TURN, SIDE_BY_SIDE, SUMMED_FIRST = (CONSTANTS[f"KV_{name}"] for name in ("IN_TURN", "SIDE_BY_SIDE", "SUMMED_FIRST"))
"""KvOrder: how attention and MLP of a layer follow each other."""
PLAIN, GROUPED = CONSTANTS["KV_PLAIN"], CONSTANTS["KV_GROUPED"]
BY_CHANNEL, SKETCHED = CONSTANTS["KV_BY_CHANNEL"], CONSTANTS["KV_SKETCHED"]
"""KvFormat: how the entries of a piece are stored."""
NO_MEMORY, BAD_CALL = CONSTANTS["KV_NO_MEMORY"], CONSTANTS["KV_BAD_CALL"]
NOT_FINITE, FAILED = CONSTANTS["KV_NOT_FINITE"], CONSTANTS["KV_FAILED"]
"""KvStatus: how a call ended, if not well."""

# ---- structures: kvkeep.h explains every field ---------------------------------------------------


class KvArray(ctypes.Structure):
    """Numbers in memory, with their length and type. Functions take a tensor, or None, in its place (library.py)."""

    __slots__ = ()
    _fields_ = _fields("KvArray")


class KvRows(ctypes.Structure):
    """Rows of each lane."""

    __slots__ = ()
    _fields_ = _fields("KvRows")


class KvMatrix(ctypes.Structure):
    """A matrix as ``kvkeep_pack`` wrote it."""

    __slots__ = ()
    _fields_ = _fields("KvMatrix")


class KvNorm(ctypes.Structure):
    """A norm of rows: its weight and bias, and its kind."""

    __slots__ = ()
    _fields_ = _fields("KvNorm")


class KvLayer(ctypes.Structure):
    """A decoder layer: its matrices, biases, norms, and its MLP."""

    __slots__ = ("kept",)
    _fields_ = _fields("KvLayer")


class KvRouter(ctypes.Structure):
    """The router of a mixture: its weight and biases, and how it chooses."""

    __slots__ = ("kept",)
    _fields_ = _fields("KvRouter")


class KvExperts(ctypes.Structure):
    """The experts of a layer: their matrices and biases, and what their gates and ups become."""

    __slots__ = ("kept",)
    _fields_ = _fields("KvExperts")


class KvMlp(ctypes.Structure):
    """An MLP, a mixture of experts, or both."""

    __slots__ = ("kept",)
    _fields_ = _fields("KvMlp")


class KvDeltaNet(ctypes.Structure):
    """A gated delta net, without its projections."""

    __slots__ = ("kept",)
    _fields_ = _fields("KvDeltaNet")


class KvMamba2(ctypes.Structure):
    """A Mamba-2 layer, without its projections."""

    __slots__ = ("kept",)
    _fields_ = _fields("KvMamba2")


class KvSide(ctypes.Structure):
    """The keys or the values of a piece."""

    __slots__ = ()
    _fields_ = _fields("KvSide")


class KvPiece(ctypes.Structure):
    """Entries that lie in one place: bfloat16, codes, or cells of a sketch."""

    __slots__ = ()
    _fields_ = _fields("KvPiece")


class KvAttention(ctypes.Structure):
    """Queries, and the pieces that they attend to."""

    __slots__ = ()
    _fields_ = _fields("KvAttention")


class KvInsert(ctypes.Structure):
    """A new entry of each lane, and the column that it takes."""

    __slots__ = ()
    _fields_ = _fields("KvInsert")


class KvStep(ctypes.Structure):
    """One token of a session in one layer: its entry is written, and then it attends."""

    __slots__ = ()
    _fields_ = _fields("KvStep")


Table = ctypes.Array[Any]
"""An array of structures, addresses or numbers in memory, as kernels read it."""

# ---- tensors and tables --------------------------------------------------------------------------

NO_ARRAY, NO_ROWS = KvArray(), KvRows()
"""What stands for a tensor that is not there."""


class _Types(dict["torch.dtype", int]):
    """The KvType of a tensor's numbers, by their dtype."""

    def __missing__(self, dtype: torch.dtype) -> int:
        number = CONSTANTS.get(f"KV_{str(dtype).removeprefix('torch.').replace('bool', 'uint8').upper()}")
        if number is None:
            raise BadCall(f"a tensor must be of a type that the library knows, not {dtype}")
        return self.setdefault(dtype, number)


_TYPES = _Types()


def array(tensor: Tensor | None) -> KvArray:
    """Return a tensor as the library reads it, one number after the other; the result does not keep it. Raises BadCall
    for one that is not on the CPU, whose numbers lie apart or beyond its memory, or whose type the library does not
    know."""
    if tensor is None:
        return NO_ARRAY
    describe(made := KvArray(), tensor)
    return made


def describe(place: KvArray, tensor: Tensor) -> None:
    """Write a tensor to its place in a structure, as :func:`array` returns it."""
    if not tensor.is_cpu:
        raise BadCall(f"a tensor must be on the CPU, not on '{tensor.device}'")
    if not tensor.is_contiguous():
        raise BadCall("numbers of a tensor must lie one after the other")
    length = tensor.numel()
    if (tensor.storage_offset() + length) * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise BadCall("numbers of a tensor must lie within its memory")
    place.type, place.length, place.data = _TYPES[tensor.dtype], length, tensor.data_ptr()


def rows(tensor: Tensor | None) -> KvRows:
    """Return a tensor (lanes, rows, width), or (1, lanes, rows, width), as the library reads it; the result does
    not keep it. Raises BadCall as :func:`array`, and where the numbers of a row lie apart."""
    if tensor is None:
        return NO_ROWS
    if not tensor.is_cpu:
        raise BadCall(f"a tensor must be on the CPU, not on '{tensor.device}'")
    if tensor.dim() < 3 or tensor.shape[:-3] not in ((), (1,)):
        raise BadCall(f"a tensor must be (lanes, rows, width), not {tuple(tensor.shape)}")
    lanes, count, width = tensor.shape[-3:]
    lane_stride, row_stride, stride = tensor.stride()[-3:]
    if stride != 1 and width > 1:
        raise BadCall("numbers of a row must lie one after the other")
    length = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    numbers = KvArray(tensor.data_ptr(), max(0, length), _TYPES[tensor.dtype])
    return KvRows(numbers, lanes, count, width, lane_stride, row_stride)


def address_of(struct: ctypes.Structure | Table) -> int:
    """Return where a structure or a table lies; the address does not keep it."""
    return ctypes.addressof(struct)


ADDRESS_BYTES = ctypes.sizeof(ctypes.c_void_p)


def address_table(addresses: Sequence[int | None]) -> Table:
    """Return a table of pointers."""
    return (ctypes.c_void_p * len(addresses))(*addresses)


def count_table(numbers: Sequence[int]) -> Table:
    """Return a table of ints of 64 bits."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


def piece_table(count: int) -> Table:
    """Return a table of ``count`` empty pieces."""
    return (KvPiece * count)()


def copy_pieces(table: Table, number: int, pieces: Table) -> None:
    """Copy pieces into a table of at least ``number`` more."""
    ctypes.memmove(ctypes.byref(table, number * ctypes.sizeof(KvPiece)), pieces, ctypes.sizeof(pieces))
