"""Tasks for a model under a cache; each is a module."""

from __future__ import annotations

from kvkeep_lab.tasks.base import Task
from kvkeep_lab.tasks.bfcl import Bfcl
from kvkeep_lab.tasks.instructions import Instructions
from kvkeep_lab.tasks.lm_eval import LmEval
from kvkeep_lab.tasks.locomo import Locomo
from kvkeep_lab.tasks.longbench import LongBench
from kvkeep_lab.tasks.longbench_v2 import LongBenchV2
from kvkeep_lab.tasks.match import Match
from kvkeep_lab.tasks.needle import Needle
from kvkeep_lab.tasks.needles import Needles
from kvkeep_lab.tasks.novel import Novel, NovelRephrased
from kvkeep_lab.tasks.perplexity import Perplexity
from kvkeep_lab.tasks.ruler import Ruler
from kvkeep_lab.tasks.summary import Summary

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        Bfcl, Instructions, LmEval, Locomo, LongBench, LongBenchV2, Match, Needle, Needles, Novel, NovelRephrased,
        Perplexity, Ruler, Summary,
    )
}  # fmt: skip
"""The tasks by name."""
