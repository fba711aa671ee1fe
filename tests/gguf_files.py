"""GGUF files as llama.cpp's tools would write them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, TokenType
from gguf.quants import quantize
from numpy.typing import NDArray

HIDDEN, HEADS, KV_HEADS, INNER = 64, 4, 2, 96
SPECIAL = ["<unk>", "<s>", "</s>"]
LETTERS = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ċ"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


SCALES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K", "NVFP4"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)},
}
"""Where the float16 scales and offsets of a kind's blocks begin, if not at byte 0."""


def set_scales(kind: str, blocks: NDArray[numpy.uint8], halves: NDArray[numpy.float16]) -> None:
    """Write the float16 scales and offsets of blocks (count, bytes of a block). halves: (count, 1 or 2), or what numpy
    makes so."""
    places = SCALES.get(kind, (0,))
    stated = numpy.broadcast_to(numpy.float16(halves), (len(blocks), len(places)))
    if kind == "IQ1_M":  # four bits in each of four words
        bits = numpy.ascontiguousarray(stated).view(numpy.uint16)[:, 0]
        for part in range(4):
            blocks[:, 49 + 2 * part] = blocks[:, 49 + 2 * part] & 15 | (bits >> 4 * part & 15) << 4
        return
    for number, place in enumerate(places):
        blocks[:, place : place + 2] = numpy.ascontiguousarray(stated[:, number : number + 1]).view(numpy.uint8)


def written(
    path: Path,
    kind: str = "F32",
    hidden: int = HIDDEN,
    inner: int = INNER,
    architecture: str = "llama",
    without: Collection[str] = (),
    keys: Mapping[str, Any] = MappingProxyType({}),
    tensors: Mapping[str, NDArray[Any]] = MappingProxyType({}),
    split: int = 0,
    experts: int = 0,
) -> Path:
    """Write a tiny Llama whose matrices are blocks of ``kind``; K blocks need widths of 256 elements. without: keys and
    tensors that are left out. keys, tensors: others, or other values. split: the greatest number of tensors of a part.
    experts: the number of experts of its MLP, of which two are used. Returns ``path``."""
    writer = GGUFWriter(path, architecture, split_max_tensors=split)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    tokens = [*SPECIAL, *LETTERS, "ab"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    stated = writer.kv_data[0]
    for key in without:
        stated.pop(key, None)
    for key, value in keys.items():
        stated.pop(key, None)
        _add_key(writer, key, value)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
    for name, shape in _shapes(len(tokens), hidden, inner, experts).items():
        if name in without or name in tensors:
            continue
        values = numpy.random.default_rng(len(name)).normal(0, 0.1, shape).astype(numpy.float32)
        if len(shape) == 1 or kind == "F32" or name.endswith("gate_inp.weight"):
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, _blocks(values, kind), raw_dtype=GGMLQuantizationType[kind])
    return _finished(writer, tensors, path)


def _finished(writer: GGUFWriter, tensors: Mapping[str, NDArray[Any]], path: Path) -> Path:
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    writer.add_key_value(key, value, _type(value), sub_type=_type(value[0]) if isinstance(value, list) else None)


def _type(value: Any) -> GGUFValueType:
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    return GGUFValueType[kinds[type(value)]]


def _blocks(values: NDArray[Any], kind: str) -> NDArray[Any]:
    """Values as blocks; random ones, with small scales, of a kind that gguf only reads."""
    try:
        return quantize(values, GGMLQuantizationType[kind])
    except NotImplementedError:
        elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        blocks = numpy.random.default_rng(values.size).integers(0, 256, (values.size // elements, size), numpy.uint8)
        set_scales(kind, blocks, numpy.float16(0.002))
        return blocks.reshape(*values.shape[:-1], -1)


def _shapes(vocabulary: int, hidden: int, inner: int, experts: int) -> dict[str, tuple[int, ...]]:
    kv = hidden // HEADS * KV_HEADS
    own: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("attn_norm", "ffn_norm"), (hidden,)),
        **dict.fromkeys(("attn_q", "attn_output"), (hidden, hidden)),
        **dict.fromkeys(("attn_k", "attn_v"), (kv, hidden)),
    }
    mlp = {**dict.fromkeys(("ffn_gate", "ffn_up"), (inner, hidden)), "ffn_down": (hidden, inner)}
    own |= {f"{name}_exps": (experts, *shape) for name, shape in mlp.items()} if experts else mlp
    own |= {"ffn_gate_inp": (experts, hidden)} if experts else {}
    whole = {"token_embd.weight": (vocabulary, hidden), "output_norm.weight": (hidden,)}
    return whole | {f"blk.0.{name}.weight": shape for name, shape in own.items()}


def requantised(
    source: Path,
    path: Path,
    kind: str = "Q8_0",
    keys: Mapping[str, Any] = MappingProxyType({}),
    tensors: Mapping[str, NDArray[Any]] = MappingProxyType({}),
    without: Collection[str] = (),
) -> Path:
    """Write the file ``source`` again, its matrices as blocks of ``kind``, and return ``path``. keys, tensors: to add
    or to replace. without: keys and tensors that are left out."""
    found = GGUFReader(source)
    stated = {name: field for name, field in found.fields.items() if not name.startswith("GGUF.")}
    writer = GGUFWriter(path, str(stated.pop("general.architecture").contents()))
    for name in without:
        stated.pop(name, None)
    for name, value in keys.items():
        stated.pop(name, None)
        _add_key(writer, name, value)
    for name, field in stated.items():
        sub_type = field.types[1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in found.tensors:
        if tensor.name in tensors or tensor.name in without:
            continue
        values = numpy.array(tensor.data)
        blocks = kind != "F32" and values.ndim > 1 and values.shape[-1] % 32 == 0
        if blocks and not re.search("norm|conv|gate_inp|bias", tensor.name):
            writer.add_tensor(
                tensor.name, quantize(values, GGMLQuantizationType[kind]), raw_dtype=GGMLQuantizationType[kind]
            )
        else:
            writer.add_tensor(tensor.name, values)
    return _finished(writer, tensors, path)
