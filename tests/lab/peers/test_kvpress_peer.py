"""kvpress as a peer, by its real worker and a made-up kvpress of one press; numbers equal those computed by hand."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tokenizer
from environments import interpreter, with_packages
from kvkeep_lab.peers.kvpress import PYTHON, KvpressProcess
from kvkeep_lab.runner import run as run_lab
from kvkeep_lab.store import ResultFile
from kvkeep_lab.subject import Subject
from results import small, stored
from transformers import AutoModelForCausalLM, DynamicCache

from kvkeep.errors import BudgetError, KvkeepError, UsageError
from kvkeep.models.loading import Loaded

IDS = torch.randint(2, 97, (60,), generator=torch.Generator().manual_seed(5)).tolist()
RIGHT, BUDGET = [7, 11, 13], 20

KVPRESS = '''
"""Keeps the first and the newest of what a prompt leaves behind."""

from contextlib import contextmanager
from dataclasses import dataclass

import torch

__version__ = "made up"
print("what packages print is no answer")


@dataclass
class EndsPress:
    compression_ratio: float = 0.0
    n_sink: int = 2

    @contextmanager
    def __call__(self, model):
        hooks = [layer.self_attn.register_forward_hook(self.prune, with_kwargs=True) for layer in model.model.layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def prune(self, module, args, kwargs, output):
        layer = kwargs["cache"].layers[module.layer_idx]
        kept = int(layer.keys.shape[2] * (1 - self.compression_ratio))
        if self.n_sink > kept:
            raise RuntimeError(f"{self.n_sink} sinks\\nare too many")
        for name in ("keys", "values"):
            held = getattr(layer, name)
            ends = [held[:, :, : self.n_sink], held[:, :, held.shape[2] - kept + self.n_sink :]]
            setattr(layer, name, torch.cat(ends, 2))


@dataclass
class RatelessPress:
    other: int = 0
'''


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An interpreter that has the kvpress above and no kvkeep; its process stays for all tests. Its packages lie below
    a folder called kvkeep, as those of a clone do."""
    folder = tmp_path_factory.mktemp("kvkeep") / "kvkeep" / "site-packages"
    folder.mkdir(parents=True)
    yield with_packages(folder, kvpress=KVPRESS)
    KvpressProcess.stop()


@pytest.fixture
def subjects(environment: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(PYTHON, environment)
    loaded = Loaded(AutoModelForCausalLM.from_pretrained(model_folder).eval(), tokenizer(), "tiny", str(model_folder))
    return lambda method, budget=None: Subject(loaded, method, budget)


@torch.no_grad()
def by_hand(model: Any, kept: int, unseen: int = 0, sinks: int = 2) -> list[float]:
    """Return ln p of RIGHT when of IDS the first ``sinks`` and the newest, ``kept`` in all, are left."""
    cache, seen = DynamicCache(), len(IDS) - unseen
    output = model(torch.tensor([IDS[:seen]]), cache=cache)
    for layer in cache.layers:
        ends = [*range(sinks), *range(seen - kept + sinks, seen)]
        layer.keys, layer.values = layer.keys[:, :, ends], layer.values[:, :, ends]
    logs = []
    for place, token in enumerate([*IDS[seen:], *RIGHT[:-1]] if unseen else RIGHT[:-1]):
        if place >= unseen:
            logs.append(float(output.logits[0, -1].log_softmax(-1)[RIGHT[place - unseen]]))
        output = model(torch.tensor([[token]]), cache=cache, position_ids=torch.tensor([[seen + place]]))
    return [*logs, float(output.logits[0, -1].log_softmax(-1)[RIGHT[-1]])]


def test_kvpress_without_pruning_equals_the_full_cache(subjects: Any) -> None:
    ours, theirs = subjects("full"), subjects("peer-kvpress:full")
    expected, found = ours.examine(IDS, RIGHT, 5), theirs.examine(IDS, RIGHT, 5)
    assert found.logs == pytest.approx(expected.logs, abs=1e-5) and found.text == expected.text
    answer = theirs.write(IDS, 5)
    assert answer.tokens == ours.write(IDS, 5).tokens and answer.text == expected.text
    assert (answer.cost.exactness, answer.cost.entries, answer.cost.prompt_tokens) == ("exact", None, 60)
    assert answer.cost.prefill_s > 0 and answer.cost.token_s is not None and answer.cost.token_s > 0
    assert answer.cost.memory["resident_bytes"] == subjects("stock").write(IDS, 5).cost.memory["resident_bytes"]
    compared = theirs.compare(IDS, 5)
    assert compared.match == 1 and compared.kl_max is not None and compared.kl_max < 1e-9
    assert theirs.versions == {
        "kvpress": "made up",
        "kvpress' transformers": __import__("transformers").__version__,
        "kvpress' torch": torch.__version__,
    }


@pytest.mark.parametrize("unseen", [0, 4])
def test_a_press_keeps_the_budget_and_equals_pruning_by_hand(subjects: Any, unseen: int) -> None:
    pruned = subjects(f"peer-kvpress:ends,unseen={unseen}", str(BUDGET))
    found = pruned.examine(IDS, RIGHT, 4)
    assert found.logs == pytest.approx(by_hand(pruned.loaded.model, BUDGET - unseen, unseen), abs=1e-4)
    assert (found.cost.entries, found.cost.exactness) == (BUDGET, "lossy")
    row, layers = 2 * 2 * 8 * 4, 4  # bytes of a token in one layer
    memory = found.cost.memory
    assert memory["resident_bytes"] == layers * row * (BUDGET + len(RIGHT) - 1)
    seen = 60 - unseen
    assert memory["peak_cache_bytes"] == row * max(seen + 3 * (BUDGET - unseen), layers * (BUDGET + len(RIGHT) - 1))


def test_parameters_reach_the_press(subjects: Any) -> None:
    found = subjects("peer-kvpress:EndsPress,n_sink=9", str(BUDGET)).examine(IDS, RIGHT, 4)
    assert found.logs == pytest.approx(by_hand(subjects("full").loaded.model, BUDGET, sinks=9), abs=1e-4)


def test_an_answer_ends_at_the_end_of_text_token(subjects: Any) -> None:
    free = subjects("peer-kvpress:ends", str(BUDGET))
    tokens = free.write(IDS, 6).tokens
    assert len(tokens) == 6
    free.loaded.model.generation_config.eos_token_id = [tokens[2]]
    assert free.write(IDS, 6).tokens == tokens[: tokens.index(tokens[2]) + 1]


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("peer-kvpress:nobody", "kvpress has no press 'nobody', but ends, rateless"),
        ("peer-kvpress:rateless", "RatelessPress takes no share"),
        ("peer-kvpress:ends,compression_ratio=0.1", "EndsPress has no parameter 'compression_ratio'"),
        ("peer-kvpress:ends,n_sink=30", "kvpress failed: RuntimeError: 30 sinks are too many"),
    ],
)
def test_a_press_that_fails_is_reported_and_the_next_one_runs(subjects: Any, method: str, said: str) -> None:
    with pytest.raises(KvkeepError, match=said) as error:
        subjects(method, str(BUDGET)).write(IDS, 2)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")
    assert subjects("peer-kvpress:full").write(IDS, 2).tokens == subjects("full").write(IDS, 2).tokens


def test_impossible_budgets_are_refused(subjects: Any) -> None:
    with pytest.raises(BudgetError, match="less than one chunk"):
        subjects("peer-kvpress:ends", "8").write(IDS, 2)
    with pytest.raises(UsageError, match="20 entries is too small beside the 20 unseen tokens"):
        subjects("peer-kvpress:ends,unseen=20", "20").write(IDS, 2)
    with pytest.raises(KvkeepError, match="a prompt of 60 tokens has no 60 to be read after"):
        subjects("peer-kvpress:ends,unseen=60", "64").write(IDS, 2)


def test_an_experiment_measures_peers_beside_kvkeep_methods(
    subjects: Any, model_folder: Path, tmp_path: Path, words: str, environment: str
) -> None:
    (tmp_path / "text.txt").write_text(". ".join([words] * 3))
    methods = ["streaming-llm:sinks=2", "peer-kvpress:full", "peer-kvpress:ends", "peer-kvpress:nobody"]
    task = {"name": "match", "length": [60], "new": 4, "samples": 1}
    experiment = small(model_folder, task=task, methods=methods, budgets=["24"])
    tally = run_lab(experiment, ResultFile(tmp_path / "r.jsonl"), tmp_path)
    assert (tally.done, [row.method for row in tally.failed]) == (4, ["peer-kvpress:nobody"])
    rows = {row.method: row for row in stored(tmp_path / "r.jsonl").records}
    assert rows["peer-kvpress:full"].scores["match"] == [1.0] and rows["peer-kvpress:full"].scores["kl"][0] < 1e-9
    assert rows["peer-kvpress:ends"].entries == rows["streaming-llm:sinks=2"].entries == 24
    assert rows["peer-kvpress:ends"].versions["kvpress"] == "made up" and "kvpress" not in rows["full"].versions
    assert os.environ[PYTHON] == environment


def test_an_interpreter_that_is_missing_or_dies_is_reported(
    subjects: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for python, said in {
        "": r"give its interpreter \(--kvpress PYTHON, or KVKEEP_KVPRESS_PYTHON\)",
        str(tmp_path / "nowhere"): "'.*nowhere' cannot be run: no such file",
        interpreter(tmp_path, "raise SystemExit('no kvpress here.')"): "ended: no kvpress here\\.$",
    }.items():
        monkeypatch.setenv(PYTHON, python)
        with pytest.raises(KvkeepError, match=said):
            subjects("peer-kvpress:ends", str(BUDGET)).write(IDS, 2)
        assert KvpressProcess.current is None or not python
    subjects("full").loaded.model.name_or_path = ""
    with pytest.raises(UsageError, match="no name or folder to load it from"):
        subjects("peer-kvpress:full").write(IDS, 2)


def test_any_process_that_follows_the_protocol_can_be_the_peer(
    subjects: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = interpreter(
        tmp_path,
        "import base64, json, struct, sys",
        "for line in sys.stdin:",
        "    asked = json.loads(line)",
        "    if asked['do'] == 'load':",
        "        print(json.dumps({'versions': {'kvpress': 'none'}}), flush=True)",
        "        continue",
        "    token = asked['token'] + 1 if asked['do'] == 'next' else asked['keep']",
        "    logits = struct.pack('97f', *[float(number == token) for number in range(97)])",
        "    sizes = {'held': 5, 'largest': 2, 'peak': 9, 'seconds': 0.25}",
        "    print(json.dumps({'logits': base64.b64encode(logits).decode(), **sizes}), flush=True)",
    )
    monkeypatch.setenv(PYTHON, python)
    peer = subjects("peer-kvpress:ends", str(BUDGET))
    answer = peer.write(IDS, 4)
    assert answer.tokens == [20, 21, 22, 23] and peer.versions == {"kvpress": "none"}
    assert (answer.cost.prefill_s, answer.cost.token_s) == (0.25, 0.25)
    memory = answer.cost.memory
    assert [memory[f"{name}_bytes"] for name in ("resident", "peak_cache", "peak_workspace")] == [5, 9, 2]
    found = peer.examine(IDS, [20, 21], 4)
    assert found.logs == pytest.approx([1 - math.log(math.e + 96)] * 2)
    first, second = (peer._cache(64) for _ in range(2))
    first.step(torch.tensor([IDS]))
    second.step(torch.tensor([IDS]))
    with pytest.raises(KvkeepError, match="one prompt at a time"):
        first.step(torch.tensor([[3]]))
    KvpressProcess.stop()
