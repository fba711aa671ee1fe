"""Counts the cases of BFCL's multi-turn families that a model solves with the full cache.

Each case has several turns. In a turn the model calls tools until an answer has no call, at most ten times (BFCL: 20),
and bfcl-eval's simulated programs answer the calls. Its checker judges the case after each turn, and a case ends with
the first turn that is wrong. Cases are in a fixed, mixed order.

python tools/multi_turn.py -m qwen2.5-coder-1.5b --cases 10 --out FILE.jsonl
python tools/multi_turn.py --table FILE.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from kvkeep_lab.statistics import student
from kvkeep_lab.tables import markdown
from kvkeep_lab.tasks.bfcl import calls_in, tool

from kvkeep import KeepCache, load
from kvkeep.decode.answer_form import Calls, answers_to
from kvkeep.decode.cached_text import common_prefix
from kvkeep.decode.generate import generate
from kvkeep.decode.prompt import GENERATED, prompt_text
from kvkeep.decode.replay import Generated
from kvkeep.engine.answer import end_ids
from kvkeep.engine.pieces import pieces_of

FAMILIES = ("multi_turn_base", "multi_turn_long_context")
STEPS, NEW = 10, 256
"""The most answers of a turn, and the most tokens of an answer."""
MODULES = "bfcl_eval.eval_checker.multi_turn_eval"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case."""

    model: str
    family: str
    case: str
    turns: int
    right: int
    """The turns before the first wrong one."""
    error: str
    """What the checker says about the wrong turn; "" if there is none."""
    tokens: int
    """Those of the last prompt."""
    seconds: int


class Player:
    """A model that solves cases in one family."""

    def __init__(self, loaded: Any, family: str) -> None:
        self.loaded, self.family = loaded, family
        self.docs = import_module("bfcl_eval.constants.executable_backend_config").MULTI_TURN_FUNC_DOC_FILE_MAPPING
        self.execute = import_module(f"{MODULES}.multi_turn_utils").execute_multi_turn_func_call
        self.check = import_module(f"{MODULES}.multi_turn_checker").multi_turn_checker
        self.ends, self.ids = end_ids(loaded.model), list[int]()

    def play(self, row: dict[str, Any], right: Sequence[Any]) -> Outcome:
        """Play a case. right: the calls that BFCL expects in each turn."""
        begun, made, error = time.monotonic(), list[Any](), ""
        described, messages = self._tools(row), list[dict[str, Any]]()
        cache, held = KeepCache(self.loaded.model, "full"), list[int]()
        for number, turn in enumerate(row["question"], 1):
            messages += turn
            held, calls = self._turn(row, described, messages, cache, held)
            made.append(calls)
            # The programs of a name keep their state, so each judgement has its own.
            found = self.check(made, right[:number], row, self.family, f"kvkeep_{number}")
            if not found["valid"]:
                error = found["error_type"]
                break
        turns = len(made) - bool(error)
        seconds = round(time.monotonic() - begun)
        return Outcome(
            self.loaded.name, self.family, row["id"], len(right), turns, error, len(self.ids), seconds
        )  # fmt: skip

    def _tools(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        files = (_data() / "multi_turn_func_doc" / self.docs[name] for name in row["involved_classes"])
        functions = (one for file in files for one in _lines(file))
        return [
            tool({key: part for key, part in one.items() if key != "response"})
            for one in functions
            if one["name"] not in row.get("excluded_function", ())
        ]

    def _turn(self, row: Any, tools: Any, messages: list[Any], cache: Any, held: list[int]) -> tuple[list[int], Any]:
        """Answer until an answer has no call. Return the tokens that the cache holds, and the calls of each answer."""
        tokenizer, made = self.loaded.tokenizer, []
        calls = Calls([(one["function"]["name"], one["function"]["parameters"]) for one in tools])
        for _ in range(STEPS):
            ids = self.ids = prompt_text(tokenizer, messages, tools=tools).ids(tokenizer)
            common = min(common_prefix(held, ids), len(ids) - 1)
            if cache.get_seq_length() > common:
                cache.crop(cache.get_seq_length() - common)
            answer = generate(self.loaded.model, tokenizer, ids, cache, max_new_tokens=NEW)
            held = [*ids, *answer.tokens][: cache.get_seq_length()]
            written = [token for token in answer.tokens if token not in self.ends]
            form = answers_to(tokenizer, ids)
            pieces = pieces_of(tokenizer, ids, named=form.named(calls))
            said = pieces.add(written) + pieces.rest()
            found = calls_in(form.reader(calls), said)
            message = {"role": "assistant", "content": said, GENERATED: Generated(written)}
            messages.append(message)
            if not found or not all(key.isidentifier() for _, given in found for key in given):
                break
            message["content"] = said.partition("<tool_call>")[0].strip()
            message["tool_calls"] = [
                {"id": f"{len(messages)}-{place}", "type": "function", "function": {"name": name, "arguments": given}}
                for place, (name, given) in enumerate(found)
            ]
            made.append([
                f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in found
            ])  # fmt: skip
            long = "long_context" in self.family
            results, _ = self.execute(
                made[-1], row["initial_config"], row["involved_classes"], "kvkeep", row["id"], long
            )  # fmt: skip
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": result}
                for call, result in zip(message["tool_calls"], results, strict=True)
            ]
        return held, made


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in path.read_text("utf-8").splitlines() if one.strip()]


def _data() -> Path:
    (folder,) = import_module("bfcl_eval").__path__
    return Path(folder) / "data"


def table(found: Sequence[Outcome]) -> str:
    """Return the share of right cases and turns by model and family, with Student's 95 % interval over cases."""
    rows = []
    for key in dict.fromkeys((one.model, one.family) for one in found):
        these = [one for one in found if (one.model, one.family) == key]
        right = student([float(not one.error) for one in these], scale=(0.0, 1.0))
        errors = Counter(one.error.removeprefix("multi_turn:") for one in these if one.error)
        shown = f"{100 * right.mean:.0f} [{100 * right.low:.0f}, {100 * right.high:.0f}]"
        turns = f"{sum(one.right for one in these)} of {sum(one.turns for one in these)}"
        wrong = ", ".join(f"{error} {count}" for error, count in errors.most_common())
        rows.append([*key, str(len(these)), shown, turns, wrong])
    return markdown(("model", "family", "N", "right cases (%)", "right turns", "first errors"), rows, 2)


def main() -> None:
    """Play the cases that a file does not have, and append a line for each; or print the table of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", "-m", default="qwen2.5-coder-1.5b")
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0])
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    if given.table is not None:
        print(table([Outcome(**one) for one in _lines(given.table)]))
        return
    known = {one["case"] for one in _lines(given.out)} if given.out is not None and given.out.exists() else ()
    name = f"BFCL_v4_{given.family}.json"
    right = {row["id"]: row["ground_truth"] for row in _lines(_data() / "possible_answer" / name)}
    rows = _lines(_data() / name)
    player = Player(load(given.model, weights="auto"), given.family)
    for row in random.Random(0).sample(rows, len(rows))[: given.cases]:
        if row["id"] in known:
            continue
        line = json.dumps(asdict(player.play(row, right[row["id"]])))
        print(line, flush=True)
        if given.out is not None:
            with given.out.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")


if __name__ == "__main__":
    main()
