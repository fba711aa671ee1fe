from pathlib import Path
from types import SimpleNamespace

import pytest
from gguf_files import written
from transformers.generation import GenerationConfig

import kvkeep
from kvkeep.engine.sampling import LLAMA_SERVER, Sampling, default_sampling
from kvkeep.errors import UsageError
from kvkeep.models.gguf.model import read_model


def stating(**fields: object) -> SimpleNamespace:
    """What counts of a model: its generation_config."""
    return SimpleNamespace(generation_config=GenerationConfig(**fields))


def test_a_models_sampling_comes_first_and_then_that_of_llama_server() -> None:
    assert default_sampling(stating()) == LLAMA_SERVER == Sampling(0.8, 0.95, 40, 0.05)
    found = default_sampling(stating(do_sample=True, temperature=0.7, top_k=20, repetition_penalty=1.1))
    assert found == Sampling(0.7, 0.95, 20, 0.05, repetition=1.1)
    with pytest.raises(UsageError, match="top_p"):
        default_sampling(SimpleNamespace(generation_config=SimpleNamespace(top_p=7.0)))


def test_a_gguf_files_recommendation_is_the_models_own(tmp_path: Path) -> None:
    names = {"temp": 0.5, "top_k": 7, "min_p": 0.0, "penalty_repeat": 1.25, "mirostat": 2}
    file = written(tmp_path / "advised.gguf", keys={f"general.sampling.{name}": one for name, one in names.items()})
    loaded = kvkeep.load(str(file))
    assert default_sampling(loaded.model) == Sampling(0.5, 0.95, 7, 0.0, repetition=1.25)
    assert read_model(written(tmp_path / "silent.gguf")).sampling == {}
