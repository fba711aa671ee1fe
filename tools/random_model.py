"""Writes a GGUF file of random weights in the shape of Qwen2.5-7B, with another Qwen2.5 file's tokenizer.

python tools/random_model.py SOURCE.gguf OUT.gguf [mxfp4]

Kinds of blocks are those of a Q4_K_M file: Q4_K, and Q6_K for some values and outputs (docs/bench.md). With mxfp4,
all matrices of the layers are MXFP4.
"""

from __future__ import annotations

import sys
from typing import Any

import gguf
import numpy as np

HIDDEN, LAYERS, KV, INNER = 3584, 28, 512, 18944
KIND = gguf.GGMLQuantizationType
COUNTS = {"block_count": LAYERS, "embedding_length": HIDDEN, "feed_forward_length": INNER}
HEADS = {"attention.head_count": 28, "attention.head_count_kv": 4}
RNG = np.random.default_rng(0)


def main(source: str, out: str, kind: str = "q4_k_m") -> None:
    """Write the file."""
    narrow, wide = (KIND.MXFP4, KIND.MXFP4) if kind == "mxfp4" else (KIND.Q4_K, KIND.Q6_K)
    given, writer = gguf.GGUFReader(source), gguf.GGUFWriter(out, "qwen2")
    changed = {f"qwen2.{name}": number for name, number in (COUNTS | HEADS).items()}
    for name, field in given.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = changed.get(name, field.contents())
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, field.types[0])
    tokens = len(given.fields["tokenizer.ggml.tokens"].data)
    matrix(writer, "token_embd", tokens, HIDDEN, KIND.Q4_K)
    matrix(writer, "output", tokens, HIDDEN, KIND.Q6_K)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for number in range(LAYERS):
        more = number < LAYERS // 8 or number >= 7 * LAYERS // 8 or (number - LAYERS // 8) % 3 == 2
        layer(writer, f"blk.{number}.", narrow, wide if more else narrow)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def layer(writer: Any, name: str, kind: Any, values: Any) -> None:
    """Add the tensors of one layer. values: the kind of the matrices that make its values and its output."""
    for norm in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"{name}{norm}.weight", np.ones(HIDDEN, np.float32))
    for part, rows, one in (("q", HIDDEN, kind), ("k", KV, kind), ("v", KV, values)):
        matrix(writer, f"{name}attn_{part}", rows, HIDDEN, one)
        writer.add_tensor(f"{name}attn_{part}.bias", RNG.normal(0, 0.1, rows).astype(np.float32))
    matrix(writer, f"{name}attn_output", HIDDEN, HIDDEN, kind)
    for part in ("gate", "up"):
        matrix(writer, f"{name}ffn_{part}", INNER, HIDDEN, kind)
    matrix(writer, f"{name}ffn_down", HIDDEN, INNER, values)


def matrix(writer: Any, name: str, rows: int, columns: int, kind: Any) -> None:
    """Add a matrix of random blocks, whose scales keep the numbers small."""
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = RNG.integers(0, 256, (rows * columns // per_block, size), dtype=np.uint8)
    if kind == KIND.Q4_K:
        blocks[:, :4] = np.frombuffer(np.array([0.02 / 128, 0.02 / 4], np.float16).tobytes(), np.uint8)
    elif kind == KIND.MXFP4:
        blocks[:, 0] = 127 - 7  # the power of two
    else:
        blocks[:, -2:] = np.frombuffer(np.float16(0.02 / 1024).tobytes(), np.uint8)
    writer.add_tensor(f"{name}.weight", blocks.reshape(rows, -1), raw_dtype=kind)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or sys.argv[3:] not in ([], ["mxfp4"]):
        sys.exit(__doc__)
    main(*sys.argv[1:])
