"""Ways to read a text: into a cache and then one token at a time, as decoding does, or once, to observe its
attention."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvkeep.cache import KeepCache
from kvkeep.contracts.selector import ReconstructionPieces
from kvkeep.decode.cached_text import common_prefix
from kvkeep.engine.answer import Answer, Ask, Scheduler, end_ids
from kvkeep.errors import UnsupportedModelError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.binding import bind
from kvkeep.policies.methods import resolve
from kvkeep.policies.names import STOCK
from kvkeep.reconstruction import ReconstructionReader
from kvkeep.stock import new_cache
from kvkeep_lab.attention_inputs import Attended, watching
from kvkeep_lab.drafts import without_drafts
from kvkeep_lab.peers import PeerReader, peer_of
from kvkeep_lab.shared_pass import SharedPass, takes_over

PINNED = "+pinned"
"""The end of a method's name that pins the instructions of a prompt, if the task says which tokens they are."""
_AT_ONCE = 128
"""Positions whose logits are in memory at the same time."""
_SHARED = 0.25
"""Share of the memory of the model's device, from which on no more passes are shared: each method then reads the text
itself."""


def takes(method: str) -> tuple[str, ...]:
    """Return the options that a method or a peer accepts; raises UsageError for an unknown name."""
    if method == STOCK:
        return ()
    peer = peer_of(method)
    return resolve(method.removesuffix(PINNED)).options if peer is None else peer.takes


def takes_budget(method: str) -> bool:
    """Return whether a method or a peer takes a budget, also one that was measured with parameters that it does not
    have. Raises UsageError for an unknown name."""
    try:
        return "budget" in takes(method)
    except UsageError:
        return "budget" in takes(re.sub(r":[^+]*", "", method))


def cache_for(
    model: Any, method: str, budget: str | None, context: int, chunk: int | None = None, pinned: int = 0
) -> Any:
    """Return a cache of ``method`` for ``context`` tokens (prompt and answer), or a peer's reader. ``chunk`` is passed
    to those that accept it. pinned: the number of first tokens that are instructions, for methods with
    :data:`PINNED`. Raises UsageError for such a method if there are none."""
    if (peer := peer_of(method)) is not None:
        return peer.open(model, budget, context)
    options: dict[str, Any] = {"budget": budget, "context": context}
    if (name := method.removesuffix(PINNED)) != method:
        if not pinned:
            raise UsageError(f"'{method}' pins instructions, and these prompts have none; use '{name}'.")
        method, options["pin"] = name, pinned
    if chunk is not None and "chunk" in takes(method):
        options["chunk"] = chunk
    return new_cache(model, method, **options)


def whole_bytes(model: Any, context: int) -> int:
    """Return the bytes of an unbounded cache in bfloat16 for ``context`` tokens, independent of the dtype of the
    model."""
    geometry = ModelGeometry.from_config(model.config, 2)
    return context * geometry.full_bytes_per_token + geometry.fixed_bytes(context)


@torch.no_grad()
def watch(
    model: Any, ids: Tensor, observe: Callable[[Attended], None], progress: Callable[[str, float, float], None]
) -> None:
    """Read ``ids`` (1, tokens) once, and pass the attention of every full layer to ``observe``. Layers with a sliding
    window are left out. Raises UnsupportedModelError if there are no full layers."""
    decoder = bind(model).decoder
    geometry = ModelGeometry.from_config(model.config)
    full = [layer.index for layer in geometry.layers if geometry.layers[layer.source].kind == "full"]
    if not full:
        raise UnsupportedModelError(
            f"'{geometry.model_type}' has no layer that attends to the whole text; use another model."
        )

    def see(attended: Attended) -> None:
        if attended.layer in full:
            observe(attended)
            progress("layers", full.index(attended.layer) + 1, len(full))

    with watching(see):
        decoder(input_ids=ids, use_cache=False)


@torch.no_grad()
def read(
    model: Any,
    ids: Tensor,
    cache: Any,
    new: int,
    forced: Sequence[int] | None = None,
    first: ReadCache | None = None,
) -> Iterator[tuple[Tensor, float]]:
    """Yield logits (vocabulary,) in float32 and seconds for each of ``new`` positions after ``ids`` (1, tokens). The
    first includes the time of the prompt. The next token is taken from ``forced``, or is the one with the largest
    logit. first: what reading ``ids`` gave, if ``cache`` has read them."""
    given = ids
    for position in range(new):
        if first is not None and not position:
            logits, seconds = first.logits, first.seconds
        else:
            logits, seconds = cache.step(given) if isinstance(cache, PeerReader) else _step(model, given, cache)
        yield logits, seconds
        given = ids.new_tensor([[int(logits.argmax()) if forced is None else forced[position]]])


def answered(model: Any, asks: Sequence[Ask], caches: Sequence[Cache]) -> list[Answer]:
    """Generate the answers to ``asks`` in passes that they share where their caches can; transformers' own cannot. No
    token is copied from the text as a draft. Each cache holds the first tokens of its prompt. Raises the exception of a
    failed pass."""
    if len(asks) > 1 and not all(isinstance(cache, KeepCache) for cache in caches):
        return [answered(model, [ask], [cache])[0] for ask, cache in zip(asks, caches, strict=True)]
    answers = [Answer(ask, cache, None, end_ids(model), None) for ask, cache in zip(asks, caches, strict=True)]
    scheduler = Scheduler(model, packed=len(asks) > 1)
    for answer in answers:
        scheduler.add(answer)
    with without_drafts(model):
        while scheduler.answers:
            for result in scheduler.step():
                if result.scheduled.give(result.logits):
                    scheduler.remove(result.scheduled)
    return answers


@dataclass
class SharedReadings:
    """What methods share of reading a text."""

    shared_pass: SharedPass | None = None
    """The pass that caches take over; None before the first."""
    first: ReadCache | None = None
    """The cache that holds all entries, before a second reading; None before the first."""
    second: dict[ReconstructionPieces, tuple[list[ReconstructionReader], float]] = field(default_factory=dict)
    """What each second reading found, and its seconds."""


Readings = dict[tuple[int, ...], SharedReadings]
"""Readings by text."""


class ReadCache(NamedTuple):
    """A cache that has read a text."""

    cache: Any
    logits: Tensor
    """Logits of the token after the text, (vocabulary,) float32."""
    seconds: float
    """The seconds of all readings."""


@torch.no_grad()
def read_text(model: Any, ids: Tensor, cache: Cache, readings: Readings) -> ReadCache:
    """Read ``ids`` (1, tokens) as a complete text into the empty ``cache``, also the second reading of methods that
    have one. What ``readings`` has is not read again."""
    shared = readings.setdefault(tuple(ids[0].tolist()), SharedReadings())
    if not isinstance(cache, KeepCache) or not cache.reading:
        return _read_once(model, ids, cache, shared, readings)
    request = cache.request
    if shared.first is None:  # a budget of all tokens evicts nothing
        shared.first = _read_once(model, ids, KeepCache(model, request.method.name, ids.shape[1]), shared, readings)
    everything, logits, seconds = shared.first
    start, pieces = time.perf_counter(), request.method.selector.reconstruction
    twin = everything.fork(request.method.name, request.budget, **request.options())
    if request.method.store_fate.reading_hook(0) is not None:  # a fit uses its queries up
        twin.compress()
        return ReadCache(twin, logits, seconds + time.perf_counter() - start)
    assert pieces is not None
    if pieces in shared.second:
        twin.compress(shared.second[pieces][0])
    elif (readers := twin.compress()) is not None:
        shared.second[pieces] = readers, time.perf_counter() - start
    return ReadCache(twin, logits, seconds + shared.second[pieces][1])


def _read_once(model: Any, ids: Tensor, cache: Cache, shared: SharedReadings, readings: Readings) -> ReadCache:
    """Read ``ids`` into the empty ``cache``, which takes over the pass of another cache if it can."""
    if not takes_over(cache, ids.shape[1]):
        return ReadCache(cache, *_step(model, ids, cache))
    if (one := shared.shared_pass) is None:
        passes = (known.shared_pass for known in readings.values())
        if sum(known.nbytes for known in passes if known is not None) >= _SHARED * _device_bytes(ids.device):
            return ReadCache(cache, *_step(model, ids, cache))
        shared.shared_pass = one = SharedPass.of(model, ids, *_longest_beginning(ids, readings))
    start = time.perf_counter()
    one.hand_over(ids, cache)
    return ReadCache(cache, one.logits, one.seconds + time.perf_counter() - start)


def _device_bytes(device: torch.device) -> int:
    """Return the bytes of memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _longest_beginning(ids: Tensor, readings: Readings) -> tuple[SharedPass | None, int]:
    """Return the pass over a text that has the most first tokens of ``ids`` (1, tokens), and their number. At least
    the last token is not among them."""
    row, best, shared = ids[0, :-1].tolist(), None, 0
    for text, known in readings.items():
        if known.shared_pass is not None and (common := common_prefix(row, text)) > shared:
            best, shared = known.shared_pass, common
    return best, shared


def copied(cache: Cache) -> Cache:
    """Return an independent copy of a cache."""
    return cache.fork() if isinstance(cache, KeepCache) else deepcopy(cache)


def greedy(model: Any, ids: Tensor, new: int, **options: Any) -> tuple[list[int], float]:
    """Return ``new`` greedy tokens after ``ids`` (1, tokens) by transformers' ``generate``, and their seconds. Ends of
    text are ignored. options: those of ``generate``, such as ``cache``."""
    ids = ids.to(next(model.parameters()).device)
    start = time.perf_counter()
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None, **options
    )
    return output[0, ids.shape[1] :].tolist(), time.perf_counter() - start


@torch.no_grad()
def continued(
    model: Any, ids: Tensor, cache: Any, continuations: Sequence[Sequence[int]], at_once: bool
) -> Iterator[tuple[Tensor, float]]:
    """Yield logits (continuations, vocabulary) in float32, and seconds, for each position after ``ids`` (1, tokens) up
    to the end of the longest continuation. The prompt is read once; the first seconds include it, and the first logits
    are the same for all continuations.

    The continuations are rows of a batch. They are read token by token, as in decoding, or many tokens ``at_once``,
    which is equivalent for an exact cache. Logits of a row after its end have no meaning.
    """
    start = time.perf_counter()
    output = model(ids, cache=cache, use_cache=True, logits_to_keep=1)
    rows, longest = len(continuations), max(map(len, continuations))
    logits = output.logits[:, -1].float().cpu()
    yield logits.expand(rows, -1), time.perf_counter() - start
    if longest == 1:
        return
    if rows > 1:
        cache.batch_repeat_interleave(rows)
    given = ids.new_tensor([[*row, *[row[-1]] * (longest - len(row))] for row in continuations])[:, :-1]
    for part in given.split(_AT_ONCE if at_once else 1, dim=1):
        start = time.perf_counter()
        logits = model(part, cache=cache, use_cache=True).logits.float().cpu()  # (rows, part, vocabulary)
        seconds = (time.perf_counter() - start) / part.shape[1]
        yield from ((logits[:, position], seconds) for position in range(part.shape[1]))


@torch.no_grad()
def scores(model: Any, ids: Tensor, cache: Any, first: int, step: int) -> Iterator[tuple[list[float], float]]:
    """Yield ln p of the tokens of ``ids`` (1, tokens) from index ``first`` (at least 1) on, and seconds.

    The tokens before ``first`` are read at once, as a prompt, which yields ln p of token ``first``. Then ``step``
    tokens are read at a time, which yields ln p of the token after each of them.
    """
    last = ids.shape[1] - 1  # only predicted
    place = 0
    for stop in dict.fromkeys([*range(first, last, step), last]):
        start = time.perf_counter()
        count = stop - place if place else 1
        output = model(ids[:, place:stop], cache=cache, use_cache=True, logits_to_keep=count)
        logs = output.logits[0].double().log_softmax(-1)
        found = logs.gather(1, ids[0, stop - count + 1 : stop + 1].unsqueeze(1)).flatten().tolist()
        yield found, time.perf_counter() - start
        place = stop


def _step(model: Any, ids: Tensor, cache: Any) -> tuple[Tensor, float]:
    start = time.perf_counter()
    output = model(ids, cache=cache, use_cache=True, logits_to_keep=1)
    logits = output.logits[0, -1].float().cpu()  # waits for the device
    return logits, time.perf_counter() - start
