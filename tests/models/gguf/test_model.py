"""Every key and tensor of a file is honoured, or harmless, or the file is refused with a sentence that names it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import Keys as GgufKeys
from gguf_files import HIDDEN, written

from kvkeep.errors import KvkeepError, ModelError, UnsupportedModelError
from kvkeep.models.gguf.architectures import ARCHITECTURES
from kvkeep.models.gguf.explain import explain
from kvkeep.models.gguf.facts import reason
from kvkeep.models.gguf.model import read_model
from kvkeep.models.loading import load

ONES = np.ones(HIDDEN, np.float32)
VALUES: tuple[Any, ...] = (3, 0.25, True, "odd", [1, 2], ["a"])


def keys_of_gguf(kind: type = GgufKeys) -> Iterator[str]:
    """Every key that the package gguf knows, in an architecture called llama."""
    for name, value in vars(kind).items():
        if isinstance(value, type):
            yield from keys_of_gguf(value)
        elif not name.startswith("__"):
            yield value.format(arch="llama", id=0, name="tool_use", dense="dense_2")


@pytest.mark.parametrize("key", sorted(set(keys_of_gguf())))
def test_every_key_is_read_or_harmless_or_refused_by_name(key: str, tmp_path: Path) -> None:
    """Whatever the type of its value."""
    outcomes = set()
    for number, value in enumerate(VALUES):
        file = written(tmp_path / f"{number}.gguf", keys={key: value})
        try:
            model = read_model(file)
            assert model.tokenizer is not None
        except KvkeepError as error:
            sentence = str(error)
            assert key in sentence or key.removeprefix("llama.") in sentence or _about(key) in sentence, sentence
            outcomes.add("refused")
            continue
        keys = model.facts.keys
        assert key in keys.read or reason(key, "llama"), "the file is loaded without a thought for the key"
        outcomes.add("read" if key in keys.read else "harmless")
    assert outcomes


def _about(key: str) -> str:
    """What a sentence names where it does not name the key."""
    abouts = {
        "general.architecture": "architecture", "general.type": "type", "general.alignment": "alignment",
        "split.no": "part", "split.count": "part", "llama.block_count": "layers", "llama.vocab_size": "tokens",
        "tokenizer.ggml.tokens": "vocabulary", "tokenizer.ggml.token_type": "types of",
        "tokenizer.ggml.merges": "merge 1",
        "tokenizer.ggml.model": "tokenizer of a kind", "tokenizer.ggml.pre": "pre-tokenizer",
        "llama.rope.scaling.type": "scales its positions", "llama.expert_count": "expert",
        "llama.attention.key_length": "dimension_count", "llama.attention.head_count": "heads",
    }  # fmt: skip
    return abouts.get(key, key)


@pytest.mark.parametrize(
    "key",
    ["llama.attention.sliding_window", "llama.logit_scale", "llama.attention.scale", "llama.expert_gating_func",
     "llama.nextn_predict_layers", "tokenizer.ggml.invented"],
)  # fmt: skip
def test_a_key_that_could_change_answers_is_refused(key: str, tmp_path: Path) -> None:
    file = written(tmp_path / "odd.gguf", keys={key: 3})
    with pytest.raises(
        UnsupportedModelError, match=rf"states {key} = 3, which kvkeep does not know in the architecture"
    ):
        load(file, device="cpu")


@pytest.mark.parametrize(
    "name", ["blk.0.ssm_a", "blk.0.attn_q_norm.weight", "odd.weight", "blk.0.attn_q.scale", "blk.1.attn_norm.weight"]
)
def test_a_tensor_without_a_place_is_refused_by_name(name: str, tmp_path: Path) -> None:
    file = written(tmp_path / "odd.gguf", tensors={name: ONES})
    with pytest.raises(ModelError, match="has the tensor|layers and has the tensors of 2") as caught:
        load(file, device="cpu")
    assert name in str(caught.value) or "layers" in str(caught.value)


def test_two_tensors_for_one_weight_are_refused_by_name(tmp_path: Path) -> None:
    """Otherwise one of them would be left out."""
    file = written(tmp_path / "both.gguf", architecture="seed_oss", tensors={"blk.0.post_attention_norm.weight": ONES})
    with pytest.raises(
        UnsupportedModelError, match=r"has 2 tensors .*ffn_norm.weight.*post_attention_norm.*makes it of 1"
    ):
        explain(file)


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "output_norm.weight", "token_embd.weight"])
def test_a_missing_tensor_is_refused(name: str, tmp_path: Path) -> None:
    written(tmp_path / "lacks.gguf", without=[name])
    with pytest.raises(ModelError, match="lacks model|has 0 rows|and its embedding 0 rows"):
        load(tmp_path / "lacks.gguf", device="cpu")


def test_an_unknown_architecture_is_named_before_anything_else(tmp_path: Path) -> None:
    file = written(tmp_path / "new.gguf", architecture="megaformer", without=["megaformer.block_count"])
    with pytest.raises(
        UnsupportedModelError, match=r"has the architecture 'megaformer'; kvkeep reads GGUF files of llama,"
    ):
        load(file, device="cpu")


def test_a_vocabulary_of_another_size_than_the_embedding_is_refused(tmp_path: Path) -> None:
    rows = np.zeros((40, HIDDEN), np.float32)
    written(tmp_path / "padded.gguf", tensors={"token_embd.weight": rows}, keys={"llama.vocab_size": 40})
    with pytest.raises(ModelError, match="its vocabulary has 32 tokens, and its embedding 40 rows"):
        load(tmp_path / "padded.gguf", device="cpu")


@pytest.mark.parametrize(
    "key", ["block_count", "embedding_length", "attention.key_length", "rope.dimension_count", "expert_count"]
)
def test_absurd_sizes_are_refused_before_anything_is_allocated(key: str, tmp_path: Path) -> None:
    file = written(tmp_path / "absurd.gguf", keys={f"llama.{key}": 2**31})
    with pytest.raises(ModelError, match="is damaged"):
        read_model(file)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.pre", "odd\nname"),
        ("tokenizer.ggml.model", "odd\u2028name\x00"),
        ("llama.tensor_data_layout", "odd\nname"),
        ("tokenizer.chat_template", "{% include 'odd\\nname' %}"),
        ("tokenizer.chat_template", "{% odd\nname %}"),
        ("tokenizer.chat_template", "{{ 'odd' \x1b[31m }}"),
    ],
)
def test_a_text_of_the_file_breaks_no_sentence(key: str, value: str, tmp_path: Path) -> None:
    file = written(tmp_path / "odd.gguf", keys={key: value})
    with pytest.raises(ModelError) as caught:
        load(file, device="cpu")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("used", [0, 9])
def test_experts_are_used_as_many_as_there_are(used: int, tmp_path: Path) -> None:
    file = written(tmp_path / "odd.gguf", keys={"llama.expert_count": 8, "llama.expert_used_count": used})
    with pytest.raises(ModelError, match=f"it states 8 experts, of which {used} are used"):
        load(file, device="cpu")


def test_the_names_of_architectures_are_llama_cpps() -> None:
    from gguf.constants import MODEL_ARCH_NAMES

    assert set(ARCHITECTURES) <= set(MODEL_ARCH_NAMES.values())


def test_the_documentation_lists_the_architectures() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text("utf-8")
    assert [name for name in ARCHITECTURES if f"\n| `{name}` |" not in page] == []
