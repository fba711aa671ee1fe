from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import tokenizer
from families import tiny
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


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_generate_samples_by_settings_in_place_of_the_models(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny("llama"), [*range(3, 20)]
    settings = {"top_k": 4, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5}

    def written_by(given: dict[str, float]) -> list[int]:
        cache = kvkeep.KeepCache(model, "full")
        how = {"max_new_tokens": 12, "temperature": temperature, "seed": 5}
        return list(kvkeep.generate(model, tokenizer(), ids, cache, settings=given, **how).tokens)  # type: ignore[arg-type]

    plain, found = written_by({}), written_by(settings)
    for name, value in settings.items():
        monkeypatch.setattr(model.generation_config, name, value)
    assert found == written_by({}) != plain
    assert written_by({"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}) != found
