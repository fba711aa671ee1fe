"""Methods, places, families, sessions and a server on a pretended GPU (:mod:`pretended_gpu`), most of them in bfloat16.

A GPU refuses tensors of the host among those of the device; here that is an error, too. What the host waits for, and
what it copies, in one decoding step is in :data:`STEP`. Neither may grow.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache as memoised
from pathlib import Path
from typing import Any

import pytest
import torch
from answering import NEW as ANSWER
from answering import Client, run, text
from cases import ALL, CASES, TURN, pairs, taken
from conftest import tokenizer
from families import tiny
from helpers import assert_near, padded, prompt
from pretended_gpu import GPU, PretendedGpu, on_gpu
from pretended_graphs import pretended_graphs
from torch import Tensor

import kvkeep
from kvkeep import KeepCache, Session, load_session, save_session
from kvkeep.blocks.beginnings import begin, find, keep
from kvkeep.blocks.folder import BlockFolder
from kvkeep.models.loading import Loaded
from kvkeep.serve.engine import Engine

STEP = {
    "paged": (8, 8),
    "kv-0": (0, 12),
    "kv": (16, 16),
    "residual": (11, 9),
    "residual:3": (5, 3),
    "tokens": (2, 0),
    "window+kv": (16, 16),
    "streaming-llm+residual": (15, 12),
    "h2o+kv": (0, 12),
    "h2o+kv-0": (0, 12),
    "tova+residual": (15, 12),
    "adakv+kv": (0, 12),
    "pyramidkv+kv": (0, 12),
    "expected-attention+kv": (0, 12),
    "kvzip+kv": (0, 12),
    "keydiff+kv": (0, 12),
    "knorm+residual:3": (7, 4),
    "random+tokens": (3, 0),
    "duo-attention+kv": (0, 12),
    "snapkv+residual+pages:all": (39, 12),
    "duo-attention+pages:all": (46, 18),
    "quantize:4+pages:all": (24, 12),
    "tiers+pages:all": (24, 12),
    "sketch+pages:all": (40, 12),
    "segments:2+pages:all": (24, 12),
    "snapkv+verified, kv": (16, 16),
    "h2o+verified, residual": (15, 12),
    "window+verified, residual:3": (3, 2),
    "tova+verified, tokens": (3, 0),
    "adakv+verified, kv": (0, 12),
    "duo-attention+verified, kv": (0, 12),
    "knorm+kv+verified": (0, 12),
    "expected-attention+verified, residual": (7, 6),
    "kvzip+verified, kv": (0, 12),
    "h2o+quantize:8+verified": (0, 12),
    "quantized:4+verified": (7, 6),
    "quest+verified": (0, 12),
    "kvslimmer+verified": (32, 12),
    "asymkv+verified": (35, 6),
    "revive+verified": (0, 12),
    "h2o+merge+verified": (0, 12),
    "snapkv+sketch+verified": (4, 12),
    "kvreviver+verified": (49, 6),
    "lowrank+verified": (0, 12),
    "kvzip": (8, 0),
    "h2o+pages:1": (24, 12),
    "kv-lru": (56, 12),
    "tova+residual+fetch-on-miss": (61, 12),
    "epicache": (6, 0),
    "kvgrad": (4, 0),
    "kvslimmer": (32, 0),
    "asymkv": (28, 0),
    "kvslimmer-exact": (32, 0),
    "asymkv-published": (12, 0),
    "h2o+sketch": (16, 0),
    "kvreviver": (28, 0),
    "h2o+sketch, shrunk": (28, 0),
    "quantized": (4, 0),
    "h2o+quantize:8": (4, 0),
    "kvzip+quantize:8": (6, 0),
    "snapkv+quantize:2": (4, 0),
    "h2o+quantize:4+pages:1": (52, 12),
    "kvreviver, averaged": (28, 0),
    "kvreviver-fisher": (28, 0),
    "lru+redecode": (23, 0),
    "snapkv+redecode": (23, 0),
    "kvslimmer+oneshot": (32, 0),
    "kvreviver+oneshot": (28, 0),
    "streaming-llm+oneshot": (1, 0),
    "endless": (16, 16),
}
"""How often the host waits for the device in a decoding step, and how many copies go between them. Not listed: never,
and none."""
KINDS = (
    *("full", "kv", "kv-0", "window+kv", "residual:3", "endless", "h2o", "kvzip", "quantized", "revive"),
    *("kvreviver", "kvslimmer", "snapkv+verified, kv"),
)
"""A method of each kind of store, reader and resident entries."""
SINGLE = 2
"""How many tokens of a text are read one by one."""
ROUNDING = {"qwen3_next": 0.2}
"""The share by which logits of bfloat16 may differ where sums are in another order. Of other families it is 0.05: the
recurrence of this one rounds more."""


@pytest.fixture(autouse=True)
def gpu() -> Iterator[PretendedGpu]:
    with PretendedGpu() as entered, pretended_graphs():
        yield entered


@memoised
def model_of(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The tiny model of a family on the GPU."""
    return on_gpu(copy.deepcopy(tiny(family)).to(dtype))


def new_cache(model: Any, name: str) -> KeepCache:
    case = CASES[name]
    given = {"budget": case.budget, "chunk": case.chunk} | dict(case.options)
    if case.method.oneshot:
        del given["chunk"]
    return KeepCache(model, case.spec, **given)


@torch.no_grad()
def read(model: Any, cache: KeepCache, tokens: Tensor, gpu: PretendedGpu | None = None) -> tuple[Tensor, set[Any]]:
    """Read a text, its last tokens one by one. Return the logits after each part, on the host, and of each single
    token what the host waited for and what was copied."""
    logits, seen = [], set()
    tokens = tokens.to(model.device)
    for part in tokens[:, :-SINGLE], *tokens[:, -SINGLE:].split(1, 1):
        if gpu is not None:
            gpu.clear()
        last = model(part, cache=cache, logits_to_keep=1).logits
        if gpu is not None and part.shape[1] == 1:
            seen.add((gpu.waits.total(), gpu.copies.total(), str(gpu.waits)))
        logits.append(last.cpu().float())
    return torch.cat(logits, 1), seen


def assert_rounded(ours: Tensor, theirs: Tensor, family: str = "llama") -> None:
    assert float((ours - theirs).norm()) < ROUNDING.get(family, 0.05) * float(theirs.norm())


@memoised
def unbounded(family: str, length: int) -> Tensor:
    model = model_of(family)
    return read(model, KeepCache(model), prompt(1, length))[0]


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", CASES)
def test_a_method_in_bfloat16(name: str, gpu: PretendedGpu) -> None:
    case, model = CASES[name], model_of("llama")
    cache = new_cache(model, name)
    logits, seen = read(model, cache, prompt(1, case.length), gpu)
    assert torch.isfinite(logits).all()
    if case.equals:
        assert_rounded(logits, unbounded("llama", case.length))
    waits, copies, where = max(seen)
    before = STEP.get(name, (0, 0))
    assert waits <= before[0] and copies <= before[1], f"a step waits and copies more than {before}: {where}"
    assert (waits, copies) == before, f"a step waits and copies less: make it {(waits, copies)} in STEP"


@pytest.mark.turns(4)
@pytest.mark.parametrize("name,family", pairs(21, lambda case: not case.equals)[TURN % 2 :: 2])
def test_results_are_those_of_the_cpu(name: str, family: str) -> None:
    """In float32, where both add the same products."""
    tokens = prompt(1, CASES[name].length)
    found, _ = read(model := model_of(family, torch.float32), new_cache(model, name), tokens)
    wanted, _ = read(model := tiny(family), new_cache(model, name), tokens)
    assert_near(found, wanted, 1e-2 if CASES[name].waits else 1e-3)


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", ALL)
def test_families(family: str) -> None:
    model = model_of(family)
    for name in "kv", *[one for one in ("residual:3", "residual") if taken(one, family)][:1]:
        assert_rounded(read(model, new_cache(model, name), prompt(1, 45))[0], unbounded(family, 45), family)


@pytest.mark.turns(3)
@pytest.mark.parametrize("where", ["device", "host", "disk"])
@pytest.mark.parametrize("kind", ["kv", "residual", "residual:3", "tokens"])
def test_a_checkpoint_lies_where_it_should(kind: str, where: str) -> None:
    model = model_of("llama")
    cache = KeepCache(model, "kv-direct", 16, checkpoint=kind, where=where)
    assert_rounded(read(model, cache, prompt(1, 45))[0], unbounded("llama", 45))
    assert kind == "tokens" or cache.memory().checkpoint_bytes[where]


@pytest.mark.parametrize("name", ["full", "kv", "h2o", "snapkv+verified, kv"])
def test_transformers_generates_from_padded_rows_and_beams(name: str) -> None:
    model = model_of("llama", torch.float32)
    ids, mask = (one.to(GPU) for one in padded([30, 21]))
    for options in {"num_beams": 1}, {"num_beams": 2}:
        given = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False} | options
        found = model.generate(ids, cache=new_cache(model, name), **given)
        if CASES[name].equals:
            assert found.tolist() == model.generate(ids, **given).tolist()


@torch.no_grad()
def test_rows_are_forked_cropped_and_chosen() -> None:
    model, token = model_of("llama"), torch.tensor([[5]], device=GPU)
    for name in KINDS[TURN % 2 :: 2]:
        cache = new_cache(model, name)
        model(prompt(1, CASES[name].length).to(GPU), cache=cache)
        twin = cache.fork()
        assert torch.equal(model(token, cache=twin).logits, model(token, cache=cache).logits), name
        if cache.crops:
            cache.crop(-2)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([1, 0], device=GPU))
        model(token.repeat(2, 1), cache=cache)
        assert str(cache) and cache.describe() and cache.memory()


@torch.no_grad()
@pytest.mark.turns(3)
@pytest.mark.parametrize("name", KINDS)
def test_a_session_goes_on_with_the_same_bits(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its text ends within a block, of which some entries are evicted, and others not."""
    model, ids = model_of("llama"), prompt(1, 264)
    cache = new_cache(model, name)
    model(ids.to(GPU), cache=cache)
    save_session(tmp_path / "s", Session(cache, ids.tolist()))
    back, token = load_session(tmp_path / "s", model).cache, torch.tensor([[5]], device=GPU)
    assert back.get_seq_length() == ids.shape[1] and not caplog.records
    assert torch.equal(model(token, cache=back).logits, model(token, cache=cache).logits)


@pytest.mark.parametrize("given", ["ids", "positions", "generate", "other positions"])
def test_a_prompt_begins_with_the_blocks_of_a_text(given: str, tmp_path: Path) -> None:
    """Whether ids alone give the text is not asked while it is read: that would wait for the device."""
    model, blocks, ids = model_of("llama"), BlockFolder(tmp_path), prompt(1, 300)
    cache, begun = (KeepCache(model, "kv-direct", 16, checkpoint="kv") for _ in range(2))
    if given == "generate":
        answer = kvkeep.generate(model, None, ids[0].tolist(), cache=cache, max_new_tokens=4)
        ids = torch.cat([ids, torch.tensor([answer.tokens])], 1)[:, : cache.get_seq_length()]
    else:
        positions = torch.arange(300, device=GPU)[None] + (given == "other positions")
        with torch.no_grad():
            model(ids.to(GPU), cache=cache, position_ids=None if given == "ids" else positions)
    keep(blocks, "owner", cache, ids[0].tolist())
    prompted = [*ids[0].tolist(), 5]
    held = begin(blocks, begun, find(blocks, "owner", begun, prompted), prompted)
    assert held == (0 if given == "other positions" else ids.shape[1])
    if held:
        token = torch.tensor([[5]], device=GPU)
        with torch.no_grad():
            logits = [model(token, cache=one).logits.cpu().float() for one in (begun, cache)]
        assert_rounded(*logits)


def test_a_server_answers_two_sessions_as_each_alone() -> None:
    model = model_of("llama", torch.float32)
    for cache in {"method": "full"}, {"method": "kv-direct", "budget": 16}, {"method": "h2o", "budget": 16}:
        engine = Engine(Loaded(model, tokenizer(), "tiny", "tiny"), 10**8, **cache)
        texts = text(40, 1), text(33, 2)
        clients = [Client(engine, ids) for ids in texts]
        run(engine)
        for ids, client in zip(texts, clients, strict=True):
            alone = kvkeep.generate(model, None, ids, cache=KeepCache(model, **cache), max_new_tokens=ANSWER)
            assert client.text.split() == tokenizer().decode(alone.tokens).split()
