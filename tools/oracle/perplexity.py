"""Perplexity of kvkeep beside that of llama.cpp, in windows of a text as ``llama-perplexity`` cuts them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from environment import Environment

WINDOW, FIRST = 512, 257
"""Tokens of a window, and the first whose probability counts: it has half a window before it."""
CHARACTERS = 8
"""More characters than this to a token no text has that is measured here."""


def compare(environment: Environment, file: Path, text: Path, windows: int) -> None:
    """Print both, with llama.cpp's ids for both, and then with kvkeep's own."""
    import kvkeep

    part = text.read_text("utf-8")[: windows * WINDOW * CHARACTERS]
    said, vocabulary = environment.ask(
        [{"tokenize": str(file), "texts": [part], "special": False, "add": True}, {"vocabulary": str(file)}]
    )
    start = vocabulary["bos"] if vocabulary["add_bos"] else None
    theirs = _windows(said["ids"][0], windows, start)
    answer = environment.ask([{"perplexity": str(file), "ids": theirs, "first": FIRST}])[0]
    reference = _perplexity(answer["nll"])
    print(f"{file.name}, {len(theirs)} windows of {WINDOW} tokens of {text.name}")
    print(f"llama.cpp                     {reference:.4f}")
    loaded = kvkeep.load(file)
    found = _perplexity([_nll(loaded.model, ids) for ids in theirs])
    print(f"kvkeep, ids of llama.cpp      {found:.4f}  {100 * (found / reference - 1):+.3f} %")
    own = loaded.tokenizer(part, split_special_tokens=True)["input_ids"]
    if own[: WINDOW * windows] == said["ids"][0][: WINDOW * windows]:
        print("kvkeep, its own ids           the same: the ids are equal")
        return
    found = _perplexity([_nll(loaded.model, ids) for ids in _windows(own, windows, start)])
    print(f"kvkeep, its own ids           {found:.4f}  {100 * (found / reference - 1):+.3f} %")


def _windows(ids: list[int], count: int, start: int | None) -> list[list[int]]:
    """Windows one after the other; ``start`` takes the place of the first token of each."""
    cut = [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)][:count]
    return cut if start is None else [[start, *window[1:]] for window in cut]


def _nll(model: Any, ids: list[int]) -> float:
    """The negative log-likelihood of the second half of a window."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, FIRST - 1 : -1].double()
    return -float(logits.log_softmax(-1).gather(1, torch.tensor(ids[FIRST:])[:, None]).sum())


def _perplexity(sums: list[float]) -> float:
    return math.exp(sum(sums) / (len(sums) * (WINDOW - FIRST)))
