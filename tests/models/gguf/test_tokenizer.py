"""The tokenizer of a GGUF file: ids, special tokens, ends and templates by llama.cpp's rules, on tiny vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle_files import tokenizer_of
from tokenizers import pre_tokenizers

from kvkeep.errors import ModelError, UnsupportedModelError, UsageError
from kvkeep.models.gguf.facts import FileKeys
from kvkeep.models.gguf.vocabulary import vocabulary_of

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{one:02X}>" for one in range(256)]


def keys(**values: Any) -> FileKeys:
    """Keys of ``tokenizer.ggml``; two underscores are a point of a whole name, None is left out."""
    named = {key.replace("__", ".") if "__" in key else f"tokenizer.ggml.{key}": one for key, one in values.items()}
    stored = {"token_type": np.int32, "scores": np.float32}
    named = {
        key: np.array(one, stored[name]) if (name := key.rpartition(".")[2]) in stored and type(one) is list else one
        for key, one in named.items()
        if one is not None
    }
    return FileKeys(Path("model.gguf"), named)


def byte_level(*more: tuple[str, int], merges: tuple[str, ...] = (), **values: Any) -> FileKeys:
    """A vocabulary of all bytes, the tokens of ``merges``, and ``more`` tokens with their types."""
    merged = [one.replace(" ", "") for one in merges]
    tokens = [*LETTERS, *merged, *(token for token, _ in more)]
    types = [NORMAL] * (256 + len(merged)) + [kind for _, kind in more]
    stated = {"tokens": tokens, "token_type": types, "merges": list(merges), "bos_token_id": 0, "eos_token_id": 0}
    return keys(**{"model": "gpt2", "pre": "gpt-2", **stated, **values})


def scored(*more: tuple[str, int, float], **values: Any) -> FileKeys:
    """A vocabulary of bytes and ``more`` tokens with their types and scores."""
    tokens = [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0)]
    tokens += [*((one, BYTE, 0.0) for one in BYTES), *more]
    names, types, scores = (list(one) for one in zip(*tokens, strict=True))
    return keys(**{"model": "llama", "tokens": names, "token_type": types, "scores": scores, **values})


def names(source: FileKeys, text: str, **how: Any) -> list[str]:
    tokenizer = tokenizer_of(source)
    return tokenizer.convert_ids_to_tokens(tokenizer(text, **how)["input_ids"])


def test_another_pre_tokenizer_can_be_asked_for() -> None:
    source = byte_level(merges=("1 2",), pre="nobody-s")
    with pytest.raises(UnsupportedModelError, match="nobody-s"):
        tokenizer_of(source)
    tokenizer = tokenizer_of(source, "smollm")
    assert tokenizer.convert_ids_to_tokens(tokenizer("12")["input_ids"]) == ["1", "2"]


def test_control_tokens_are_text_where_they_are_not_parsed() -> None:
    source = byte_level(("<|user|>", CONTROL), ("[U]", UNKNOWN), ("<b>", USER))
    assert names(source, "<|user|>[U]<b>") == ["<|user|>", "[U]", "<b>"]
    plain = names(source, "<|user|>[U]<b>", split_special_tokens=True)
    assert plain == [*"<|user|>", *"[U]", "<b>"]
    assert tokenizer_of(source).decode([256, 257, 258, 64], skip_special_tokens=True).startswith("<b>")


def test_text_of_a_special_token_is_kept_where_it_could_be_a_byte() -> None:
    tokens = [one for one in LETTERS if one != "ø"]
    source = keys(
        model="gpt2", pre="gpt-2", tokens=[*tokens, "ø"], token_type=[NORMAL] * 255 + [USER], merges=[],
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    tokenizer = tokenizer_of(source)
    assert tokenizer("ø")["input_ids"] == [255]
    assert tokenizer.decode([255]) == "ø"


def test_the_beginning_and_the_end_are_added_as_the_file_says() -> None:
    more = (("<s>", CONTROL), ("</s>", CONTROL))
    ids = {"bos_token_id": 256, "eos_token_id": 257}
    assert names(byte_level(*more, **ids), "a") == ["a"]
    assert names(byte_level(*more, **ids, pre="llama-bpe"), "a") == ["<s>", "a"]
    assert names(byte_level(*more, **ids, pre="llama-bpe", add_bos_token=False), "a") == ["a"]
    assert names(byte_level(*more, **ids, add_bos_token=True, add_eos_token=True), "a") == ["<s>", "a", "</s>"]
    assert names(byte_level(*more, **ids, add_bos_token=True), "a", add_special_tokens=False) == ["a"]
    assert names(byte_level(*more, **ids, add_bos_token=True), "") == ["<s>"]
    assert names(byte_level(("a:0 $A", CONTROL), bos_token_id=256, add_bos_token=True), "a") == ["a:0 $A", "a"]


def test_what_a_file_does_not_state_is_llama_cpps_default() -> None:
    tokenizer = tokenizer_of(keys(model="gpt2", tokens=LETTERS, merges=[]))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (11, 11, None)
    assert tokenizer(LETTERS[11])["input_ids"] == [11]  # and an ordinary token all the same
    assert not tokenizer.added_tokens_decoder
    tokenizer = tokenizer_of(scored(("a", NORMAL, 0.0)))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert tokenizer_of(keys(model="gpt2", pre="glm4", tokens=LETTERS, merges=[])).bos_token_id is None


# Tokens with scores


def test_merges_without_letters_for_bytes() -> None:
    tokens = ["<bos>", "<eos>", "▁", "a", "▁a", "\n", "\n\n", *BYTES]
    types = [CONTROL, CONTROL, *[NORMAL] * 5, *[BYTE] * 256]
    source = keys(
        model="gemma4", tokens=tokens, token_type=types, merges=["▁ a", "\n \n"], bos_token_id=0, eos_token_id=1,
        add_bos_token=False,
    )  # fmt: skip
    assert names(source, " a é\n\n\na") == ["<bos>", "▁a", "▁", "<0xC3>", "<0xA9>", "\n\n", "\n", "a"]
    assert tokenizer_of(source).decode([4, 2, 7 + 0xC3, 7 + 0xA9, 6, 3]) == " a é\n\na"


# Ends


def ends(*more: tuple[str, int], **values: Any) -> list[str]:
    vocabulary = vocabulary_of(byte_level(*more, **{"eos_token_id": 256, **values}))
    return [vocabulary.tokens[one] for one in vocabulary.ends]


def test_every_token_that_ends_a_generation_is_an_end() -> None:
    assert ends(("</x>", CONTROL)) == ["</x>"]
    assert ends(("</x>", CONTROL), ("<|im_end|>", CONTROL), ("<|eom_id|>", NORMAL)) == [
        "</x>", "<|im_end|>", "<|eom_id|>"
    ]  # fmt: skip
    assert ends(("</x>", CONTROL), ("<t>", CONTROL), ("<m>", CONTROL), eot_token_id=257, eom_token_id=258) == [
        "</x>", "<t>", "<m>"
    ]  # fmt: skip
    assert ends(("</x>", CONTROL), ("<|fim_pad|>", CONTROL), ("<|file_sep|>", USER)) == [
        "</x>", "<|fim_pad|>", "<|file_sep|>"
    ]  # fmt: skip


def test_a_message_s_end_is_none_where_others_end_the_answer() -> None:
    harmony = [(one, CONTROL) for one in ("<|return|>", "<|call|>", "<|end|>", "<|channel|>")]
    assert ends(*harmony) == ["<|return|>", "<|call|>"]
    tokenizer = tokenizer_of(byte_level(*harmony, eos_token_id=256))
    assert tokenizer.decode([258, 259, 256], skip_special_tokens=True) == "<|end|><|channel|>"
    assert ends(("<eos>", CONTROL), ("</s>", NORMAL)) == ["<eos>", "</s>"]
    assert ends(("<eos>", CONTROL), ("</s>", NORMAL), ("<|tool_response>", CONTROL)) == ["<eos>", "<|tool_response>"]


def test_a_token_named_as_an_end_is_a_control_token() -> None:
    source = byte_level(("<|im_end|>", NORMAL), ("<|fim_prefix|>", USER))
    assert names(source, "<|im_end|>") == ["<|im_end|>"]
    assert names(source, "<|im_end|>", split_special_tokens=True) == [*"<|im_end|>"]
    assert names(source, "<|fim_prefix|>", split_special_tokens=True) == [*"<|fim_prefix|>"]
    stated = byte_level(("<|im_end|>", NORMAL), ("<|fim_prefix|>", USER), fim_pre_token_id=257)
    assert names(stated, "<|fim_prefix|>", split_special_tokens=True) == ["<|fim_prefix|>"]


# Templates


def test_named_templates_are_kept() -> None:
    one = byte_level(tokenizer__chat_template="{{ messages }}")
    assert tokenizer_of(one).chat_template == "{{ messages }}"
    several = byte_level(
        tokenizer__chat_template="a",
        tokenizer__chat_templates=["tool_use"],
        tokenizer__chat_template__tool_use="b",
    )
    assert tokenizer_of(several).chat_template == {"default": "a", "tool_use": "b"}
    assert not [key for key in several.metadata if key not in several.read and "template" in key]
    assert tokenizer_of(several).apply_chat_template([{}], chat_template="tool_use", tokenize=False) == "b"
    assert tokenizer_of(byte_level()).chat_template is None


@pytest.mark.parametrize(
    "template",
    ["{% for m in messages %}", "{{ a b }}", "{% include 'x' %}", "{{ " + "(" * 5000 + ")" * 5000 + " }}",
     "{{ x }}" * 100_000],
)  # fmt: skip
def test_a_template_that_cannot_be_compiled_is_one_sentence(template: str) -> None:
    with pytest.raises(ModelError, match=r"^The chat template of 'model.gguf' [^\n]*\.$"):
        tokenizer_of(byte_level(tokenizer__chat_template=template))


# Bad input


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (byte_level(merges=("a b",), tokens=LETTERS), "types of 257"),
        (keys(model="gpt2", tokens=LETTERS, merges=["a b"]), "merge 1, 'a b', names 'ab'"),
        (keys(model="gpt2", tokens=LETTERS, merges=["a zz"]), "names 'zz'"),
        (keys(model="gpt2", tokens=["a", "b", "ab"], merges=["a b", "a "]), "has no two parts"),
        (keys(model="gpt2", tokens=LETTERS), "tokenizer.ggml.merges"),
        (keys(model="gpt2", merges=[]), "tokenizer.ggml.tokens"),
        (keys(tokens=[]), "tokenizer.ggml.model"),
        (byte_level(("a", CONTROL)), "'a' twice"),
        (byte_level(eos_token_id=256), "eos_token_id is 256"),
        (byte_level(pre="glm4", add_bos_token=True, bos_token_id=None), "bos_token_id"),
        (scored(scores=[0.0]), "1 scores"),
        (scored(("ab", NORMAL, 0.0), ("a", NORMAL, 0.0)), "'ab'"),
        (keys(model="bert", tokens=[]), "'bert'"),
        (keys(model="none"), "'none'"),
    ],
)
def test_a_file_that_contradicts_itself_is_one_sentence(source: FileKeys, says: str) -> None:
    with pytest.raises(ModelError) as error:
        tokenizer_of(source)
    sentence = str(error.value)
    assert says in sentence
    assert "model.gguf" in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_a_pre_tokenizer_for_tokens_with_scores_is_refused() -> None:
    with pytest.raises(UsageError, match="--pre"):
        tokenizer_of(scored(), "gpt-2")


def test_an_unknown_name_asked_for_is_the_user_s_mistake() -> None:
    with pytest.raises(UsageError, match="Unknown pre-tokenizer 'gpt2': did you mean gpt-2"):
        tokenizer_of(byte_level(), "gpt2")


def test_an_empty_token_has_a_name_of_its_own() -> None:
    assert "[EMPTY_256]" in tokenizer_of(byte_level(("", NORMAL), ("", UNUSED))).get_vocab()
