"""Models whose weights lie in several places: split by heads over processes (tensor parallel), or by layers over
devices (``device_map``)."""

from __future__ import annotations

from typing import Any


def processes(model: Any) -> int:
    """Return the number of processes that share each layer's heads; 1: this process has all of them."""
    return getattr(model, "tp_size", None) or 1


def devices(model: Any) -> list[str]:
    """Return the devices that run layers by ``device_map``, in order; empty without a map. Layers offloaded to the
    processor or to disk run on the first accelerator, or on the processor if there is none."""
    places = (getattr(model, "hf_device_map", None) or {}).values()
    names = [f"cuda:{place}" if isinstance(place, int) else str(place) for place in places]
    found = dict.fromkeys(name for name in names if name not in ("cpu", "disk"))
    return list(found) or ["cpu"] * bool(places)
