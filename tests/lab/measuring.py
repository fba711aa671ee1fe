"""Tiny models in the lab, without files: what its tests ask of tasks, peers and studies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from unittest.mock import patch

from conftest import tokenizer
from families import tiny
from kvkeep_lab.studies.base import Study, TextStudy, Trial
from kvkeep_lab.subject import Subject
from scripted import START, byte_level, write_gguf
from torch import Tensor

from kvkeep.models.loading import Loaded, load


@cache
def loaded(family: str = "llama") -> Loaded:
    return Loaded(tiny(family), tokenizer(), f"tiny-{family}", "")


def copying(folder: Path) -> Loaded:
    """A model whose products the library computes, so that its answers have drafts. It says one thing again and again;
    texts of calls are empty."""
    made = byte_level("ant")
    write_gguf(folder / "copying.gguf", made, made.script([START, "ant"]), positions=16_384, rest={made.id('"'): 9.0})
    return load(str(folder / "copying.gguf"))


def subject(method: str = "full", budget: str | None = None, family: str = "llama") -> Subject:
    return Subject(loaded(family), method, budget)


def ending_subject(method: str = "full", budget: str | None = None, family: str = "llama") -> Subject:
    """A subject whose tokenizer has an end of text, as the harness wants it."""
    made = tokenizer()
    made.eos_token = "<unk>"
    return Subject(Loaded(tiny(family), made, "tiny", ""), method, budget)


def tool(name: str) -> Any:
    """A script of tools/, as a module."""
    spec = spec_from_file_location(name, Path(__file__).parents[2] / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def quiet(what: str, done: float, total: float) -> None:
    pass


def measured(
    study: Study, family: str = "llama", ids: Tensor | None = None, files: Sequence[Path] = (), progress: Any = quiet
) -> Any:
    """What a study finds in a tiny model; ids: read in place of a passage."""
    with patch.object(TextStudy, "passage", TextStudy.passage if ids is None else lambda *given: ids):
        return study.measure(Trial(loaded(family), files, progress=progress))
