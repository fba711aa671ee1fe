"""A new entry of each lane and the column that it takes, as the kernels read it."""

from __future__ import annotations

import ctypes

from torch import Tensor


class Entering(ctypes.Structure):
    """``Entering`` of eviction.h, which says what is what. Its tensors must outlive it."""

    _fields_ = [
        ("ranks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("whole", "oldest", "columns", "at", "slot")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("key_lane", "key_bytes", "value_lane", "value_bytes")),
        *((name, ctypes.c_void_p) for name in ("slots", "scores", "extra", "newest", "new_scores")),
        *((name, ctypes.c_void_p) for name in ("left_keys", "left_values")),
        *((name, ctypes.c_int64) for name in ("left_key_lane", "left_value_lane")),
        *((name, ctypes.c_void_p) for name in ("left_slots", "left_scores", "left_extra", "left_newest")),
    ]

    @classmethod
    def into(cls, keys: Tensor, values: Tensor) -> Entering:
        """Return where an entry goes, in some row of ``keys`` and ``values`` (.., lanes, rows, dim); which, remains
        to be told."""
        return cls(
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            key_lane=keys.stride(-3) * keys.itemsize,
            key_bytes=keys.shape[-1] * keys.itemsize,
            value_lane=values.stride(-3) * values.itemsize,
            value_bytes=values.shape[-1] * values.itemsize,
        )
