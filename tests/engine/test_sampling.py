from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tokenizer
from families import tiny
from gguf_files import written
from transformers.generation import GenerationConfig

import kvkeep
from kvkeep.engine.sampling import LLAMA_SERVER, NotNumbers, Sampling, default_sampling
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


SETTINGS = [
    {"top_k": 40, "top_p": 0.9, "min_p": 0.05}, {"top_k": 3}, {"top_k": 900, "top_p": 0.5}, {"top_p": 0.7}, {},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_likeliest_tokens_have_the_scores_that_all_processors_give_a_vocabulary(settings: dict[str, Any]) -> None:
    """Logits of bfloat16 are often equal, and a form of the answer leaves few of them."""
    generator = torch.Generator().manual_seed(7)
    for left in (600, 25, 1):
        sampler, ids = (
            Sampling(temperature=0.7, seed=1, **settings).sampler(1, torch.device("cpu")),
            torch.tensor([[1]]),
        )
        noise = torch.Generator().manual_seed(1)
        for _ in range(30):
            logits = (4 * torch.randn(1, 600, generator=generator)).bfloat16()
            logits[0, torch.randperm(600, generator=generator)[left:]] = float("-inf")
            wanted = sampler.processors(ids, logits.float()).softmax(-1) / torch.empty(1, 600).exponential_(
                1, generator=noise
            )
            found = sampler.scores(ids, logits)
            torch.testing.assert_close(found, wanted)
            assert int(found.argmax()) == int(wanted.argmax())


@pytest.mark.parametrize("settings", [{"top_k": 5, "min_p": 0.1}, {"top_p": 0.5}, {}], ids=str)
def test_logits_that_are_not_numbers_are_an_error(settings: dict[str, Any]) -> None:
    logits = torch.zeros(1, 50)
    logits[0, 7] = float("nan")
    with pytest.raises(NotNumbers):
        Sampling(temperature=1.0, seed=1, **settings).sampler(1, torch.device("cpu")).scores(
            torch.tensor([[1]]), logits
        )


def test_noise_without_a_callers_seed_samples_by_probability() -> None:
    sampler = replace(Sampling(temperature=1.0, seed=3).sampler(1, torch.device("cpu")), seeded=False)
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05])
    drawn = [int(sampler.scores(torch.tensor([[1]]), chances.log()[None]).argmax()) for _ in range(4000)]
    found = torch.bincount(torch.tensor(drawn), minlength=4) / 4000
    assert ((found - chances).abs() < 4 * (chances * (1 - chances) / 4000).sqrt()).all()
