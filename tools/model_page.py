"""Measures the table of docs/models.md: one row for each GGUF architecture.

    python tools/model_page.py           # prints the table
    python tools/model_page.py --write   # into docs/models.md

The files are the tiny ones of tests/models/records, of which llama.cpp's log-probabilities were recorded. What the
library runs is seen with random weights of the same config, but of widths that its kernels need.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

ROOT = Path(__file__).parents[1]
RECORDS, PAGE = ROOT / "tests" / "models" / "records", ROOT / "docs" / "models.md"
BEGIN, END = "<!-- the table of tools/model_page.py -->", "<!-- its end -->"
HEADINGS = (
    "architecture", "model type", "difference from llama.cpp", "stays quantised", "run by the library", "same bits",
    "refused methods",
)  # fmt: skip
METHODS = ("full", "kv-direct", "h2o", "snapkv", "streaming-llm", "quantized", "kvreviver", "revive", "lru+redecode:3")
"""Methods that some families refuse."""
WIDER = (
    "mamba_d_state", "ssm_state_size", "linear_key_head_dim", "linear_value_head_dim", "moe_intermediate_size",
    "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
    "hidden_size_per_layer_input",
)  # fmt: skip
"""Sizes of a config that the library's kernels need as multiples of 16; the records have 8 or 24."""


def rows() -> Iterator[list[str]]:
    """Yield a row for each architecture that kvkeep reads and llama.cpp's converter wrote."""
    from kvkeep.models.gguf.architectures import ARCHITECTURES

    models = json.loads((RECORDS / "models.json").read_text("utf-8"))
    found: dict[str, list[list[str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, facts in models["models"].items():
            if "float32" in facts and "why" not in facts:
                file = Path(folder) / f"{name}.gguf"
                file.write_bytes(lzma.decompress((RECORDS / f"{name}.gguf.xz").read_bytes()))
                if (row := _row(name, file, models)) is not None:
                    found.setdefault(row[0], []).append(row)
    for variants in found.values():
        first = variants[0]
        first[1] = ", ".join(dict.fromkeys(row[1] for row in variants))
        first[2] = max((row[2] for row in variants), key=float)
        yield first
    for name in ARCHITECTURES:
        if f"`{name}`" not in found:
            yield [f"`{name}`", "", "no record", "", "", "", ""]


def _row(name: str, file: Path, models: dict[str, Any]) -> list[str] | None:
    from kvkeep.errors import UnsupportedModelError
    from kvkeep.models.gguf.model import read_model
    from kvkeep.models.loading import load

    try:
        read = read_model(file)
        model: Any = load(file, weights="float32", device="cpu").model
    except UnsupportedModelError:
        return None
    print(name, file=sys.stderr, flush=True)
    with torch.no_grad():
        found = model(torch.tensor([models["ids"]]), use_cache=False).logits[0].double().log_softmax(-1)
    units = numpy.frombuffer(lzma.decompress((RECORDS / f"{name}.logprobs.xz").read_bytes()), "<i4")
    apart = float((found - torch.from_numpy(units * models["step"]).view(found.shape)).abs().max())
    config = _wider(read.config)
    native, same, refused = _in_library(read.tokenizer, config, file.parent / name)
    measured = f"{apart:.0e}", _in_blocks(file, config), native, same, ", ".join(f"`{one}`" for one in refused)
    return [f"`{read.facts.architecture}`", f"`{read.config.model_type}`", *measured]


def _in_blocks(file: Path, config: Any) -> str:
    """Return the share of the matrices that keep their blocks, of a file whose matrices are all in blocks."""
    sys.path.insert(0, str(ROOT / "tests"))
    from gguf_files import requantised

    from kvkeep.models.gguf.model import read_model
    from kvkeep.models.gguf.tensors import packing_places, tensors_of
    from kvkeep.models.matrices import built

    kept = whole = 0
    facts = read_model(requantised(file, file.with_suffix(".blocks.gguf"))).facts
    for tensor in tensors_of(facts, packing_places(built(config))).values():
        for part in tensor.parts:
            if part.kind == "Q8_0":
                whole += part.size
                kept += part.size * tensor.packs
    return "all" if kept == whole else f"{100 * kept // max(whole, 1)} %"


def _wider(config: Any) -> Any:
    for name in WIDER:
        if (size := getattr(config, name, None)) in (8, 24):
            setattr(config, name, size + 8)
    return config


def _in_library(tokenizer: Any, config: Any, folder: Path) -> tuple[str, str, list[str]]:
    """Return the parts of layers that the library runs, whether bits are the same for all chunks, and the methods that
    are refused, of a model with the config of a file and random weights."""
    from transformers import AutoModelForCausalLM

    from kvkeep import KeepCache
    from kvkeep.errors import BudgetError, UnsupportedModelError
    from kvkeep.models.loading import load

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model: Any = load(folder, weights="bfloat16", device="cpu").model
    refused, same = [], False
    for method in METHODS:
        try:
            cache = KeepCache(model, method, None if method == "full" else 512)
            same = all(one.same_bits for one in cache.describe()) if method == "full" else same
        except UnsupportedModelError:
            refused.append(method)
        except BudgetError:  # the budget is too small for the tiny model, but the method works
            continue
    return _run_by_the_library(model), "yes" if same else "no", refused


def _run_by_the_library(model: Any) -> str:
    from kvkeep.models.adapter import decoder_of, layers_of
    from kvkeep.models.fused import FusedLayer
    from kvkeep.models.mlps import FusedMlp

    parts: dict[str, list[bool]] = {}
    for layer in layers_of(decoder_of(model)):
        forward = vars(layer).get("forward")
        for module in layer.modules():
            name, replaced = type(module).__name__, vars(module).get("forward")
            if name.endswith("Attention"):
                parts.setdefault("attention", []).append(isinstance(forward, FusedLayer))
            elif hasattr(module, "conv1d") or isinstance(getattr(module, "conv", None), torch.nn.Conv1d):
                parts.setdefault("recurrent", []).append(getattr(module, "in_order", False))
            elif name.endswith(("MLP", "MoE", "Moe", "MoeBlock", "MoEBlock")):
                whole = isinstance(forward, FusedLayer) and forward.mlp is not None
                parts.setdefault("MLPs", []).append(whole or isinstance(replaced, FusedMlp))
    run = [name for name, done in parts.items() if all(done)]
    return "all" if len(run) == len(parts) else ", ".join(sorted(run)) or "products"


def table() -> str:
    """Return the table in Markdown."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *rows()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Print the table, or write it into the page."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--write", action="store_true", help="write it into docs/models.md")
    made = table()
    if not options.parse_args().write:
        print(made)
        return
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    main()
