"""Checks of the claims everything rests on, on the user's own model: KV-Direct's Tables 1-3, Fig. 8 and Eq. 28.

Each check is a function of a model and token ids that returns what it measured and whether the claim held.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvkeep.cache import KeepCache
from kvkeep.geometry import CheckpointKind, ModelGeometry
from kvkeep.models.adapter import Adapter, layers_of
from kvkeep.models.binding import bind
from kvkeep.models.forward import attending, probing

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (16, 32, 64, 128, 256)
DONOR, RECIPIENT = "What is the capital of Australia?", "What language is spoken in France?"  # the paper's, section 5.3
TEXT = (
    "A library keeps its books on shelves that a reader can reach, and the rest in a store below. When a shelf is "
    "full, the books that nobody has asked for leave it first; they are carried down, not thrown away, and "
    "whoever wants one of them later waits a moment while it is brought up again. The catalogue does not change: "
    "every book is still in the house, and the reader who asks for a page gets that page, word for word. What "
    "changes is only how long it takes, and how much room the shelves need. A good librarian knows which books "
    "are asked for every day, which are read once and then forgotten, and which are so thin that copying them "
    "anew is quicker than walking down the stairs. There are houses that keep every book within reach, and build "
    "another hall whenever the last one is full. There are houses that burn what does not fit, and hope that "
    "nobody will ask. And there are houses that write a short summary of what they burn, which serves well until "
    "somebody needs the very sentence that the summary left out. This house does none of these. It counts its "
    "shelves before the first reader comes in, and it tells the readers how many there are. It writes down, for "
    "every book that is carried below, from what it can be set again, letter by letter: from the author's "
    "manuscript, from the printer's plates, or from the book itself. In the evening, when the doors are closed, "
    "the librarian takes a few books at random, sets them again from the manuscript, and lays the new pages over "
    "the old ones, against the light. If a single letter differs, the house does not open in the morning."
)
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Reconstruction:
    """Table 2. Largest absolute differences of rebuilt and cached keys and values in one kind of layer.

    same: rebuilt with the shapes of the forward pass. rows: one token at a time, where sums may run in another order.
    """

    dtype: str
    length: int
    kind: str
    layers: int
    same_keys: float
    same_values: float
    rows_keys: float | None
    rows_values: float | None

    @property
    def holds(self) -> bool:
        """With the same shapes, not a bit differs."""
        return self.same_keys == 0 and self.same_values == 0


@dataclass(frozen=True)
class Tokens:
    """Table 3. Greedy tokens of one way of decoding against the stock cache's."""

    way: str
    matching: int
    of: int
    seconds: float
    ratio: float  # seconds by the stock cache's

    @property
    def holds(self) -> bool:
        """All tokens are the same."""
        return self.matching == self.of


@dataclass(frozen=True)
class Patching:
    """Fig. 8. KL of the patched run's next-token distribution from the donor's, by layer, in nats."""

    layer: int
    kl: float

    @property
    def holds(self) -> bool:
        """The residual stream determines everything after it."""
        return abs(self.kl) < 1e-9


@dataclass(frozen=True)
class Bytes:
    """Eq. 28 against measurement, for ``tokens`` tokens and a budget of ``entries``.

    paper: M(T, B) = B kv + (T - B) d b. predicted: what this kind should hold: B kv, and its own bytes for T (residuals
    and ids are written as tokens come) or T - B tokens (entries are moved when they leave). used: the rows really held.
    allocated: with the idle part of the last page.
    """

    kind: str
    tokens: int
    entries: int
    paper: int
    predicted: int
    used: int
    allocated: int

    @property
    def holds(self) -> bool:
        """To the byte."""
        return self.used == self.predicted


@dataclass(frozen=True)
class Windows:
    """Sliding windows: greedy tokens after a text longer than the window. The paper's recompute ignores it."""

    text_tokens: int
    window: int
    matching: int
    matching_without_window: int
    of: int

    @property
    def holds(self) -> bool:
        """All tokens are the same under kv-direct, sliding layers passed through by the recompute included."""
        return self.matching == self.of


@dataclass(frozen=True)
class Report:
    """Everything measured, and Table 1's row for this model (bytes a token)."""

    model: str
    kv_bytes: int
    residual_bytes: int
    rho: float
    reconstruction: list[Reconstruction]
    tokens: list[Tokens]
    patching: list[Patching]
    memory: list[Bytes]
    windows: Windows | None

    @property
    def holds(self) -> bool:
        """Every claim held."""
        rows: list[Any] = [*self.reconstruction, *self.tokens, *self.patching, *self.memory]
        return all(row.holds for row in rows) and (self.windows is None or self.windows.holds)

    def as_dict(self) -> dict[str, Any]:
        """Return plain types."""
        return asdict(self) | {"holds": self.holds}


def verify(
    model: Any, tokenizer: Any, name: str = "", *, quick: bool = False, progress: Progress = lambda text: None
) -> Report:
    """Run all checks; ``quick`` takes one length, one dtype and fewer kinds."""
    bind(model)
    geometry = ModelGeometry.from_config(model.config, next(model.parameters()).dtype.itemsize)
    ids = _text(tokenizer, max(LENGTHS))
    lengths, dtypes = (LENGTHS[-1:], DTYPES[:1]) if quick else (LENGTHS, DTYPES)
    rebuilt = [row for dtype in dtypes for row in reconstruction(model, ids, lengths, dtype, progress)]
    progress("greedy tokens")
    tokens = list(same_tokens(model, ids[:, :96], kinds=("kv", "residual") if quick else ("kv", "residual", "tokens")))
    progress("residual patching")
    patched = list(patching(model, tokenizer))
    progress("memory")
    memory = list(account(model, ids, kinds=("kv", "residual", "tokens")))
    windows = None
    if geometry.sliding_layers:
        progress("sliding windows")
        windows = beyond_the_window(model, _text(tokenizer, 4096))
    return Report(
        name,
        geometry.kv_bytes_per_token,
        geometry.residual_bytes_per_token,
        geometry.rho,
        rebuilt,
        tokens,
        patched,
        memory,
        windows,
    )


def _text(tokenizer: Any, count: int) -> Tensor:
    ids = tokenizer(TEXT).input_ids
    return torch.tensor([(ids * (count // len(ids) + 1))[:count]])


# -- Table 2 ------------------------------------------------------------------------------------------


@torch.no_grad()
def reconstruction(
    model: Any, ids: Tensor, lengths: Sequence[int], dtype: torch.dtype, progress: Progress = lambda text: None
) -> Iterator[Reconstruction]:
    """Rebuild keys and values from the residuals of a forward pass in ``dtype``, for each length."""
    bind(model)
    cast = model if next(model.parameters()).dtype == dtype else copy.deepcopy(model).to(dtype)
    adapter = Adapter(cast)
    geometry = ModelGeometry.from_config(model.config)
    for length in lengths:
        progress(f"rebuilding {length} tokens in {str(dtype).removeprefix('torch.')}")
        tokens = ids[:, :length].to(next(cast.parameters()).device)
        entering: list[Tensor] = []
        cache = DynamicCache()  # without a config it keeps what sliding layers would drop, so that all can be compared
        with attending(None), probing(lambda index, hidden: entering.append(hidden)):  # noqa: B023 - used at once
            adapter.decoder(input_ids=tokens, past_key_values=cache, use_cache=True)
        for kind in ("full", "sliding"):
            layers = [layer.index for layer in geometry.layers if layer.kind == kind]
            if layers:
                apart = length == max(lengths)
                yield _largest(adapter, layers, entering, cache, dtype, kind, apart)


def _largest(
    adapter: Adapter,
    layers: list[int],
    entering: list[Tensor],
    cache: DynamicCache,
    dtype: torch.dtype,
    kind: str,
    apart: bool,
) -> Reconstruction:
    same, rows = [0.0, 0.0], [0.0, 0.0]
    length = entering[0].shape[1]
    positions = torch.arange(length, device=entering[0].device).unsqueeze(0)
    for layer in layers:
        held = cache.layers[layer]
        whole = adapter.project(layer, entering[layer], positions)
        same = [max(old, _distance(a, b)) for old, a, b in zip(same, whole, (held.keys, held.values), strict=True)]
        if not apart:
            continue
        singles = [
            adapter.project(layer, entering[layer][:, at : at + 1], positions[:, at : at + 1]) for at in range(length)
        ]
        joined = [torch.cat([single[part] for single in singles], dim=2) for part in (0, 1)]
        rows = [max(old, _distance(a, b)) for old, a, b in zip(rows, joined, (held.keys, held.values), strict=True)]
    name = str(dtype).removeprefix("torch.")
    return Reconstruction(name, length, kind, len(layers), *same, *(rows if apart else (None, None)))


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


# -- Table 3 ------------------------------------------------------------------------------------------


def same_tokens(model: Any, ids: Tensor, *, kinds: Sequence[str], new: int = 30) -> Iterator[Tokens]:
    """Decode greedily with the stock cache, without any, and with kv-direct at budgets 0 and 64."""
    expected, stock_s = _greedy(model, ids, new, past_key_values=DynamicCache(config=model.config))
    yield Tokens("stock cache", new, new, stock_s, 1.0)
    ways: dict[str, dict[str, Any]] = {"no cache": {"use_cache": False}}
    for budget in (0, 64):
        for kind in kinds:
            cache = KeepCache(model, "kv-direct", budget, checkpoint=kind, where="device")
            ways[f"kv-direct B={budget}, {kind}"] = {"past_key_values": cache}
    for way, options in ways.items():
        got, seconds = _greedy(model, ids, new, **options)
        yield Tokens(way, sum(a == b for a, b in zip(got, expected, strict=True)), new, seconds, seconds / stock_s)


def _greedy(model: Any, ids: Tensor, new: int, **options: Any) -> tuple[list[int], float]:
    ids = ids.to(next(model.parameters()).device)
    start = time.perf_counter()
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, **options
    )
    return output[0, ids.shape[1] :].tolist(), time.perf_counter() - start


# -- Fig. 8 -------------------------------------------------------------------------------------------


@torch.no_grad()
def patching(model: Any, tokenizer: Any) -> Iterator[Patching]:
    """Replace a recipient's residuals by a donor's at each layer; prompts are cut at the left to the same length."""
    decoder = bind(model).decoder
    device = next(model.parameters()).device
    prompts = [tokenizer(text).input_ids for text in (DONOR, RECIPIENT)]
    length = min(map(len, prompts))
    donor, recipient = (torch.tensor([prompt[-length:]], device=device) for prompt in prompts)
    entering: list[Tensor] = []
    with probing(lambda index, hidden: entering.append(hidden)):
        expected = model(donor, use_cache=False).logits[0, -1].double().log_softmax(-1)
    for index, layer in enumerate(layers_of(decoder)):

        def replace(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int = index) -> Any:
            if args:
                return (entering[index], *args[1:]), kwargs
            return args, kwargs | {"hidden_states": entering[index]}

        handle = layer.register_forward_pre_hook(replace, with_kwargs=True)
        try:
            patched = model(recipient, use_cache=False).logits[0, -1].double().log_softmax(-1)
        finally:
            handle.remove()
        yield Patching(index, float((patched.exp() * (patched - expected)).sum()))


# -- Eq. 28 -------------------------------------------------------------------------------------------


@torch.no_grad()
def account(model: Any, ids: Tensor, *, kinds: Sequence[CheckpointKind], entries: int = 64) -> Iterator[Bytes]:
    """Measure what kv-direct holds after a text, for each checkpoint kind and two lengths."""
    for kind in kinds:
        for tokens in (ids.shape[1] // 2, ids.shape[1]):
            cache = KeepCache(model, "kv-direct", entries, checkpoint=kind, where="host")
            model(ids[:, :tokens].to(cache.request.device), past_key_values=cache, logits_to_keep=1)
            geometry, memory = cache.geometry, cache.memory()
            fixed = geometry.sliding_bytes(tokens)
            resident = min(entries, tokens) * geometry.full_bytes_per_token
            charged = max(0, tokens - entries) if kind == "kv" else tokens
            stored = 4 * cache.ledger.length if cache.checkpoint is not None and cache.checkpoint.reads_ids else 0
            for _, rows in cache.checkpoint_rows():
                stored += sum(piece.nbytes for _, piece in rows.read(rows.first, rows.length))
            yield Bytes(
                kind,
                tokens,
                entries,
                paper=entries * geometry.kv_bytes_per_token + (tokens - entries) * geometry.residual_bytes_per_token,
                predicted=fixed + resident + charged * geometry.checkpoint_bytes_per_token(kind),
                used=memory.resident_bytes + stored,
                allocated=memory.resident_bytes + sum(memory.checkpoint_bytes.values()),
            )


# -- the paper's own failure ----------------------------------------------------------------------------


@torch.no_grad()
def beyond_the_window(model: Any, ids: Tensor, *, new: int = 12) -> Windows:
    """Decode after a text longer than the window: the stock cache, kv-direct from tokens, and the paper's recompute,
    which runs the sliding layers as if they had no window (section 5.4, "Sliding-window limitation")."""
    window = max(layer.window or 0 for layer in ModelGeometry.from_config(model.config).sliding_layers)
    ids = ids[:, : 2 * window + 64].to(next(model.parameters()).device)
    expected, _ = _greedy(model, ids, new, past_key_values=DynamicCache(config=model.config))
    cache = KeepCache(model, "kv-direct", max(16, window // 4), checkpoint="tokens")
    got, _ = _greedy(model, ids, new, past_key_values=cache)
    blind: list[int] = []
    sequence = ids
    for _ in range(new):  # stock masks, but none for the window
        masks = {"full_attention": None, "sliding_attention": None}
        logits = model(sequence, attention_mask=masks, use_cache=False, logits_to_keep=1).logits
        blind.append(int(logits[0, -1].argmax()))
        sequence = torch.cat([ids, torch.tensor([expected[: len(blind)]], device=ids.device)], dim=1)
    return Windows(
        ids.shape[1],
        window,
        sum(a == b for a, b in zip(got, expected, strict=True)),
        sum(a == b for a, b in zip(blind, expected, strict=True)),
        new,
    )
