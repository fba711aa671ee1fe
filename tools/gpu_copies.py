"""Counts what `kv-direct` with entries in the host's memory copies and waits for, on the pretended GPU of the tests.

PYTHONPATH=tests python tools/gpu_copies.py [EVICTED ...]

prints, for a Llama of random weights and each number of evicted tokens, the last chunk of a prompt and the mean of 64
steps; then a whole prompt, in chunks of several lengths, the last of them the default. Nothing is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from pretended_gpu import GPU, PretendedGpu, on_gpu
from transformers import LlamaConfig, LlamaForCausalLM

from kvkeep import KeepCache

LAYERS, BUDGET, STEPS = 8, 1024, 64
PROMPT, CHUNKS = 4096, (512, 1024, None)


def main(counts: list[int]) -> None:
    """Print the table for these numbers of evicted tokens."""
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=16,
        num_key_value_heads=8, head_dim=16, max_position_embeddings=16384,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16().eval()
    print("| evicted | pass | copies to the device | MB | pageable | copies to the host | waits |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    with PretendedGpu() as gpu, torch.no_grad():
        on_gpu(model)
        for evicted in counts:
            ids = torch.randint(1, 97, (1, BUDGET + evicted + STEPS), device="cpu").to(GPU)
            cache = KeepCache(model, "kv-direct", BUDGET, checkpoint="kv", where="host")
            place = 0
            for chunk in cache.stream.chunks(BUDGET + evicted):
                gpu.clear()
                model(ids[:, place : place + chunk], cache=cache)
                place += chunk
            _print(gpu, f"{evicted:,} | a chunk of {chunk}", 1)
            gpu.clear()
            for _ in range(STEPS):
                model(ids[:, place : place + 1], cache=cache)
                place += 1
            _print(gpu, f"{evicted:,} | a step", STEPS)
        print("\n| tokens | chunk | copies to the device | MB | pageable | copies to the host | waits |")
        print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for longest in CHUNKS:
            ids = torch.randint(1, 97, (1, PROMPT), device="cpu").to(GPU)
            cache = KeepCache(model, "kv-direct", 2 * BUDGET, chunk=longest)
            gpu.clear()
            model(ids, cache=cache, logits_to_keep=1)
            _print(gpu, f"{PROMPT:,} | {cache.stream.chunk:,}", 1)


def _print(gpu: PretendedGpu, name: str, passes: int) -> None:
    def total(counted: Mapping[str, int], *words: str) -> float:
        return sum(count for name, count in counted.items() if all(word in name for word in words)) / passes

    cells = (
        f"{total(gpu.copies, 'to device'):.0f}",
        f"{total(gpu.copied_bytes, 'to device') / 1e6:.1f}",
        f"{total(gpu.copied_bytes, 'to device', 'pageable') / 1e6:.1f}",
        f"{total(gpu.copies, 'to host'):.1f}",
        f"{sum(gpu.waits.values()) / passes:.0f}",
    )
    print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main([*map(int, sys.argv[1:])] or [1024, 4096])
