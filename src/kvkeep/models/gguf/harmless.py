"""Keys of GGUF files that change no answer, and why. A key that is neither read nor listed here gets a file refused."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvkeep.errors import UnsupportedModelError
from kvkeep.models.gguf.keys import FileKeys

HARMLESS: Mapping[str, str] = {
    r"general\.(type|quantization_version|alignment|file_type)": "about the file; each tensor states its own format",
    r"general\.(name|author|version|organization|finetune|basename|description|quantized_by|size_label|url|doi|uuid)":
        "who made the model",
    r"general\.(repo_url|tags|languages|datasets|license(\.\w+)*|source\.\w+)": "who made the model, and its licence",
    r"general\.(base_model|dataset)\.(count|\d+\.\w+)": "what the model was made of",
    r"general\.sampling\.\w+": "recommended sampling; an answer is sampled as its request says",
    r"split\.(no|count|tensors\.count)": "the parts of a file; they are checked when they are joined",
    r"(quantize\.)?imatrix\.\w+": "how the file was quantised",
    r"ARCH\.rope\.scaling\.finetuned": "how the model was trained; Granite reads it",
    r"ARCH\.pooling_type": "embeddings of texts, which kvkeep does not compute",
    r"tokenizer\.ggml\.(fim_(pre|suf|mid|pad|rep|sep)|prefix|suffix|middle)_token_id":
        "marks of texts to be filled in, which a prompt names itself",
    r"tokenizer\.ggml\.(mask|seperator|cls)_token_id": "tokens of encoders",
    r"tokenizer\.ggml\.token_type_count": "segments of encoders",
    r"tokenizer\.ggml\.(scores|merges|pre|add_space_prefix|add_sep_token|remove_extra_whitespaces|precompiled_charsmap|normalizer\.\w+)":
        "a rule of another kind of tokenizer than the file's, which reads those of its own",
    r"tokenizer\.huggingface\.json": "the tokenizer once more; the other keys are read, as llama.cpp does",
}  # fmt: skip
"""Patterns of harmless keys, and the reason. ARCH stands for the architecture's name."""
OURS = ("general", "tokenizer", "split", "adapter", "clip", "diffusion", "xielu", "imatrix")
"""Names before the first point of keys that describe models. Other programs' notes have others, which nothing reads."""


def check_read(keys: FileKeys, architecture: str, prefixes: tuple[str, ...] = OURS) -> None:
    """Raise UnsupportedModelError for a key that was not read and that is not harmless. prefixes: names before the
    first point of the keys that are checked, besides the architecture's."""
    for key in keys.unread:
        if key.split(".")[0] in (architecture, *prefixes) and reason(key, architecture) is None:
            raise UnsupportedModelError(
                f"'{keys.file}' states {key[:80]} = {keys.shown(key)}, which kvkeep does not know in the architecture "
                f"'{architecture}'; without it the model would give other answers."
            )


def reason(key: str, architecture: str) -> str | None:
    """Return why ``key`` changes no answer; None if it may change some."""
    if key.split(".")[0] not in (architecture, *OURS):
        return "a note of another program"
    for pattern, why in HARMLESS.items():
        if re.fullmatch(pattern.replace("ARCH", re.escape(architecture)), key):
            return why
    return None
