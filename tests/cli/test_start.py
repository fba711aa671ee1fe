"""A start: mistakes are told before torch is imported, and a model brings in nothing that it never uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_files import written

from kvkeep.policies import names
from kvkeep.policies.registry import FATES, RECALLS, SELECTORS

RUN = """
import contextlib, io, json, sys
from kvkeep.cli import main
report, runs = json.loads(sys.stdin.read())
for arguments in runs:
    sys.argv, out, err, code = ["kvkeep", *arguments], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as leaving:
            code = leaving.code
    imported = [name for name in report if name in sys.modules]
    print(json.dumps([code, out.getvalue(), err.getvalue(), imported]))
"""
"""Runs commands one after the other, and prints what became of each, with the modules that were imported by then."""

UNUSED = (
    "torch._dynamo.convert_frame", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp",
    "torch.distributed.checkpoint", "sympy", "scipy", "sklearn", "pandas", "matplotlib", "datasets", "triton", "ray",
    "fastapi", "transformers.models.auto.processing_auto",
)  # fmt: skip
LIBRARIES = ("torch", "transformers", "numpy", "tokenizers")


def started(*runs: list[str], report: tuple[str, ...]) -> list[tuple[int, str, str, list[str]]]:
    """Exit code, standard output and error of each command, and those modules of ``report`` that were imported."""
    given = json.dumps([report, runs])
    done = subprocess.run([sys.executable, "-c", RUN], input=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


MISTAKES = [
    ("generate -p Hi --budget abc", "Budget 'abc' cannot be read"),
    ("generate -p Hi --file missing.txt", "The file 'missing.txt' cannot be read"),
    ("generate -p Hi --method h2p", "Unknown method 'h2p': did you mean h2o?"),
    ("generate -p Hi -b 64 --method h2o+drip", "Unknown fate 'drip'"),
    ("generate -p Hi --model nosuch", "or give a GGUF file, a folder, or a hub id (owner/name)."),
    ("generat", "Unknown command 'generat': did you mean generate or agent? 'kvkeep --help' lists all."),
    ("generate -p Hi --model ./missing.gguf", "There is no model at './missing.gguf'"),
    ("generate -p Hi --max-tokens 0", "Invalid value for '--max-tokens'"),
    ("generate -p Hi --weights q4", "Unknown weight format 'q4'"),
    ("generate -p Hi --device gpu", "Unknown device 'gpu'"),
    ("generate -p Hi --budget 64 --where moon", "Unknown place for checkpoints 'moon'"),
    ("generate -p Hi --memory 1GB", "--memory is used with '--budget auto' only"),
    ("demo --budget abc", "Budget 'abc' cannot be read"),
    ("serve --memory much", "The memory 'much' is not a number of bytes"),
    ("agent nosuch", "Unknown agent 'nosuch'"),
    ("agent claude --url http://localhost:9 -m smollm2", "leave --model out"),
    ("models --fetch nosuch", "Unknown model 'nosuch'"),
]


def test_a_mistake_is_told_before_anything_is_loaded() -> None:
    found = started(*(arguments.split() for arguments, _ in MISTAKES), report=LIBRARIES)
    for (arguments, sentence), (code, out, err, imported) in zip(MISTAKES, found, strict=True):
        assert code and not out and sentence in err and "Traceback" not in err, (arguments, err)
        assert not imported, arguments


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_an_answer_imports_what_it_uses(
    kind: str, model_folder: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    model = model_folder
    if kind == "file":
        written(model := tmp_path / "tiny.gguf", "Q8_0")
    common = ("generate", "-m", str(model), "-p", "the of", "--raw", "-n", "1", "--json")
    if kind == "file":
        assert run(*common)[0] == 0, "it is converted, once, by what only that needs"
    [(code, out, err, imported)] = started([*common], report=(*LIBRARIES, *UNUSED))
    assert code == 0 and len(json.loads(out)["tokens"]) == 1, err
    # A folder is read by transformers' own loader, which computes tables of positions without memory.
    assert set(imported) - {"sympy" if kind == "folder" else ""} == set(LIBRARIES)


def test_what_was_put_off_runs_when_it_is_used(tmp_path: Path) -> None:
    """Beside a name that was given, a submodule leaves a package as it is; any other name runs it."""
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "__init__.py").write_text("print('runs')\nvalue = 5\ndef given(): return 'own'\n")
    (tmp_path / "late" / "part.py").write_text("inside = 3\n")
    lines = (
        "from kvkeep.cli.imports import defer",
        "defer('late', {'given': lambda: 'stand-in'})",
        "import late, late.part",
        "print(late.given(), late.part.inside, hasattr(late, '__wrapped__'))",
        "from late import value",
        "print(value, late.given(), late.part.inside, hasattr(late, 'other'))",
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines() == ["stand-in 3 False", "runs", "5 own 3 False"], done.stderr


@pytest.mark.slow
def test_the_whole_of_transformers_is_there_when_it_is_asked_for() -> None:
    lines = (
        "from kvkeep.cli.imports import Deferred, import_transformers",
        "import_transformers()",
        "import sys, torch, transformers",
        "import transformers.models.llama.modeling_llama, transformers.processing_utils as processing",
        "late = (torch._dynamo, transformers, transformers.models, processing)",
        "print([type(one) is Deferred for one in late])",
        "from transformers.models import LlamaConfig",
        "print(LlamaConfig is transformers.LlamaConfig, torch.distributed.is_available())",
        "print(processing.ProcessorMixin is transformers.ProcessorMixin)",
        "doubled = torch.compile(lambda x: 2 * x, backend='eager')",
        "print(doubled(torch.ones(2)).tolist(), type(torch._dynamo) is Deferred, 'scipy' in sys.modules)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    wanted = ["[True, True, True, True]", "True True", "True", "[2.0, 2.0] False False"]
    assert done.stdout.splitlines() == wanted, done.stderr


def test_the_names_of_methods_are_those_of_the_registry() -> None:
    from kvkeep.policies.methods import names as known

    own = [name for name in known() if name not in names.LAB]
    assert [*own, names.STOCK] == list(names.METHODS) and {*SELECTORS} - {*names.LAB} <= {*names.METHODS}
    found = ([name for name in registry if name not in names.LAB] for registry in (FATES, RECALLS))
    assert [*found] == [[*names.FATES], [*names.RECALLS]]
