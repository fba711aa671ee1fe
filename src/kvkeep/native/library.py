"""The native library as Python calls it: its structures (kvkeep.h), how it is found, and which instructions it uses.

No other module of the package imports ctypes. The library lies beside this file, made when the package is built. Where
it is missing or cannot be loaded, callers use plain torch operations, and one sentence says so. The environment
variable ``KVKEEP_CPU`` names the path to use (``plain``, ``avx2``, ...), or ``torch`` for no library at all.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.errors import KvkeepError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

FILE = Path(__file__).with_name("libkvkeep.so")
"""The library; by this name on macOS as well."""
NUMERICS_VERSION = 1
"""Part of every receipt: raised whenever the bits that kernels, or methods on them, compute change; kvkeep.h has the
same number."""
SLOWDOWN = "about ten times slower"
"""How plain torch operations compare with the library."""
OPENMP = ("libgomp", "libomp", "libiomp")
"""How the files of OpenMP's runtimes begin."""
TORCH = "torch"
"""The value of ``KVKEEP_CPU`` that means no library."""

# ---- structures, as kvkeep.h declares them -------------------------------------------------------

_Fields = list[tuple[str, Any]]


def _pointers(*names: str) -> _Fields:
    return [(name, ctypes.c_void_p) for name in names]


def _integers(*names: str) -> _Fields:
    return [(name, ctypes.c_int64) for name in names]


class KvMatrix(ctypes.Structure):
    """A matrix as ``kvkeep_pack`` wrote it, and the kind of its blocks."""

    _fields_ = [*_pointers("panels"), *_integers("inputs", "outputs", "kind")]


class KvLayer(ctypes.Structure):
    """A decoder layer: its matrices, biases, and weights of norms."""

    _fields_ = [
        ("qkv", KvMatrix * 3),
        ("out", KvMatrix),
        ("gates", KvMatrix * 2),
        ("down", KvMatrix),
        ("qkv_bias", ctypes.c_void_p * 3),
        *_pointers("out_bias", "before", "query_norm", "key_norm", "after_attention", "before_mlp", "after_mlp"),
        *_integers("hidden", "heads", "kv_heads", "dim", "inner", "gate"),
        ("eps", ctypes.c_float),
    ]


class KvPiece(ctypes.Structure):
    """Entries that lie in one place: bfloat16, codes, or cells of a sketch."""

    _fields_ = [
        *_pointers("keys", "values"),
        *_integers("count", "lanes", "key_lane", "key_row", "value_lane", "value_row"),
        *_pointers("key_scale", "key_offset", "value_scale", "value_offset", "mean", "deviation"),
        *_integers("key_bits", "value_bits", "width", "key_scale_lane", "value_scale_lane"),
        *_pointers("places", "key_mean"),
        *_integers("sums", "median"),
    ]


class KvAttention(ctypes.Structure):
    """Queries, and the pieces that they attend to."""

    _fields_ = [
        *_pointers("query", "pieces", "first", "stop", "shift", "mask"),
        *_integers("lanes", "groups", "queries", "dim", "value_dim", "count", "entries"),
        *_integers("past", "mask_lane", "mask_query"),
        ("scaling", ctypes.c_float),
    ]


class KvInsert(ctypes.Structure):
    """A new entry of each lane, and the column that it takes. Tensors that it points to must outlive it."""

    _fields_ = [
        *_pointers("ranks"),
        *_integers("whole", "oldest", "columns", "at", "slot"),
        *_pointers("keys", "values"),
        *_integers("key_lane", "key_bytes", "value_lane", "value_bytes"),
        *_pointers("slots", "scores", "extra", "newest", "new_scores", "left_keys", "left_values"),
        *_integers("left_key_lane", "left_value_lane"),
        *_pointers("left_slots", "left_scores", "left_extra", "left_newest"),
    ]

    @classmethod
    def into(cls, keys: Tensor, values: Tensor) -> KvInsert:
        """Return an insert into some row of ``keys`` and ``values`` (.., lanes, rows, dim); the caller fills in
        which row."""
        return cls(
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            key_lane=keys.stride(-3) * keys.itemsize,
            key_bytes=keys.shape[-1] * keys.itemsize,
            value_lane=values.stride(-3) * values.itemsize,
            value_bytes=values.shape[-1] * values.itemsize,
        )


class KvField(ctypes.Structure):
    """A field of a structure as the library was compiled with it; without a name the structure itself."""

    _fields_ = [("structure", ctypes.c_char_p), ("name", ctypes.c_char_p), *_integers("offset", "size")]


class KvStep(ctypes.Structure):
    """A new entry of each lane of a session's layer, and what its query attends to once the entry is there."""

    _fields_ = [
        ("attention", KvAttention),
        ("insert", KvInsert),
        *_pointers("received"),
        *_integers("greatest", "token"),
    ]


STRUCTURES = (KvMatrix, KvLayer, KvPiece, KvAttention, KvInsert, KvStep)
"""All that calls of the library point to."""
PIECE_BYTES = ctypes.sizeof(KvPiece)
"""From one piece of a table to the next."""
Table = ctypes.Array[Any]
"""An array of structures, addresses or floats in memory, as kernels read it."""

# ---- what other modules need of ctypes -----------------------------------------------------------


def address(tensor: Tensor | None) -> int | None:
    """Return where a tensor's numbers begin, None for none: a pointer, which does not keep the tensor."""
    return None if tensor is None else tensor.data_ptr()


def address_of(struct: ctypes.Structure | Table) -> int:
    """Return where a structure or a table lies; the address does not keep it."""
    return ctypes.addressof(struct)


def address_table(addresses: Sequence[int | None]) -> Table:
    """Return a table of pointers."""
    return (ctypes.c_void_p * len(addresses))(*addresses)


def float_table(numbers: Sequence[float]) -> Table:
    """Return a table of floats of 32 bits."""
    return (ctypes.c_float * len(numbers))(*numbers)


def piece_table(count: int) -> Table:
    """Return a table of ``count`` empty pieces."""
    return (KvPiece * count)()


def copy_piece(table: Table, number: int, piece: KvPiece) -> None:
    """Copy a piece into a table of them."""
    ctypes.memmove(ctypes.addressof(table) + number * PIECE_BYTES, ctypes.addressof(piece), PIECE_BYTES)


def copy_pieces(target: Table, sources: Iterable[Table]) -> None:
    """Copy the pieces of ``sources``, one table after another, into ``target``, which has room for all of them."""
    at = ctypes.addressof(target)
    for source in sources:
        size = ctypes.sizeof(source)
        ctypes.memmove(at, source, size)
        at += size


@functools.cache
def _malloc_trim() -> Any:
    """Return glibc's malloc_trim; None where the C library has none."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


def trim_memory() -> None:
    """Return freed memory to the system, where the C library can. Packing a model frees memory between tensors in use,
    whose pages the process would keep (1.6 GB for a model of 8 billion parameters)."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


# ---- the library ---------------------------------------------------------------------------------

_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float, "s": ctypes.c_char_p}
_SIGNATURES = {
    "kvkeep_fields": "p:p",
    "kvkeep_paths": ":s",
    "kvkeep_choose": "s:i",
    "kvkeep_path": ":s",
    "kvkeep_use_openmp": "pp",
    "kvkeep_set_threads": "i",
    "kvkeep_packed_bytes": "lll:l",
    "kvkeep_pack": "lllplp:i",
    "kvkeep_numerics": ":l",
    "kvkeep_unpack": "ppl",
    "kvkeep_rows": "pplp",
    "kvkeep_product": "pplppl",
    "kvkeep_norm": "ppfllp",
    "kvkeep_angles": "plplfpp",
    "kvkeep_enter_layer": "ppllppippp",
    "kvkeep_leave_layer": "ppplp",
    "kvkeep_attend": "ppippi",
    "kvkeep_attend_rows": "pppllllllllfpppi",
    "kvkeep_received": "pplip",
    "kvkeep_insert": "plpp",
    "kvkeep_attend_sessions": "plpppllifpp",
    "kvkeep_run_layers": "ppplllppp",
}
"""Arguments, and behind a colon the result: pointers, integers of 64 and of 32 bits, floats, strings."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the native library; None where there is none, or ``KVKEEP_CPU=torch``. Raises UsageError where
    ``KVKEEP_CPU`` names a path that this processor does not run."""
    loaded = _chosen()
    if loaded is not None:
        _share_threads(loaded)
    return loaded


def kernels() -> ctypes.CDLL:
    """Return the native library where the caller knows that it is there."""
    found = library()
    assert found is not None
    return found


def path() -> str:
    """Return the name of the path in use: ``plain``, ``avx2``, ..., or ``torch`` without the library. Does not load
    torch."""
    found = _chosen()
    return TORCH if found is None else found.kvkeep_path().decode()


def check_environment() -> None:
    """Raise UsageError where ``KVKEEP_CPU`` names no path of this machine. Needs neither torch nor much time."""
    if os.environ.get("KVKEEP_CPU"):
        _chosen()


def _chosen() -> ctypes.CDLL | None:
    """Return the library on the path that ``KVKEEP_CPU`` names, the best one without it; without threads."""
    wanted = os.environ.get("KVKEEP_CPU", "")
    if wanted == TORCH:
        return None
    loaded = _loaded()
    if loaded is None:
        if wanted:
            raise UsageError(f"KVKEEP_CPU={wanted} needs the native library, which {_absent()}.")
        return None
    paths = loaded.kvkeep_paths().decode().split()
    if wanted and wanted not in paths:
        raise UsageError(
            f"KVKEEP_CPU={wanted}: this machine cannot run '{wanted}'. It runs {', '.join([*paths, TORCH])}."
        )
    loaded.kvkeep_choose((wanted or paths[0]).encode())
    return loaded


def _absent() -> str:
    return "cannot be used" if FILE.is_file() else "was not built"


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    """Load the library and check that it has the structures of this module; None where it cannot be used, which a
    warning says."""
    try:
        _check_digest()
        loaded = ctypes.CDLL(str(FILE))
        for name, signature in _SIGNATURES.items():
            arguments, _, result = signature.partition(":")
            function = getattr(loaded, name)
            function.argtypes = [_TYPES[kind] for kind in arguments]
            function.restype = _TYPES[result] if result else None
        _check_version(loaded)
    except (OSError, AttributeError, KvkeepError) as error:
        if FILE.is_file():
            log.warning("The native library cannot be used (%s). kvkeep computes with torch, %s.", error, SLOWDOWN)
        else:
            log.warning("The native library was not built. kvkeep computes with torch, %s.", SLOWDOWN)
        return None
    return loaded


def _check_digest() -> None:
    """Raise KvkeepError where the library's file is not what was built: the system ends a program that reads beyond the
    end of a file cut short. Where no digest lies beside it, there is nothing to compare."""
    digest = FILE.with_suffix(".sha256")
    if digest.is_file() and digest.read_bytes().strip() != hashlib.sha256(FILE.read_bytes()).hexdigest().encode():
        raise KvkeepError("its file is damaged or another build's; install kvkeep again")


def _check_version(loaded: ctypes.CDLL) -> None:
    """Raise KvkeepError where the library is of another version than this module: it computes other bits, or has other
    structures."""
    if loaded.kvkeep_numerics() != NUMERICS_VERSION:
        raise KvkeepError("it was built for another kvkeep; install kvkeep again")
    count = ctypes.c_int64()
    first = loaded.kvkeep_fields(ctypes.byref(count))
    found = {
        (field.structure.decode(), field.name.decode()): (field.offset, field.size)
        for field in (KvField * count.value).from_address(first)
    }
    expected = {key: place for structure in STRUCTURES for key, place in _fields_of(structure).items()}
    for key in expected | found:
        if found.get(key) != expected.get(key):
            name, (ours, theirs) = ".".join(filter(None, key)), (_place(own.get(key)) for own in (expected, found))
            raise KvkeepError(f"it was built for another kvkeep: {name} has {theirs}, not {ours}; install kvkeep again")


def _fields_of(structure: type[ctypes.Structure]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the offset and the size of each field, and with an empty name those of the structure."""
    name, fields = structure.__name__, (field[0] for field in structure._fields_)
    places = {(name, field): getattr(structure, field) for field in fields}
    return {(name, ""): (0, ctypes.sizeof(structure))} | {key: (at.offset, at.size) for key, at in places.items()}


def _place(place: tuple[int, int] | None) -> str:
    return "no place" if place is None else f"{place[1]} bytes at {place[0]}"


def _share_threads(loaded: ctypes.CDLL) -> None:
    """Let the library work in torch's OpenMP threads, or in as many of its own: two OpenMP runtimes would fight for
    the same cores."""
    import torch

    loaded.kvkeep_set_threads(torch.get_num_threads())
    runtime = _openmp(Path(torch.__file__).parent)
    if runtime is not None:
        parallel, count = (_function_address(runtime, name) for name in ("GOMP_parallel", "omp_get_max_threads"))
        if count is not None:
            loaded.kvkeep_use_openmp(parallel, count)


def _openmp(torch_folder: Path) -> ctypes.CDLL | None:
    """Return the OpenMP runtime that torch has loaded; None where it cannot be told."""
    folders = (torch_folder / "lib", torch_folder.parent / "torch.libs")
    found = [file for folder in folders for name in OPENMP for file in sorted(folder.glob(f"{name}*"))]
    for file in [*found, *_mapped_openmp()]:
        try:
            return ctypes.CDLL(str(file), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:  # there, but torch did not load it
            continue
    return None


def _mapped_openmp() -> list[Path]:
    """Return the OpenMP runtimes that this process has mapped: a torch of the distribution uses the system's."""
    if sys.platform != "linux":
        return []
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = {Path(parts[5]) for line in lines if len(parts := line.split(maxsplit=5)) == 6}
    return sorted(file for file in files if file.name.startswith(OPENMP))


def _function_address(runtime: ctypes.CDLL, name: str) -> int | None:
    try:
        return ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value
    except AttributeError:
        return None
