"""``kvkeep plan`` and ``--budget auto`` as a person and a program meet them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvkeep import KeepCache
from kvkeep.models.loading import load

Run = Callable[..., tuple[int, str, str]]
LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
"""The shape of Llama 3.1 8B."""


@pytest.fixture
def large(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    return str(tmp_path / "config.json")


def test_a_large_model_is_planned_from_its_config(run: Run, large: str) -> None:
    code, out, err = run("plan", "-m", large, "-n", "32768", "-b", "4096", "--memory", "20GB", "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert answer["weight_bytes"] == pytest.approx(16.06e9, rel=0.01)
    full, direct = answer["rows"][:2]
    assert (full["method"], direct["method"]) == ("full", "kv-direct") and full["fitting"] == 4
    assert full["resident_bytes"] == 32768 * 131072 and direct["checkpoint_bytes"]["disk"] == (32768 - 4096) * 131072
    assert answer["auto"]["options"] == {"method": "full"}
    answer = json.loads(run("plan", "-m", large, "-n", "32768", "--memory", "2GB", "--json")[1])
    assert answer["rows"][0]["method"] == answer["auto"]["options"]["method"] == "kv-direct"
    assert "No exact cache" in json.loads(run("plan", "-m", large, "--memory", "1KB", "--json")[1])["auto"]["reason"]


def test_a_table_says_what_fits_and_what_is_exact(run: Run, model_folder: Path) -> None:
    common = ("plan", "-m", str(model_folder), "-n", "500", "-c", "kv", "--memory")
    code, out, err = run(*common, "100KB")
    assert code == 0, err
    heading, first, *_ = out.splitlines()
    assert "fit in 100.0 KB" in heading and first.split()[:2] == ["kv-direct", "exact"]
    assert any(line.split()[:2] == ["h2o", "lossy"] for line in out.splitlines())
    assert any(line.split()[:2] == ["full", "exact"] and line.split()[-1] == "no" for line in out.splitlines())
    assert "With --budget auto: 'kv-direct' is used with" in out and "kvkeep compare" in out and "weights take" in err
    assert run(*common, "1GB")[1].splitlines()[1].split()[:2] == ["full", "exact"]


def test_chosen_methods_and_checkpoints_are_planned_and_the_rest_is_left_out(run: Run, model_folder: Path) -> None:
    common = ("plan", "-m", str(model_folder), "-n", "400", "-b", "100", "--json", "-x")
    code, out, err = run(*common, "kv-direct,h2o+quantize:4,kvzip", "-c", "residual", "-w", "host")
    assert code == 0, err
    answer = json.loads(out)
    assert [row["method"] for row in answer["rows"]] == ["kv-direct", "h2o+quantize:4"] and [*answer["left_out"]] == [
        "kvzip"
    ]
    cache = KeepCache(load(model_folder).model, "kv-direct", 100, checkpoint="residual", where="host", context=400)
    row = answer["rows"][0]
    assert cache.spec is not None and (row["checkpoint"], row["where"]) == (str(cache.spec), cache.spec.where)
    assert row["checkpoint_bytes"]["host"] > 0 and row["budget"] == cache.entries == 100


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("-m", "smolm2"), "did you mean smollm2"),
        (("-n", "200000"), "131,072 positions"),
        (("--memory", "25%"), "give bytes"),
        (("-x", "h3o"), "h2o"),
        (("-x", "h2o+nothing"), "Unknown fate"),
        (("--where", "moon"), "Unknown place"),
        (("--weights", "float31"), "Unknown weight format"),
    ],
)
def test_bad_input_is_one_sentence(run: Run, large: str, arguments: tuple[str, ...], sentence: str) -> None:
    code, out, err = run("plan", "-m", large, *arguments)
    assert code in (1, 2) and out == "" and err.strip().count("\n") == 0
    assert err.startswith("kvkeep: ") and sentence in err


def test_a_budget_of_auto(run: Run, model_folder: Path, words: str) -> None:
    common = ("generate", "-m", str(model_folder), "-f", "-", "-n", "9", "--json")
    expected = json.loads(run(*common, "-x", "stock", stdin=words)[1])["tokens"]
    for memory, method in (("64KB", "kv-direct"), ("64MB", "full")):
        code, out, err = run(*common, "-b", "auto", "--memory", memory, stdin=words)
        assert code == 0, err
        assert json.loads(out)["method"] == method and json.loads(out)["tokens"] == expected
        assert f"'{method}' is used" in err
    code, out, err = run("chat", "-m", str(model_folder), "-b", "auto", "-n", "5", stdin="the of\n")
    assert code == 0 and out.strip() and "'full' is used" in err, err
    for extra, sentence in (
        (("-b", "auto", "-x", "h2o"), "leave --method out"),
        (("-b", "auto", "--capacity", "5"), "a capacity makes it lossy"),
        (("-b", "auto", "--chunk", "7"), "leave --chunk out"),
        (("-b", "auto", "--folder", "x"), "leave --folder out"),
        (("--memory", "64KB"), "--budget auto"),
        (("-b", "auto", "--memory", "much"), "give bytes"),
        (("-b", "auto", "--memory", "10B"), "'kv-direct' at least"),
    ):
        code, out, err = run("generate", "-m", str(model_folder), "-p", "the", *extra)
        assert code == 2 and sentence in err and out == ""
