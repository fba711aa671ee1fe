"""Record token ids: what llama.cpp makes of the corpus with real files and with tiny vocabularies."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from typing import Any

import corpus
import vocabularies
from environment import Environment

from kvkeep.errors import ModelError

TESTS = Path(__file__).parents[2] / "tests"
sys.path.insert(0, str(TESTS))  # the writer of the tests, so that they read the same files
from oracle_files import WHOLE, ids_of, tokenizer_from, write_vocabulary  # noqa: E402


def record_texts(out: Path) -> None:
    """Write the corpus, a text a line."""
    lines = ",\n".join(json.dumps(text) for text in corpus.texts())
    (out / "texts.json").write_text(f"[\n{lines}\n]\n")


def record_real(environment: Environment, files: dict[str, Path], out: Path) -> None:
    """Write the ids of all texts with each model's own file."""
    texts = corpus.texts()
    for name, file in files.items():
        said = _asked(environment, [file], texts)[0]
        _write(out / f"ids-{name}.json.xz", said)
        print(f"{name}: {sum(map(len, said['data']))} ids, ends {said['ends']}")


def record_tiny(environment: Environment, work: Path, out: Path) -> None:
    """Write the tiny vocabularies, their files, and the ids of all texts with each."""
    texts = corpus.texts()
    trained = {
        "bytes": vocabularies.byte_level(texts),
        "pieces": vocabularies.sentencepiece(texts),
        "escaped": vocabularies.spaces_escaped(texts),
    }
    files = vocabularies.files(vocabularies.pre_tokenizers_of(environment.sources))
    paths = [work / f"{at}.gguf" for at in range(len(files))]
    for path, file in zip(paths, files.values(), strict=True):
        write_vocabulary(path, trained[file["vocabulary"]], file["model"], file["keys"])
    said = _asked(environment, paths, texts, back=True)
    found: dict[str, dict[str, Any]] = {}
    for (name, file), one in zip(files.items(), said, strict=True):
        alike = [other for other in found.values() if other["said"] == one and _alike(other["file"], file)]
        if alike:
            alike[0]["names"].append(file["keys"]["pre"])
        else:
            found[name] = {"file": file, "names": [file["keys"].get("pre")], "said": one}
    ends = _ends(environment, work)
    (out / "vocabularies.json").write_text(json.dumps(trained).replace('], "', '],\n"') + "\n")
    _write(out / "ids-tiny.json.xz", {"files": found, "ends": ends})
    print(f"{len(files)} files, of which {len(found)} differ; {len(ends)} files for ends")


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two files differ only in the name of their pre-tokenizer."""
    given = [file["keys"] for file in (one, other)]
    kinds = [
        (file["vocabulary"], file["model"], keys | {"pre": ""}) for file, keys in zip((one, other), given, strict=True)
    ]
    return all("pre" in keys for keys in given) and kinds[0] == kinds[1]


def _ends(environment: Environment, work: Path) -> dict[str, Any]:
    """Files by name, each with what it has and which ids end an answer."""
    files = vocabularies.end_files()
    for name, file in files.items():
        write_vocabulary(work / f"end-{name}.gguf", file["own"], "gpt2", file["keys"])
    said = environment.ask({"vocabulary": str(work / f"end-{name}.gguf")} for name in files)
    return {name: file | {"said": one} for (name, file), one in zip(files.items(), said, strict=True)}


def _asked(environment: Environment, paths: list[Path], texts: list[str], back: bool = False) -> list[dict[str, Any]]:
    """For each file: ``data``, the ids of each text as data; ``special``, those of texts in which names of special
    tokens are these tokens, by index, if they differ; ``whole``, those of ``WHOLE``, with what begins and ends a text;
    and what the file says of its vocabulary."""
    asked: list[dict[str, Any]] = []
    for path in paths:
        given: dict[str, Any] = {"tokenize": str(path), "texts": texts, "add": False}
        asked.append(given | {"special": False, "detokenize": back})
        asked.append(given | {"special": True})
        asked.append(given | {"special": True, "add": True, "texts": WHOLE})
        asked.append({"vocabulary": str(path)})
    answers = iter(environment.ask(asked))
    found = []
    for path in paths:
        data, special, whole, said = (next(answers) for _ in range(4))
        if "error" in data:
            found.append({"error": data["error"]})
            print(path, data["error"])
            continue
        differ = {at: ids for at, ids in enumerate(special["ids"]) if ids != data["ids"][at]}
        backs = {"back": data["back"]} if back else {}
        found.append({"data": data["ids"], "special": differ, "whole": whole["ids"], **said, **backs})
    return found


def _write(path: Path, what: Any) -> None:
    path.write_bytes(lzma.compress(json.dumps(what, separators=(",", ":")).encode(), preset=9 | lzma.PRESET_EXTREME))


def compare(environment: Environment, file: Path) -> None:
    """Print how many texts have the same ids in kvkeep and llama.cpp, and the first that have not."""
    texts = corpus.texts()
    said = _asked(environment, [file], texts)[0]
    if "error" in said:
        return
    try:
        tokenizer = tokenizer_from(file)
    except ModelError as error:
        print(f"{file.name}: {error}")
        return
    data, special = (ids_of(tokenizer, texts, special=special) for special in (False, True))
    cases = [(at, data[at], ids) for at, ids in enumerate(said["data"])]
    cases += [(at, special[at], ids) for at, ids in said["special"].items()]
    wrong = [case for case in cases if case[1] != case[2]]
    print(f"{file.name}: {len(cases) - len(wrong)} of {len(cases)} are equal")
    for at, ids, wanted in wrong[:5]:
        print(f"  {texts[at]!r}: {ids}, llama.cpp {wanted}")
