"""Runs a model with a press of NVIDIA's kvpress, in a separate environment.

kvpress requires an older transformers than kvkeep. Questions and answers (worker.py):

* ``{"do": "load", "folder", "dtype", "device", "threads"}`` -> ``{"versions"}``: the first question, asked once;
* ``{"do": "read", "ids", "press", "options", "keep", "unseen"}`` -> a step: reads a prompt in one pass and prunes it to
  ``keep`` entries by ``press`` ("": no pruning); the last ``unseen`` tokens are read after the pruning, one by one;
* ``{"do": "next", "token"}`` -> a step: reads one more token.

A step is ``{"seconds", "logits", "held", "largest", "peak"}``. logits: after the last token (float32, base64). held:
bytes of all entries. largest: bytes of the largest layer. peak: peak bytes while the prompt was pruned layer by layer.
The answer to an impossible question is ``{"error"}``, the reason as text.
"""

from __future__ import annotations

import ast
import base64
import dataclasses
import importlib.metadata
import inspect
import time
from contextlib import ExitStack
from typing import Any

import torch

EAGER = {"ObservedAttentionPress"}
"""Presses that need attention weights, which only eager attention returns."""


class KvpressError(Exception):
    """A question that cannot be answered."""


class KvpressAnswerer:
    """One model and its current prompt."""

    def __init__(self) -> None:
        self.model: Any = None
        self.cache: Any = None
        self.length = 0  # tokens read, including pruned ones: the next token's position
        self.peak = 0

    def load(self, folder: str, dtype: str, device: str, threads: int) -> dict[str, Any]:
        import kvpress
        import transformers

        torch.set_num_threads(threads)
        made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.model = made.to(device).eval()
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        return {"versions": {"kvpress": _version(kvpress), **{f"kvpress' {name}": v for name, v in versions.items()}}}

    def read(self, ids: list[int], press: str, options: str, keep: int, unseen: int) -> dict[str, Any]:
        from transformers import DynamicCache

        if unseen >= len(ids):
            raise KvpressError(f"a prompt of {len(ids)} tokens has no {unseen} to be read after the others")
        seen = len(ids) - unseen
        made = _press(press, options, keep, seen) if press else None
        attention = "eager" if type(made).__name__ in EAGER else "sdpa"
        if self.model.config._attn_implementation != attention:
            self.model.set_attn_implementation(attention)
        self.cache, self.length, self.peak = DynamicCache(), 0, 0
        start = time.perf_counter()
        with ExitStack() as stack:
            decoder = getattr(self.model.model, "language_model", self.model.model)
            for layer in decoder.layers:  # registered before the press' hooks, so that it sees the unpruned entries
                stack.callback(layer.self_attn.register_forward_hook(self._note).remove)
            if made is not None:
                stack.enter_context(made(self.model))
            logits = self._forward(ids[:seen])
        for token in ids[seen:]:  # one by one, because layers of different lengths need different masks
            logits = self._forward([token])
        return self._step(logits, start)

    def next(self, token: int) -> dict[str, Any]:
        """Read one more token."""
        if self.cache is None:
            raise KvpressError("no prompt was read yet")
        start = time.perf_counter()
        return self._step(self._forward([token]), start)

    def _forward(self, ids: list[int]) -> torch.Tensor:
        device = self.model.device
        positions = torch.arange(self.length, self.length + len(ids), device=device)[None]
        given = torch.tensor([ids], device=device)
        with torch.no_grad():
            output = self.model(
                given, past_key_values=self.cache, position_ids=positions, use_cache=True, logits_to_keep=1
            )
        self.length += len(ids)
        return output.logits[0, -1].float().cpu()

    def _step(self, logits: torch.Tensor, start: float) -> dict[str, Any]:
        seconds, sizes = time.perf_counter() - start, self._layer_bytes()
        self.peak = max(self.peak, sum(sizes))
        coded = base64.b64encode(logits.contiguous().numpy().tobytes()).decode()
        return {"seconds": seconds, "logits": coded, "held": sum(sizes), "largest": max(sizes), "peak": self.peak}

    def _note(self, *_: Any) -> None:
        self.peak = max(self.peak, sum(self._layer_bytes()))

    def _layer_bytes(self) -> list[int]:
        layers = [layer for layer in self.cache.layers if layer.keys is not None]
        return [layer.keys.nbytes + layer.values.nbytes for layer in layers]


def _press(name: str, options: str, keep: int, tokens: int) -> Any:
    """Return the press that keeps ``keep`` of ``tokens`` entries. ``name``: a class of kvpress or its short name."""
    import kvpress

    known = {
        _short(key): value
        for key, value in vars(kvpress).items()
        if key.endswith("Press") and inspect.isclass(value) and dataclasses.is_dataclass(value)
    }
    if _short(name) not in known:
        raise KvpressError(f"kvpress has no press '{name}', but {', '.join(sorted(known))}")
    made: Any = known[_short(name)]
    defaults = {field.name: field.default for field in dataclasses.fields(made) if field.init}
    if "compression_ratio" not in defaults:
        raise KvpressError(f"{made.__name__} takes no share of the entries to prune, so it cannot keep a budget")
    given: dict[str, Any] = {}
    for part in (part for part in options.split(",") if part):
        key, _, text = part.partition("=")
        if key not in defaults or key == "compression_ratio":
            raise KvpressError(f"{made.__name__} has no parameter '{key}'")
        given[key] = _value(text, defaults[key])
    # Presses keep int(tokens * (1 - ratio)) entries. Half an entry is added so that this rounds down to ``keep``.
    return made(compression_ratio=max(0.0, 1 - (keep + 0.5) / tokens), **given)


def _short(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").removesuffix("press")


def _value(text: str, default: Any) -> Any:
    try:
        value = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError):
        value = text
    return float(value) if isinstance(default, float) and isinstance(value, int) else value


def _version(module: Any) -> str:
    try:
        return importlib.metadata.version(module.__name__)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(module, "__version__", "unknown"))


ANSWERER = KvpressAnswerer
"""The class that ``worker.py`` instantiates."""
