"""Convert transformers folders by llama.cpp's own converter: a program of its own, whose path is llama.cpp's folder.

    python converting.py LLAMA_CPP < REQUEST

REQUEST: a JSON object, folder to GGUF file. The answer, one JSON object: GGUF file to what the converter said when it
failed, or null. The vocabulary alone is not as the converter would write it: every folder has the same tiny byte-level
one, which the converter would refuse because it does not know its hash.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch


def main() -> None:
    """Read a request from standard input and print the answer."""
    sys.path.insert(0, sys.argv[1])  # before its folder gguf-py, which the converter itself adds
    import convert_hf_to_gguf as converter

    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        answer = {out: _convert(converter, folder, out) for folder, out in asked.items()}
    print(json.dumps(answer))


def _convert(converter: Any, folder: str, out: str) -> str | None:
    given = ["convert_hf_to_gguf.py", folder, "--outfile", out, "--outtype", "f32"]
    find, read = converter.get_model_class, converter.ModelBase.load_hparams
    try:
        with (
            patch.object(sys, "argv", given),
            patch.object(converter, "get_model_class", lambda *args, **more: _own_vocabulary(find(*args, **more))),
            patch.object(
                converter.ModelBase, "load_hparams", lambda *args, **more: read(*args, **more) | _older(folder)
            ),
        ):
            converter.main()
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return None if Path(out).is_file() else "no file was written"


def _older(folder: str) -> dict[str, Any]:
    """What an older transformers would have written into the folder's config.json."""
    return json.loads((Path(folder) / "older.json").read_text())


def _own_vocabulary(kind: Any) -> Any:
    for one in (kind, *(own for own in vars(kind).values() if isinstance(own, type))):
        one.set_vocab = kind._set_vocab_gpt2
        one.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
        one.no_mtp = True  # the option --no-mtp, of models that may have such layers
    return kind


if __name__ == "__main__":
    main()
