"""Writes a GGUF file of random weights in the shape of a Qwen model, with a Qwen2.5 file's tokenizer.

python tools/random_model.py SOURCE.gguf OUT.gguf [--kind KIND] [--shape 7b]

Kinds of blocks are those of a Q4_K_M file: Q4_K, and Q6_K for some values and outputs (docs/bench.md). With --kind,
all matrices of the layers are of that kind.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import gguf
import numpy as np

KIND = gguf.GGMLQuantizationType
RNG = np.random.default_rng(0)
FIRST = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K")
"""Kinds whose blocks begin with their scale, beside those with codebooks (IQ). Blocks of other kinds end with it."""
OFFSET = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
"""Kinds with the scale of an offset beside that of the codes."""


class Shape(NamedTuple):
    """The sizes of a model, in numbers of rows or columns, heads, layers or experts."""

    architecture: str
    """qwen2, or qwen3moe, whose MLPs are experts."""
    hidden: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    experts: int = 0
    used: int = 0
    """The experts of a token."""


HEAD = 128
"""The width of a head, in all shapes."""
SHAPES = {
    "7b": Shape("qwen2", 3584, 28, 18944, 28, 4),
    "1.5b": Shape("qwen2", 1536, 28, 8960, 12, 2),
    "a3b-8-layers": Shape("qwen3moe", 2048, 8, 768, 32, 4, 128, 8),
}


def main(source: str, out: str, kind: str | None, shape: Shape) -> None:
    """Write the file."""
    narrow, wide = (KIND[kind], KIND[kind]) if kind else (KIND.Q4_K, KIND.Q6_K)
    given, writer = gguf.GGUFReader(source), gguf.GGUFWriter(out, shape.architecture)
    sizes = {
        "block_count": shape.layers,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.inner,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
    }
    if shape.experts:
        sizes |= {
            "attention.key_length": HEAD,
            "attention.value_length": HEAD,
            "expert_count": shape.experts,
            "expert_used_count": shape.used,
            "expert_feed_forward_length": shape.inner,
        }
    for name, size in sizes.items():
        writer.add_uint32(f"{shape.architecture}.{name}", size)
    for name, field in given.fields.items():
        own = name.replace("qwen2.", f"{shape.architecture}.")
        if name.startswith("GGUF.") or name == "general.architecture" or name.removeprefix("qwen2.") in sizes:
            continue
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(own, field.contents())
        else:
            writer.add_key_value(own, field.contents(), field.types[0])
    tokens = len(given.fields["tokenizer.ggml.tokens"].data)
    matrix(writer, "token_embd", (tokens, shape.hidden), KIND.Q4_K)
    matrix(writer, "output", (tokens, shape.hidden), KIND.Q6_K)
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, np.float32))
    for number in range(shape.layers):
        more = number < shape.layers // 8 or number >= 7 * shape.layers // 8 or (number - shape.layers // 8) % 3 == 2
        layer(writer, f"blk.{number}.", shape, narrow, wide if more else narrow)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def layer(writer: Any, name: str, shape: Shape, kind: Any, values: Any) -> None:
    """Add the tensors of one layer. values: the kind of the matrices that make its values and its output."""
    for norm in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"{name}{norm}.weight", np.ones(shape.hidden, np.float32))
    queries, keys = shape.heads * HEAD, shape.kv_heads * HEAD
    for part, rows, one in (("q", queries, kind), ("k", keys, kind), ("v", keys, values)):
        matrix(writer, f"{name}attn_{part}", (rows, shape.hidden), one)
        if not shape.experts:
            writer.add_tensor(f"{name}attn_{part}.bias", RNG.normal(0, 0.1, rows).astype(np.float32))
        elif part != "v":
            writer.add_tensor(f"{name}attn_{part}_norm.weight", np.ones(HEAD, np.float32))
    matrix(writer, f"{name}attn_output", (shape.hidden, queries), kind)
    experts, suffix = ((shape.experts,), "_exps") if shape.experts else ((), "")
    for part in ("gate", "up"):
        matrix(writer, f"{name}ffn_{part}{suffix}", (*experts, shape.inner, shape.hidden), kind)
    matrix(writer, f"{name}ffn_down{suffix}", (*experts, shape.hidden, shape.inner), values)
    if experts:
        router = RNG.normal(0, 0.02, (*experts, shape.hidden)).astype(np.float32)
        writer.add_tensor(f"{name}ffn_gate_inp.weight", router)


def matrix(writer: Any, name: str, size: tuple[int, ...], kind: Any) -> None:
    """Add a matrix of random blocks, whose scales keep the numbers small. size: (rows, columns), or (experts, ...)."""
    per_block, stored = gguf.GGML_QUANT_SIZES[kind]
    blocks = RNG.integers(0, 256, (np.prod(size) // per_block, stored), dtype=np.uint8)
    set_scales(blocks[:1000], kind, 1.0, 0.0)
    codes = gguf.quants.dequantize(blocks[:1000], kind)
    scale, offset = 0.02 / codes.std(), 0.0
    if kind.name in OFFSET:  # which makes the mean 0
        set_scales(blocks[:1000], kind, 0.0, 1.0)
        offset = -scale * codes.mean() / gguf.quants.dequantize(blocks[:1000], kind).mean()
    set_scales(blocks, kind, scale, offset)
    writer.add_tensor(f"{name}.weight", blocks.reshape(*size[:-1], -1), raw_dtype=kind)


def set_scales(blocks: np.ndarray, kind: Any, scale: float, offset: float) -> None:
    """Write the scale of each block, and that of its offset if it has one. blocks: uint8 (blocks, bytes of one)."""
    numbers = np.array([scale, offset] if kind.name in OFFSET else [scale], np.float16).view(np.uint8)
    if kind == KIND.MXFP4:  # a power of two
        blocks[:, 0] = 127 + round(np.log2(scale))
    elif kind == KIND.IQ1_M:  # the upper half bytes of four 16-bit numbers, the lowest first
        for at in range(4):
            digit = numbers[at // 2] >> 4 * (at % 2) & 15
            blocks[:, 2 * at - 7] = blocks[:, 2 * at - 7] & 15 | digit << 4
    elif kind.name in FIRST or kind.name.startswith("IQ"):
        blocks[:, : len(numbers)] = numbers
    else:
        blocks[:, -len(numbers) :] = numbers


def options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--kind", choices=[kind.name for kind, (one, _) in gguf.GGML_QUANT_SIZES.items() if one > 1])
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    return parser.parse_args()


if __name__ == "__main__":
    given = options()
    main(given.source, given.out, given.kind, SHAPES[given.shape])
