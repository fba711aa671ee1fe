"""Times vLLM on a CPU. Questions and answers (worker.py):

* ``{"do": "load", "source", "threads", "tokens", "rows", "cache_bytes", "compiled"}`` -> ``{"versions"}``: the first
  question, asked once; ``source``: a folder, loaded as bfloat16; ``tokens``: maximum tokens of a row; ``rows``: maximum
  rows; ``cache_bytes``: bytes of their entries;
* ``{"do": "time", "ids", "steps"}`` -> ``{"prefill_s", "steps_s"}``: reads all prompts in one batch until each row has
  its first token, then generates greedy tokens, one per row and step.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any


class VllmAnswerer:
    """One engine with one model."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.tokens = 0
        self.names = itertools.count()

    def load(
        self, source: str, threads: int, tokens: int, rows: int, cache_bytes: int, compiled: bool
    ) -> dict[str, Any]:
        """Start the engine in this process."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(1 + (cache_bytes >> 30))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["OMP_NUM_THREADS"] = str(threads)
        import vllm

        made = vllm.LLM(
            source,
            dtype="bfloat16",
            max_model_len=tokens,
            max_num_seqs=rows,
            enforce_eager=not compiled,
            enable_prefix_caching=False,  # every round reads the same prompt
        )
        self.engine, self.tokens = made.llm_engine, tokens
        return {"versions": {"vllm": vllm.__version__}}

    def time(self, ids: list[list[int]], steps: int) -> dict[str, Any]:
        """Time the prompts and ``steps`` steps after them. The step before them is a warm-up and is not timed."""
        from vllm import SamplingParams

        left = self.tokens - max(map(len, ids))
        greedy = SamplingParams(max_tokens=left, temperature=0, ignore_eos=True, detokenize=False)
        names = [str(next(self.names)) for _ in ids]
        start = time.perf_counter()
        for name, row in zip(names, ids, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": row}, greedy)
        begun: set[str] = set()
        while len(begun) < len(names):
            begun |= {output.request_id for output in self.engine.step() if output.outputs[0].token_ids}
        prefill_s = time.perf_counter() - start
        self.engine.step()
        steps_s = []
        for _ in range(steps):
            start = time.perf_counter()
            self.engine.step()
            steps_s.append(time.perf_counter() - start)
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return {"prefill_s": prefill_s, "steps_s": steps_s}


ANSWERER = VllmAnswerer
"""The class that ``worker.py`` instantiates."""
