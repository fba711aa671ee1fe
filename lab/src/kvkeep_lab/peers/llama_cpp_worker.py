"""Times llama.cpp through llama-cpp-python. Questions and answers (worker.py):

* ``{"do": "load", "source", "threads", "tokens", "rows"}`` -> ``{"versions"}``: the first question, asked once;
  ``source``: a GGUF file; ``tokens``: maximum tokens of a row;
* ``{"do": "time", "ids", "steps", "flash", "cache"}`` -> ``{"prefill_s", "steps_s"}``: reads one prompt, then generates
  greedy tokens one at a time; ``cache``: the type of keys and values ("f16", "q8_0", "q4_0").
"""

from __future__ import annotations

import time
from typing import Any


class LlamaCppError(Exception):
    """A question that cannot be answered."""


class LlamaCppAnswerer:
    """One file, with a context for each kind of attention and cache."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.made: dict[tuple[bool, str], Any] = {}

    def load(self, source: str, threads: int, tokens: int, rows: int) -> dict[str, Any]:
        """Store the options. Each context is created when it is first timed."""
        import llama_cpp

        self.options = {
            "model_path": source,
            "n_ctx": tokens,
            "n_threads": threads,
            "n_threads_batch": threads,
            "verbose": False,
        }
        self._context(False, "f16")  # raises the error of an unreadable file here
        return {"versions": {"llama-cpp-python": llama_cpp.__version__}}

    def time(self, ids: list[list[int]], steps: int, flash: bool, cache: str) -> dict[str, Any]:
        """Time one prompt and ``steps`` tokens after it. The token before them is a warm-up and is not timed."""
        import llama_cpp
        import numpy

        if len(ids) > 1:
            raise LlamaCppError("only one row is timed here")
        llama = self._context(flash, cache)
        size = llama.n_vocab()

        def read(tokens: list[int]) -> tuple[float, int]:
            start = time.perf_counter()
            llama.eval(tokens)
            logits = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
            best = int(numpy.ctypeslib.as_array(logits, (size,)).argmax())
            return time.perf_counter() - start, best

        llama.reset()
        prefill_s, token = read(ids[0])
        _, token = read([token])
        steps_s = []
        for _ in range(steps):
            seconds, token = read([token])
            steps_s.append(seconds)
        return {"prefill_s": prefill_s, "steps_s": steps_s}

    def _context(self, flash: bool, cache: str) -> Any:
        import llama_cpp

        key = (flash, cache)
        if key not in self.made:
            kind = getattr(llama_cpp, f"GGML_TYPE_{cache.upper()}")
            self.made[key] = llama_cpp.Llama(**self.options, flash_attn=flash, type_k=kind, type_v=kind)
        return self.made[key]


ANSWERER = LlamaCppAnswerer
"""The class that ``worker.py`` instantiates."""
