"""GGUF files mean what they mean to llama.cpp: its token ids, its ends and its log-probabilities were recorded.

``tools/oracle`` makes the records. The models were written by transformers and converted by llama.cpp's converter.
"""

from __future__ import annotations

import base64
import json
import lzma
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from oracle_files import RECORDS, WHOLE, ends_from, ids_of, tokenizer_from, unpacked, write_vocabulary

import kvkeep
from kvkeep.errors import UnsupportedModelError
from kvkeep.models.embedded import EMBEDDED, gguf_path
from kvkeep.models.gguf.architectures import ARCHITECTURES
from kvkeep.models.gguf.header import read_header

TEXTS: list[str] = json.loads((RECORDS / "texts.json").read_text("utf-8"))
VOCABULARIES: dict[str, Any] = json.loads((RECORDS / "vocabularies.json").read_text("utf-8"))
TINY: dict[str, Any] = unpacked("ids-tiny.json.xz")
FILES: dict[str, Any] = {
    name: one for name, one in TINY["files"].items() if "error" not in one["said"] and "phi-3" not in name
}
"""Files of tiny vocabularies; files of one kind of pre-tokenizer are listed once, with all its names."""
MODELS: dict[str, Any] = json.loads((RECORDS / "models.json").read_text("utf-8"))
LIKELIHOODS: dict[str, Any] = json.loads((RECORDS / "likelihoods.json").read_text("utf-8"))
LIKELIHOOD = 3e-5
"""Log-likelihoods differ by so much, relatively: 6e-8 with SmolLM2, 8e-6 with Gemma 3 and its GELU."""
SOUND = {name: facts for name, facts in MODELS["models"].items() if "float32" in facts}
REFUSED = {name for name, facts in SOUND.items() if "why" in facts}
"""Models for which llama.cpp computes what transformers does not."""
OTHER_LAYOUTS = {"falcon-new": "has the tensor blk.0.attn_norm_2"}
"""Models of an architecture that kvkeep reads in another form, and what the refusal names."""
ROUNDING = 1e-4
"""Log-probabilities in float32 may differ by so much more than those of transformers differ from those of llama.cpp,
which looks up GELU in a table of float16."""


def check_ids(tokenizer: Any, said: dict[str, Any]) -> None:
    """All texts as data, with special tokens, and with what begins and ends a text."""
    for found, wanted, text in zip(ids_of(tokenizer, TEXTS), said["data"], TEXTS, strict=True):
        assert found == wanted, text
    differ = {int(at): ids for at, ids in said["special"].items()}
    for found, at in zip(ids_of(tokenizer, [TEXTS[at] for at in differ], special=True), differ, strict=True):
        assert found == differ[at], TEXTS[at]
    assert ids_of(tokenizer, WHOLE, special=True, add=True) == said["whole"]


def written(path: Path, file: dict[str, Any], **more: Any) -> Path:
    write_vocabulary(path, VOCABULARIES[file["vocabulary"]], file["model"], file["keys"] | more)
    return path


@pytest.mark.turns(8)
@pytest.mark.parametrize(("name", "pre"), [(name, pre) for name in FILES for pre in FILES[name]["names"]])
def test_ids_are_those_of_llama_cpp(name: str, pre: str | None, tmp_path: Path) -> None:
    """With every name of a pre-tokenizer that llama.cpp knows."""
    path = written(tmp_path / "tiny.gguf", FILES[name]["file"], **({"pre": pre} if pre else {}))
    check_ids(tokenizer_from(path), FILES[name]["said"])


@pytest.mark.parametrize("name", FILES)
def test_text_comes_back_where_it_does_in_llama_cpp(name: str, tmp_path: Path) -> None:
    """Where it does not, llama.cpp takes out spaces before punctuation, which it leaves while it generates."""
    said = FILES[name]["said"]
    tokenizer = tokenizer_from(written(tmp_path / "tiny.gguf", FILES[name]["file"]))
    whole = [base64.b64decode(back) == text.encode() for back, text in zip(said["back"], TEXTS, strict=True)]
    assert sum(whole) > len(TEXTS) / 2
    for ids, text, is_whole in zip(said["data"], TEXTS, whole, strict=True):
        assert not is_whole or tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["bytes:phi-3", "spm:phi-3"])
def test_special_tokens_of_white_space_are_refused_where_white_space_is_dropped(name: str, tmp_path: Path) -> None:
    """They are in these files, unlike in those of Phi-3."""
    with pytest.raises(UnsupportedModelError, match="white space after a special token is dropped"):
        tokenizer_from(written(tmp_path / "tiny.gguf", TINY["files"][name]["file"]))


@pytest.mark.parametrize("name", TINY["ends"])
def test_tokens_that_end_an_answer_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    one = TINY["ends"][name]
    write_vocabulary(tmp_path / "tiny.gguf", one["own"], "gpt2", one["keys"])
    assert ends_from(tmp_path / "tiny.gguf") == one["said"]["ends"]


@pytest.mark.turns(4)
@pytest.mark.real
@pytest.mark.parametrize("name", EMBEDDED)
def test_ids_of_embedded_models_are_those_of_llama_cpp(name: str) -> None:
    file = gguf_path(EMBEDDED[name])
    if not file.is_file():
        pytest.skip(f"{name} was not fetched")
    said = unpacked(f"ids-{name}.json.xz")
    check_ids(tokenizer_from(file), said)
    assert ends_from(file) == said["ends"]


@pytest.mark.turns(4)
@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_likelihood_of_a_text_is_that_of_llama_cpp(name: str) -> None:
    """With a real file, whose weights are unpacked to float32, because products of packed weights round."""
    file, one = gguf_path(EMBEDDED[name]), LIKELIHOODS[name]
    if not file.is_file():
        pytest.skip(f"{name} was not fetched")
    model = kvkeep.load(file, weights="float32", device="cpu").model
    with torch.no_grad():
        logits = model(torch.tensor([one["ids"]]), use_cache=False).logits[0, one["first"] - 1 : -1]
    wanted = torch.tensor(one["ids"][one["first"] :])
    found = float(torch.nn.functional.cross_entropy(logits.double(), wanted, reduction="sum"))
    assert found == pytest.approx(one["nll"], rel=LIKELIHOOD)


def unpacked_model(name: str, folder: Path) -> Path:
    path = folder / f"{name}.gguf"
    path.write_bytes(lzma.decompress((RECORDS / f"{name}.gguf.xz").read_bytes()))
    return path


def recorded(name: str) -> torch.Tensor:
    """Log-probabilities of llama.cpp, (positions, vocabulary)."""
    units = numpy.frombuffer(lzma.decompress((RECORDS / f"{name}.logprobs.xz").read_bytes()), "<i4")
    return torch.from_numpy(units * MODELS["step"]).view(len(MODELS["ids"]), -1)


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", [name for name in SOUND if name not in REFUSED])
def test_log_probabilities_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    """Of a model of each architecture that kvkeep reads; others are refused by name."""
    file = unpacked_model(name, tmp_path)
    architecture = read_header(file).metadata["general.architecture"]
    if architecture not in ARCHITECTURES or name in OTHER_LAYOUTS:
        with pytest.raises(
            UnsupportedModelError, match=OTHER_LAYOUTS.get(name, f"has the architecture '{architecture}'")
        ):
            kvkeep.load(file, device="cpu")
        return
    loaded = kvkeep.load(file, weights="float32", device="cpu")
    with torch.no_grad():
        logits = loaded.model(torch.tensor([MODELS["ids"]]), use_cache=False).logits[0]
    apart = (logits.double().log_softmax(-1) - recorded(name)).abs().max()
    assert apart < SOUND[name]["float32"] + ROUNDING


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_models_that_kvkeep_does_not_read_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError):
        kvkeep.load(unpacked_model(name, tmp_path))
