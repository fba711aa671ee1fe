"""``compare``: the quality of methods on texts (:mod:`kvkeep_lab.reference`): KV-Direct's Fig. 4 and 9."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

import kvkeep
from kvkeep.decode.prompt import encode, question, shortened
from kvkeep.decode.texts import read_text
from kvkeep.errors import EmptyText, UsageError
from kvkeep_lab.compare_figure import draw_comparisons, nats
from kvkeep_lab.comparisons import Comparisons, MethodAtBudget, Passage
from kvkeep_lab.figures import FilePath
from kvkeep_lab.latex import booktabs
from kvkeep_lab.partial import Interruption
from kvkeep_lab.provenance import commit, version
from kvkeep_lab.reading import PINNED, whole_bytes
from kvkeep_lab.reference import ReferenceRow, cases, check_fits, compare
from kvkeep_lab.statistics import RESAMPLES
from kvkeep_lab.studies.base import BudgetText, Flag, MethodName, Progress, Study, Trial, part, unique
from kvkeep_lab.tables import Table, fixed, megabytes, percent, spread
from kvkeep_lab.tasks.texts import ShortText, pieces

log = logging.getLogger(__name__)

METHODS = ["kv-direct", "streaming-llm", "h2o", "snapkv", "tova", "window"]
_FULL_CACHE = "the full cache's in bfloat16, where an entry in float32 counts twice"


class Compare(Study):
    """Methods and budgets compared with the full cache, on a prompt, or on passages of texts."""

    name = "compare"
    about = "methods and budgets against the full cache: tokens, KL, perplexity, bytes, speed"
    protocol = (
        "Every method reads a prompt, or each of several passages, at every budget and continues it twice. "
        "Free-running, it continues with its own tokens (match, KL, speed); once a token differs, the KL "
        "compares different texts. Teacher-forced, it is given the full cache's continuation token by token (KL "
        "of the same text, top-1, perplexity). KL is in nats. The reference is transformers' own cache; for "
        "models in 16 bits it is kvkeep's 'full'. For several passages the tables show means, with bootstrap "
        "intervals over passages."
    )
    found = Comparisons
    text = "optional"
    reads = (
        "Text file to read. Several files, a folder of .txt files, or a quoted pattern are compared one by one; "
        "- is standard input."
    )

    prompt: Annotated[str | None, Flag("--prompt", "-p")] = Field(None, description="the question or instruction")
    methods: Annotated[list[MethodName], unique, Flag("--method", "-x")] = Field(
        METHODS, min_length=1, description="cache methods ('kvkeep methods' lists them)"
    )
    budgets: Annotated[list[BudgetText], unique, Flag("--budget", "-b")] = Field(
        ["12.5%", "25%", "50%"],
        min_length=1,
        description="cache budgets: entries per layer (64), bytes (4MB), or shares of prompt and continuation (25%)",
    )
    new: Annotated[int, Flag("--max-tokens", "-n")] = Field(
        64, ge=1, description="number of tokens to generate and compare; an end of the text is ignored"
    )
    limit: int | None = Field(None, ge=1, description="number of tokens to read from each text or passage")
    seeds: int | None = Field(
        None,
        ge=1,
        description="number of passages of --limit tokens from each text; seeds draw where they begin. Without this "
        "option, the one passage is the beginning of the text",
    )
    raw: Annotated[bool | None, Flag("--raw/--chat")] = Field(
        None,
        description="continue the text itself, or apply the model's chat template; a file without "
        "a prompt is raw by default",
    )
    chunk: int | None = Field(None, ge=1, description="prompt tokens processed in one pass")
    pin: int | None = Field(
        None, ge=1, description="number of first tokens that methods with +pinned (h2o+pinned) never evict"
    )

    def check(self, files: Sequence[Path]) -> None:
        if (self.pin is not None) != any(name.endswith(PINNED) for name in self.methods):
            raise UsageError(
                "--pin N and a method with +pinned (-x h2o,h2o+pinned) belong together; give both or none."
            )
        if not files:
            question(None, self.prompt)
        if self.seeds is not None and not (files and self.limit):
            lacks = "how long they are (--limit)" if files else "a text (--file)"
            raise UsageError(f"--seeds draws passages of a text; give it {lacks}.")
        _some([_empty(path) for path in files if str(path) != "-"], len(files))

    def measure(self, trial: Trial) -> Comparisons:
        left_out: list[str] = []
        prompts = list(self._prompts(trial, left_out))
        _some(left_out, len(trial.sources))
        for text, _, ids in prompts:
            try:
                check_fits(trial.model, len(ids), self.new)
            except UsageError as error:
                raise UsageError(f"{text}: {error}" if len(prompts) > 1 else str(error)) from None
        listed, found = cases(self.methods, self.budgets), Comparisons([], len(prompts), left_out)
        for place, (text, seed, ids) in enumerate(prompts):
            number = f"passage {place + 1} of {len(prompts)}: " if len(prompts) > 1 else ""
            progress = part(_numbered(trial.progress, number), place, len(prompts))

            def measured(row: ReferenceRow, number: str = number) -> None:
                trial.say(f"{number}{_brief(row)}")

            full_bytes = whole_bytes(trial.model, len(ids) + self.new)
            try:
                one = compare(
                    trial.model,
                    ids,
                    listed,
                    new=self.new,
                    chunk=self.chunk,
                    pinned=self.pin or 0,
                    progress=progress,
                    measured=measured,
                )
            except Interruption as stop:
                found.passages.append(Passage(text, seed, replace(stop.found, whole_bytes=full_bytes)))
                raise Interruption(found) from None
            except KeyboardInterrupt:
                raise (Interruption(found) if found.passages else KeyboardInterrupt) from None
            found.passages.append(Passage(text, seed, replace(one, whole_bytes=full_bytes)))
        return found

    def _prompts(self, trial: Trial, left_out: list[str]) -> Iterator[tuple[str, int | None, list[int]]]:
        """Yield the name of each prompt's text, its seed, and its token ids. left_out: receives a sentence for each
        text without a prompt."""
        raw = self.raw if self.raw is not None else bool(trial.sources) and not self.prompt
        for text, seed, passage in self._passages(trial, left_out) if trial.sources else [("", None, None)]:
            yield text, seed, encode(trial.tokenizer, question(passage, self.prompt), raw=raw)

    def _passages(self, trial: Trial, left_out: list[str]) -> Iterator[tuple[str, int | None, str | None]]:
        for path in trial.sources:
            name = "standard input" if str(path) == "-" else path.name
            try:
                found = self._drawn(trial, name, read_text(str(path)))
            except (EmptyText, ShortText) as error:
                left_out.append(str(error) if isinstance(error, EmptyText) else f"{name}: {error}")
                if len(trial.sources) > 1:
                    log.warning("Left out: %s", left_out[-1])
                continue
            yield from ((name, seed, piece) for seed, piece in found)

    def _drawn(self, trial: Trial, name: str, text: str) -> list[tuple[int | None, str]]:
        """Return a text's passages with their seeds, or its start. Raises ShortText for a text that is too short."""
        if self.seeds is not None:
            assert self.limit is not None
            return list(enumerate(pieces(trial.tokenizer, text, self.limit, self.seeds)))
        if self.limit is not None:
            text, count = shortened(trial.tokenizer, text, self.limit)
            if count > self.limit:
                which = "the text's" if len(trial.sources) == 1 else f"{name}'s"
                log.warning("Only the first %s of %s %s tokens are read.", f"{self.limit:,}", which, f"{count:,}")
        return [(None, text)]

    def problem(self, found: Comparisons) -> str | None:
        return None if found.lines else "No method could be measured; the reasons are above."

    def as_json(self, found: Comparisons) -> dict[str, Any]:
        """Return the comparison of a single passage, or all comparisons with a summary of each method and budget."""
        passages = [
            asdict(one.found) | {"text": one.text, "seed": one.seed, "context": one.found.context}
            for one in found.passages
        ]
        if found.single:
            return {key: value for key, value in passages[0].items() if key not in ("text", "seed")}
        summary = [line.as_dict() for line in (found.reference, *found.lines)]
        return {"asked": found.asked, "left_out": found.left_out, "summary": summary, "passages": passages}

    def tables(self, found: Comparisons) -> list[Table]:
        """Return quality and cost of each method and budget, and the refused cases. The best of a budget is bold."""
        lines, several = found.lines, not found.single
        recalls = _RECALL if any(line.values("recalled") for line in lines) else []
        named = [*_NAMED, *([_COUNT] if several else [])]
        quality = [one for one in _quality(found.reference) if not (several and one[0] == "differs at")]
        columns = [*named, *quality, *recalls, *_COST]
        table = Table(
            found.measured,
            [heading for heading, _, _ in columns],
            notes=[
                f"{found.reference.method.capitalize()} is the reference. KL is in nats. Bold: the best of each "
                "budget.",
                "Match and 'KL, free' are free-running; once a token differs, that KL compares different texts. "
                "All other quality columns are teacher-forced.",
                f"Share of bfloat16: held bytes as a share of {_FULL_CACHE}.",
                *(self._of_passages(found) if several else ()),
                *found.refusals,
                *(_merged(line) for line in lines if any(row.merges[0] > 0 for row in line.rows)),
            ],
            named=len(named),
        )
        for line in (found.reference, *lines):
            peers = [peer for peer in lines if peer.budget == line.budget and line.budget is not None]
            table.rows.append([_cell(line, peers, show, badness) for _, show, badness in columns])
        return [table]

    def _of_passages(self, found: Comparisons) -> Iterator[str]:
        """Yield notes about several passages."""
        if found.interrupted:
            yield f"Interrupted: {len(found.passages)} of {found.asked} passages were begun."
        yield f"Passages are of {found.texts}."
        yield from (f"Left out: {sentence}" for sentence in found.left_out)
        yield (
            f"n: number of passages measured. In brackets: the range of 95 % of {RESAMPLES:,} bootstrap means "
            "over passages."
        )
        yield (
            "Perplexity is the exponential of the mean over passages; the largest KL is that of all passages; "
            "seconds and bytes are means."
        )

    def draw(self, found: Comparisons, path: FilePath, *, title: str) -> None:
        draw_comparisons(found, path, title=title)

    def records(self, found: Comparisons) -> list[dict[str, Any]]:
        """Return the figures of every method and budget on every passage, the reference's first."""
        versions = {"kvkeep": kvkeep.__version__, "commit": commit()}
        return [
            {"text": one.text, "seed": one.seed, "prompt_tokens": one.found.prompt_tokens}
            | {"new_tokens": one.found.new_tokens, "role": "reference" if row is one.found.reference else "method"}
            | _figures(row)
            | {"whole_bytes": one.found.whole_bytes, "error": row.error, **versions}
            for one in found.passages
            for row in (one.found.reference, *one.found.rows)
        ]

    def latex(self, found: Comparisons, where: Mapping[str, Any]) -> str:
        """Return a table for a paper. Its caption names the measures, the model and the version."""
        lines, columns = found.lines, _PAPER
        if len({len(line.rows) for line in lines}) > 1:
            columns = [*_PAPER[:2], _COUNT, *_PAPER[2:]]
        table = Table("", [heading for heading, _, _ in columns], named=len(columns) - len(_PAPER) + 2)
        for line in lines:
            peers = [peer for peer in lines if peer.budget == line.budget and line.budget is not None]
            table.rows.append([_cell(line, peers, show, badness) for _, show, badness in columns])
        several = ""
        if len(found.passages) > 1:
            several = f" In brackets: 95 % bootstrap intervals over passages (n = {len(found.passages)})."
        texts = f"; texts: {found.texts}" if found.texts else ""
        missing = [f"Interrupted: {len(found.passages)} of {found.asked} passages were begun."] * found.interrupted
        missing += [f"Left out: {sentence}" for sentence in found.left_out]
        missing += [f"Not measured: {sentence.replace('`', '')}" for sentence in found.refusals]
        caption = (
            f"{Path(str(where['model'])).name} ({where['weights']}): {found.measured}, greedily{texts}. Match with the "
            f"unbounded cache ({found.reference.method}) is free-running; KL (nats) and top-1 are teacher-forced, KL, "
            "free is not. Held: bytes that attention reads, as a share of "
            f"{_FULL_CACHE}; budgets in percent are of a cache in the run's own precision. In bold: the best of a "
            f"budget.{several} {' '.join([*missing, version()])}."
        )
        return booktabs(table, caption, "tab:kvkeep-compare", [line.budget or "" for line in lines])


def _numbered(progress: Progress, number: str) -> Progress:
    """Return a function that reports progress with the passage's number as a prefix."""
    return lambda what, done, total: progress(f"{number}{what}", done, total)


def _brief(row: ReferenceRow) -> str:
    """Return a row as one line, shown before the table is complete."""
    if row.error:
        return f"{row.label}: {row.error}"
    speed = "" if row.tokens_per_s is None else f", {row.tokens_per_s:.1f} tokens/s"
    return f"{row.label}: match {_hundredths(row.match or 0.0)} %, KL {nats(row.kl_mean)}{speed}"


def _empty(path: Path) -> str:
    """Return the reason why a file is left out; "" for a file with text. Raises UsageError for an unreadable file."""
    try:
        read_text(str(path))
    except EmptyText as error:
        return str(error)
    return ""


def _some(left_out: Sequence[str], count: int) -> None:
    """Raise UsageError if all of ``count`` texts are left out. The sentence of a text that is used is ""."""
    reasons = [sentence for sentence in left_out if sentence]
    if reasons and len(reasons) == count:
        first = reasons[0] if count == 1 else f"None of the {count} texts can be compared. The first: {reasons[0]}"
        raise UsageError(first)


# -- the tables ---------------------------------------------------------------------------------------

Column = tuple[str, Callable[[MethodAtBudget], str], Callable[[MethodAtBudget], float | None] | None]
"""A heading, a function for the text of a cell, and a function whose smallest value marks the best row of a budget
(None: no mark)."""


def _quality(reference: MethodAtBudget) -> list[Column]:
    usual = reference.mean("nll")

    def surprise(line: MethodAtBudget) -> float | None:
        """Return the distance of the perplexity from the reference's. A lower perplexity is not better."""
        found = line.mean("nll")
        return None if found is None or usual is None else abs(found - usual)

    return [
        ("entries", _entries, None),
        ("match", lambda line: spread(line.estimate("match"), _hundredths, " %"), _highest("match")),
        ("differs at", lambda line: "-" if (at := line.rows[0].differs_at) is None else str(at), None),
        ("KL, free", lambda line: spread(line.estimate("kl_free_mean"), nats), None),
        ("KL, forced", lambda line: spread(line.estimate("kl_mean"), nats), _lowest("kl_mean")),
        ("largest KL", lambda line: nats(line.largest("kl_max")), None),
        ("top-1", lambda line: spread(line.estimate("top1"), _hundredths, " %"), _highest("top1")),
        ("perplexity", lambda line: spread(line.estimate("perplexity"), _four), surprise),
    ]


def _entries(line: MethodAtBudget) -> str:
    if (found := line.entries) is None:
        return "all"
    low, high = found
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _hundredths(value: float) -> str:
    return f"{100 * value:.0f}"


def _four(value: float) -> str:
    return f"{value:#.4g}".rstrip(".")


def _lowest(name: str) -> Callable[[MethodAtBudget], float | None]:
    return lambda line: line.mean(name)


def _highest(name: str) -> Callable[[MethodAtBudget], float | None]:
    return lambda line: None if (found := line.mean(name)) is None else -found


def _resident(row: ReferenceRow) -> int:
    return int(row.memory["resident_bytes"])


_METHOD: Column = ("method", lambda line: f"`{line.method}`", None)
_BUDGET: Column = ("budget", lambda line: line.budget or "-", None)
_COUNT: Column = ("n", lambda line: str(len(line.rows)), None)
_NAMED: list[Column] = [_METHOD, ("class", lambda line: line.exactness, None), _BUDGET]

_RECALL: list[Column] = [
    (
        "recalled of a head",
        lambda line: (
            "-" if (found := line.mean("recalled")) is None else f"{found:,.0f} of {line.mean('away') or 0:,.0f}"
        ),
        None,
    ),
    ("left out at most", lambda line: percent(line.largest("left_out")), None),
]

_COST: list[Column] = [
    ("resident", lambda line: megabytes(line.bytes(_resident)), lambda line: line.bytes(_resident)),
    ("share of bfloat16", lambda line: percent(line.share, 0), None),
    ("compressed + checkpoints", lambda line: megabytes(line.bytes(lambda row: row.kept_bytes) or None), None),
    ("prefill s", lambda line: fixed(line.mean("prefill_s")), None),
    ("tokens/s", lambda line: fixed(line.mean("tokens_per_s"), 1), _highest("tokens_per_s")),
]

_PAPER: list[Column] = [
    _METHOD,
    _BUDGET,
    ("match (%)", lambda line: spread(line.estimate("match"), _hundredths), _highest("match")),
    ("KL", lambda line: spread(line.estimate("kl_mean"), nats), _lowest("kl_mean")),
    ("KL, free", lambda line: spread(line.estimate("kl_free_mean"), nats), None),
    ("top-1 (%)", lambda line: spread(line.estimate("top1"), _hundredths), _highest("top1")),
    ("held (% of bf16)", lambda line: "-" if line.share is None else _hundredths(line.share), None),
]
"""Columns of the table for a paper."""


def _figures(row: ReferenceRow) -> dict[str, Any]:
    """Return a row's numbers, one per field."""
    names = ("match", "differs_at", "kl_free_mean", "kl_mean", "kl_max", "top1", "perplexity", "prefill_s")
    found = {"method": row.method, "budget": row.budget, "class": row.exactness, "entries": row.entries}
    found |= {name: getattr(row, name) for name in (*names, "tokens_per_s")}
    memory = row.memory
    sizes = {f"{name}_bytes": memory.get(f"{name}_bytes") for name in ("resident", "compressed")}
    return found | sizes | {"checkpoint_bytes": sum(memory.get("checkpoint_bytes", {}).values())}


def _merged(line: MethodAtBudget) -> str:
    pairs, clamped = (sum(row.merges[place] for row in line.rows) for place in (0, 1))
    return f"`{line.label}`: {pairs:,} pairs merged, {clamped:,} shares of keys clamped."


def _cell(
    line: MethodAtBudget,
    peers: Sequence[MethodAtBudget],
    show: Callable[[MethodAtBudget], str],
    badness: Callable[[MethodAtBudget], float | None] | None,
) -> str:
    """Return the text of a cell. It is bold if it is the best of its budget and another row is worse."""
    text = show(line)
    if badness is None or line not in peers:
        return text
    values = {show(peer): value for peer in peers if (value := badness(peer)) is not None}
    best = min(values, key=lambda key: values[key], default=text)
    return f"**{text}**" if text == best and len(values) > 1 else text
