"""Ask for facts in texts that are longer than the model's context, and tell what fails: the choice of passages, their
places, or the model.

Three facts are hidden in each text, at 5, 40 and 80 % of it. For each fact, a copy of the cache that has read all but
the last tokens of the text is asked a question in the chat template. The full cache answers the same question from 256
tokens around the fact (*alone*), and from the tokens to which ``endless`` attends, read anew as one short prompt (*the
same tokens*). *Begun*: the first words of the answer are given. Texts are cut from files of several authors, in turn.

python tools/endless_needles.py AUTHOR.txt AUTHOR.txt ... --text 0 -m smollm2 -b 1024 --out FILE.jsonl
python tools/endless_needles.py --table FILE.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from endless_chat import attended
from kvkeep_lab.tables import markdown
from kvkeep_lab.tasks.needle import hidden
from kvkeep_lab.tasks.texts import passage_text

from kvkeep import KeepCache, load
from kvkeep.decode.generate import generate
from kvkeep.decode.prompt import encode, question
from kvkeep.decode.texts import read_text

DEPTHS = (5, 40, 80)
TOWNS = ("Oslo", "Lima", "Cairo")
NEW = 24
"""The maximum number of tokens of an answer."""
PASSAGE = 128
"""Tokens on each side of a fact that is asked for alone."""
FORMS = {
    "pass key": (
        "The pass key is {value}. Remember it, the pass key is {value}.",
        "What is the pass key?",
        "The pass key is",
    ),
    "door code": (
        "By the way, the door code of the house in {town} is {value}. Write it down.",
        "What is the door code of the house in {town}?",
        "The door code of the house in {town} is",
    ),
    "phone number": (
        "Call my sister in {town} if anything happens. Her phone number is {value}.",
        "What is the phone number of my sister in {town}?",
        "The phone number of your sister in {town} is",
    ),
}
"""By form: the sentence that states the fact, the question, and the first words of its answer."""


@dataclass(frozen=True)
class Fact:
    """A fact in a text."""

    depth: int
    form: str
    text: str
    question: str
    lead: str
    value: str


@dataclass(frozen=True)
class Outcome:
    """The answers to the question about a fact."""

    model: str
    method: str
    budget: int
    text: int
    author: str
    tokens: int
    depth: int
    form: str
    value: str
    recalled: bool
    """Whether the recalled passages, or the newest entries, contain the value."""
    passages: int
    answers: dict[str, str]
    """The answer, by what the model was given."""

    def found(self, given: str) -> bool:
        """Return whether an answer has the value."""
        return self.value in self.answers[given].replace(",", "")


def facts(number: int) -> list[Fact]:
    """Return the facts of a text. Each form takes each depth in three texts of an author."""
    draw, found = random.Random(f"facts {number}"), []
    for place, (depth, town) in enumerate(zip(DEPTHS, TOWNS, strict=True)):
        form, value = [*FORMS][(number + number // 3 + place) % 3], str(draw.randrange(10_000, 100_000))
        found.append(Fact(depth, form, *(part.format(town=town, value=value) for part in FORMS[form]), value))
    return found


def ask(loaded: Any, authors: Sequence[Path], number: int, method: str, budget: int, tokens: int) -> Iterator[Outcome]:
    """Read text ``number`` and yield the answers about its facts."""
    model, tokenizer, author = loaded.model, loaded.tokenizer, authors[number % len(authors)]
    hay, hidden_facts = passage_text(tokenizer, read_text(str(author)), tokens, random.Random(number)), facts(number)
    for fact in hidden_facts:
        hay = hidden(hay, fact.text, fact.depth)

    def answer_to(ids: Sequence[int], cache: KeepCache) -> str:
        return tokenizer.decode(generate(model, tokenizer, ids, cache, max_new_tokens=NEW).tokens, True)

    def prompt(text: str, fact: Fact, begun: bool = False) -> list[int]:
        return encode(tokenizer, question(text, fact.question), answer=fact.lead if begun else "")

    cache, prompts = KeepCache(model, method, budget), [prompt(hay, fact) for fact in hidden_facts]
    start = len(prompts[0]) - 2 * PASSAGE
    with torch.no_grad():
        model(torch.tensor([prompts[0][:start]]), cache=cache, use_cache=True, logits_to_keep=1)
    for fact, ids in zip(hidden_facts, prompts, strict=True):
        assert ids[:start] == prompts[0][:start]
        twin = cache.fork()
        answers = {"endless": answer_to(ids, twin)}
        spans = attended(twin)
        twin = cache.fork()
        answers["endless, begun"] = answer_to(prompt(hay, fact, begun=True), twin)
        near = [token for low, high in spans for token in ids[low : min(high, len(ids))]]
        place = len(prompt(hay[: hay.index(fact.text)], fact)) - len(prompt("", fact))
        alone = tokenizer.decode(ids[max(0, place - PASSAGE) : place + PASSAGE])
        for name, given in (
            ("the same tokens", near),
            ("alone", prompt(alone, fact)),
            ("alone, begun", prompt(alone, fact, begun=True)),
        ):
            answers[name] = answer_to(given, KeepCache(model, "full"))
        recalled = fact.value in tokenizer.decode(near)
        yield Outcome(
            loaded.name, method, budget, number, author.stem, len(ids), fact.depth, fact.form, fact.value, recalled,
            len(spans) - 1, answers,
        )  # fmt: skip


def table(found: Sequence[Outcome]) -> str:
    """Return how often the value is in the answer, by model and budget."""
    rows = []
    for key in dict.fromkeys((one.model, one.method, one.budget) for one in found):
        these = [one for one in found if (one.model, one.method, one.budget) == key]
        counts = (sum(one.found(name) for one in these) for name in these[0].answers)
        rows.append([*map(str, key), str(len(these)), str(sum(one.recalled for one in these)), *map(str, counts)])
    return markdown(("model", "method", "budget", "N", "recalled", *found[0].answers), rows, 2)


def main() -> None:
    """Ask, and append a line for each fact to a file; or print the table of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("author", type=Path, nargs="*", help="a file or, for several files, a folder")
    parser.add_argument("--text", type=int, default=0)
    parser.add_argument("--model", "-m", default="smollm2")
    parser.add_argument("--method", "-x", default="endless")
    parser.add_argument("--budget", "-b", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=40_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    if given.table is not None:
        print(table([Outcome(**json.loads(line)) for line in given.table.read_text("utf-8").splitlines()]))
        return
    loaded = load(given.model, weights="auto")
    for one in ask(loaded, given.author, given.text, given.method, given.budget, given.tokens):
        line = json.dumps(asdict(one))
        print(line, flush=True)
        if given.out is not None:
            with given.out.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")


if __name__ == "__main__":
    main()
