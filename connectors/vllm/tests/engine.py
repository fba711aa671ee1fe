"""Runs vLLM with and without the connector, in vLLM's own environment: ``python engine.py SCENARIO MODEL FOLDER``.

It prints one JSON object: what was answered, and what happened. The engine is in this process, so that a disk can be
made to fail and preemptions can be counted.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
BLOCK = 32
PROMPT, SHORT, ANSWER = 300, 90, 130


def ids(seed: int, count: int) -> list[int]:
    """Return some tokens."""
    return [(seed * 31 + number * number * 7 + number * (seed + 3)) % 120 + 2 for number in range(count)]


class Engine:
    """vLLM with the model, whose cache has few blocks, and with blocks in ``folder`` unless it is None."""

    def __init__(self, model: str, folder: Path | None, **more: Any) -> None:
        import vllm
        from vllm.v1.core.sched.scheduler import Scheduler

        own: dict[str, Any] = {}
        if folder is not None:
            own["kv_transfer_config"] = {
                "kv_connector": "KeepConnector",
                "kv_connector_module_path": "kvkeep_vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"folder": str(folder), "quota": "100MB"} | more,
            }
        self.preempted = self.resumed = 0
        preempt = Scheduler._preempt_request

        def counted(scheduler: Any, request: Any, *rest: Any, **named: Any) -> None:
            self.preempted += 1
            preempt(scheduler, request, *rest, **named)

        Scheduler._preempt_request = counted
        self.llm = vllm.LLM(
            model, dtype="float32", max_model_len=512, block_size=BLOCK, num_gpu_blocks_override=21, max_num_seqs=4,
            max_num_batched_tokens=512, enforce_eager=True, skip_tokenizer_init=True, max_logprobs=8,
            kv_cache_memory_bytes=1 << 26, **own,
        )  # fmt: skip
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.keep = self.core.scheduler.connector
        if self.keep is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self.work = get_kv_transfer_group().work
            admitted = self.keep.update_state_after_alloc

            def noted(request: Any, blocks: Any, tokens: int) -> None:
                self.resumed += request.num_preemptions > 0 and tokens > 0
                admitted(request, blocks, tokens)

            self.keep.update_state_after_alloc = noted

    def answers(self, prompts: list[list[int]], tokens: int, salt: str | None = None) -> list[dict[str, Any]]:
        """Answer all prompts together."""
        from vllm import SamplingParams

        greedy = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=4, detokenize=False)
        asked = [{"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {}) for prompt in prompts]
        made = []
        for output in self.llm.generate(asked, greedy, use_tqdm=False):
            (one,) = output.outputs
            logprobs = [sorted((token, found.logprob) for token, found in at.items()) for at in one.logprobs]
            made.append({"tokens": [*one.token_ids], "logprobs": logprobs, "cached": output.num_cached_tokens})
        return made

    def written(self) -> None:
        """Wait until all blocks are in their files."""
        assert self.work.writer.flush(60)

    def leave(self, prompt: list[int]) -> None:
        """Ask, and go away while blocks are loaded."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        engine.add_request("left", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=5, detokenize=False))
        engine.step()
        engine.abort_request(["left"])
        while engine.has_unfinished_requests() or self.core.scheduler.has_requests():
            engine.step()


def without(model: str, folder: Path) -> dict[str, Any]:
    """What vLLM answers, and answers again with its own prefix cache."""
    engine = Engine(model, None)
    long = ids(1, PROMPT)
    first, again = engine.answers([long], 8), engine.answers([long], 8)
    many = engine.answers([ids(seed, SHORT) for seed in range(2, 6)], ANSWER)
    return {"first": first, "again": again, "many": many, "preempted": engine.preempted}


def kept(model: str, folder: Path) -> dict[str, Any]:
    """The same with the connector."""
    engine = Engine(model, folder)
    first = engine.answers([ids(1, PROMPT)], 8)
    many = engine.answers([ids(seed, SHORT) for seed in range(2, 6)], ANSWER)
    engine.llm.llm_engine.engine_core.shutdown()  # what is queued is written
    counts = vars(engine.work.counts)
    return {"first": first, "many": many, "preempted": engine.preempted, "resumed": engine.resumed, "counts": counts}


def restarted(model: str, folder: Path) -> dict[str, Any]:
    """In another process: hits, a damaged block, another salt, a request that leaves, and a disk that is full."""
    from kvkeep.blocks import folder as module

    engine, long = Engine(model, folder), ids(1, PROMPT)
    engine.leave(long)
    first, salted = engine.answers([long], 8), engine.answers([long], 8, "of somebody")
    engine.written()
    found, again = engine.work.counts.loaded, engine.answers([long], 8)
    name = engine.keep.planner.space
    files = sorted((engine.work.folder.folder / name / "shared").rglob("*.block"))
    for path in files:  # of each block one byte, in places that differ
        data = bytearray(path.read_bytes())
        data[-1 - hash(path.name) % 40_000] ^= 16
        path.write_bytes(data)
    assert engine.llm.reset_prefix_cache()  # vLLM's own
    flipped = engine.answers([long], 8)
    engine.written()
    whole = module.write_whole

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    module.write_whole = full
    other = engine.answers([ids(9, PROMPT)], 8)
    engine.written()
    counts = dict(vars(engine.work.counts))
    module.write_whole = whole
    engine.work.writer._paused = 0.0
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    left = [*(engine.work.folder.folder / name).rglob("*.block")]
    reset = engine.answers([long], 8)
    engine.work.close()
    return {
        "first": first, "salted": salted, "again": again, "flipped": flipped, "other": other, "reset": reset,
        "loaded": found, "counts": counts, "left": len(left),
    }  # fmt: skip


def coded(model: str, folder: Path) -> dict[str, Any]:
    """Blocks as codes, in their own namespace."""
    engine, long = Engine(model, folder, codec="int8"), ids(1, PROMPT)
    first = engine.answers([long], 1)
    engine.written()
    assert engine.llm.reset_prefix_cache()
    again = engine.answers([long], 1)
    block = engine.work.tensors.nbytes
    sizes = [path.stat().st_size for path in (engine.work.folder.folder / engine.keep.planner.space).rglob("*.block")]
    return {"first": first, "again": again, "block": block, "sizes": sizes}


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print is no answer
    made = globals()[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
    answers.write(json.dumps(made))
    answers.flush()
    os._exit(0)
