"""Run AsymKV's or KVSlimmer's published code on a small Llama, and print what it keeps: for tests that compare.

Runs in an environment of its own, with transformers 4.44.2 (what the authors name) and copies of both repositories:

    python tools/published_merging.py FOLDER METHOD < REQUEST

FOLDER holds ``Asymkv`` (github.com/the-scale-lab/Asymkv) and ``KVSlimmer`` (github.com/lianjunl13-sudo/KVSlimmer).
METHOD: "asymkv" or "kvslimmer". REQUEST: a JSON object with ``config`` (of the Llama), ``weights`` (a safetensors
file), ``ids``, ``chunk``, ``sinks`` and ``size`` (entries after merging, the sinks included). The answer is a JSON
object: ``counts``, for each chunk and layer the tokens that each entry stands for, and ``logits``, the last of each
chunk.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any


def main() -> None:
    """Read a request from standard input and print the answer."""
    folder, method = Path(sys.argv[1]), sys.argv[2]
    sys.path[:0] = [str(folder / "KVSlimmer"), str(folder / "Asymkv")]  # both have a "pred"
    asked = json.load(sys.stdin)
    model = _model(asked)
    cache = _cache(method, asked)
    print(json.dumps((_kvslimmer if method == "kvslimmer" else _asymkv)(model, cache, asked)))


def _model(asked: dict[str, Any]) -> Any:
    from asymkv.method.asymkv_forward.asymkv_llama import enable_llama_pos_shift_asymkv_attention_442
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**asked["config"], attn_implementation="eager")
    model = LlamaForCausalLM(config).float().eval()
    model.load_state_dict(load_file(asked["weights"]), strict=False)
    enable_llama_pos_shift_asymkv_attention_442(model)
    return model


def _cache(method: str, asked: dict[str, Any]) -> Any:
    from asymkv.method.asymkv import AsymKVCache
    from kvslimmer.cache import KVSlimmerCache

    kind = KVSlimmerCache if method == "kvslimmer" else AsymKVCache
    return kind(start_size=asked["sinks"], recent_size=asked["size"] - asked["sinks"], k_seq_dim=2, v_seq_dim=2)


def _kvslimmer(model: Any, cache: Any, asked: dict[str, Any]) -> dict[str, Any]:
    import torch

    sys.modules["datasets"] = stub = types.ModuleType("datasets")  # which their script loads its data with
    stub.load_dataset = None  # type: ignore[attr-defined]
    import pred

    groups, past, hessian, answer = model.model.layers[0].self_attn.num_key_value_groups, None, None, _Answer()
    for number, ids in enumerate(_chunks(asked)):
        with torch.no_grad():
            if past is not None:
                found = model(ids, past_key_values=past, use_cache=True, output_attentions=True).attentions
                found = [weights[..., : -ids.shape[1]] for weights in found]
                local = pred.build_hessian_proxy_from_ratio(past, found, cache.start_size, groups)
                past, hessian = cache(past, found, pred.smooth_hessian_proxy_like_hk(local, hessian, number))
            output = model(ids, past_key_values=past, use_cache=True)
        past = output.past_key_values
        answer.note(past, output.logits)
    return answer.found


def _asymkv(model: Any, cache: Any, asked: dict[str, Any]) -> dict[str, Any]:
    import torch

    groups, past, answer = model.model.layers[0].self_attn.num_key_value_groups, None, _Answer()
    model.requires_grad_(False)
    for ids in _chunks(asked):
        if past is not None:
            past = [(key.detach().requires_grad_(), value.detach(), count) for key, value, count in past]
            output = model(ids, past_key_values=past, use_cache=True, output_attentions=True, labels=ids)
            output.loss.backward()
            found = [weights.detach()[..., : -ids.shape[1]] for weights in output.attentions]
            gradients = [(key.grad, None) for key, _, _ in past]
            past = [(key.detach().clone(), value.clone(), count.clone()) for key, value, count in past]
            past, _ = cache(past, found, groups, gradients)
        with torch.no_grad():
            output = model(ids, past_key_values=past, use_cache=True)
        past = output.past_key_values
        answer.note(past, output.logits)
    return answer.found


def _chunks(asked: dict[str, Any]) -> Any:
    import torch

    return torch.tensor([asked["ids"]]).split(asked["chunk"], 1)


class _Answer:
    def __init__(self) -> None:
        self.found: dict[str, Any] = {"counts": [], "logits": []}

    def note(self, past: Any, logits: Any) -> None:
        """Keep the counts of all layers, and the last logits of a chunk."""
        self.found["counts"].append([layer[2][0, 0].int().tolist() for layer in past])
        self.found["logits"].append(logits[0, -1].tolist())


if __name__ == "__main__":
    main()
