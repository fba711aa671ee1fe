"""``long-chat``: memory and time of every turn of a long conversation, with several caches (KV-Direct's Fig. 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar

from pydantic import Field

from kvkeep.decode.chat import Conversation
from kvkeep.decode.generate import positions_of
from kvkeep.errors import UsageError
from kvkeep.memory.meter import Memory
from kvkeep.models.loading import Loaded
from kvkeep.policies.names import STOCK
from kvkeep.stock import new_cache
from kvkeep_lab.figures import FilePath, dress, panels, styled
from kvkeep_lab.partial import keeping
from kvkeep_lab.reading import takes
from kvkeep_lab.statistics import each, where
from kvkeep_lab.studies.base import BUDGET, BudgetText, Flag, Kind, OwnMethod, PlaceName, Progress, Study, Trial
from kvkeep_lab.tables import Table, fixed, megabytes, times
from kvkeep_lab.tasks.base import Metric

SYSTEM = "You are a helpful, concise AI assistant."

QUESTIONS = (
    "Tell me about France.",
    "Describe the Eiffel Tower.",
    "Tell me how it was built.",
    "Tell me about the engineer who designed it.",
    "Describe Paris to somebody who has never been there.",
    "Tell me about the river Seine.",
    "Describe the Louvre.",
    "Tell me about the Mona Lisa.",
    "Describe the countries around France.",
    "Tell me about Lyon.",
    "Tell me about the French language.",
    "Describe French cuisine.",
    "Explain how cheese is made.",
    "Tell me about the French Revolution.",
    "Tell me about Napoleon.",
    "Describe Mont Blanc.",
    "Tell me about the wines of Bordeaux.",
    "Plan a day in Paris for me.",
    "Describe Versailles.",
    "Summarise what we have talked about.",
)
"""Questions in this order; they repeat after the last."""

SHOWN = 20
"""Maximum number of turns in a table."""


@dataclass(frozen=True)
class Turn:
    """One answer of one method."""

    method: str
    turn: int
    """Number of the turn, from 1."""
    context: int
    """Tokens in the cache after the answer."""
    read: int
    """Tokens that were new to the cache before the answer."""
    written: int
    """Tokens of the answer."""
    prefill_s: float
    """Seconds to read, including the first token."""
    decode_s: float
    """Seconds of the other tokens."""
    same: bool
    """Whether the tokens equal the first method's answer in the same turn. After a difference the conversations
    differ."""
    memory: Memory
    """Bytes after the answer."""
    text: str

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def attended_bytes(self) -> int:
        """Bytes of entries that attention reads, in full or compressed."""
        return self.memory.resident_bytes + self.memory.compressed_bytes

    @property
    def kept(self) -> int:
        """Bytes of checkpoints."""
        return sum(self.memory.checkpoint_bytes.values())


@dataclass(frozen=True)
class ChatTurns:
    """Every turn of every method."""

    turns: list[Turn]

    @property
    def methods(self) -> list[str]:
        """The methods in order. The others are compared with the first."""
        return each(self.turns, "method")

    def of(self, method: str) -> list[Turn]:
        return where(self.turns, method=method)

    def ratio(self, turn: Turn) -> float:
        """Return the seconds of a turn relative to the first method's."""
        return turn.seconds / self.of(self.methods[0])[turn.turn - 1].seconds

    def ratios(self, method: str) -> float:
        """Return the median ratio over a method's turns."""
        return median(self.ratio(turn) for turn in self.of(method))


class LongChat(Study):
    """KV-Direct's Fig. 3, with its system prompt and 30 tokens per turn. The paper's appendix names only the subjects;
    the questions are kvkeep's."""

    name = "long-chat"
    command = "longchat"
    about = "hold a conversation of many turns: memory and time of each turn, by method"
    protocol = (
        "Each cache has one conversation. The caches take turns, so that other load on the machine affects all "
        "of them. In a turn the model reads the new messages and answers greedily. Held: bytes of the entries "
        "that attention reads after the turn. Same: the answer has the same tokens as the first method's."
    )
    found = ChatTurns
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("grown", "MB that the first method holds at the end", "lower", "number"),
        Metric("held", "MB that the second holds at the end", "lower", "number"),
        Metric("kept", "MB of its checkpoints at the end", "lower", "number"),
        Metric("ratio", "seconds of a turn, second by first, median", "lower", "number"),
        Metric("same", "answers that are the first's, of the second"),
    )
    certain = ("grown", "held", "kept", "same")

    methods: Annotated[list[OwnMethod], Flag("--methods", "-x")] = Field(
        [STOCK, "kv-direct", "snapkv+verified"],
        min_length=1,
        description="cache methods; all others are compared with the first",
    )
    budget: Annotated[BudgetText, Flag("--budget", "-b")] = Field("256", description=BUDGET)
    checkpoint: Annotated[Kind | None, Flag("--checkpoint", "-c")] = Field(
        None, description="what is stored of evicted entries"
    )
    where: Annotated[PlaceName | None, Flag("--where", "-w")] = Field(
        None, description="where evicted entries are stored: device, host, disk"
    )
    turns: int = Field(20, ge=1, description="number of turns; the list of questions repeats")
    new: Annotated[int, Flag("--max-tokens", "-n")] = Field(30, ge=1, description="tokens generated in each turn")

    def check(self, files: Sequence[Path]) -> None:
        if len(set(self.methods)) < len(self.methods):
            raise UsageError("--methods names a method twice, and each has one conversation; name it once.")

    def measure(self, trial: Trial) -> ChatTurns:
        self.check(())
        found = ChatTurns([])
        with keeping(found, found.turns):
            for turn in self.converse(trial.loaded, trial.progress):
                found.turns.append(turn)
        return found

    def converse(self, loaded: Loaded, progress: Progress) -> Iterator[Turn]:
        """Run one conversation with each cache, turn by turn, and yield each turn when it ends. Raises UsageError
        before a turn that would exceed the model's positions."""
        talks = {name: self._conversation(loaded, name) for name in self.methods}
        for number in range(self.turns):
            question = QUESTIONS[number % len(QUESTIONS)]
            reference: list[int] | None = None
            for place, (name, talk) in enumerate(talks.items()):
                progress(f"{name}, turn {number + 1}", number * len(talks) + place, self.turns * len(talks))
                prompt = talk.prompt(question)
                _check_room(loaded.model, talk.cache, len(prompt) + self.new, number + 1)
                result = talk.answer(question, prompt, max_new_tokens=self.new)
                timing, tokens = result.timing, result.tokens
                reference = tokens if reference is None else reference
                counts = number + 1, talk.cache.get_seq_length(), timing.prefill_tokens, len(tokens)
                same = tokens == reference
                yield Turn(name, *counts, timing.prefill_s, timing.decode_s, same, result.memory, result.text)

    def _conversation(self, loaded: Loaded, method: str) -> Conversation:
        """Start a method's conversation with the options that the method accepts."""
        given = {"budget": self.budget, "checkpoint": self.checkpoint, "where": self.where}
        options = {key: value for key, value in given.items() if key in takes(method)}
        cache: Any = new_cache(loaded.model, method, **options)
        return Conversation(loaded.model, loaded.tokenizer, cache, system=SYSTEM)

    def as_json(self, found: ChatTurns) -> dict[str, Any]:
        return {"budget": self.budget, "turns": [asdict(turn) | {"seconds": turn.seconds} for turn in found.turns]}

    def plain(self, found: ChatTurns) -> Any:
        return super().plain(ChatTurns([replace(turn, text="") for turn in found.turns]))

    def scores(self, found: ChatTurns) -> dict[str, float]:
        first, *others = found.methods
        scores = {"grown": found.of(first)[-1].attended_bytes / 1e6}
        if others:
            mine = found.of(others[0])
            scores |= {"held": mine[-1].attended_bytes / 1e6, "kept": mine[-1].kept / 1e6}
            scores |= {"ratio": found.ratios(others[0]), "same": sum(turn.same for turn in mine) / len(mine)}
        return scores

    def tables(self, found: ChatTurns) -> list[Table]:
        last = max(turn.turn for turn in found.turns)
        table = Table(
            f"After {last} turns",
            [
                "method",
                "tokens in the cache",
                "held",
                "checkpoints",
                "median turn",
                "relative to the first",
                "same answers",
            ],
            notes=[f"Budget {self.budget}; {self.new} tokens a turn."],
        )
        for name in found.methods:
            mine = found.of(name)
            sizes = [f"{mine[-1].context:,}", megabytes(mine[-1].attended_bytes), megabytes(mine[-1].kept)]
            timings = [f"{median(turn.seconds for turn in mine):.2f} s", times(found.ratios(name))]
            table.rows.append([f"`{name}`", *sizes, *timings, f"{sum(turn.same for turn in mine)}/{len(mine)}"])
        return [table]

    def details(self, found: ChatTurns) -> list[Table]:
        last = max(turn.turn for turn in found.turns)
        table = Table(
            "Turns",
            [
                "turn",
                "method",
                "tokens",
                "new",
                "read s",
                "write s",
                "relative to the first",
                "held",
                "checkpoints",
                "same",
            ],
            notes=["New: tokens read + generated. Same: whether the answer equals the first method's."],
            named=2,
        )
        for turn in found.turns:
            if turn.turn == 1 or not turn.turn % -(-last // SHOWN) or turn.turn == last:
                labels = [f"{turn.turn}", f"`{turn.method}`", f"{turn.context:,}", f"{turn.read}+{turn.written}"]
                timings = [fixed(turn.prefill_s), fixed(turn.decode_s), times(found.ratio(turn))]
                sizes = [megabytes(turn.attended_bytes), megabytes(turn.kept or None)]
                table.rows.append([*labels, *timings, *sizes, "yes" if turn.same else "no"])
        return [table]

    def draw(self, found: ChatTurns, path: FilePath, *, title: str) -> None:
        """Draw Fig. 3 (a) and (b): resident bytes (lines), checkpoints (dotted) and seconds of each turn, by method."""
        from matplotlib.ticker import MaxNLocator

        with panels(path, f"{title}, budget {self.budget}", 2, 4.6) as (memory, latency):
            for place, name in enumerate(found.methods):
                mine = found.of(name)
                turns, style = [turn.turn for turn in mine], styled(place)
                style["markevery"] = max(1, len(turns) // 20)
                memory.plot(turns, [turn.attended_bytes / 1e6 for turn in mine], label=name, **style)
                if any(turn.kept for turn in mine):
                    places = [where for where, size in mine[-1].memory.checkpoint_bytes.items() if size]
                    label = f"{name}, checkpoints on {' and '.join(places)}"
                    kept = [turn.kept / 1e6 for turn in mine]
                    memory.plot(turns, kept, label=label, color=style["color"], linestyle=":", linewidth=1.5)
                latency.plot(turns, [turn.seconds for turn in mine], label=name, **style)
            dress(memory, "Keys and values held after each turn (MB)", "turn", y=0, legend=True, grid="y")
            dress(latency, "Time of each turn (s)", "turn", y=0, legend=True, grid="y")
            for axes in (memory, latency):
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _check_room(model: Any, cache: Any, tokens: int, turn: int) -> None:
    positions = positions_of(model, cache)
    if positions is not None and tokens > positions:
        raise UsageError(
            f"Turn {turn} would take the conversation to {tokens:,} tokens, and the model has {positions:,} positions."
        )
