"""The records of llama.cpp belong to the texts and models that tools/oracle makes today."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from oracle_files import RECORDS, unpacked

TOOL = Path(__file__).parents[1] / "tools" / "oracle"


@pytest.fixture(autouse=True)
def tool_modules() -> Iterator[None]:
    """Modules of the tool can be imported, for one test."""
    names = {path.stem for path in TOOL.glob("*.py")}
    sys.path.insert(0, str(TOOL))
    yield
    sys.path.remove(str(TOOL))
    for name in names & set(sys.modules) - {"__main__"}:
        del sys.modules[name]


def test_texts_are_the_same_whenever_they_are_made() -> None:
    import corpus

    assert corpus.texts() == json.loads((RECORDS / "texts.json").read_text("utf-8"))


def test_vocabularies_are_the_same_whenever_they_are_trained() -> None:
    import corpus
    import vocabularies

    texts = corpus.texts()
    made = [vocabularies.byte_level(texts), vocabularies.sentencepiece(texts), vocabularies.spaces_escaped(texts)]
    assert made == list(json.loads((RECORDS / "vocabularies.json").read_text("utf-8")).values())


def test_every_model_and_end_is_recorded() -> None:
    import architectures
    import making
    import vocabularies

    index = json.loads((RECORDS / "models.json").read_text("utf-8"))
    assert list(index["models"]) == list(architectures.ARCHITECTURES) and index["ids"] == making.token_ids()
    for name, facts in index["models"].items():
        files = [RECORDS / f"{name}.{end}.xz" for end in ("gguf", "logprobs")]
        assert [file.is_file() for file in files] == ["float32" in facts] * 2, name
    assert list(unpacked("ids-tiny.json.xz")["ends"]) == list(vocabularies.ENDS)


def test_pre_tokenizers_are_read_from_the_source_of_llama_cpp(tmp_path: Path) -> None:
    import vocabularies

    (tmp_path / "src").mkdir()
    source = 'if (tokenizer_pre == "one") {\n} else if (\n  tokenizer_pre == "two" ||\n  tokenizer_pre == "one") {'
    (tmp_path / "src" / "llama-vocab.cpp").write_text(source)
    assert vocabularies.pre_tokenizers_of(tmp_path) == ["one", "two"]
