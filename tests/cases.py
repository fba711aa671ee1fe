"""Every method that contract tests walk, what it promises, and the families it works on: one list."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from families import FAMILIES, REFUSES, tiny

from kvkeep import EntryState, KeepCache
from kvkeep.policies.fates.base import GroupedFate
from kvkeep.policies.fates.tiers import InTiers
from kvkeep.policies.methods import names, parts, resolve
from kvkeep.policies.names import LAB
from kvkeep.policies.registry import Method

ALL = tuple(FAMILIES)
EVERY = os.environ.get("KVKEEP_TURN") == "every"
"""Whether each property meets every case, and not a choice of them that has all parts."""
TURN = 0 if EVERY else int(os.environ.get("KVKEEP_TURN", "0"))
"""Another number, another family for each method and property, and another choice of cases."""
RECURRENT = ("qwen3_next", "lfm2", "bamba", "falcon_h1")
"""Families with recurrent states: gated delta nets, short convolutions, Mamba 2, and Mamba 2 beside attention."""
ONE_WAY = tuple(family for family in RECURRENT if family != "lfm2")
"""Families that cannot take tokens back; a short convolution can while it records its inputs."""
UNLIKE = ("llama", "gemma3", "gpt2", "deepseek_v3", "gemma4", "phi3", "qwen3_next", "falcon_h1")
"""Families that differ in what a cache sees: grouped heads, windows, no rotation, latents, shared layers, fused
weights, recurrent states (the other two recurrent families run every method in a test of their own)."""
ROTARY = tuple(family for family in ALL if family not in ("gpt2", "deepseek_v3", "gemma3n", "gemma4"))
PLAIN = ("llama", "mistral", "qwen2", "gemma2", "gpt_oss", "bamba", "falcon_h1")
"""Families with projections of keys by themselves, and no norm after them."""
ADVANCING = tuple(
    family for family in ALL if family not in ("gemma2", "gemma3", "gemma3n", "gemma4", "gpt_oss", *RECURRENT)
)
"""Families whose layers can be run by themselves over old tokens: none keeps a window or a state only."""
GRADED = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma2", "gemma3", "gpt_oss")
"""Families whose residual before the MLP is found."""
WITHOUT_LATENTS = tuple(family for family in ALL if family != "deepseek_v3")
"""Families that cache keys and values."""
OWN_PROJECTIONS = (*PLAIN, "qwen3", "gemma3", "qwen3_moe", "gemma3n", "gemma4", "qwen3_next", "lfm2")
"""Families whose projections of keys and of values are modules of their own."""

KNOWN = {*names(), *(name for registry in parts().values() for name in registry)}
"""All methods and parts; the lab's are tested where it is installed."""

ELSEWHERE = {"kvpress": "tests/lab/test_presses.py: it needs a package, or a double of one"}
"""Registered parts that are in no case here, and where they are tested."""


@dataclass(frozen=True)
class Case:
    """One method as the contract tests it.

    spec, options: of a :class:`KeepCache`. equals: what it gives is what the unbounded cache gives. length: of the
    longest prompt, chunk: tokens of it at a time, None by default. becomes: what is made of what leaves. alone: a row
    of a padded batch is what it is "alone", or alone and "padded" as much; "" where others' padding changes what it is
    kept as. holds: resident and compressed entries are within the budget; else what leaves is kept whole.
    """

    spec: str
    budget: int | None = 16
    options: Mapping[str, Any] = field(default_factory=dict)
    equals: bool = True
    promise: str = "exact"
    length: int = 45
    chunk: int | None = None
    becomes: EntryState = EntryState.CHECKPOINTED
    alone: str = "alone"
    holds: bool = True
    families: tuple[str, ...] = ALL

    @cached_property
    def method(self) -> Method:
        """The method of this name."""
        return resolve(self.spec)

    @property
    def keeps(self) -> str:
        """What a cache says of its texts in these tests, which are all within the model's positions."""
        return "exact" if self.method.recall.endless else self.promise

    @property
    def drafts(self) -> bool:
        """Whether its resident entries draft."""
        return self.method.recall.drafts

    @property
    def backed(self) -> bool:
        """Whether all entries are in a checkpoint, resident or not."""
        return self.method.recall.backed

    @property
    def gradients(self) -> bool:
        """Whether a pass goes back through the model."""
        reading = self.method.selector.reconstruction
        return getattr(self.method.fate, "gradients", False) or (reading is not None and reading.during is not None)

    @property
    def waits(self) -> bool:
        """Whether what leaves waits as it is until it is a group."""
        return isinstance(self.method.fate, GroupedFate | InTiers) or "segments" in self.method.fate.label

    @property
    def loses(self) -> bool:
        """Whether what is kept in a smaller form is gone in the end."""
        return self.becomes == CODED

    @property
    def lengths(self) -> list[int]:
        """Of three prompts that are padded by whole chunks, so that each is cut as it is alone."""
        chunk = self.chunk or 16
        return [self.length, self.length - chunk, self.length - 2 * chunk]


CODED, MERGED, SKETCHED = EntryState.QUANTISED, EntryState.MERGED, EntryState.SKETCHED
AHEAD = {
    "budget": 24,
    "chunk": 8,
    "families": tuple(family for family in ROTARY if family not in ("gemma2", "gemma3", "gpt_oss", *RECURRENT)),
}
"""Of methods that read a chunk twice, which stays whole, and which a window or a recurrent state cannot take back."""


def _exact(spec: str, budget: int | None = 16, **given: Any) -> Case:
    own = {name: given.pop(name) for name in [*given] if name in Case.__dataclass_fields__}
    return Case(spec, budget, given, **own)


def _lossy(spec: str, budget: int = 16, **given: Any) -> Case:
    about = {"equals": False, "promise": "lossy", "chunk": 16, "becomes": EntryState.DROPPED}
    return Case(spec, budget, **(about | given))


def _grouped(spec: str, budget: int, **given: Any) -> Case:
    """What leaves is kept by groups of 32, which takes a longer text."""
    about = {"length": 170, "chunk": 32, "becomes": CODED, "alone": ""}
    return _lossy(spec, budget, **(about | given))


EXACT: dict[str, Case] = {
    "full": _exact("full", None, becomes=EntryState.RESIDENT),
    "static": _exact("static", 200, becomes=EntryState.RESIDENT),
    "paged": _exact("paged", None, becomes=EntryState.RESIDENT),
    "kv-0": _exact("kv-direct", 0, chunk=7, checkpoint="kv", where="host"),
    "kv": _exact("kv-direct", checkpoint="kv", where="disk"),
    "residual": _exact("kv-direct", chunk=5, checkpoint="residual", where="host", page=17),
    "residual:3": _exact("kv-direct", checkpoint="residual:3", where="host", page=17),
    "tokens": _exact("kv-direct", chunk=11, checkpoint="tokens", where="device", page=17),
    # Any selector with checkpoints is exact.
    "window+kv": _exact("window+checkpoint:kv", where="disk"),
    "streaming-llm+residual": _exact("streaming-llm+checkpoint:residual", where="host", page=17),
    "h2o+kv": _exact("h2o+checkpoint:kv", where="host"),
    "h2o+kv-0": _exact("h2o+checkpoint:kv", 0, chunk=7, where="host"),
    "snapkv+kv": _exact("snapkv:window=4,kernel=3+checkpoint:kv", 17, chunk=9, where="device"),
    "tova+residual": _exact("tova+checkpoint:residual", where="host", page=17),
    "adakv+kv": _exact("adakv:window=4,kernel=3+checkpoint:kv", 24, chunk=11, where="host"),
    "pyramidkv+kv": _exact("pyramidkv:window=4,kernel=3+checkpoint:kv", 24, chunk=11, where="host"),
    "expected-attention+kv": _exact(
        "expected-attention:future=9,sinks=1+checkpoint:kv", chunk=18, where="host", families=ROTARY
    ),
    "kvzip+kv": _exact("kvzip:sinks=2+checkpoint:kv", where="host"),
    "keydiff+kv": _exact("keydiff+checkpoint:kv", where="host"),
    "knorm+residual:3": _exact("knorm+checkpoint:residual:3", where="host", page=17),
    "random+tokens": _exact("random+checkpoint:tokens", where="device", page=17),
    "duo-attention+kv": _exact("duo-attention:sinks=2+checkpoint:kv", where="host"),
    # What is recalled is all that could matter.
    "h2o+segments:99": _exact("h2o+segments:99", promise="reversible", holds=False),
    "endless": _exact("endless+passages:count=3,size=16", promise="reversible", where="disk", families=ROTARY),
    "snapkv+residual+pages:all": _exact(
        "snapkv:window=4,kernel=3+checkpoint:residual+pages:all",
        17, promise="reversible", chunk=9, where="host", page=17,
    ),
    "duo-attention+pages:all": _exact(
        "duo-attention:sinks=2+pages:all", promise="reversible", checkpoint="kv", where="disk"
    ),
    # The same beside a store that keeps what leaves in a smaller form, of which then nothing is needed.
    **{
        f"{store}+pages:all": _exact(
            f"{selector}+{store}+pages:all", budget, promise="reversible", length=length, checkpoint="kv",
            where="host", **given,
        )
        for store, selector, budget, length, given in (
            ("quantize:4", "h2o", 100, 170, {"becomes": CODED}),
            ("tiers", "snapkv:window=4,kernel=3", 60, 170, {"becomes": CODED}),
            ("sketch", "random", 24, 45, {"becomes": SKETCHED}),
            ("segments:2", "tova", 16, 110, {"holds": False}),
        )
    },
}  # fmt: skip
"""What these give is what the unbounded cache gives."""

DRAFTING: dict[str, Case] = {
    "snapkv+verified, kv": _exact("snapkv:window=4,kernel=3+verified:5", chunk=9, checkpoint="kv", where="disk"),
    "h2o+verified, residual": _exact("h2o+verified:3", checkpoint="residual", where="host", page=17),
    "window+verified, residual:3": _exact("window+verified:7", 18, checkpoint="residual:3", where="host"),
    "tova+verified, tokens": _exact("tova+verified:2", checkpoint="tokens", where="device", page=17),
    "adakv+verified, kv": _exact("adakv:window=4,kernel=3+verified:4", 20, checkpoint="kv", where="host"),
    "duo-attention+verified, kv": _exact("duo-attention:sinks=2+verified:4", checkpoint="kv", where="host"),
    "knorm+kv+verified": _exact("knorm+checkpoint:kv+verified:4", chunk=5),
    "expected-attention+verified, residual": _exact(
        "expected-attention:sinks=2+verified:4", checkpoint="residual", where="host", families=ROTARY
    ),
    "kvzip+verified, kv": _exact("kvzip:least=0.5+verified:4", checkpoint="kv", where="host"),
    "h2o+quantize:8+verified": _exact("h2o+quantize:8+verified:5", 130, length=170, checkpoint="kv", becomes=CODED),
    "quantized:4+verified": _exact("quantized:4+verified:5", 110, length=170, checkpoint="residual", becomes=CODED),
    "quest+verified": _exact("quest+verified:5", 24, length=90, checkpoint="kv", holds=False),
    "kvslimmer+verified": _exact(
        "kvslimmer:sinks=2,slack=3+verified:3", 22, checkpoint="kv", becomes=MERGED, families=ROTARY
    ),
    "asymkv+verified": _exact(
        "asymkv:sinks=1,cap=0+verified:4", 22, checkpoint="residual", becomes=MERGED, families=ROTARY
    ),
    "revive+verified": _exact("revive+verified:4", 64, length=170, checkpoint="kv", becomes=CODED),
    "h2o+merge+verified": _exact("h2o+merge+verified:3", 20, checkpoint="kv", becomes=MERGED),
    "snapkv+sketch+verified": _exact(
        "snapkv:window=4,kernel=3+sketch+verified:3", 24, checkpoint="kv", becomes=SKETCHED
    ),
    "kvreviver+verified": _exact("kvreviver+verified:3", 24, checkpoint="residual", becomes=SKETCHED),
    "lowrank+verified": _exact(
        "lowrank:4+verified:4", 60, length=170, checkpoint="kv", becomes=CODED, families=PLAIN
    ),
}  # fmt: skip
"""Whatever drafts, the forward pass is exact, and so is an answer."""

LOSSY: dict[str, Case] = {
    "window": _lossy("window"),
    "streaming-llm": _lossy("streaming-llm:sinks=3", families=ROTARY),
    "streaming-llm, absolute": _lossy("streaming-llm:positions=absolute"),
    "h2o": _lossy("h2o"),
    "h2o-fisher": _lossy("h2o-fisher", families=OWN_PROJECTIONS),
    "snapkv": _lossy("snapkv:window=6,kernel=3"),
    "tova": _lossy("tova"),
    "expected-attention": _lossy("expected-attention:future=20,sinks=2", families=ROTARY),
    # Whether a text is longer than the budget, and where its pieces end, is counted in slots.
    "kvzip": _lossy("kvzip:sinks=2", alone="padded"),
    "kvzip, heads alike, in pieces": _lossy("kvzip:least=1,piece=19", alone="padded"),
    "adakv": _lossy("adakv:window=6,kernel=3"),
    "pyramidkv": _lossy("pyramidkv:window=4,kernel=3"),
    "duo-attention": _lossy("duo-attention:sinks=2"),
    "knorm": _lossy("knorm"),
    "keydiff": _lossy("keydiff"),
    "random": _lossy("random", alone="padded"),  # it draws by slot
    "lru": _lossy("lru"),
    **{
        # Pages are of slots, so with padding they are compared with as much padding.
        name: _lossy(spec, promise="reversible", becomes=EntryState.CHECKPOINTED, alone="padded")
        for name, spec in (
            ("h2o+pages:1", "h2o+pages:1"),
            ("kv-lru", "kv-lru"),
            ("tova+residual+fetch-on-miss", "tova+checkpoint:residual+fetch-on-miss:3"),
        )
    },
    **{
        name: _lossy(spec, **({"becomes": MERGED} | given))
        for name, spec, given in (
            ("h2o+merge", "h2o+merge", {}),
            ("snapkv+merge", "snapkv:window=6,kernel=3+merge", {}),
            ("tova+merge", "tova+merge", {}),
            ("adakv+merge", "adakv:window=6,kernel=3+merge", {}),
            ("attention-matching", "attention-matching", {"alone": "padded", "families": WITHOUT_LATENTS}),
            (
                "highest-attention",
                "highest-attention",
                {"becomes": EntryState.DROPPED, "alone": "padded"},
            ),
            (
                "epicache",
                "epicache:segment=7,medoids=2,episodes=2",
                {"becomes": EntryState.DROPPED, "alone": "padded"},
            ),
            (
                "kvzip+attention-matching",
                "kvzip:sinks=2+attention-matching:40",
                {"alone": "padded", "families": WITHOUT_LATENTS},
            ),
            ("cam", "cam:2", {"becomes": EntryState.DROPPED, "alone": "padded"}),
            ("kvslimmer", "kvslimmer:sinks=2,slack=3", {"families": ROTARY}),
            ("asymkv", "asymkv:sinks=1,cap=0", {"families": ROTARY}),
            ("kvslimmer-exact", "kvslimmer-exact:sinks=2,cap=3", {"families": ROTARY}),
            ("kvslimmer-published", "kvslimmer-published:sinks=2,slack=3", AHEAD),
            ("asymkv-published", "asymkv-published:sinks=1,cap=0,slack=2", AHEAD),
        )
    },
    **{
        name: _lossy(spec, promise="reversible", becomes=SKETCHED)
        for name, spec in (
            ("h2o+sketch", "h2o+sketch"),
            ("kvreviver", "kvreviver"),
            (
                "h2o+sketch, shrunk",
                "h2o:recent=0.2+sketch-variants:vague=0.4,swap=1,estimate=shrunk,by=mean,keys=signed",
            ),
        )
    },
    "quantized": _grouped("quantized:4", 100),
    "h2o+quantize:8": _grouped("h2o+quantize:8", 120),
    "kvzip+quantize:8": _grouped("kvzip+quantize:8", 120),
    "snapkv+quantize:2": _grouped("snapkv:window=6,kernel=3+quantize:2", 90),
    "revive": _grouped("revive", 60),
    "lowrank": _grouped("lowrank:4", 50, families=PLAIN),
    "quest": _grouped("quest", 40, promise="reversible", becomes=EntryState.CHECKPOINTED, holds=False),
    "tova+segments:2": _grouped(
        "tova+segments:2", 40, promise="reversible", becomes=EntryState.CHECKPOINTED, holds=False
    ),
    # A store that keeps what leaves in a smaller form, and a recall of what matters most of it.
    "h2o+quantize:4+pages:1": _grouped("h2o+quantize:4+pages:1", 100, promise="reversible"),
    "kvreviver, averaged": _lossy("h2o+sketch-variants:swap=1.1,keys=averaged", promise="reversible", becomes=SKETCHED),
    "kvreviver-fisher": _lossy("kvreviver-fisher", promise="reversible", becomes=SKETCHED, families=OWN_PROJECTIONS),
    **{
        name: _lossy(spec, families=ADVANCING)
        for name, spec in (("lru+redecode", "lru+redecode:3"), ("snapkv+redecode", "snapkv:window=6,kernel=3+redecode"))
    },
    # Prompts are read at once, whatever the budget.
    "snapkv+oneshot": _lossy("snapkv:window=6,kernel=3+oneshot", chunk=None),
    "adakv+oneshot": _lossy("adakv:window=6,kernel=3,least=0+oneshot", chunk=None),
    "kvslimmer+oneshot": _lossy("kvslimmer:sinks=2,slack=3+oneshot", chunk=None, becomes=MERGED, families=ROTARY),
    "kvreviver+oneshot": _lossy("kvreviver+oneshot", chunk=None, promise="reversible", becomes=SKETCHED),
    "revive+oneshot": _grouped("revive+oneshot", 60, chunk=None),
    "streaming-llm+oneshot": _lossy("streaming-llm:sinks=3+oneshot", chunk=None, families=ROTARY),
    "kvgrad": _lossy("kvgrad:sinks=2", alone="padded", families=GRADED),
    "h2o+merge-values": _lossy("h2o+merge-values", becomes=MERGED),
}
"""These give something else than the unbounded cache does."""

EXACT, DRAFTING, LOSSY = (
    {name: case for name, case in cases.items() if {*re.split(r"[+:]", case.spec)} & {*LAB} <= KNOWN}
    for cases in (EXACT, DRAFTING, LOSSY)
)
CASES = EXACT | DRAFTING | LOSSY
CASES["endless"] = CASES.pop("endless")  # last: the number of a case chooses its family
Pair = tuple[str, str]  # the name of a case, and a family


# What takes the past of every cache whose promise is exact, what only of one that keeps the ids, and which do.
TAKES_ANY = (
    *("full", "static", "paged", "kv-0", "kv", "window+kv", "h2o+kv", "h2o+kv-0", "snapkv+kv", "pyramidkv+kv"),
    *("keydiff+kv", "adakv+kv", "adakv+verified, kv"),
    *("duo-attention+kv", "duo-attention+pages:all", "snapkv+verified, kv", "duo-attention+verified, kv"),
    *("knorm+kv+verified", "h2o+quantize:8+verified", "quest+verified", "revive+verified", "h2o+merge+verified"),
    "expected-attention+kv",
)
TAKES_IDS = (
    *("tokens", "random+tokens", "sketch+pages:all", "tova+verified, tokens"),
    *("snapkv+sketch+verified", "lowrank+verified", "kvzip+kv", "kvzip+verified, kv", "endless"),
)
KEEPS_IDS = (
    *("residual", "residual:3", "tokens", "streaming-llm+residual", "tova+residual", "knorm+residual:3"),
    *("random+tokens", "h2o+verified, residual", "window+verified, residual:3", "tova+verified, tokens"),
    *("quantized:4+verified", "asymkv+verified", "snapkv+sketch+verified", "kvreviver+verified", "lowrank+verified"),
    *("expected-attention+verified, residual", "endless"),
)


def handed_on(source: str, target: str) -> bool:
    """Tell whether the past of one case can be put into another."""
    return CASES[source].keeps == "exact" and (target in TAKES_ANY or (target in TAKES_IDS and source in KEEPS_IDS))


def taken(name: str, family: str) -> bool:
    """Tell whether a case works on a family."""
    case = CASES[name]
    kind = str(case.options.get("checkpoint", case.spec.partition("+checkpoint:")[2].partition("+")[0]))
    return family in case.families and kind not in REFUSES.get(family, ())


def pairs(
    turn: int,
    wanted: Callable[[Case], bool] = lambda case: True,
    *,
    everywhere: Sequence[str] = (),
    without: Sequence[str] = (),
) -> list[Pair]:
    """Return cases, each with one of the families that it works on, which is another one for each ``turn`` of as many:
    the next case has the next family. ``everywhere``: cases that come with all of them; ``without``: families that do
    not have the property.

    Where entries come back as they are, every family is told apart by how it projects them; else by what a cache sees.
    """
    found, rest = [], []
    for row, (name, case) in enumerate(CASES.items()):
        families = [family for family in (ALL if case.equals else UNLIKE) if family not in without]
        own = [family for family in families if taken(name, family)]
        if name in everywhere:
            found += [(name, family) for family in own if wanted(case)]
        elif wanted(case):
            rest.append((name, own[(row + turn + TURN) % len(own)]))
    return found + covering(rest, turn)


def covering(made: Sequence[Pair], turn: int = 0) -> list[Pair]:
    """Return a choice of cases that has every selector, fate, recall and family of all of them. It
    begins at another case for each ``turn``, so that every case is in one."""
    if EVERY or not made:
        return [*made]
    start, seen, found = (turn * 5 + TURN) % len(made), set[Any](), []
    for pair in [*made[start:], *made[:start]]:
        method = CASES[pair[0]].method
        has = {type(method.selector), type(method.fate), type(method.recall), method.oneshot, pair[1]}
        if not has <= seen:
            seen |= has
            found.append(pair)
    return sorted(found, key=[*made].index)


def covering_names(names: Iterable[str], turn: int = 0) -> list[str]:
    """Return a choice of cases as :func:`covering` does, where each meets the families by itself."""
    return [name for name, _ in covering([(name, "") for name in names], turn)]


def new_cache(name: str, family: str, **options: Any) -> KeepCache:
    """Return an empty cache of a case."""
    case = CASES[name]
    given = {"budget": case.budget, "chunk": case.chunk} | dict(case.options) | options
    if case.method.oneshot:
        del given["chunk"]
    return KeepCache(tiny(family), case.spec, **given)
