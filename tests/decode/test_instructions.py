"""Which first tokens of a prompt are instructions and tools, by the model's chat template."""

from __future__ import annotations

import pytest
from answer_formats import TEMPLATES
from conftest import tokenizer
from scripted import byte_level

from kvkeep.decode.instructions import instruction_tokens
from kvkeep.decode.prompt import prompt_text
from kvkeep.errors import UsageError
from kvkeep.policies.names import checked_pin

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("weather", "search")]
SYSTEM = {"role": "system", "content": "Be short."}
QUESTIONS = [{"role": "user", "content": "Is it warm?"}, {"role": "user", "content": "Another question"}]


@pytest.mark.parametrize("name", ["hermes", "glm"])
def test_the_system_prompt_and_the_tools_are_counted_and_no_question(name: str) -> None:
    made = byte_level().tokenizer(TEMPLATES[name])
    counts = []
    for question in QUESTIONS:
        for messages in ([SYSTEM, question], [SYSTEM, question, {"role": "assistant", "content": "So"}, QUESTIONS[0]]):
            prompt = prompt_text(made, messages, tools=TOOLS).ids(made)
            counts.append(instruction_tokens(made, prompt, messages, tools=TOOLS))
            head = made.decode(prompt[: counts[-1]])
            assert "Be short." in head and "weather" in head and "search" in head
            assert made.decode(prompt[counts[-1] :]).startswith(question["content"])
    assert len({*counts}) == 1
    fewer = [SYSTEM, QUESTIONS[0]]
    assert 0 < instruction_tokens(made, prompt_text(made, fewer).ids(made), fewer) < counts[0]


def test_without_instructions_only_what_the_template_writes_first_is_counted() -> None:
    made, messages = tokenizer(), [{"role": "user", "content": "the of"}]
    prompt = prompt_text(made, messages).ids(made)
    assert instruction_tokens(made, prompt, messages) == 1  # the name of the role
    raw = prompt_text(made, messages, raw=True).ids(made)
    assert instruction_tokens(made, raw, messages, raw=True) == 0


def test_a_pin_is_a_word_or_a_number() -> None:
    assert (checked_pin("system"), checked_pin("0"), checked_pin(200)) == ("system", 0, 200)
    for wrong in ("-1", "all", "1.5", "²", ""):
        with pytest.raises(UsageError, match="A pin is 'system' or a number of first tokens, not"):
            checked_pin(wrong)
