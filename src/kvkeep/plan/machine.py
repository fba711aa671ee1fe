"""The machine of the cost model: measured rates, estimates, or rates computed from a data sheet."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from kvkeep.errors import KvkeepError, UsageError, reason_of
from kvkeep.units import size

SHEET = "from the data sheet, not measured"
MEASURED = "measured"
ESTIMATED = "estimated"
Curve = tuple[tuple[float, float], ...]
"""Points (x, y) with rising x. Values between points are interpolated on logarithms; beyond them the last y holds."""


@dataclass(frozen=True)
class Machine:
    """Rates of one machine, in seconds, bytes, elements and floating-point operations."""

    name: str
    """Hardware, threads and dtype, for people."""
    source: str
    """Where the figures come from."""
    device: str
    """The kind of device: "cpu", "cuda" or "mps"."""
    dtype_bytes: int
    """Bytes of an element of the measured matrices."""
    matrix: Mapping[int, Curve]
    """Operations a second by rows multiplied at a time, for each width of a matrix. The weights are not in the
    processor's cache."""
    attention: Curve
    """Operations a second by stacked query rows. The entries are not in the processor's cache."""
    causal: Curve
    """Operations a second of a prompt attended in one piece, by its tokens."""
    elementwise: float
    """Bytes a second of a prompt's elementwise operations: norms, rotation, activation."""
    memory: float
    """Bytes read a second."""
    copy: float
    """Bytes copied a second."""
    link: float | None
    """Bytes a second from host memory to device memory; None if both are the same memory."""
    disk: float
    """Bytes read a second from mapped files in the page cache."""
    disk_cold: float
    """Bytes read a second from mapped files outside the page cache."""
    disk_write: float
    """Bytes written a second to mapped files."""
    layer_s: float
    """Fixed seconds of one layer of a pass, in addition to its matrices and attention."""
    bounded_s: float
    """Fixed seconds of one layer of a pass in a cache with a budget."""
    page_s: float
    """Fixed seconds of one page of a checkpoint, in addition to reading and attention."""
    memory_bytes: int
    """Bytes of the device's memory."""
    host_bytes: int
    """Bytes of the host's memory."""

    def multiply(self, rows: float, width: int, elements: float) -> float:
        """Return the seconds to multiply ``rows`` rows by matrices of ``elements`` in total, about ``width`` wide."""
        rates = {known: at(curve, rows) for known, curve in self.matrix.items()}
        rate = at(tuple(sorted(rates.items())), width)
        return 2 * rows * elements / rate

    @property
    def estimated(self) -> bool:
        """Whether the rates come from a table; ``source`` then names the command that measures them."""
        return self.source.startswith(ESTIMATED)

    @property
    def shared(self) -> bool:
        """Whether the device's memory is the host's."""
        return self.link is None

    def cache_bytes(self, weight_bytes: int) -> int:
        """Return the bytes for caches: nine tenths of the device's memory, minus the weights. Raises UsageError if none
        remain."""
        left = int(0.9 * self.memory_bytes) - weight_bytes
        if left <= 0:
            raise UsageError(
                f"The weights alone take {size(weight_bytes)}, and '{self.name}' has {size(self.memory_bytes)} of "
                "memory. If several machines share the weights, give the memory for caches with --memory."
            )
        return left

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rates as JSON."""
        Path(path).write_text(self.json(), encoding="utf-8")

    def json(self) -> str:
        """Return the content of a file of :meth:`save`."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Machine:
        """Read a file of :meth:`save`, or a data sheet (:meth:`from_sheet`). Raises UsageError for other files."""
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise UsageError(f"The machine '{path}' cannot be read: {reason_of(error)}.") from None
        except ValueError:
            raise UsageError(f"The machine '{path}' is not a JSON file; 'kvkeep plan --json' prints one.") from None
        if not isinstance(given, dict):
            raise UsageError(f"The machine '{path}' is not an object of rates; see docs/plan.md.")
        given = given.get("machine", given)
        try:
            return cls._measured(given) if "matrix" in given else cls.from_sheet(**given)
        except KvkeepError:
            raise
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise UsageError(f"The machine '{path}' cannot be understood: {error}; see docs/plan.md.") from None

    @classmethod
    def _measured(cls, given: dict[str, Any]) -> Machine:
        read: dict[Any, Callable[[Any], Any]] = {"str": str, "Curve": _curve, "Mapping[int, Curve]": _curves}
        made: dict[str, Any] = {
            one.name: read.get(one.type, partial(_number, one.name))(given[one.name]) for one in fields(cls)
        }
        return cls(**made)

    @classmethod
    def from_sheet(
        cls,
        *,
        name: str,
        device: str,
        flops: float,
        memory: float,
        link: float | None,
        disk: float,
        memory_bytes: float,
        host_bytes: float,
        layer_step: float,
        dtype_bytes: int = 2,
        reached: float = 0.6,
        source: str = SHEET,
    ) -> Machine:
        """Return a machine with the figures of a vendor's data sheet. Memory bounds a product of few rows, which reads
        its matrix once; arithmetic bounds a product of many rows. Raises UsageError unless each figure is finite and
        above 0.

        flops: operations a second at ``dtype_bytes``. memory, link, disk: bytes a second. layer_step: seconds to
        launch one layer from the host; a recalled page has a third of its operations. reached: share of all rates that
        programs reach.
        """
        numbers = (flops, memory, disk, memory_bytes, host_bytes, layer_step, dtype_bytes, reached)
        if not _positive(*numbers, *(() if link is None else (link,))):
            raise UsageError(f"The rates and sizes of the machine '{name}' have to be finite and above 0.")
        flops, memory, disk = reached * flops, reached * memory, reached * disk
        rows = [2**power for power in range(13)]
        product = tuple((float(row), min(flops, 2 * row * memory / dtype_bytes)) for row in rows)
        # kvkeep's attention uses plain tensor operations on an accelerator: scores are written and read again.
        attend = tuple((float(row), min(flops / 4, 2 * row * memory / dtype_bytes)) for row in rows)
        return cls(
            name=name,
            source=source,
            device=device,
            dtype_bytes=dtype_bytes,
            matrix={4096: product},
            attention=attend,
            causal=((1.0, flops / 2),),
            elementwise=memory,
            memory=memory,
            copy=memory / 2,
            link=None if link is None else reached * link,
            disk=disk,
            disk_cold=disk,
            disk_write=disk,
            layer_s=layer_step,
            bounded_s=layer_step,
            page_s=layer_step / 3,
            memory_bytes=int(memory_bytes),
            host_bytes=int(host_bytes),
        )


def at(curve: Curve, x: float) -> float:
    """Return the value of a curve at ``x``."""
    if x <= curve[0][0]:
        return curve[0][1]
    for (low, first), (high, last) in pairwise(curve):
        if x <= high:
            share = math.log(x / low) / math.log(high / low)
            return math.exp(math.log(first) + share * math.log(last / first))
    return curve[-1][1]


def _number(name: str, value: Any) -> Any:
    """Return a checked rate. It must be above 0; fixed seconds may be 0, and a link may be None."""
    zero = name.endswith("_s") and value == 0 and not isinstance(value, bool)
    if not (zero or _positive(value) or (name == "link" and value is None)):
        raise ValueError(f"'{name}' is a finite number above 0")
    return value


def _positive(*numbers: Any) -> bool:
    """Return whether all numbers are finite and above 0."""
    return all(
        isinstance(number, int | float) and not isinstance(number, bool) and 0 < number <= sys.float_info.max
        for number in numbers
    )


def _curve(points: Any) -> Curve:
    curve = [(x, y) for x, y in points]
    if not curve or not _positive(*chain(*curve)) or curve != sorted(set(curve)):
        raise ValueError("a curve is a list of rising points above 0")
    return tuple((float(x), float(y)) for x, y in curve)


def _curves(given: Mapping[str, Any]) -> dict[int, Curve]:
    curves = {int(width): _curve(points) for width, points in given.items()}
    if not curves or not _positive(*curves):
        raise ValueError("'matrix' has a curve for each width above 0")
    return curves
