"""Made-up rows in the shape of official releases, for tasks whose data are not shipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvkeep.lab.tasks.longbench import SETTINGS

CLASSES = ["Food", "Date", "Sport", "Other location"]
_ANSWERS = {
    "trec": ["Sport"],
    "passage_count": ["7"],
    "passage_retrieval_en": ["Paragraph 15"],
    "lcc": ["        return a + b\n"],
    "repobench-p": ["    it = them.more(one)"],
}


def longbench_rows(name: str, words: str, count: int = 2) -> list[dict[str, Any]]:
    """Rows of one data set of LongBench's ``data.zip``; the first is longer than 200 words."""
    return [
        {
            "input": " ".join(words.split()[number : number + 8]),
            "context": " ".join([words] * (3 - min(number, 2))),
            "answers": _ANSWERS.get(name, ["the man was not there", "no man"]),
            "length": 3 * len(words.split()),
            "dataset": name,
            "language": "python" if name in ("lcc", "repobench-p") else "en",
            "all_classes": CLASSES if name == "trec" else None,
            "_id": f"{name}-{number}",
        }
        for number in range(count)
    ]


def longbench_v2_rows(words: str, count: int = 3) -> list[dict[str, Any]]:
    """Rows of LongBench v2's ``data.json``."""
    return [
        {
            "_id": str(number),
            "domain": "Single-Document QA",
            "sub_domain": "Literary",
            "difficulty": ("easy", "hard")[number % 2],
            "length": ("short", "medium", "long")[number % 3],
            "question": "which of them was there\n",
            **{f"choice_{letter}": f" the {word} " for letter, word in zip("ABCD", words.split(), strict=False)},
            "answer": "ABCD"[number % 4],
            "context": f"\n{words} {words}\n",
        }
        for number in range(count)
    ]


def write_official(folder: Path, words: str) -> None:
    """Write a file of every data set into ``folder``, as the releases call them."""
    for name in SETTINGS:
        _write_lines(folder / f"{name}.jsonl", longbench_rows(name, words))
    (folder / "data.json").write_text(json.dumps(longbench_v2_rows(words), indent=2))


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
