"""The fast reader of GGUF headers gives what gguf's reader gives, and transformers makes the same tokenizer with it."""

from __future__ import annotations

import json
from pathlib import Path
from time import process_time
from typing import Any

import numpy
import pytest
from gguf import GGUFReader, GGUFWriter, TokenType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from kvkeep.errors import ModelError
from kvkeep.models.embedded import EMBEDDED, gguf_path
from kvkeep.models.gguf_reader import open_gguf, parsed_once

CONTROL, USER = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), ("<think>",)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
TEXTS = (
    "The house counts its shelves before it counts 1234567 books.\n\n  Don't   WE'LL\t\r\n",
    "def fibonacci(n: int) -> int:\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)  # 3.14e-10\n",
    "Cafe\u0301 naïve — «Übung» Ελληνικά русский 日本語のテキスト العربية 👩‍👩‍👧 \u200b\ufeff\x00\x7f",
    "<|im_start|>user\n<think>Paris?<|im_end|><|im_start|> <|im_end",
    "",
)


@pytest.fixture(scope="module")
def byte_level_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The header of a Qwen2 model with a byte-level vocabulary, as llama.cpp's tools would write it."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [Path(__file__).read_text("utf-8"), *TEXTS]
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet))
    vocabulary = sorted(trained.get_vocab(), key=lambda token: trained.get_vocab()[token])
    path = tmp_path_factory.mktemp("header") / "bytes.gguf"
    writer = GGUFWriter(path, "qwen2")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*vocabulary, *CONTROL, *USER])
    kinds = [TokenType.NORMAL] * len(vocabulary) + [TokenType.CONTROL] * len(CONTROL)
    writer.add_token_types([*kinds, TokenType.USER_DEFINED])
    merges = json.loads(trained.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_array("test.numbers", [0.5, -2.0, 3.25])
    writer.add_eos_token_id(len(vocabulary) + 2)
    writer.add_pad_token_id(len(vocabulary))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    writer.add_tensor("token_embd.weight", numpy.zeros((8, 64), numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_fields_and_tensors_are_those_of_ggufs_reader(byte_level_gguf: Path, tiny_gguf: Path) -> None:
    for file in (byte_level_gguf, tiny_gguf):
        found, wanted = open_gguf(file), GGUFReader(file)
        assert list(found.fields) == list(wanted.fields)
        for name, field in wanted.fields.items():
            assert found.fields[name].contents() == field.contents(), name
            assert found.fields[name].types == field.types, name
        facts = [
            [(one.name, one.n_bytes, one.data_offset, *one.shape) for one in reader.tensors]
            for reader in (found, wanted)
        ]
        assert facts[0] == facts[1]


def tokenizers(file: Path) -> tuple[Any, Any]:
    """The tokenizer as kvkeep reads it, and as transformers does."""
    with parsed_once(file, open_gguf(file)):
        made = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    return made, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def check_same(made: Any, wanted: Any) -> None:
    """Vocabulary, merges, added tokens, pre-tokenizer and decoder, and what they do."""
    assert type(made) is type(wanted)
    assert made.backend_tokenizer.to_str() == wanted.backend_tokenizer.to_str()
    assert made.special_tokens_map == wanted.special_tokens_map and made.chat_template == wanted.chat_template
    for text in TEXTS:
        ids = made(text).input_ids
        assert ids == wanted(text).input_ids and made.decode(ids) == wanted.decode(ids)


def test_the_tokenizer_is_transformers_own(byte_level_gguf: Path, tiny_gguf: Path) -> None:
    for file in (byte_level_gguf, tiny_gguf):
        check_same(*tokenizers(file))
    made, _ = tokenizers(byte_level_gguf)
    assert len(made(TEXTS[3]).input_ids) < len(TEXTS[3]) / 2, "merges and special tokens are used"
    shown = made.apply_chat_template([{"role": "user", "content": "Paris?"}], tokenize=False)
    assert shown == "<|im_start|>user\nParis?<|im_end|>\n"


@pytest.mark.real
def test_a_vocabulary_of_152_000_is_read_within_seconds_and_is_transformers_own() -> None:
    """On the real file, if it is there. transformers alone takes a minute."""
    file = gguf_path(EMBEDDED["qwen2.5-coder-0.5b"])
    if not file.is_file():
        pytest.skip("qwen2.5-coder-0.5b was not fetched")
    start = process_time()
    with parsed_once(file, open_gguf(file)):
        made = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert process_time() - start < 10
    check_same(made, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name))
    assert len(made) == 151_936 and made.decode(made("fibonacci").input_ids) == "fibonacci"


@pytest.mark.parametrize("keep", [40, 400, 4_000, 9_000])
def test_a_header_that_is_cut_short_is_refused(byte_level_gguf: Path, tmp_path: Path, keep: int) -> None:
    (tmp_path / "cut.gguf").write_bytes(byte_level_gguf.read_bytes()[:keep])
    with pytest.raises(
        ModelError, match=r"is cut short: it has [\d,]+ bytes and needs at least [\d,]+; fetch it again"
    ):
        open_gguf(tmp_path / "cut.gguf")
