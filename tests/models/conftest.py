"""A tiny GGUF file, and model folders that have something wrong with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from gguf import GGUFWriter, TokenType

HIDDEN, HEADS, KV_HEADS, INNER = 64, 4, 2, 96
SPECIAL = ["<unk>", "<s>", "</s>"]
LETTERS = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ċ"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of one layer whose tokens are letters, as llama.cpp's tools would write it."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
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
    for name, shape in _shapes(len(tokens)).items():
        writer.add_tensor(name, numpy.random.default_rng(len(name)).normal(0, 0.1, shape).astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // HEADS * KV_HEADS
    own: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("attn_norm", "ffn_norm"), (HIDDEN,)),
        **dict.fromkeys(("attn_q", "attn_output"), (HIDDEN, HIDDEN)),
        **dict.fromkeys(("attn_k", "attn_v"), (kv, HIDDEN)),
        **dict.fromkeys(("ffn_gate", "ffn_up"), (INNER, HIDDEN)),
        "ffn_down": (HIDDEN, INNER),
    }
    whole = {"token_embd.weight": (vocabulary, HIDDEN), "output_norm.weight": (HIDDEN,)}
    return whole | {f"blk.0.{name}.weight": shape for name, shape in own.items()}


@pytest.fixture
def gguf_file(tiny_gguf: Path, tmp_path: Path) -> Path:
    """A copy of the tiny GGUF file that a test may spoil."""
    return Path(shutil.copy(tiny_gguf, tmp_path / "mine.gguf"))


@pytest.fixture
def spoiled(model_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """A maker of copies of the tiny model's folder without some files, or with another config.json."""

    def make(*without: str, config: dict[str, object] | None = None) -> Path:
        folder = tmp_path / "spoiled"
        shutil.copytree(model_folder, folder)
        for name in without:
            (folder / name).unlink()
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make
