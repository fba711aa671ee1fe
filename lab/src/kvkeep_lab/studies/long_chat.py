"""``long-chat``: memory and time of every turn of a conversation, with several caches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import ClassVar

from pydantic import Field

from kvkeep.models.loading import Loaded
from kvkeep_lab.longchat import METHODS, Turn, caches, converse
from kvkeep_lab.longchat_figure import draw_longchat
from kvkeep_lab.studies.base import BudgetText, MethodName, Progress, Study
from kvkeep_lab.tables import Table, megabytes, times
from kvkeep_lab.tasks.base import Metric


@dataclass(frozen=True)
class Chat:
    """Every turn of every method, without the texts."""

    turns: list[Turn]

    @property
    def methods(self) -> list[str]:
        """In their order, the first being whom others are compared with."""
        return list(dict.fromkeys(turn.method for turn in self.turns))

    def of(self, method: str) -> list[Turn]:
        """Return one method's turns."""
        return [turn for turn in self.turns if turn.method == method]


class LongChat(Study):
    """KV-Direct's Fig. 3: its system prompt, 30 tokens a turn; its appendix names subjects, the questions are ours."""

    name = "long-chat"
    about = "a conversation of many turns: memory and seconds of each, by method"
    protocol = (
        "One conversation with each cache, a turn of each in turn, so that they share what else the machine does. A "
        "turn reads what is new and answers greedily. Held: entries that attention reads, after the turn. Same: the "
        "answer's tokens are the first method's."
    )
    found = Chat
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("grown", "MB that the first method holds at the end", "lower", "number"),
        Metric("held", "MB that the second holds at the end", "lower", "number"),
        Metric("kept", "MB of its checkpoints at the end", "lower", "number"),
        Metric("ratio", "seconds of a turn, second by first, median", "lower", "number"),
        Metric("same", "answers that are the first's, of the second"),
    )
    certain = ("grown", "held", "kept", "same")

    methods: list[MethodName] = Field(
        list(METHODS), min_length=1, description="the first is whom others are compared with"
    )
    budget: BudgetText = Field("256", description="of those that have one")
    turns: int = Field(20, ge=1, description="questions")
    new: int = Field(30, ge=1, description="tokens written a turn")

    def measure(self, loaded: Loaded, sources: Sequence[Path], seed: int, progress: Progress) -> Chat:
        """Hold the conversation."""
        listed = caches(loaded.model, self.methods, budget=self.budget)
        spoken = converse(
            loaded.model, loaded.tokenizer, listed, turns=self.turns, max_new_tokens=self.new, progress=progress
        )
        return Chat([replace(turn, text="") for turn in spoken])

    def scores(self, found: Chat) -> dict[str, float]:
        """Return the first two methods' numbers."""
        first, *others = found.methods
        scores = {"grown": _held(found.of(first)[-1]) / 1e6}
        if others:
            mine = found.of(others[0])
            scores |= {"held": _held(mine[-1]) / 1e6, "kept": _kept(mine[-1]) / 1e6}
            scores |= {"ratio": _ratio(found, others[0]), "same": sum(turn.same for turn in mine) / len(mine)}
        return scores

    def tables(self, found: Chat) -> list[Table]:
        """Return what each method came to."""
        last = max(turn.turn for turn in found.turns)
        table = Table(
            f"After {last} turns",
            ["method", "tokens in the cache", "held", "checkpoints", "turn, median", "by the first's", "same answers"],
            notes=[f"Budget {self.budget}; {self.new} tokens a turn."],
        )
        for name in found.methods:
            mine = found.of(name)
            table.rows.append(
                [
                    f"`{name}`",
                    f"{mine[-1].context:,}",
                    megabytes(_held(mine[-1])),
                    megabytes(_kept(mine[-1])),
                    f"{median(turn.seconds for turn in mine):.2f} s",
                    times(_ratio(found, name)),
                    f"{sum(turn.same for turn in mine)}/{len(mine)}",
                ]
            )
        return [table]

    def draw(self, found: Chat, path: str | os.PathLike[str], *, title: str) -> None:
        """Draw Fig. 3 (a) and (b)."""
        draw_longchat(found.turns, path, title=f"{title}, budget {self.budget}")


def _held(turn: Turn) -> int:
    return turn.memory.resident_bytes + turn.memory.compressed_bytes


def _kept(turn: Turn) -> int:
    return sum(turn.memory.checkpoint_bytes.values())


def _ratio(found: Chat, method: str) -> float:
    rival = {turn.turn: turn.seconds for turn in found.of(found.methods[0])}
    return median(turn.seconds / rival[turn.turn] for turn in found.of(method))
