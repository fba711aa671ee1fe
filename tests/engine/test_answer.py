"""Log-probabilities of an answer's tokens: their bytes are the text, also around stop strings and half characters."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import END, Vocabulary, byte_level, scripted, sentencepiece

from kvkeep import KeepCache
from kvkeep.engine.answer import Answer, Ask, Scheduler
from kvkeep.engine.pieces import TextPiece, TokenLogprob
from kvkeep.models.loading import Loaded

KINDS = {"byte level": byte_level, "sentencepiece": sentencepiece}
EURO, BIRD = "\N{EURO SIGN}", "\N{PARROT}"


def written(loaded: Loaded, prompt: list[int], **options: Any) -> tuple[Answer, list[TextPiece]]:
    """The answer to a prompt, and its pieces of text."""
    pieces: list[TextPiece] = []
    ends = [loaded.model.config.eos_token_id]
    ask = Ask(prompt, 40, top_logprobs=20, **options)
    answer = Answer(ask, KeepCache(loaded.model), loaded.tokenizer, ends, pieces.append)
    scheduler = Scheduler(loaded.model)
    scheduled = scheduler.add(answer)
    while not scheduled.give(scheduler.step()[0].logits):
        pass
    return answer, pieces


def bytes_of(text: str) -> list[bytes]:
    return [bytes([byte]) for byte in text.encode()]


def script(kind: str) -> tuple[Vocabulary, Loaded]:
    """A model that writes one character of three bytes and one of four, each byte a token, among others."""
    vocabulary = KINDS[kind]("  ", " a", "xy")
    answer = ["Q", "\n", "  ", " a", *bytes_of(EURO), "xy", *bytes_of(BIRD), ".", END]
    if kind == "byte level":
        vocabulary = KINDS[kind]("  ", " a", "xy", b"!\xf0\x9f")  # begins a character after one of its own
        answer[-6:-2] = [b"!\xf0\x9f", b"\xa6", b"\x9c"]
    return vocabulary, scripted(vocabulary, vocabulary.script(answer))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [None, EURO, BIRD, "y", "a", f"a{EURO}x", "nowhere", "\n"])
def test_bytes_of_the_tokens_are_the_text_before_a_stop_string(kind: str, stop: str | None) -> None:
    vocabulary, loaded = script(kind)
    text = f"\n   a{EURO}xy!{BIRD}." if kind == "byte level" else f"\n   a{EURO}xy{BIRD}."
    answer, pieces = written(loaded, [vocabulary.id("Q")], stops=[] if stop is None else [stop])
    wanted = text.partition(stop or "\0")[0]
    assert answer.text == wanted == "".join(one.text for one in pieces)
    assert answer.reason == ("stop" if wanted != text else "eos")
    told = [one for piece in pieces for one in piece.logprobs]
    assert b"".join(one.data for one in told) == wanted.encode()
    assert "".join(one.text for one in told) == wanted
    shown, sent = "", b""
    for piece in pieces:  # a token's bytes come with the text that has them, or after it
        shown += piece.text
        sent += b"".join(one.data for one in piece.logprobs)
        assert shown.encode().startswith(sent)


@pytest.mark.parametrize("kind", KINDS)
def test_likely_tokens_have_their_own_bytes(kind: str) -> None:
    vocabulary, loaded = script(kind)
    answer, pieces = written(loaded, [vocabulary.id("Q")])
    told: list[TokenLogprob] = [one for piece in pieces for one in piece.logprobs]
    assert [one.token for one in told] == answer.tokens[:-1]
    for one in told:
        token, data, value = one.top[0]
        assert (token, data, value) == (one.token, one.data, pytest.approx(one.logprob)) and len(one.top) == 20
        for other, data, _ in one.top:
            name = vocabulary.tokens[other]
            assert data in (name.encode(), name.replace("▁", " ").encode()) or vocabulary.spelt(data) == name
    parts = {data for one in told for _, data, _ in one.top if data.decode(errors="ignore") != data.decode("latin-1")}
    assert {b"\xe2", b"\x82", b"\xac"} < parts


def test_half_a_character_at_the_end_is_a_token_of_its_bytes() -> None:
    for kind in KINDS.values():
        vocabulary = kind()
        loaded = scripted(vocabulary, vocabulary.script(["Q", "a", b"\xe2", b"\x82", END]))
        answer, pieces = written(loaded, [vocabulary.id("Q")])
        told = [one for piece in pieces for one in piece.logprobs]
        assert answer.text == "a\ufffd" and [one.data for one in told] == [b"a", b"\xe2", b"\x82"]
        assert [one.text for one in told] == ["a", "", "\ufffd"]
