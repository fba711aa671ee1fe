"""The next turn of a conversation after its server was killed: the time to its first token, and what was not read
again (docs/bench.md, After a restart).

KVKEEP_LLAMA_SERVER=LLAMA_SERVER KVKEEP_VLLM_PYTHON=PYTHON python tools/restart.py RECORDS ROUNDS [SERVER ...]

An ``openai`` client, which names no session, sends a conversation of 4,400 tokens and then asks: twice of the server
that has read it, and twice of one that was started after ``kill -9``. Each question has other words, and as many of
them. Every round has a new conversation and an empty folder. RECORDS: a file of JSON, to which the rounds are added;
its medians are printed. SERVER: see ``SERVERS``; all of them if none is named.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import openai
from kvkeep_lab.peers.servers import LlamaServer, Ours, Running, Server, VllmServer
from kvkeep_lab.serving import WORDS

from kvkeep.models.loading import Loaded, load

TOKENS, LIMIT = 4400, 8192
"""Tokens of the conversation, and of the model's context."""
IDLE_S = 2.0
"""Seconds between two requests. In this time a server can store what it has read."""
QUESTIONS = ("before", "before again", "after", "after again")


class SlotServer(LlamaServer):
    """llama.cpp's server, whose client saves the slot after a turn and restores it by the name of its file."""

    name = "llama-server, slot saved"

    @contextmanager
    def command(self, port: int) -> Iterator[tuple[list[str], Mapping[str, str]]]:  # noqa: D102
        with super().command(port) as (line, variables):
            yield [*line, "--slot-save-path", os.environ["KVKEEP_DATA"]], variables


class CachingVllm(VllmServer):
    """vLLM with its prefix cache in memory."""

    name = "vllm"
    transfer: ClassVar[Mapping[str, Any] | None] = None

    @contextmanager
    def command(self, port: int) -> Iterator[tuple[list[str], Mapping[str, str]]]:  # noqa: D102
        with super().command(port) as (line, variables):
            options = ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
            if self.transfer is not None:
                given = json.dumps(self.transfer).replace("FOLDER", os.environ["KVKEEP_DATA"])
                options += ["--kv-transfer-config", given]
            root = Path(__file__).resolve().parents[1]
            sources = os.pathsep.join(f"{root / folder}" for folder in ("src", "connectors/vllm/src"))
            line = [word for word in line if word != "--no-enable-prefix-caching"]
            yield [*line, *options], {**variables, "PYTHONPATH": sources}


class KeepVllm(CachingVllm):
    """vLLM with kvkeep's connector (docs/vllm.md)."""

    name = "vllm, KeepConnector"
    transfer: ClassVar[Mapping[str, Any] | None] = {
        "kv_connector": "KeepConnector",
        "kv_connector_module_path": "kvkeep_vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"folder": "FOLDER"},
    }


class TieredVllm(CachingVllm):
    """vLLM with its own tiers: the processor's memory, and a folder."""

    name = "vllm, OffloadingConnector"
    transfer: ClassVar[Mapping[str, Any] | None] = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 1 << 30,
            "secondary_tiers": [{"type": "fs", "root_dir": "FOLDER"}],
        },
    }


def ours(method: str, budget: str, loaded: Loaded) -> Server:
    """Return ``kvkeep serve`` with a method."""
    return Ours(loaded, LIMIT, 1, method, budget, "2GB")


SERVERS = {
    "kvkeep full": lambda loaded: ours("full", "512", loaded),
    "kvkeep kv-direct": lambda loaded: ours("kv-direct", "512", loaded),
    **{
        kind.name: lambda loaded, kind=kind: kind(loaded, LIMIT, 1)
        for kind in (SlotServer, LlamaServer, KeepVllm, CachingVllm, TieredVllm)
    },
}
"""How a server is made, by name."""


def conversation(draw: random.Random) -> list[dict[str, str]]:
    """Return messages of about ``TOKENS`` tokens, the last one from the user."""
    texts = [" ".join(draw.choices(WORDS, k=TOKENS // 9 - 6)) for _ in range(9)]
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def ask(server: Server, running: Running, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Request an answer; return its text, the seconds to its first token, and the server's count of tokens."""
    client = openai.OpenAI(base_url=running.url, api_key="none", max_retries=0, timeout=300)
    began, first, text, usage = time.perf_counter(), None, "", None
    stream = client.chat.completions.create(
        model=server.model, messages=messages, max_tokens=8, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for chunk in stream:
        for choice in chunk.choices:
            if first is None and (choice.delta.content or choice.finish_reason):  # an answer can be empty
                first = time.perf_counter() - began
            text += choice.delta.content or ""
        usage = chunk.usage or usage
    details = usage.prompt_tokens_details
    return {
        "text": text, "first_s": first, "prompt": usage.prompt_tokens,
        "cached": details.cached_tokens if details is not None else 0,
    }  # fmt: skip


def slot(running: Running, action: str) -> float:
    """Save or restore llama-server's slot; return the seconds."""
    began = time.perf_counter()
    url = f"{running.url.removesuffix('/v1')}/slots/0?action={action}"
    given = urllib.request.Request(url, b'{"filename": "talk"}', {"Content-Type": "application/json"})
    urllib.request.urlopen(given, timeout=60).close()
    return time.perf_counter() - began


@contextmanager
def started(server: Server) -> Iterator[tuple[Running, float]]:
    """Run a server until the block ends with ``kill -9``; yield it and the seconds until it was healthy."""
    began = time.perf_counter()
    with server.running() as running:
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"{running.url.removesuffix('/v1')}/health", timeout=5).close()
                break
            time.sleep(0.05)
        yield running, time.perf_counter() - began
        running.kill()


def measure(server: Server, seed: int) -> dict[str, Any]:
    """Return the record of one round."""
    draw = random.Random(seed)
    messages, found = conversation(draw), {}
    words = draw.sample(WORDS, 2 * len(QUESTIONS))  # no question begins like another
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVKEEP_DATA"] = folder

        def question(running: Running, label: str) -> None:
            time.sleep(IDLE_S)
            text = f"{words.pop()} or {words.pop()}: which word is longer?"
            found[label] = ask(server, running, [*messages, {"role": "user", "content": text}])

        with started(server) as (running, _):
            ask(server, running, [{"role": "user", "content": "Name a river."}])  # what the first request starts
            first = ask(server, running, messages)
            messages.append({"role": "assistant", "content": first["text"]})
            saved_s = slot(running, "save") if isinstance(server, SlotServer) else 0.0
            for label in QUESTIONS[:2]:
                question(running, label)
            time.sleep(IDLE_S)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        with started(server) as (running, start_s):
            restored_s = slot(running, "restore") if isinstance(server, SlotServer) else 0.0
            for label in QUESTIONS[2:]:
                question(running, label)
    return {
        "read_s": first["first_s"], "read": first["prompt"], "saved_s": saved_s, "stored_bytes": size,
        "start_s": start_s, "restored_s": restored_s, **found,
    }  # fmt: skip


def table(records: Mapping[str, list[dict[str, Any]]]) -> str:
    """Return the medians and ranges of all rounds."""
    lines = [
        "| | read s | " + " | ".join(f"{one}, ms" for one in QUESTIONS) + " | after ÷ before | saved, restored ms "
        "| cached after | of | MB | start s |"
    ]
    lines.append("| --- |" + " ---: |" * 11)
    for name, rounds in records.items():
        whole = [one for one in rounds if "error" not in one]
        if not whole:
            lines.append(f"| {name} | {rounds[-1]['error']} |")
            continue

        def spread(values: list[float], digits: int = 0) -> str:
            middle, low, high = statistics.median(values), min(values), max(values)
            return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"

        times = [spread([1e3 * one[label]["first_s"] for one in whole]) for label in QUESTIONS]
        ratio = [(one["restored_s"] + one["after"]["first_s"]) / one["before"]["first_s"] for one in whole]
        slots = f"{1e3 * statistics.median(one['saved_s'] for one in whole):.0f}, "
        slots += f"{1e3 * statistics.median(one['restored_s'] for one in whole):.0f}"
        last = whole[-1]
        cells = [
            spread([one["read_s"] for one in whole], 1), *times, spread(ratio, 2), slots,
            f"{min(one['after']['cached'] for one in whole)}", f"{last['after']['prompt']}",
            f"{last['stored_bytes'] / 1e6:.0f}", spread([one["start_s"] for one in whole], 1),
        ]  # fmt: skip
        lines.append(f"| {name}, {len(whole)} rounds | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Add rounds of the named servers to the records."""
    place, rounds, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or [*SERVERS]
    records: dict[str, list[dict[str, Any]]] = json.loads(place.read_text()) if place.exists() else {}
    loaded = load("smollm2")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server is left
    for _ in range(rounds):
        for name in names:
            done = records.setdefault(name, [])
            try:
                done.append(measure(SERVERS[name](loaded), len(done)))
            except Exception as error:
                done.append({"error": f"{type(error).__name__}: {error}"})
            print(name, done[-1], flush=True)
            place.write_text(json.dumps(records, indent=1) + "\n")
    print(table(records))


if __name__ == "__main__":
    main()
