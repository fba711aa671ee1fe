"""RULER's variable tracking: names that got one value by way of each other, among noise."""

from __future__ import annotations

import random
import string
from itertools import pairwise

from kvkeep_lab.tasks.ruler.family import Asked
from kvkeep_lab.tasks.ruler.niah import NOISE

HOPS = 4
_TEXT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {query} in the text above."
)
_LEAD = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {query}, they are:"
)


def track(loaded: None, draw: random.Random, size: int, length: int) -> Asked:
    """Return a question about one chain among ``size`` lines of noise, after an example that is answered. The example
    has ten lines of noise, as RULER's has at most lengths, and fewer below 4,000 tokens."""
    example = _chain(draw, min(10, max(1, length // 400)), letters=3)
    asked = _chain(draw, size, letters=5)
    return Asked(
        f"{example.text} {example.lead} {example.right}\n\n{asked.text}", asked.lead, asked.answers, asked.right
    )


def _chain(draw: random.Random, size: int, letters: int) -> Asked:
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(draw.choices(string.ascii_uppercase, k=letters))
        names += [] if name in names else [name]
    value = str(draw.randrange(10_000, 99_999))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
    lines = [f"{NOISE}\n"] * size
    if size <= len(chain):  # sentence by sentence, or there are too few places
        lines = [f"{sentence.strip()}." for sentence in NOISE.split(".") if sentence] * size
    for number, place in enumerate(sorted(draw.sample(range(len(lines)), len(chain)))):
        lines.insert(place + number, chain[number])
    context = " ".join(lines)
    return Asked(
        _TEXT.format(context=context, query=value), _LEAD.format(count=len(names), query=value), names, " ".join(names)
    )
