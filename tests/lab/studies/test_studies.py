"""Studies: results can be stored, printed and drawn, and are right where the answer is known."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import WORDS
from families import tiny
from kvkeep_lab.agent_day.records import Answered, DayRecords, Repeated
from kvkeep_lab.experiment import StudyExperiment, load_experiment, packaged
from kvkeep_lab.shapes import config_of, weights_of
from kvkeep_lab.studies import STUDIES
from kvkeep_lab.studies.agent_day import AgentDay
from kvkeep_lab.studies.base import Drawn, Study, Trial
from kvkeep_lab.studies.conversation_bytes import ConversationBytes, bytes_of, tokens_of
from kvkeep_lab.studies.decoding import Decoding
from kvkeep_lab.studies.drafting import Drafting
from kvkeep_lab.studies.passes import Passes
from kvkeep_lab.studies.rebuilt import Rebuilt, reconstruction
from kvkeep_lab.studies.sketch_error import NORMAL, SketchError
from kvkeep_lab.studies.throughput import Throughput
from kvkeep_lab.studies.token_bytes import TokenBytes
from kvkeep_lab.studies.window_recompute import BLIND, DIRECT, FULL, TURNED, UNSCALED, WindowRecompute
from kvkeep_lab.tables import Table, refusals
from kvkeep_lab.timing import NAIVE, TimingCase, run
from measuring import copying, loaded, measured
from official import hellaswag_text_rows, write_lines
from pydantic import ValidationError
from transformers import AutoConfig

from kvkeep.errors import KvkeepError
from kvkeep.geometry import ModelGeometry

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
PUBLISHED = {
    "smollm2-135m": "SmolLM2-135M-Instruct",
    "qwen2.5-0.5b": "Qwen2.5-0.5B-Instruct",
    "qwen3-0.6b": "Qwen3-0.6B",
    "r1-distill-qwen-1.5b": "DeepSeek-R1-Distill-Qwen-1.5B",
    "qwen2.5-1.5b": "Qwen2.5-1.5B-Instruct",
    "gemma3-4b": "gemma-3-4b-it",
    "gemma3-12b": "gemma-3-12b-it",
}


@cache
def study_experiments() -> list[StudyExperiment]:
    return [one for one in map(load_experiment, packaged()) if isinstance(one, StudyExperiment)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(". ".join(" ".join(WORDS[(7 * number) % len(WORDS)] for number in range(200)) for _ in range(5)))
    return path


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_lines(path, hellaswag_text_rows(" ".join(WORDS * 2), 6))
    return path


SMALL: dict[str, dict[str, Any]] = {
    "bounds": {"tokens": 100, "pages": [2, 8], "queries": 20},
    "rotation": {"tokens": 100, "queries": 4},
    "held-bytes": {"lengths": [96], "kinds": ["kv"]},
    "kept": {"tokens": 100, "budget": "32"},
    "verify": {"quick": True},
    "prove": {"prompts": 1, "lengths": [60], "new": 4, "budgets": ["20"]},
    "bench": {"contexts": [64], "budget": "32", "rounds": 1, "steps": 3, "only": ["full", "h2o"], "slow": False},
    "compare": {"limit": 60, "new": 4, "methods": ["full", "h2o"], "budgets": ["32"]},
    "stream": {"tokens": 300, "stretch": 100, "budget": "32"},
    "agent-day": {"start": 200, "requests": 11},
    "drafts": {"edits": 2, "rounds": 1, "new": 20},
    "passes": {"contexts": [40], "tokens": [1, 3], "budget": "32", "rounds": 1, "passes": 2},
}
"""Sizes of the studies that no experiment is packaged of."""


@pytest.fixture(scope="module")
def found(text: Path, rows: Path) -> Callable[[str], tuple[Study, Any]]:
    """What the smoke version of an experiment, or a small study, finds in the tiny model, measured once."""

    @cache
    def measure(name: str) -> tuple[Study, Any]:
        study = STUDIES[name].model_validate(SMALL[name]) if name in SMALL else load_experiment(name).smoked().subject
        assert isinstance(study, Study)
        shares: list[float] = []
        files = [rows if isinstance(study, WindowRecompute) else text]
        model = loaded()
        if isinstance(study, AgentDay):
            model = replace(model, model=tiny("llama", positions=4096))
            study = played(study, model.name, text.parent / "records")
        if isinstance(study, Drafting | Passes):
            model = copying(text.parent)
        result = study.measure(Trial(model, files, 0, lambda what, done, total: shares.append(done / total)))
        assert shares == sorted(shares) and all(0 <= share <= 1.01 for share in shares)
        return study, result

    return measure


def played(study: AgentDay, model: str, folder: Path) -> AgentDay:
    """A day that has records of all requests (tests/lab/agent_day plays one)."""
    records = DayRecords(folder / "kvkeep.jsonl")
    sizes = study.model_dump(include={"start", "requests", "seed"})
    records.begin(sizes | {"server": "kvkeep", "model": model})
    for number in range(study.requests):
        message = {"role": "assistant", "content": "the"}
        records.answered(Answered(number, "first", "text", message, None, 9, 3 + number % 3, 4, 1, 0.5, 1.0))
    records.repeated(Repeated(True, 9, 8, 0.5))
    return study.model_copy(update={"records": str(folder)})


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_every_study_describes_itself(study: type[Study]) -> None:
    names = [metric.name for metric in study.metrics]
    assert len(set(names)) == len(names) and set(study.certain) <= set(names)
    assert study.about and study.protocol.endswith(".") and is_dataclass(study.found)
    assert all(field.description for field in study.model_fields.values())
    packaged_of = any(type(one.study) is study for one in study_experiments())
    assert packaged_of == bool(study.metrics) == (study.name not in SMALL)


def test_unset_fields_are_not_part_of_an_experiment() -> None:
    """A new field then changes no stored result."""
    names = {name for study in STUDIES.values() for name, value in study.model_validate({}) if value is None}
    assert {"folder", "where", "kinds"} <= names
    for study in STUDIES.values():
        assert None not in study.model_validate({}).model_dump(mode="json").values()


@pytest.mark.parametrize("name", [*(one.name for one in study_experiments()), *SMALL])
def test_results_can_be_stored_printed_and_drawn(
    found: Callable[[str], tuple[Study, Any]], name: str, tmp_path: Path
) -> None:
    study, result = found(name)
    data = json.loads(json.dumps(study.plain(result)))
    again = study.restored(data)
    assert type(again) is type(result) and study.plain(again) == data
    scores = study.scores(again)
    assert bool(scores) == bool(study.metrics) and set(scores) <= {metric.name for metric in study.metrics}
    assert all(math.isfinite(value) for value in scores.values())
    for key, value in study.scores(result).items():
        assert scores[key] == pytest.approx(value, rel=1e-2, abs=1e-4)
    assert study.problem(again) is None and json.dumps(study.as_json(again))
    for table in (*study.details(again), *study.tables(again)):
        assert table.rows and all(len(row) == len(table.headings) for row in table.rows)
        lines = [line for line in table.markdown().splitlines() if line.startswith("|")]
        assert len({line.count(" | ") for line in lines}) == 1
    if isinstance(study, Drawn):
        pytest.importorskip("matplotlib")
        study.draw(again, tmp_path / "figure.png", title="tiny")
        assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_results_that_are_nan_are_refused() -> None:
    study = TokenBytes()
    found = measured(study)
    found.rows[0].checkpoints["kv"] = 1
    bad = type(found)([type(row)(**{**row.__dict__, "rho": math.nan}) for row in found.rows])
    with pytest.raises(KvkeepError, match="nan"):
        study.plain(bad)


def test_tables_are_printed_as_markdown() -> None:
    table = Table("T", ["a|b", "c"], [["1", "2"]], notes=["One.", "Two."])
    assert table.markdown() == "### T\n\n| a\\|b | c |\n| --- | ---: |\n| 1 | 2 |\n\nOne. Two."


def test_invalid_fields_are_refused() -> None:
    """By the types that studies share; the tests of commands have the other fields."""
    wrongs = {"bounds": {"share": 1.0}, "long-chat": {"methods": ["stock-static"]}, "recompute": {"counts": []}}
    for name, wrong in wrongs.items():
        with pytest.raises(ValidationError):
            STUDIES[name].model_validate(wrong)
    assert STUDIES["recompute"].model_validate({"counts": [9, 1, 9]}).model_dump()["counts"] == [1, 9]


# -- one by one -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_equal_those_of_the_published_configs(name: str) -> None:
    theirs = ModelGeometry.from_config(AutoConfig.from_pretrained(CONFIGS / f"{PUBLISHED[name]}.json"), 2)
    ours = ModelGeometry.from_config(config_of(name), 2)
    assert (ours.layers, ours.hidden_size) == (theirs.layers, theirs.hidden_size)


def test_conversation_bytes_of_12b_equal_those_computed_by_hand() -> None:
    study = ConversationBytes()
    found = measured(study)
    plain, _, _, windowed = found.rows
    assert plain.token_bytes == 48 * 2 * 8 * 256 * 2 and plain.tokens == pytest.approx(978e6 / plain.token_bytes)
    assert plain.beside_tokens == pytest.approx(103e6 / 139_264)
    assert plain.same_mb == pytest.approx(103 * plain.token_bytes / 139_264)
    assert plain.resident * plain.token_bytes + (plain.tokens - plain.resident) * 7680 == pytest.approx(150e6)
    assert plain.most == pytest.approx(150e6 / (48 * 7680))
    assert 40 * 8192 * 1024 + windowed.tokens * windowed.token_bytes == pytest.approx(978e6)
    assert windowed.beside_tokens == plain.beside_tokens  # the window is not reached
    assert weights_of("gemma3-12b") / 48 == 2 * 3840 * 24 * 256 + 3 * 3840 * 15360 + 4 * 3840 + 2 * 256
    scores = study.scores(found)
    assert scores["one"] == 1 and scores["each"] == pytest.approx(plain.most / plain.tokens)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("windowed", [False, True])
def test_tokens_of_bytes_inverts_bytes_of_tokens(name: str, windowed: bool) -> None:
    geometry = ModelGeometry.from_config(config_of(name), 2)
    for tokens in (1, 900, 1024, 1025, 5000):
        assert tokens_of(geometry, bytes_of(geometry, tokens, windowed), windowed) == pytest.approx(tokens)
    if windowed:
        found, full = bytes_of(geometry, 5000, windowed), 5000 * geometry.full_bytes_per_token
        spare = sum(layer.entry_elements * 63 for layer in geometry.sliding_layers) * geometry.dtype_bytes
        assert found == full + geometry.sliding_bytes(5000) - spare  # of the planned memory, 64 - 1 rows are spare


def test_token_bytes_equal_table_1_and_the_bytes_of_a_cache() -> None:
    study = TokenBytes()
    found = measured(study, "gemma3")
    rows = {row.model: row for row in found.rows}
    assert rows["smollm2-135m"].entries == 22.5 * 1024 and rows["gemma3-4b"].rho == pytest.approx(27.2)
    assert rows["gemma3-4b"].checkpoints["residual"] == 5 * 5 * 1024  # five full layers, 5 KB each
    windowless = measured(TokenBytes()).rows[0]
    assert windowless.held == windowless.entries
    (table,) = study.tables(found)
    assert any("22.5, 1.1, 20.0" in row for row in table.rows)


def test_rebuilding_is_checked_beyond_sliding_windows() -> None:
    study = Rebuilt(lengths=[16], dtypes=["float32"])
    found = measured(study, "gemma3")
    assert {row.kind for row in found.rows} == {"full", "sliding"} and found.windows is not None
    scores = study.scores(found)
    assert scores["keys"] == scores["values"] == scores["window"] == scores["entropy"] == 0
    assert len(study.tables(found)) == 2


def test_keys_depend_on_the_position_and_values_on_the_residual_only() -> None:
    """In the first layer a repeated token has the same residual, so Eq. 17 needs the position."""
    ids = torch.tensor([[5, 6, 7, 8] * 8])
    with torch.no_grad():
        (found,) = reconstruction(tiny("llama"), ids, [32], "float32")
    assert found.entropy is not None and found.entropy.ordered == 0
    assert found.entropy.keys == pytest.approx(3)  # eight places each
    assert found.entropy.values == found.layers[1].entropy.keys == 0  # later residuals know what came before
    with torch.no_grad():
        (gpt2,) = reconstruction(tiny("gpt2"), ids, [32], "float32")
    assert gpt2.entropy is not None and gpt2.entropy.keys == 0  # its positions are in the residual


def test_stored_reconstructions_without_entropy_are_read() -> None:
    study = Rebuilt(lengths=[16], dtypes=["float32"])
    data = study.plain(measured(study))
    for row in data["rows"]:
        del row["entropy"]
    old = study.restored(data)
    assert set(study.scores(old)) == {"keys", "values"} and study.tables(old)[0].rows[0][-1] == "-"


def test_a_recompute_without_windows_differs_beyond_them_only(tmp_path: Path) -> None:
    draw, rows = random.Random(0), tmp_path / "rows.jsonl"
    picked = [[" ".join(draw.choices(WORDS[:90], k=count)) for count in (5, 3, 3, 3, 3)] for _ in range(20)]
    write_lines(rows, [{"ctx": ctx, "label": k % 4, "endings": ends} for k, (ctx, *ends) in enumerate(picked)])
    study = WindowRecompute(samples=12, budget="16", scored=8)
    found = measured(study, "gemma3", files=[rows])
    assert found.longest <= found.window < found.text_tokens
    ways = {row.way: row for row in found.rows}
    assert ways[FULL].same == ways[BLIND].same == ways[DIRECT].same == 1 and ways[BLIND].right == ways[FULL].right
    perplexities = [ways[way].perplexity for way in (FULL, BLIND, TURNED, UNSCALED)]
    assert len(set(perplexities)) == 4
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    answers = [line["label"] == _likeliest(line) for line in lines[:12]]
    assert ways[FULL].right == pytest.approx(sum(answers) / 12)
    windowless = measured(study, files=[rows])  # llama: no windows, one sort of angles, no factor
    assert all(row.same == 1 and row.perplexity is None for row in windowless.rows)


def _likeliest(row: dict[str, Any]) -> int:
    """The ending with the greatest sum of ln p, token by token."""
    model, tokenizer = loaded("gemma3").model, loaded("gemma3").tokenizer
    context, sums = tokenizer(row["ctx"]).input_ids, []
    for ending in row["endings"]:
        ids = tokenizer(f"{row['ctx']} {ending}").input_ids
        total = 0.0
        for place in range(len(context), len(ids)):
            with torch.no_grad():
                logits = model(torch.tensor([ids[:place]]), use_cache=False).logits[0, -1].double()
            total += float(logits.log_softmax(-1)[ids[place]])
        sums.append(total)
    return sums.index(max(sums))


def test_decoding_times_every_step_of_every_cache() -> None:
    study = Decoding(prompt=8, new=12, lengths=[16, 32], rounds=1, caches=["paged"])
    found = measured(study)
    assert [one.way for one in found.runs] == [NAIVE, "stock", "paged"]
    assert all(len(one.step_ms) == 11 and one.total_s > one.first_s > 0 for one in found.runs)
    assert [(one.way, one.length) for one in found.appends] == [
        (way, length) for way in ("stock", "full", "static") for length in (16, 32)
    ]


def test_memory_grows_with_the_rows_of_a_batch() -> None:
    rows = run(tiny("llama"), [TimingCase(f"{n}", 40, "stock", batch=n) for n in (1, 3)], rounds=1, steps=2)
    assert rows[1].memory["resident_bytes"] == 3 * rows[0].memory["resident_bytes"]
    study = Throughput(methods=["stock", "h2o", "static"], batches=[1, 8], budget="25%", length=96, steps=3, rounds=1)
    found = measured(study)
    one, eight = found.of(1, "h2o"), found.of(8, "h2o")
    assert one is not None and eight is not None and eight.held_bytes == 8 * one.held_bytes
    notes = [note for note in study.tables(found)[0].notes if "static" in note]  # too small a budget: refused, and said
    assert len(notes) == 1 and notes[0].startswith("`static` with 1, 8 rows: ")  # once


def test_equal_refusals_are_listed_once() -> None:
    found = [("a", 1, "Small."), ("b", 1, ""), ("a", 2, "Small."), ("a", 2, "Small."), ("a", 3, "Long.")]
    assert refusals(found) == ["`a` at 1, 2: Small.", "`a` at 3: Long."]


def test_sketch_errors_of_normal_vectors_follow_the_lemma(text: Path) -> None:
    study = SketchError(tokens=500, loads=[5, 20], dim=32)
    found = measured(study, files=[text])
    for row in (row for row in found.rows if row.sort == NORMAL):
        assert row.median == pytest.approx(row.predicted, rel=0.15) and row.mean < row.median < row.bound
        assert row.constant == pytest.approx(1, abs=0.02) and row.crowded < row.chance
