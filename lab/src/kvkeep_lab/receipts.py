"""Receipts: digests of a model's results for fixed prompts, equal on every processor.

The native library gives the same bits on every processor, so a digest of logits is enough to show that another machine
gives the same answers. A receipt has one row for each method: a digest of logits and tokens, and a digest of the saved
session. docs/verified.md specifies the hashed data and their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from kvkeep import transfer
from kvkeep.blocks.sessions import Session, load_session, save_session
from kvkeep.cache import KeepCache
from kvkeep.engine.answer import Answer, Ask, Scheduler
from kvkeep.errors import KvkeepError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import decoder_of, layers_of
from kvkeep.models.experts import PackedExperts
from kvkeep.models.fingerprint import sampled_fingerprint
from kvkeep.models.fused import FusedLayer
from kvkeep.models.loading import Loaded
from kvkeep.models.norms import FusedNorm
from kvkeep.models.packed import row_independent
from kvkeep.models.rotary import Rotary
from kvkeep.native.library import library
from kvkeep.native.structures import NUMERICS_VERSION
from kvkeep_lab.answers import AnswerCase
from kvkeep_lab.reading import takes

LENGTHS = (40, 560)
"""Tokens of the prompts: one is within every budget; the other exceeds every budget and a block of the attention
kernel."""
NEW_TOKENS = 12
"""Tokens of each answer."""
CHUNK = 128
"""Tokens of a prompt read at a time. A lossy method's choice of entries depends on it."""
SHOWN = 16
"""Shown digits of a digest in a table."""
_BUDGET = "128"
CASES = (
    AnswerCase("full"),
    AnswerCase("kv-direct", _BUDGET, "kv", "disk"),
    AnswerCase("kv-direct", _BUDGET, "residual", "host"),
    AnswerCase("snapkv+verified", _BUDGET, "kv", "host"),
    AnswerCase("window", _BUDGET),
    AnswerCase("streaming-llm", _BUDGET),
    AnswerCase("h2o", _BUDGET),
    AnswerCase("snapkv", _BUDGET),
    AnswerCase("h2o+quantize:4", _BUDGET),
    AnswerCase("revive", _BUDGET),
    AnswerCase("kvreviver", _BUDGET),
)
"""The caches of a receipt, each with a budget in entries per layer."""


@dataclass(frozen=True)
class ReceiptRow:
    """The digests of one cache."""

    label: str
    exactness: str
    promised: bool
    """Whether the design, and not only measurement, makes the digest of logits equal on every processor."""
    logits: str = ""
    """Digest of prompts, logits and tokens."""
    session: str = ""
    """Digest of the saved sessions."""
    error: str = ""
    """Reason if there is no digest."""


@dataclass(frozen=True)
class Receipt:
    """The digests of one model."""

    family: str
    """Family of the loaded model."""
    weights: str
    """Format of its weights."""
    fingerprint: str
    """Fingerprint of the loaded model."""
    numerics: int
    prompts: str
    """Digest of the prompts' token ids."""
    rows: list[ReceiptRow]

    @property
    def exact(self) -> str:
        """One digest of all promised rows."""
        return self._digest(row for row in self.rows if row.promised)

    @property
    def all(self) -> str:
        """One digest of all rows."""
        return self._digest(self.rows)

    def _digest(self, rows: Iterable[ReceiptRow]) -> str:
        head = f"{self.fingerprint} {self.numerics} {self.prompts}\n"
        lines = (f"{row.label} {row.logits} {row.session}\n" for row in rows if not row.error)
        return sha256("".join([head, *lines]).encode()).hexdigest()


def check_library() -> None:
    """Raise UsageError if there is no native library."""
    if library() is None:
        raise UsageError(
            "A receipt needs the native library: without it torch computes the logits, and their bits differ "
            "between processors. Install kvkeep from a wheel, or unset KVKEEP_CPU."
        )


def text() -> str:
    """Return the source text of the prompts."""
    return (files("kvkeep_lab") / "receipt.txt").read_text(encoding="utf-8")


def prompts(loaded: Loaded, source: str) -> list[list[int]]:
    """Return the token ids of the prompts, shortened if the model has fewer positions. Raises UsageError for a text
    that is too short."""
    ids = loaded.tokenizer(source, verbose=False).input_ids
    if len(ids) < max(LENGTHS):
        raise UsageError(f"The text has {len(ids)} tokens; a receipt needs {max(LENGTHS)}.")
    positions = ModelGeometry.from_config(loaded.model.config).max_positions
    limit = max(LENGTHS) if positions is None else positions - NEW_TOKENS
    return [ids[: min(length, limit)] for length in LENGTHS]


def start(loaded: Loaded, prompts: Sequence[Sequence[int]]) -> Receipt:
    """Return a receipt without rows. Raises UsageError for a model that torch computes in part."""
    check_library()
    if not row_independent(loaded.model):
        raise UsageError(
            f"The weights of '{loaded.name}' ({loaded.weights}, {loaded.model.device}) are multiplied by torch, "
            "whose bits differ from one processor to another; a receipt needs a GGUF file, or --weights bfloat16, int8 "
            "or int4 on the cpu."
        )
    family = ModelGeometry.from_config(loaded.model.config).model_type
    if not library_computes(loaded.model):
        raise UsageError(
            f"torch computes parts of the layers of '{loaded.name}' (a {family} model), and its bits differ from one "
            "processor to another; a receipt needs a model whose layers the native library computes, such as Llama, "
            "Qwen 3, Gemma 3 or OLMo 2."
        )
    ids = sha256(b"".join(_ids(prompt) for prompt in prompts)).hexdigest()
    return Receipt(family, loaded.weights, sampled_fingerprint(loaded.model), NUMERICS_VERSION, ids, [])


def library_computes(model: Any) -> bool:
    """Return whether the library computes all layers, norms and angles of ``model``, its routers and experts among
    them, without recurrent modules (which this does not examine), and the logits are not capped (by torch's tanh). Then
    torch only rounds single elements, with the same result on every processor."""
    config = model.config.get_text_config()
    if getattr(config, "final_logit_softcapping", None) is not None:
        return False
    fused = [vars(layer).get("forward") for layer in layers_of(decoder_of(model))]
    found = [one for one in fused if isinstance(one, FusedLayer) and one.mlp is not None]
    layers = [one for one in found if one.parts.recurrent is None]
    if len(layers) < len(fused):
        return False
    widths = {one.rotation.channels for one in layers} - {0}  # some layers rotate nothing
    for module in model.modules():
        name, forward = type(module).__name__, vars(module).get("forward")
        if name.endswith("Norm") and not isinstance(forward, FusedNorm):
            return False
        if isinstance(module, PackedExperts) and module.form.transposed:  # activated by tables in bfloat16
            return False
        if "RotaryEmbedding" in name and not (isinstance(forward, Rotary) and forward.exact):
            return False
        if isinstance(forward, Rotary) and {2 * len(one) for one in forward.frequencies.values()} != widths:
            return False
    return True


def rows(
    loaded: Loaded, cases: Sequence[AnswerCase], prompts: Sequence[Sequence[int]], progress: Callable[[str, int], None]
) -> Iterator[ReceiptRow]:
    """Yield the row of each case. progress: called with a label and the number of finished cases."""
    for number, case in enumerate(cases):
        progress(case.label, number)
        yield _row(loaded.model, case, prompts)


def _row(model: Any, case: AnswerCase, prompts: Sequence[Sequence[int]]) -> ReceiptRow:
    logits, session = sha256(), sha256()
    exactness, promised = "", False
    for prompt in prompts:
        try:
            cache = _new_cache(model, case, len(prompt) + NEW_TOKENS)
            exactness, promised = str(cache.exactness), all(report.same_bits for report in cache.describe())
            sequence, found = _answer(model, prompt, cache)
        except KvkeepError as error:
            return ReceiptRow(case.label, exactness, promised, error=str(error))
        for part in (_ids(prompt), _bytes(found), _ids(sequence[len(prompt) :])):
            logits.update(part)
        for part in _saved(cache, sequence):
            session.update(part)
    return ReceiptRow(case.label, exactness, promised, logits.hexdigest(), session.hexdigest())


def _new_cache(model: Any, case: AnswerCase, context: int) -> KeepCache:
    options = case.options(context)
    if "chunk" in takes(case.method):
        options["chunk"] = CHUNK
    return KeepCache(model, case.method, **options)


@torch.inference_mode()
def _answer(model: Any, prompt: Sequence[int], cache: KeepCache) -> tuple[list[int], Tensor]:
    """Return all token ids, and the logits of each new one, (new, vocabulary) in float32."""
    if cache.method.recall.drafts:
        return _drafted(model, prompt, cache)
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences[0].tolist(), torch.cat(output.logits)


class _Recorded(Answer):
    """An answer that keeps the logits of its tokens."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.logits = list[Tensor]()

    def take(self, token: int, logits: Tensor | None = None) -> None:
        assert logits is not None
        self.logits.append(logits.float())
        super().take(token, logits)


def _drafted(model: Any, prompt: Sequence[int], cache: KeepCache) -> tuple[list[int], Tensor]:
    """Return what :func:`_answer` does, for a method that drafts, which transformers' generate() does not do."""
    scheduler, answer = Scheduler(model, packed=False), _Recorded(Ask(prompt, NEW_TOKENS), cache, None, (), None)
    scheduled = scheduler.add(answer)
    while not scheduled.give(scheduler.step()[0].logits):
        pass
    return [*prompt, *answer.tokens], torch.stack(answer.logits)


def _saved(cache: KeepCache, sequence: Sequence[int]) -> Iterator[bytes]:
    """Save and load the session; yield names, forms and bytes of its tensors. The number of drafts depends on measured
    seconds, and the resident entries depend on the drafts, so a method that drafts yields only its checkpoint."""
    with TemporaryDirectory(prefix="kvkeep-receipt-") as folder:
        path = Path(folder) / "session"
        save_session(path, Session(cache, [list(sequence[: cache.get_seq_length()])]))
        session = load_session(path, cache.model)
        tensors = transfer.state(session.cache) | {"session.ids": torch.tensor(session.ids, dtype=torch.int32)}
        for name, tensor in sorted(tensors.items()):
            if cache.method.recall.drafts and name.startswith("layer."):
                continue
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield f"{name} {dtype} {' '.join(map(str, tensor.shape))}\n".encode()
            yield _bytes(tensor)


def _ids(tokens: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def _bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor in the order of its elements, each little-endian as on all supported processors."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
