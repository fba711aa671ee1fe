"""The connector within vLLM, where there is one: ``KVKEEP_VLLM_PYTHON`` names the interpreter that has it."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("KVKEEP_VLLM_PYTHON")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="KVKEEP_VLLM_PYTHON is not set")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers depend on all of a text."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run(*arguments: str) -> str:
    path = os.pathsep.join(str(ROOT / folder) for folder in ("src", "connectors/vllm/src"))
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([str(PYTHON), *arguments], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def engine(scenario: str, model: Path, folder: Path) -> dict[str, Any]:
    return json.loads(run(str(Path(__file__).with_name("engine.py")), scenario, str(model), str(folder)))


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Whether the tokens are the same."""
    return [answer["tokens"] for answer in one] == [answer["tokens"] for answer in other]


REFUSED = """
from types import SimpleNamespace as Some
from kvkeep_vllm.connector import _refusals
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
shape = dict(block_size=32, num_kv_heads=1, head_size=32, dtype=__import__("torch").float32)
full, window = FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=64)
def reasons(*specs, world=1, policy="recompute", hashes="sha256", drafts=None):
    parallel = Some(world_size=world, prefill_context_parallel_size=1, decode_context_parallel_size=1)
    config = Some(
        parallel_config=parallel, speculative_config=drafts, kv_transfer_config=Some(kv_load_failure_policy=policy),
        cache_config=Some(prefix_caching_hash_algo=hashes),
    )
    groups = [Some(kv_cache_spec=spec) for spec in specs]
    return [*_refusals(config, Some(kv_cache_groups=groups))]
assert not reasons(full)
for odd in (
    reasons(full, world=2), reasons(full, policy="fail"), reasons(full, hashes="xxhash"), reasons(full, drafts=1),
    reasons(window), reasons(full, full),
):
    (why,) = odd
    print("refused:", why)
"""


def test_nothing_of_vllm_that_the_connector_leans_on_has_moved() -> None:
    code = """
import vllm
from kvkeep_vllm import pinned
print(vllm.__version__, pinned.PIN, pinned.moved())
pinned.CALLS["vllm.v1.request:Request.is_finished"] = "self more"
pinned.FIELDS |= {"vllm.config:CacheConfig": "block_size nothing", "vllm.gone:Gone": "x"}
print(len(pinned.moved()))
"""
    told, broken = run("-c", code).strip().splitlines()[-2:]
    version, pin, moved = told.split(maxsplit=2)
    assert version == pin and moved == "[]" and broken == "3"


def test_engines_that_it_does_not_understand_are_refused_by_name() -> None:
    refused = [line for line in run("-c", REFUSED).splitlines() if line.startswith("refused: ")]
    known = (
        "split over processes",
        '"kv_load_failure_policy": "recompute"',
        "sha256_cbor",
        "drafts",
        "keep all entries",
    )
    assert len(refused) == 6 and all(word in line for word, line in zip((*known, known[-1]), refused, strict=True))


def test_answers_are_vllms_own_and_come_back_after_a_restart(model: Path, tmp_path: Path) -> None:
    """To the bit those of vLLM with its own prefix cache, also after preemptions, and of two engines on one folder."""
    plain = engine("without", model, tmp_path)
    with ThreadPoolExecutor(2) as both:
        for kept in both.map(lambda _: engine("kept", model, tmp_path), range(2)):
            assert plain["preempted"] and kept["preempted"] and kept["resumed"], "the cache has too few blocks"
            assert same(plain["first"], kept["first"]) and same(plain["many"], kept["many"])
            assert not kept["counts"]["dropped"] and not kept["counts"]["bad"]
    assert len([*tmp_path.rglob("*.block")]) == 9 + 4 * 6 and plain["again"][0]["cached"] == 288

    later = engine("restarted", model, tmp_path)
    assert later["first"][0]["cached"] == 288 and later["loaded"] >= 9
    assert later["first"][0]["logprobs"] == plain["again"][0]["logprobs"] == later["again"][0]["logprobs"]
    assert later["salted"][0]["cached"] == 0 and same(later["salted"], plain["first"])
    assert later["flipped"][0]["cached"] == 0 or later["counts"]["bad"]
    assert same(later["flipped"], plain["first"]) and later["counts"]["bad"] == 1
    assert later["counts"]["failed"] == 1 and later["counts"]["dropped"] >= 9 and len(later["other"][0]["tokens"]) == 8
    assert later["left"] == 0 and later["reset"][0]["cached"] == 0 and same(later["reset"], plain["first"])


def test_codes_are_smaller_and_near(model: Path, tmp_path: Path) -> None:
    made = engine("coded", model, tmp_path)
    assert made["again"][0]["cached"] == 288
    assert all(0 < size - made["block"] * 9 / 32 < 1000 for size in made["sizes"])  # 9 bits of 32, and a description
    exact, near = (dict(made[name][0]["logprobs"][0]) for name in ("first", "again"))
    both = exact.keys() & near.keys()
    assert both and exact != near and all(abs(exact[token] - near[token]) < 0.2 for token in both)
