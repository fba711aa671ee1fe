"""Perplexity of kvkeep beside that of llama.cpp, in windows of a text as ``llama-perplexity`` cuts them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import corpus
import torch
from environment import Environment

WINDOW, FIRST = 512, 257
"""Tokens of a window, and the first whose probability counts: it has half a window before it."""
CHARACTERS = 8
"""More characters than this to a token no text has that is measured here."""


def compare(environment: Environment, file: Path, text: Path, windows: int, exact: Path | None) -> None:
    """Print both: with llama.cpp's ids for both, and with kvkeep's own where they differ. ``exact``: also with weights
    unpacked to float32, into this file, so that no activation is rounded to 8 bits, and no key to 16."""
    part = text.read_text("utf-8")[: windows * WINDOW * CHARACTERS]
    said, vocabulary = environment.ask(
        [{"tokenize": str(file), "texts": [part], "special": False, "add": True}, {"vocabulary": str(file)}]
    )
    start = vocabulary["bos"] if vocabulary["add_bos"] else None
    ids = _windows(said["ids"][0], windows, start)
    print(f"{file.name}, {len(ids)} windows of {WINDOW} tokens of {text.name}")
    loaded, reference = _both(environment, file, file, ids, "auto")
    own = loaded.tokenizer(part, split_special_tokens=True)["input_ids"]
    if own[: WINDOW * windows] == said["ids"][0][: WINDOW * windows]:
        print("kvkeep makes the same ids")
    else:
        found = _mean(_nll(loaded.model, one) for one in _windows(own, windows, start))
        _print("kvkeep, its own ids", found, reference)
    if exact:
        environment.ask([{"unpack": str(file), "out": str(exact)}])
        _both(environment, exact, file, ids, "float32")


def record(environment: Environment, files: dict[str, Path], unpacked: Path, out: Path) -> None:
    """Write, for each model, a window of the corpus, and the negative log-likelihood of its second half, as llama.cpp
    computes it with float32 weights, keys and values."""
    text = "\n".join(corpus.WRITTEN["prose"] + corpus.WRITTEN["code"])
    found = {}
    for name, file in files.items():
        environment.ask([{"unpack": str(file), "out": str(unpacked)}])
        said = environment.ask([{"tokenize": str(file), "texts": [text], "special": False, "add": True}])[0]
        ids = said["ids"][0][:WINDOW]
        answer = environment.ask([{"perplexity": str(unpacked), "ids": [ids], "first": FIRST, "exact": True}])[0]
        found[name] = {"ids": ids, "first": FIRST, "nll": answer["nll"][0]}
        print(f"{name}: {found[name]['nll']:.4f}")
    unpacked.unlink()
    out.write_text(json.dumps(found) + "\n")


def _both(environment: Environment, theirs: Path, ours: Path, ids: list[list[int]], weights: str) -> tuple[Any, float]:
    """Print llama.cpp's perplexity and kvkeep's; returns kvkeep's model, and llama.cpp's perplexity."""
    import kvkeep

    asked = {"perplexity": str(theirs), "ids": ids, "first": FIRST, "exact": weights == "float32"}
    reference = _mean(environment.ask([asked])[0]["nll"])
    kind = "float32 weights" if weights == "float32" else "weights of the file"
    _print(f"llama.cpp, {kind}", reference, reference)
    loaded = kvkeep.load(ours, weights=weights, device="cpu")
    _print(f"kvkeep, {kind}", _mean(_nll(loaded.model, one) for one in ids), reference)
    return loaded, reference


def _print(what: str, found: float, reference: float) -> None:
    print(f"{what:32} {found:.4f}  {100 * (found / reference - 1):+.3f} %", flush=True)


def _windows(ids: list[int], count: int, start: int | None) -> list[list[int]]:
    """Windows one after the other; ``start`` takes the place of the first token of each."""
    cut = [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)][:count]
    return cut if start is None else [[start, *window[1:]] for window in cut]


def _nll(model: Any, ids: list[int]) -> float:
    """The negative log-likelihood of the second half of a window."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, FIRST - 1 : -1].double()
    return -float(logits.log_softmax(-1).gather(1, torch.tensor(ids[FIRST:])[:, None]).sum())


def _mean(sums: Iterable[float]) -> float:
    """The perplexity, from the sums of windows."""
    found = list(sums)
    return math.exp(sum(found) / (len(found) * (WINDOW - FIRST)))
