"""Made-up rows in the shape of official releases, for tasks whose data are not shipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvkeep_lab.tasks.longbench import SETTINGS

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
            "input": " ".join(words.split()[number : number + 8]), "context": " ".join([words] * (3 - min(number, 2))),
            "answers": _ANSWERS.get(name, ["the man was not there", "no man"]), "length": 3 * len(words.split()),
            "dataset": name, "language": "python" if name in ("lcc", "repobench-p") else "en",
            "all_classes": CLASSES if name == "trec" else None, "_id": f"{name}-{number}",
        }
        for number in range(count)
    ]  # fmt: skip


def longbench_v2_rows(words: str, count: int = 3) -> list[dict[str, Any]]:
    """Rows of LongBench v2's ``data.json``."""
    return [
        {
            "_id": str(number), "domain": "Single-Document QA", "sub_domain": "Literary",
            "difficulty": ("easy", "hard")[number % 2], "length": ("short", "medium", "long")[number % 3],
            "question": "which of them was there\n",
            **{f"choice_{letter}": f" the {word} " for letter, word in zip("ABCD", words.split(), strict=False)},
            "answer": "ABCD"[number % 4], "context": f"\n{words} {words}\n",
        }
        for number in range(count)
    ]  # fmt: skip


def hellaswag_rows(words: str, count: int = 4) -> list[dict[str, Any]]:
    """Rows of HellaSwag's validation split."""
    some = words.split()
    return [
        {
            "ind": number, "activity_label": some[number],
            "ctx_a": " ".join(some[number : number + 12]) + ".", "ctx_b": "he",
            "ctx": " ".join(some[number : number + 12]) + ". he",
            "endings": [" ".join(some[number + place : number + place + 3 + place]) for place in range(4)],
            "source_id": f"activitynet~{number}", "split": "val", "split_type": "indomain", "label": str(number % 4),
        }
        for number in range(count)
    ]  # fmt: skip


def hellaswag_text_rows(words: str, count: int = 4) -> list[dict[str, Any]]:
    """The same, contexts put together, as in ``hellaswag_val_first500.jsonl``."""
    return [
        {"ctx": f"{row['activity_label']}: {row['ctx']}", "label": int(row["label"]), "endings": row["endings"]}
        for row in hellaswag_rows(words, count)
    ]


def write_official(folder: Path, words: str) -> None:
    """Write a file of every data set into ``folder``, as the releases call them."""
    for name in SETTINGS:
        write_lines(folder / f"{name}.jsonl", longbench_rows(name, words))
    write_lines(folder / "hellaswag_val_first500.jsonl", hellaswag_text_rows(words))
    (folder / "data.json").write_text(json.dumps(longbench_v2_rows(words), indent=2))


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
