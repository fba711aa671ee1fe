"""What kvkeep.h declares, in Python: constants, structures, and tables of them as the library reads them.

library.py compares the constants, and the offset and size of every field, with those of the library that it loads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# ---- constants -----------------------------------------------------------------------------------

NUMERICS_VERSION = 1
"""Part of every receipt: raised whenever the bits that kernels, or methods on them, compute change."""
PANEL_OUTPUTS = 16
"""Outputs of a matrix that lie in one panel."""
BLOCK_ENTRIES = 512
"""Entries that attention combines at a time."""
TILE_ENTRIES = 32
"""Entries of a tile of a block, and of a group of codes."""
MAX_DIM = 1024
"""The largest width of a key or a value."""
KIND_NUMBERS = {"BF16": 0, "Q4_0": 1, "Q4_1": 2, "Q5_0": 3, "Q5_1": 4, "Q8_0": 5, "Q4_K": 6, "Q5_K": 7, "Q6_K": 8}
"""KvKind: how a matrix is stored."""
SILU, GELU_TANH = 0, 1
"""KvActivation: the activation of a gated MLP."""
DONE, NO_MEMORY = 0, 1
"""KvStatus: how a kernel ended."""
CONSTANTS = {
    "KV_NUMERICS": NUMERICS_VERSION,
    "KV_PANEL_OUTPUTS": PANEL_OUTPUTS,
    "KV_BLOCK_ENTRIES": BLOCK_ENTRIES,
    "KV_TILE_ENTRIES": TILE_ENTRIES,
    "KV_MAX_DIM": MAX_DIM,
    "KV_SILU": SILU,
    "KV_GELU_TANH": GELU_TANH,
    "KV_DONE": DONE,
    "KV_NO_MEMORY": NO_MEMORY,
    **{f"KV_{kind}": number for kind, number in KIND_NUMBERS.items()},
}
"""All constants, by their names in kvkeep.h."""

# ---- structures ----------------------------------------------------------------------------------

_Fields = list[tuple[str, Any]]


def _pointers(names: str) -> _Fields:
    return [(name, ctypes.c_void_p) for name in names.split()]


def _integers(names: str) -> _Fields:
    return [(name, ctypes.c_int64) for name in names.split()]


class KvMatrix(ctypes.Structure):
    """A matrix as ``kvkeep_pack`` wrote it. Every field of these structures is explained in kvkeep.h."""

    __slots__ = ()
    _fields_ = [*_pointers("panels"), *_integers("inputs outputs kind")]


class KvLayer(ctypes.Structure):
    """A decoder layer: its matrices, biases, and weights of norms."""

    __slots__ = ("kept",)
    _fields_ = [
        ("qkv", KvMatrix * 3),
        ("out", KvMatrix),
        ("gates", KvMatrix * 2),
        ("down", KvMatrix),
        ("qkv_bias", ctypes.c_void_p * 3),
        *_pointers("out_bias input_norm query_norm key_norm post_attention_norm pre_mlp_norm post_mlp_norm"),
        *_integers("hidden heads kv_heads dim intermediate activation"),
        ("eps", ctypes.c_float),
    ]


class KvPiece(ctypes.Structure):
    """Entries that lie in one place: bfloat16, codes, or cells of a sketch."""

    __slots__ = ()
    _fields_ = [
        *_pointers("keys values"),
        *_integers("entries lanes key_lane_stride key_row_stride value_lane_stride value_row_stride"),
        *_pointers("key_scale key_offset value_scale value_offset value_mean value_deviation"),
        *_integers("key_bits value_bits value_group key_scale_stride value_scale_stride"),
        *_pointers("cell_indices key_mean"),
        *_integers("sums use_median"),
    ]


class KvAttention(ctypes.Structure):
    """Queries, and the pieces that they attend to."""

    __slots__ = ()
    _fields_ = [
        *_pointers("query pieces first stop shift mask"),
        *_integers("lanes groups queries dim value_dim piece_count entries"),
        *_integers("causal_offset mask_lane_stride mask_query_stride"),
        ("scaling", ctypes.c_float),
    ]


class KvInsert(ctypes.Structure):
    """A new entry of each lane, and the column that it takes."""

    __slots__ = ()
    _fields_ = [
        *_pointers("ranks"),
        *_integers("integer_ranks oldest_first columns column new_slot"),
        *_pointers("keys values"),
        *_integers("key_lane_bytes key_bytes value_lane_bytes value_bytes"),
        *_pointers("slots scores extra newest new_scores evicted_keys evicted_values"),
        *_integers("evicted_key_lane_bytes evicted_value_lane_bytes"),
        *_pointers("evicted_slots evicted_scores evicted_extra evicted_newest"),
    ]


class KvStep(ctypes.Structure):
    """One token of a session in one layer: its entry is written, and then it attends."""

    __slots__ = ()
    _fields_ = [
        ("attention", KvAttention),
        ("insert", KvInsert),
        *_pointers("received"),
        *_integers("reduce_max token first_lane token_lanes"),
    ]


class KvField(ctypes.Structure):
    """A field of a structure as the library was compiled with it; without a name the structure itself."""

    _fields_ = [("structure", ctypes.c_char_p), ("name", ctypes.c_char_p), *_integers("offset size")]


class KvNumber(ctypes.Structure):
    """A constant as the library was compiled with it."""

    _fields_ = [("name", ctypes.c_char_p), *_integers("value")]


STRUCTURES = (KvMatrix, KvLayer, KvPiece, KvAttention, KvInsert, KvStep)
"""All structures that calls of the library point to."""
Table = ctypes.Array[Any]
"""An array of structures, addresses or numbers in memory, as kernels read it."""

# ---- addresses and tables -----------------------------------------------------------


def address(tensor: Tensor | None) -> int | None:
    """Return where a tensor's numbers begin, None for none: a pointer, which does not keep the tensor."""
    return None if tensor is None else tensor.data_ptr()


def address_of(struct: ctypes.Structure | Table) -> int:
    """Return where a structure or a table lies; the address does not keep it."""
    return ctypes.addressof(struct)


def address_table(addresses: Sequence[int | None]) -> Table:
    """Return a table of pointers."""
    return (ctypes.c_void_p * len(addresses))(*addresses)


def count_table(numbers: Sequence[int]) -> Table:
    """Return a table of ints of 64 bits."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


def float_table(numbers: Sequence[float]) -> Table:
    """Return a table of floats of 32 bits."""
    return (ctypes.c_float * len(numbers))(*numbers)


def piece_table(count: int) -> Table:
    """Return a table of ``count`` empty pieces."""
    return (KvPiece * count)()


def copy_pieces(table: Table, number: int, pieces: Table) -> None:
    """Copy pieces into a table of at least ``number`` more."""
    ctypes.memmove(ctypes.byref(table, number * ctypes.sizeof(KvPiece)), pieces, ctypes.sizeof(pieces))
