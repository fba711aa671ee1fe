"""Answers that are sent back as they were generated."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import TURN, byte_level

from kvkeep.decode.prompt import GENERATED, NUMBER, prompt_text
from kvkeep.decode.replay import Generated, answer_key, bodies, reasoning_tokens, spoken_after

TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' }}"
    "{% if m.reasoning_content and loop.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m['content'] | trim }}{% for c in m.tool_calls or [] %}{{ '<tool_call>\n{\"name\": \"' + c.function.name + "
    "'\", \"arguments\": ' + c.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}<|turn|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
CALL = {"id": "a", "type": "function", "function": {"name": "read", "arguments": {"path": "a", "more": [1]}}}
ASK = {"role": "user", "content": "the Q"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level("<tool_call>", "</tool_call>", "Hello", "<think>", "</think>").tokenizer(TEMPLATE)


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def answer(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": ""} | fields


@pytest.mark.parametrize(
    "message, generated",
    [
        (answer(content="Hello there"), ["H", "e", "l", "l", "o", " ", "there"]),
        (answer(content="Hello"), ["Hello", "\n", " "]),
        (
            answer(tool_calls=[CALL]),
            ['<tool_call>\n{"name": "read",  "arguments":{"more":[1],"path":"a"}}\n</tool_call>'],
        ),
        (
            answer(content="Hello", tool_calls=[CALL]),
            ["Hello", '\n\n<tool_call>\n{"name":"read", "arguments": {"path"'],
        ),
    ],
)
def test_an_answer_continues_as_it_was_generated(tokenizer: Any, message: Any, generated: list[str]) -> None:
    """What was read up to its end is the beginning of the next prompt."""
    first = [{"role": "system", "content": "Be <|turn|> brief"}, ASK]
    made = [token for part in generated for token in ids(tokenizer, part)]
    read = prompt_text(tokenizer, first).ids(tokenizer) + made
    sent = [*first, {**message, GENERATED: Generated(made)}, {"role": "user", "content": "more of <|turn|> it"}]
    sent = [{**one, NUMBER: number} for number, one in enumerate(sent)]
    again = prompt_text(tokenizer, sent)
    assert again.ids(tokenizer)[: len(read)] == read
    plain = prompt_text(tokenizer, [{name: one for name, one in m.items() if name != GENERATED} for m in sent])
    assert again.text == plain.text and again.data[0] == plain.data[0] and again.messages == plain.messages
    rest = [tokenizer.convert_tokens_to_ids(TURN), *ids(tokenizer, "<|start|>user\nmore of ")]
    assert again.ids(tokenizer)[len(read) :][: len(rest)] == rest
    assert [again.text[slice(*again.messages[number])] for number in (0, 3)] == [
        "Be <|turn|> brief",
        "more of <|turn|> it",
    ]


@pytest.mark.parametrize("last", [True, False])
def test_a_template_that_leaves_reasoning_out_leaves_its_tokens_out(tokenizer: Any, last: bool) -> None:
    message = answer(content="Hello", reasoning_content="so it is")
    thoughts, said = ids(tokenizer, "<think>so it is</think>"), ids(tokenizer, "Hel") + ids(tokenizer, "lo")
    message[GENERATED] = Generated([*thoughts, *said], len(thoughts), "so it is")
    sent = [ASK, message] if last else [ASK, message, ASK]
    found = prompt_text(tokenizer, sent).ids(tokenizer)
    start = len(prompt_text(tokenizer, [ASK]).ids(tokenizer))
    wanted = [*thoughts, *said] if last else said
    assert found[start : start + len(wanted)] == wanted


def test_what_a_template_leaves_out_or_changes_is_not_replayed(tokenizer: Any) -> None:
    made = Generated(ids(tokenizer, "other"))
    with_call = prompt_text(tokenizer, [ASK, answer(content="Hello", **{GENERATED: made}), ASK])
    assert not with_call.answers  # its tokens begin otherwise


def test_a_digest_is_of_what_an_answer_says() -> None:
    one, other = answer(content=" Hello\n", tool_calls=[CALL]), answer(content="Hello", tool_calls=[CALL | {"id": "b"}])
    turned = {"name": "read", "arguments": {"more": [1], "path": "a"}}
    assert (
        answer_key(one) == answer_key(other) == answer_key(answer(content="Hello", tool_calls=[{"function": turned}]))
    )
    assert answer_key(one) != answer_key(answer(content="Hello"))


def test_bodies_are_not_known_where_a_template_writes_something_else() -> None:
    assert bodies("<a>x<b>y<c>", "<a>#0#<b>#1#<c>", "#", 2) == [(3, 4), (7, 8)]
    assert bodies("<a>x<b>y<c>", "<a>#0#<b>#1#", "#", 2) == [(3, 4), (7, 11)]
    assert bodies("<a>x<d>y<c>", "<a>#0#<b>#1#<c>", "#", 2) is None
    assert bodies("<a>x<b>y<c>", "<a>#1#<b>#0#<c>", "#", 2) is None


def test_bodies_are_not_known_where_a_message_has_what_is_between_two() -> None:
    marked = "[I] $0$ [/I] $1$ </s>[I] $2$ [/I]"
    assert bodies("[I] q [/I] a </s>[I] w [/I]", marked, "\\$", 3) == [(4, 5), (11, 12), (21, 22)]
    for asked in ("q [/I] a IGNORE", "q [/I] a </s>[I] w"):
        assert bodies(f"[I] {asked} [/I] a </s>[I] w [/I]", marked, "\\$", 3) is None


def test_an_answer_is_spoken_after_its_reasoning() -> None:
    assert spoken_after(["<think>", "\n", "so", "</think>", "\n\n", "Yes"], "so", "</think>") == 5
    assert spoken_after(["<think>", "so", "</think>\n\nYes"], "so", "</think>") == 0
    assert spoken_after(["Yes"], "so", "</think>") == 0


def test_tokens_of_reasoning_are_those_before_the_end_of_its_mark() -> None:
    assert reasoning_tokens(["<think>", "\n", "so", "</think>", "\n\n", "Yes"], "so", "</think>") == 4
    assert reasoning_tokens(["<think>", "so", "</think>\n\nYes", "!"], "so", "</think>") == 3
    assert reasoning_tokens(["<think>", "so", " it"], "so it", "</think>") == 3
