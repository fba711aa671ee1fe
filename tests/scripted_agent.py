"""A scripted model that is an agent's: it calls a known tool, and gives a known answer once it has the result."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from scripted import ALPHABET, BEGIN, END, START, Vocabulary, byte_level, scripted, write_gguf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from kvkeep.models.loading import Loaded

ANSWER = "The file says hello."
TEMPLATE = (
    "{% if tools %}<|start|>system\n# Tools\n{% for one in tools %}{{ one | tojson }}\n{% endfor %}<|turn|>{% endif %}"
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + (m.content or '') }}"
    '{% for one in m.tool_calls %}{{ \'\n<tool_call>\n{"name": "\' + one.function.name + \'", "arguments": \' }}'
    "{{ one.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}<|turn|>{% endfor %}"
    "{% set results = messages | selectattr('role', 'equalto', 'tool') | list %}"
    "{% if add_generation_prompt %}{{ '<|start|>' if tools and not results else '<s>' }}{% endif %}"
)
"""It writes tools, calls and results as Hermes does. An answer begins after START if it has to be a call."""


def vocabulary(tool: str, value: str, words: Iterable[bytes] = ()) -> Vocabulary:
    """The vocabulary of a model that calls ``tool``. words: further tokens."""
    return byte_level(*words, "<tool_call>", ANSWER, f'{tool}"', f": {json.dumps(value)}}}")


def script(made: Vocabulary, tool: str, value: str) -> dict[int, int | list[int]]:
    """The successors. A quote comes where the form of a call leaves a choice: before the tool's name, and before the
    value of its one argument."""
    found = made.script([START, "<tool_call>"], [BEGIN, ANSWER, END])
    return {**found, made.id('"'): [made.id(f'{tool}"'), made.id(f": {json.dumps(value)}}}")]}


def rest(made: Vocabulary) -> dict[int, float]:
    """Logits by which an answer of any other form ends soon."""
    return {made.id(piece): logit for piece, logit in ((END, 14.0), ('"', 12.0), ("}", 8.0), ("]", 7.0), (",", 6.0))}


def agent_model(tool: str, value: str, positions: int = 4096) -> Loaded:
    """The model in memory. value: what the tool gets as its first argument."""
    made = vocabulary(tool, value)
    return scripted(made, script(made, tool, value), TEMPLATE, positions, rest(made))


def write_agent(path: Path, tool: str, value: str, positions: int = 65_536) -> None:
    """The same as a file. It knows words of this repository's pages, so that the texts of a real agent are no longer
    than other models find them."""
    made = vocabulary(tool, value, words())
    write_gguf(path, made, script(made, tool, value), TEMPLATE, positions, rest=rest(made))


@cache
def words(count: int = 2000) -> tuple[bytes, ...]:
    """Tokens that byte-pair encoding finds in the pages."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pages = [str(page) for page in (Path(__file__).parents[1] / "docs").glob("*.md")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train(pages, trainers.BpeTrainer(vocab_size=256 + count, initial_alphabet=alphabet, show_progress=False))
    bytes_of = {letter: bytes([byte]) for byte, letter in ALPHABET.items()}
    found = sorted(inner.get_vocab().items(), key=lambda one: one[1])
    return tuple(b"".join(bytes_of[letter] for letter in token) for token, _ in found[256:] if '"' not in token)
