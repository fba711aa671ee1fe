"""Compare which positions kvkeep and NVIDIA's kvpress 0.5.5 keep of the same prompt, and what that costs.

Both read the same token ids with the same weights (SmolLM2-135M-Instruct, float32), each in processes of its own
environment: kvpress asks for a transformers that kvkeep is too new for.

    python tools/compare_kvpress.py --file TEXT --tokens 1024 --ratio 0.5 --venv .venv-kvpress --json FILE
    python tools/compare_kvpress.py --file TEXT --kvpress-python PATH

Where the two differ, the difference is taken out by parameters, or by replacing one function on our side for the
occasion, and the comparison is made again: an explanation stands only if what is kept then agrees.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch

WINDOW, KERNEL, CHUNK, NEW = 32, 7, 256, 64
REQUIREMENTS = ["transformers<5.3", "kvpress==0.5.5"]

# Ours by name and parameters; theirs by class and parameters.
METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "snapkv": (
        f"snapkv:window={WINDOW},kernel={KERNEL}",
        "SnapKVPress",
        {"window_size": WINDOW, "kernel_size": KERNEL},
    ),
    "pyramidkv": (
        f"pyramidkv:window={WINDOW},kernel={KERNEL}",
        "PyramidKVPress",
        {"window_size": WINDOW, "kernel_size": KERNEL},
    ),
    "tova": ("tova", "TOVAPress", {}),
    "h2o": ("h2o", "ObservedAttentionPress", {}),
    "streaming-llm": ("streaming-llm:sinks=4", "StreamingLLMPress", {"n_sink": 4}),
    "knorm": ("knorm", "KnormPress", {}),
    "random": ("random", "RandomPress", {"seed": 0}),
}
FULL = "nothing pruned"

Job = dict[str, Any]


# -- what runs in both environments -------------------------------------------------------------------


def rss(field: str) -> int:
    """Return bytes of resident memory of this process: VmRSS now, VmHWM the most since :func:`forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def forget_peak() -> None:
    """Let VmHWM begin anew: reading the weights needs more memory than a prompt may."""
    Path("/proc/self/clear_refs").write_text("5")


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """Return what ``run`` returns, and its seconds."""
    start = time.perf_counter()
    made = run()
    return made, time.perf_counter() - start


def measured(run: Callable[[], Any]) -> dict[str, Any]:
    """Return the seconds and the rise of resident memory while ``run`` runs, with what it tells."""
    forget_peak()
    before = rss("VmRSS")
    told, seconds = timed(run)
    return {"seconds": seconds, "rise": rss("VmHWM") - before, "peak_rss": rss("VmHWM"), **told}


def load(folder: str, eager: bool = False) -> Any:
    """Return the model in float32; ``eager`` attention hands out its weights."""
    from transformers import AutoModelForCausalLM

    attention = "eager" if eager else "sdpa"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()


def serve(answer: Callable[[Job], dict[str, Any]]) -> None:
    """Answer jobs, one line of JSON each, until there are no more."""
    own, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        with torch.no_grad():
            own.write(json.dumps(answer(json.loads(line))) + "\n")
        own.flush()


# -- theirs -------------------------------------------------------------------------------------------


def theirs() -> None:
    """Answer with kvpress. Nothing of kvkeep is imported here."""
    import kvpress
    from transformers import DynamicCache

    models: dict[bool, Any] = {}

    def answer(job: Job) -> dict[str, Any]:
        eager = job.get("press") == "ObservedAttentionPress"
        if eager not in models:
            models[eager] = load(job["folder"], eager)
        model = models[eager]
        if job["do"] == "load":
            model(torch.tensor([job["ids"][:16]]))
            return {}
        ids, cache = torch.tensor([job["ids"]]), DynamicCache()
        press = None
        if job["press"]:
            press = getattr(kvpress, job["press"])(compression_ratio=job["ratio"], **job["options"])
        kept: list[Any] = []
        margins: list[Any] = []
        budgets: list[int] = []
        held = [0]

        def bytes_held() -> None:
            layers = [layer for layer in cache.layers if layer.is_initialized]
            held[0] = max(held[0], sum(layer.keys.nbytes + layer.values.nbytes for layer in layers))

        if press is not None:
            compress, score = press.compress, press.score
            shown: list[Any] = []

            def watched(*given: Any) -> Any:
                bytes_held()
                if job["do"] == "positions":  # given slots as values, a press returns those that it keeps
                    slots = torch.arange(given[2].shape[2], dtype=torch.float32)[:, None].expand_as(given[3])
                    stay = compress(*given[:3], slots, *given[4:])[1][0, :, :, 0].long().sort(-1).values
                    kept.append(stay.tolist())
                    scores = shown[-1][0]
                    last = scores.gather(-1, stay).amin(-1, keepdim=True)
                    margins.append(((scores - last) / last.abs().clamp(min=1e-30)).tolist())
                    budgets.append(stay.shape[-1])
                return compress(*given)

            def recorded(*given: Any) -> Any:
                shown[:] = [score(*given)]
                return shown[-1]

            press.compress = watched
            press.score = recorded

        def prefill() -> dict[str, Any]:
            with press(model) if press is not None else nullcontext():
                model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            bytes_held()
            return {"cache_bytes": held[0]}

        told = measured(prefill)
        return told | {"kept": kept, "margins": margins, "budgets": budgets}

    serve(answer)


# -- ours ---------------------------------------------------------------------------------------------


def ours() -> None:
    """Answer with kvkeep."""
    from kvkeep.cache import memory_of

    models: list[Any] = []

    def answer(job: Job) -> dict[str, Any]:
        if not models:
            models.append(load(job["folder"]))
        if job["do"] == "load":
            models[0](torch.tensor([job["ids"][:16]]))
            return {}
        ids, cache = torch.tensor([job["ids"]]), our_cache(models[0], job["method"], job["budget"], job["chunk"])

        def prefill() -> dict[str, Any]:
            models[0](ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            return {}

        return measured(prefill) | {"cache_bytes": memory_of(cache).peak_cache_bytes}

    serve(answer)


def our_cache(model: Any, method: str, budget: int | None, chunk: int | None) -> Any:
    """Return a cache that takes ``chunk`` tokens at a time. kvkeep refuses chunks beyond the budget, which would break
    its promise of a bounded peak; to compare like with like it is made to."""
    from kvkeep.cache import KeepCache, new_cache

    cache = new_cache(model, method, **({} if budget is None else {"budget": budget}))
    if isinstance(cache, KeepCache) and chunk is not None:
        cache.chunk = chunk
    return cache


@torch.no_grad()
def our_kept(model: Any, ids: list[int], method: str, budget: int, chunk: int) -> list[list[list[int]]]:
    """Return the slots kept of the prompt, by layer and KV head."""
    from kvkeep.stores.whereabouts import Whereabouts

    cache = our_cache(model, method, budget, chunk)
    model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    codes = [layer[0] == Whereabouts.RESIDENT for layer in cache.whereabouts()]
    return [[head.nonzero().flatten().tolist() for head in layer] for layer in codes]


# -- taking differences out -----------------------------------------------------------------------------


@contextmanager
def replaced(owner: Any, name: str, by: Any) -> Iterator[None]:
    """Within the block, let ``owner.name`` be something else."""
    before = owner.__dict__[name]
    setattr(owner, name, by)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def average_pooling() -> Iterator[None]:
    """SnapKV's votes averaged over neighbours in place of the largest (kvpress: F.avg_pool1d)."""
    import torch.nn.functional as F

    from kvkeep.policies.selectors.snapkv import SnapKV

    def pool(votes: Any, kernel: int, stride: int, padding: int) -> Any:
        return F.avg_pool1d(votes, kernel, stride, padding)

    module = sys.modules[SnapKV.__module__]
    functional = type("functional", (), {"max_pool1d": staticmethod(pool)})
    with replaced(module, "F", functional):
        yield


@contextmanager
def their_budgets(budgets: list[int]) -> Iterator[None]:
    """PyramidKV with the other's entries by layer."""
    from kvkeep.policies.selectors.pyramidkv import PyramidKV

    with replaced(PyramidKV, "budgets", lambda self, model, geometry, entries: [(count,) for count in budgets]):
        yield


@contextmanager
def whole_window() -> Iterator[None]:
    """SnapKV's window stays even where it is more than half of the layer's entries."""
    from kvkeep.policies.selectors.base import STAYS
    from kvkeep.policies.selectors.snapkv import SnapKV

    def rank(self: Any, entries: Any) -> Any:
        return entries.marks.masked_fill(entries.slots >= entries.length - self.window, STAYS)

    with replaced(SnapKV, "rank", rank):
        yield


@contextmanager
def last_token_stays() -> Iterator[None]:
    """TOVA with the last token always kept."""
    from kvkeep.policies.selectors.base import STAYS
    from kvkeep.policies.selectors.tova import Tova

    def rank(self: Any, entries: Any) -> Any:
        return entries.marks.masked_fill(entries.slots == entries.length - 1, STAYS)

    with replaced(Tova, "rank", rank):
        yield


@contextmanager
def mean_over_queries() -> Iterator[None]:
    """H2O's sums divided by the number of queries that could see the entry; no recent ones kept for being recent."""
    from kvkeep.policies.selectors.h2o import H2O

    with replaced(H2O, "rank", lambda self, entries: entries.marks / (entries.length - entries.slots)):
        yield


@contextmanager
def both(*blocks: Any) -> Iterator[None]:
    """Several at once."""
    if not blocks:
        yield
        return
    with blocks[0], both(*blocks[1:]):
        yield


# Why what is kept differs, and how the difference is taken out; a method may have several steps.
REASONS: dict[str, list[tuple[str, Callable[[list[int]], Any]]]] = {
    "snapkv": [("votes averaged over neighbours, not the largest", lambda budgets: average_pooling())],
    "pyramidkv": [
        ("their entries by layer", their_budgets),
        ("and votes averaged", lambda budgets: both(their_budgets(budgets), average_pooling())),
        (
            "and the window whole in small layers",
            lambda budgets: both(their_budgets(budgets), average_pooling(), whole_window()),
        ),
    ],
    "tova": [("the last token always stays", lambda budgets: last_token_stays())],
    "h2o": [("mean over queries, nothing kept for being recent", lambda budgets: mean_over_queries())],
    "knorm": [("none; what differs ties", lambda budgets: nullcontext())],
}


# -- comparing ------------------------------------------------------------------------------------------


def agreement(a: list[Any], b: list[Any]) -> dict[str, float]:
    """Return the share of kept positions that both keep: mean and least over layers and heads, and how many differ."""
    shares, differing = [], 0
    for ours_by_head, theirs_by_head in zip(a, b, strict=True):
        for one, other in zip(ours_by_head, theirs_by_head, strict=True):
            common = len(set(one) & set(other))
            most = max(len(one), len(other))
            shares.append(common / most)
            differing += most - common
    return {"mean": sum(shares) / len(shares), "least": min(shares), "differing": differing}


def margin(a: list[Any], b: list[Any], margins: list[Any]) -> float:
    """Return how far from the last place, by their scores and as a share, the farthest is that only one side keeps."""
    gap = 0.0
    for layer, (ours_by_head, theirs_by_head) in enumerate(zip(a, b, strict=True)):
        for head, (one, other) in enumerate(zip(ours_by_head, theirs_by_head, strict=True)):
            for slot in set(one) ^ set(other):
                gap = max(gap, abs(margins[layer][head][slot]))
    return gap


class Worker:
    """A process that answers jobs."""

    def __init__(self, python: str, side: str, folder: str, ids: list[int], **job: Any) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        if side == "theirs":
            environment.pop("PYTHONPATH", None)
        command = [python, __file__, "--side", side]
        self.words = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process; a pipe could fill up
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.words, text=True, env=environment
        )
        self.common = {"folder": folder, "ids": ids, **job}
        self.ask(do="load")

    def ask(self, **job: Any) -> dict[str, Any]:
        """Return the answer. Leaves with the worker's own words if there is none."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(self.common | job) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            self.words.seek(0)
            sys.exit(f"A process for {self.common.get('press') or 'kvkeep'} ended:\n{self.words.read()[-2000:]}")
        return json.loads(line)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


def cost(arguments: Any, python: str, folder: str, ids: list[int], name: str, repeats: int) -> dict[str, Any]:
    """Return the prompt's seconds and bytes on each side, in fresh processes that take turns."""
    method, press, options = METHODS.get(name, ("stock", "", {}))
    budget = None if name == FULL else kept_entries(len(ids), arguments.ratio)
    theirs_job = {"press": press, "options": options, "ratio": arguments.ratio, "do": "prefill"}
    ours_job = {"method": method, "budget": budget, "do": "prefill"}
    with (
        Worker(sys.executable, "ours", folder, ids, **ours_job, chunk=CHUNK) as chunked,
        Worker(sys.executable, "ours", folder, ids, **ours_job, chunk=len(ids)) as whole,
        Worker(python, "theirs", folder, ids, **theirs_job) as pressed,
    ):
        workers = {"ours": chunked, "ours in one chunk": whole, "theirs": pressed}
        answers: dict[str, list[dict[str, Any]]] = {side: [] for side in workers}
        for _ in range(repeats):
            for side, worker in workers.items():
                answers[side].append(worker.ask())
    return {
        side: {
            "seconds": median(answer["seconds"] for answer in told),
            "cache_bytes": told[0]["cache_bytes"],
            "rise_bytes": told[0]["rise"],  # of the first run: later ones reuse what the process has
            "peak_rss_bytes": told[0]["peak_rss"],
        }
        for side, told in answers.items()
    }


def kept_entries(tokens: int, ratio: float) -> int:
    """Return what kvpress keeps of a prompt (kvpress.utils.compute_n_kept)."""
    return max(1, int(tokens * (1 - ratio)))


def positions(model: Any, worker: Worker, ids: list[int], name: str, ratio: float) -> dict[str, Any]:
    """Return how what is kept agrees: in one chunk, with each difference taken out, and in chunks."""
    method, press, options = METHODS[name]
    budget = kept_entries(len(ids), ratio)
    other = worker.ask(do="positions", press=press, options=options, ratio=ratio)
    kept, margins, budgets = other["kept"], other["margins"], other["budgets"]
    whole = our_kept(model, ids, method, budget, len(ids))
    chunked = our_kept(model, ids, method, budget, CHUNK)
    steps = []
    for reason, block in REASONS.get(name, []):
        with block(budgets):
            alike = our_kept(model, ids, method, budget, len(ids))
        steps.append({"reason": reason, **agreement(alike, kept), "margin": margin(alike, kept, margins)})
    told: dict[str, Any] = {
        "method": method,
        "press": press,
        "entries": {"ours": [len(layer[0]) for layer in whole], "theirs": budgets},
        "one_chunk": agreement(whole, kept),
        "explained": steps,
        "chunks": agreement(chunked, kept),
        "chunks_and_one": agreement(chunked, whole),
    }
    if (adapter := through_adapter(model, ids, press, options, budget)) is not None:
        told["adapter"] = {**agreement(adapter, kept), "margin": margin(adapter, kept, margins)}
    return told


def through_adapter(model: Any, ids: list[int], press: str, options: dict[str, Any], budget: int) -> Any:
    """Return what kvkeep keeps by the press' own scores, None where kvpress is not installed beside kvkeep."""
    from kvkeep.errors import KvkeepError

    given = "".join(f",{key}={value}" for key, value in options.items())
    try:
        return our_kept(model, ids, f"kvpress:{press}{given}", budget, len(ids))
    except KvkeepError:
        return None


def quality(model: Any, ids: list[int], name: str, budget: int) -> dict[str, dict[str, Any]]:
    """Return what the choice costs over the next tokens, the prompt read in one chunk and in chunks."""
    from kvkeep_lab import compare as lab

    told = {}
    for way, chunk in (("one chunk", len(ids)), ("chunks", CHUNK)):

        def made(model: Any, method: str, chunk: int = chunk, **options: Any) -> Any:
            return our_cache(model, method, options.get("budget"), chunk)

        with replaced(lab, "new_cache", made):
            row = lab.compare(model, ids, [lab.Case(METHODS[name][0], str(budget))], new=NEW).rows[0]
        told[way] = {"match": row.match, "kl_mean": row.kl_mean, "top1": row.top1, "perplexity": row.perplexity}
    return told


# -- the environment of kvpress ---------------------------------------------------------------------------


def their_python(arguments: Any) -> str:
    """Return the Python that has kvpress, made where it is not there yet."""
    if arguments.kvpress_python:
        return arguments.kvpress_python
    python = Path(arguments.venv) / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-c", "import kvpress"], capture_output=True).returncode:
        print(f"Setting up {arguments.venv} ...", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", arguments.venv], check=True)
        # The version kvkeep runs with, first: what asks for "any torch" later brings gigabytes of CUDA.
        for wanted in ([f"torch=={torch.__version__.partition('+')[0]}"], REQUIREMENTS):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    return str(python)


# -- the report -------------------------------------------------------------------------------------------


def shown(share: dict[str, float]) -> str:
    """Return mean and least share as a person reads them."""
    return f"{share['mean']:.2%} / {share['least']:.2%}"


def table(heading: list[str], rows: list[list[str]]) -> str:
    """Return a table that is also Markdown."""
    widths = [max(len(line[column]) for line in [heading, *rows]) for column in range(len(heading))]
    lines = [heading, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def report(result: dict[str, Any]) -> None:
    """Print the tables."""
    rows = []
    for name, one in result["positions"].items():
        adapter = shown(one["adapter"]) if "adapter" in one else "-"
        rows.append([name, shown(one["one_chunk"]), shown(one["chunks"]), shown(one["chunks_and_one"]), adapter])
    print(f"\n{result['tokens']} tokens, {result['budget']} kept; share of kept positions that agree, mean / least")
    print(table(["method", "one chunk", f"chunks of {CHUNK}", "chunks and one chunk", "their scores, our cache"], rows))
    rows = [
        [name, step["reason"], shown(step), str(step["differing"]), f"{step['margin']:.0e}"]
        for name, one in result["positions"].items()
        for step in one["explained"]
    ]
    print("\nthe same in one chunk, with a difference taken out")
    print(table(["method", "difference", "agreement", "positions that differ", "farthest from the last place"], rows))
    if result["quality"]:
        rows = [
            [
                name,
                way,
                f"{told['match']:.0%}",
                f"{told['kl_mean']:.4f}",
                f"{told['top1']:.0%}",
                f"{told['perplexity']:.3f}",
            ]
            for name, ways in result["quality"].items()
            for way, told in ways.items()
        ]
        print(f"\nthe next {NEW} tokens")
        print(table(["method", "prompt read in", "match", "KL (nats)", "top-1", "perplexity"], rows))
    if result["cost"]:
        rows = []
        for name, sides in result["cost"].items():
            for side, told in sides.items():
                seconds = f"{told['seconds']:.2f} s ({told['seconds'] / sides['theirs']['seconds']:.2f})"
                sizes = [f"{told[key] / 2**20:.1f}" for key in ("cache_bytes", "rise_bytes", "peak_rss_bytes")]
                rows.append([name, side, seconds, *sizes])
        print("\nreading the prompt; times as medians, in brackets as multiples of theirs; memory in MiB")
        print(table(["method", "side", "time", "cache at its peak", "rise of RSS", "peak RSS"], rows))


def main() -> None:
    """Run the comparison that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--side", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help="the text")
    parser.add_argument("--tokens", type=int, default=1024, help="of the text, from its start")
    parser.add_argument("--ratio", type=float, default=0.5, help="share that leaves (kvpress' compression_ratio)")
    parser.add_argument("--methods", default=",".join(METHODS), help="separated by commas")
    parser.add_argument("--kvpress-python", help="a Python that has kvpress 0.5.5")
    parser.add_argument("--venv", default=str(Path(tempfile.gettempdir()) / "kvpress-0.5.5"), help="made if missing")
    parser.add_argument("--repeats", type=int, default=3, help="of each timing; 0: none, and no memory either")
    parser.add_argument("--no-quality", action="store_true", help="leave the next tokens out")
    parser.add_argument("--json", type=Path, help="where to write everything")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if arguments.side:
        {"ours": ours, "theirs": theirs}[arguments.side]()
        return
    if arguments.file is None:
        parser.error("--file is needed")
    python = their_python(arguments)

    from kvkeep import load as load_by_name

    loaded = load_by_name("smollm2", dtype="float32")
    model, folder = loaded.model, str(loaded.source)
    ids = loaded.tokenizer(arguments.file.read_text(encoding="utf-8")).input_ids[: arguments.tokens]
    if len(ids) < arguments.tokens:
        parser.error(f"the text has {len(ids)} tokens")
    names = arguments.methods.split(",")
    if unknown := [name for name in names if name not in METHODS]:
        parser.error(f"unknown methods {', '.join(unknown)}; known are {', '.join(METHODS)}")
    budget = kept_entries(len(ids), arguments.ratio)
    with Worker(python, "theirs", folder, ids, press="", options={}) as worker:
        compared = {name: positions(model, worker, ids, name, arguments.ratio) for name in names}
    asked = [] if arguments.no_quality else [name for name in ("snapkv", "pyramidkv") if name in names]
    result = {
        "tokens": len(ids),
        "ratio": arguments.ratio,
        "budget": budget,
        "chunk": CHUNK,
        "threads": torch.get_num_threads(),
        "positions": compared,
        "quality": {name: quality(model, ids, name, budget) for name in asked},
        "cost": {},
    }
    if arguments.repeats:
        result["cost"] = {
            name: cost(arguments, python, folder, ids, name, arguments.repeats) for name in [FULL, *names]
        }
    report(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
