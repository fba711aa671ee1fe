"""Scripted models: every token has one fixed successor, so an answer is known to the letter.

A :class:`Vocabulary` is byte-level (GPT-2's alphabet) or of sentencepiece's kind (``▁`` and byte tokens). A script
says which token follows which; :func:`scripted` makes a model of it in memory, and :func:`write_gguf` a file. The model
looks only at the last token: attention and MLP add nothing, and the output matrix maps a token to its successor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from gguf import GGUFWriter, TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvkeep.models.loading import Loaded

BEGIN, END, START, TURN = "<s>", "</s>", "<|start|>", "<|turn|>"
SPECIAL = ("<unk>", BEGIN, END, START, TURN)
"""The control tokens of every vocabulary, which come first. START begins a message of :data:`TEMPLATE`, and TURN ends
one."""
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|turn|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>' }}{% endif %}"
)
"""The answer begins after START, and its first token is START's successor."""
CONTENTS = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
"""A template of nothing but contents: the answer follows the last character of the question."""
HIDDEN, HEADS, KV_HEADS, INNER = 256, 4, 2, 32
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
ALPHABET = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + number) for number, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
"""GPT-2's character for each byte."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model, in the order of their ids, and the tokenizer made of them."""

    sentencepiece: bool
    pieces: tuple[str | bytes, ...] = ()
    """Tokens of several bytes or characters, as they stand in a text."""
    space_prefix: bool = True
    """Whether sentencepiece puts a space before a text, and takes it away from a decoded one."""

    @cached_property
    def tokens(self) -> list[str]:
        """The tokens as a file spells them."""
        if self.sentencepiece:
            single = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *map(chr, range(33, 127))]
        else:
            single = [ALPHABET[byte] for byte in range(256)]
        return [*dict.fromkeys([*SPECIAL, *single, "ab", *map(self.spelt, self.pieces)])]  # readers want a merge

    @property
    def types(self) -> list[int]:
        """The type of each token, as GGUF files number them."""
        kinds = {False: TokenType.NORMAL, True: TokenType.BYTE}
        names = [kinds[self.sentencepiece and one.startswith("<0x")] for one in self.tokens[len(SPECIAL) :]]
        return [int(one) for one in (TokenType.UNKNOWN, *[TokenType.CONTROL] * (len(SPECIAL) - 1), *names)]

    def spelt(self, piece: str | bytes) -> str:
        """A piece of text as a file spells its token. A byte that is no character by itself is one of sentencepiece's
        byte tokens."""
        if piece in SPECIAL:
            return str(piece)
        if not self.sentencepiece:
            return "".join(ALPHABET[byte] for byte in (piece.encode() if isinstance(piece, str) else piece))
        if isinstance(piece, bytes):
            assert len(piece) == 1
            return f"<0x{piece[0]:02X}>"
        return f"<0x{ord(piece):02X}>" if piece in ("\n", "\t") else piece.replace(" ", "▁")

    def id(self, piece: str | bytes) -> int:
        """The id of a piece of text."""
        return self.tokens.index(self.spelt(piece))

    def script(self, *answers: Iterable[str | bytes]) -> dict[int, int]:
        """The successor of each token, for answers that begin with the last token of their prompts. An answer that does
        not end in END goes on with its last token."""
        successors: dict[int, int] = {}
        for answer in answers:
            ids = [self.id(piece) for piece in answer]
            last = [] if ids[-1] == self.id(END) else [(ids[-1], ids[-1])]
            for one, following in [*pairwise(ids), *last]:
                assert successors.setdefault(one, following) == following, f"two successors of {self.tokens[one]!r}"
        return successors

    @property
    def merges(self) -> list[tuple[str, str]]:
        """The ways in which two tokens join to a third, those of earlier pieces first."""
        known = set(self.tokens)
        names = self.tokens[len(SPECIAL) + 256 :]
        halves = [(one[:place], one[place:]) for one in names for place in range(1, len(one))]
        return [(left, right) for left, right in halves if left in known and right in known]

    def tokenizer(self, template: str | None = TEMPLATE) -> Any:
        """The tokenizer of these tokens, with a chat template. A text begins with BEGIN only if a template says so."""
        ids = {token: number for number, token in enumerate(self.tokens)}
        options: Any = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True} if self.sentencepiece else {}
        inner = Tokenizer(models.BPE(ids, self.merges, **options))
        if self.sentencepiece:
            steps: list[Any] = [normalizers.Replace(" ", "▁")]
            inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * self.space_prefix + steps)
            plain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            inner.decoder = decoders.Sequence(plain + [decoders.Strip(" ", 1, 0)] * self.space_prefix)
        else:
            split = pre_tokenizers.Split(Regex(r"\n| *[^\s]+|\s+"), "isolated")
            bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            inner.pre_tokenizer, inner.decoder = pre_tokenizers.Sequence([split, bytewise]), decoders.ByteLevel()
        inner.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
        named = {"unk_token": "<unk>", "bos_token": BEGIN, "eos_token": END, "pad_token": END}
        made = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **named)
        made.chat_template = template
        return made


def byte_level(*pieces: str | bytes) -> Vocabulary:
    """The 256 bytes, and these pieces."""
    return Vocabulary(False, pieces)


def sentencepiece(*pieces: str, space_prefix: bool = True) -> Vocabulary:
    """The byte tokens, a space, the printable characters of ASCII, and these pieces."""
    return Vocabulary(True, pieces, space_prefix)


def scripted(
    vocabulary: Vocabulary,
    successors: Mapping[int, int | list[int]],
    template: str | None = TEMPLATE,
    positions: int = 512,
    rest: Mapping[int, float] = MappingProxyType({}),
) -> Loaded:
    """A model in memory that follows a script, and its tokenizer. rest: see :func:`_matrices`."""
    config = LlamaConfig(
        vocab_size=len(vocabulary.tokens), hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=1,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=positions,
        bos_token_id=vocabulary.id(BEGIN), eos_token_id=vocabulary.id(END), pad_token_id=vocabulary.id(END),
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    embedding, output = _matrices(len(vocabulary.tokens), successors, rest)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(output)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return Loaded(model, vocabulary.tokenizer(template), "scripted", "scripted")


def _matrices(
    count: int, successors: Mapping[int, int | list[int]], rest: Mapping[int, float]
) -> tuple[Tensor, Tensor]:
    """Embeddings (tokens, hidden) that are nearly orthogonal, and the output matrix that maps each to its successor, or
    to several of equal logits (26). rest: logits that some tokens have after any other one: the first of them that the
    form of an answer allows follows a token whose successor it does not allow."""
    embedding = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(0))
    if rest:
        embedding[:, 0] = 1.0  # a constant, which the output matrix reads
    embedding /= embedding.square().mean(1, keepdim=True).sqrt()
    output = torch.zeros(count, HIDDEN)
    for one, logit in rest.items():
        output[one, 0] = logit
    for one, following in successors.items():
        output[following] += 0.1 * embedding[one]
    return embedding, output


def write_gguf(
    path: Path,
    vocabulary: Vocabulary,
    successors: Mapping[int, int | list[int]],
    template: str | None = TEMPLATE,
    positions: int = 512,
    pre: str = "gpt-2",
    rest: Mapping[int, float] = MappingProxyType({}),
    **keys: int | float | bool | str,
) -> None:
    """Write a Llama that follows a script as llama.cpp's tools would. keys: more keys of the file, by their names with
    ``__`` for a dot (``tokenizer__ggml__add_bos_token=True``)."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(positions)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(vocabulary.tokens))
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.sentencepiece:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(number) for number in range(len(vocabulary.tokens))])
        writer.add_add_space_prefix(vocabulary.space_prefix)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(pair) for pair in vocabulary.merges])
    writer.add_bos_token_id(vocabulary.id(BEGIN))
    writer.add_eos_token_id(vocabulary.id(END))
    writer.add_pad_token_id(vocabulary.id(END))
    if template is not None:
        writer.add_chat_template(template)
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in keys.items():
        kinds[type(value)](name.replace("__", "."), value)
    for name, tensor in _tensors(len(vocabulary.tokens), successors, rest).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(count: int, successors: Mapping[int, int | list[int]], rest: Mapping[int, float]) -> dict[str, Tensor]:
    """The tensors of a scripted model by the names of a GGUF file."""
    embedding, output = _matrices(count, successors, rest)
    width, random = HIDDEN // HEADS * KV_HEADS, torch.Generator().manual_seed(1)
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (width, HIDDEN), "attn_v": (width, HIDDEN)}
    shapes |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN)}
    drawn = {name: 0.1 * torch.randn(shape, generator=random) for name, shape in shapes.items()}
    silent = {"attn_output": torch.zeros(HIDDEN, HIDDEN), "ffn_down": torch.zeros(HIDDEN, INNER)}
    norms = dict.fromkeys(("attn_norm", "ffn_norm"), torch.ones(HIDDEN))
    whole = {"token_embd.weight": embedding, "output_norm.weight": torch.ones(HIDDEN), "output.weight": output}
    return whole | {f"blk.0.{name}.weight": tensor for name, tensor in (drawn | silent | norms).items()}
