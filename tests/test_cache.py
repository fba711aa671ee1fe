"""What KeepCache promises beyond the contract: requests, capacity, recovery, and callers that do as they like."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCABULARY, tiny
from helpers import allocated, assert_near, counted, drafted, expected, generate, padded, prompt, step, stock

from kvkeep import BudgetError, KeepCache, ModelGeometry, StoreError, UsageError
from kvkeep.memory.pages import PagedRows
from kvkeep.memory.places import Disk
from kvkeep.models.same_text import digest_text
from kvkeep.passes import stream
from kvkeep.policies.methods import requested

KINDS = ["kv", "residual", "residual:3", "tokens"]


# -- requests -----------------------------------------------------------------------------------------


def test_what_is_left_out_has_a_default() -> None:
    model = tiny("llama")
    assert KeepCache(model).method.name == "full" and KeepCache(model, budget=32).method.name == "kv-direct"
    per_token = ModelGeometry.from_config(model.config, 4).kv_bytes_per_token
    assert KeepCache(model, budget=f"{64 * per_token}B").entries == 64
    assert KeepCache(model, budget=f"{64 * per_token}B", batch=2).entries == 32
    assert KeepCache(model, budget="25%", context=200).entries == 50


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"method": "kvdirect"}, "did you mean kv-direct"),
        ({"method": "full", "budget": 5}, "takes no budget"),
        ({"method": "static"}, "needs a budget"),
        ({"method": "kv-direct"}, "needs a budget"),
        ({"method": ""}, "must be a name, not"),
        ({"budget": 16, "checkpoint": "residuals"}, "did you mean residual"),
        ({"budget": 16, "checkpoint": "residual:0"}, "whole number of layers"),
        ({"budget": 16, "checkpoint": "kv:2"}, "only 'residual' takes a stride"),
        ({"budget": 16, "where": "dsk"}, "did you mean disk"),
        ({"budget": 16, "where": 1}, "must be a name, not"),
        ({"budget": 16, "checkpoint": "tokens", "capacity": 9}, "only checkpoint kind 'kv' takes one"),
        ({"budget": 16, "capacity": 1.5}, "The capacity of a cache must be a whole number of at least 1"),
        ({"budget": 16, "where": "host", "folder": "/tmp"}, "'--where disk' only"),
        ({"budget": 16, "page": 0}, "The page of a cache must be a whole number of at least 1, not 0"),
        ({"budget": 16, "page": -1}, "The page of a cache must be a whole number of at least 1, not -1"),
        ({"budget": 16, "chunk": "16"}, "The chunk of a cache must be a whole number of at least 1, not '16'"),
    ],
)
def test_bad_requests_are_one_sentence(options: dict[str, Any], sentence: str) -> None:
    """Before a model is loaded, too."""
    for ask in (requested, lambda **given: KeepCache(tiny("llama"), **given)):
        with pytest.raises(UsageError, match=sentence):
            ask(**options)


def test_a_budget_below_one_chunk_names_the_smallest() -> None:
    with pytest.raises(BudgetError, match="smallest is 16"):
        KeepCache(tiny("llama"), budget=3)
    with pytest.raises(BudgetError, match="64"):
        KeepCache(tiny("llama"), "h2o", budget=32, chunk=64)
    assert KeepCache(tiny("llama"), budget=32, chunk=64).stream.chunk == 64, "exact in chunks of any size"
    assert KeepCache(tiny("llama"), budget=4, chunk=4).entries == 4


def test_a_static_cache_that_is_full_says_so() -> None:
    cache = KeepCache(tiny("llama"), "static", 20)
    step("llama", cache, prompt(1, 20))
    with pytest.raises(UsageError, match="holds 20 entries, but 21 are needed"):
        step("llama", cache, prompt(1, 1))


def test_one_line_says_what_it_is_and_a_block_ends_with_nothing_held(tmp_path: Path) -> None:
    mapped = Path("/proc/self/maps")
    with KeepCache(tiny("llama"), "kv-direct", 16, where="disk", folder=tmp_path) as cache:
        step("llama", cache, prompt(1, 40))
        held = cache.memory().resident_bytes
        assert held and str(tmp_path) in mapped.read_text()
        assert repr(cache) == f"KeepCache(method='kv-direct', budget='16', tokens=40, bytes={held}, exactness='exact')"
        assert (cache.memory().process_bytes or 0) > held
    assert str(tmp_path) not in mapped.read_text() and cache.memory().resident_bytes == 0
    assert repr(cache).startswith("KeepCache(method='kv-direct', budget='16', tokens=0, bytes=0")
    assert repr(KeepCache(tiny("llama"))) == "KeepCache(method='full', tokens=0, bytes=0, exactness='exact')"


@pytest.mark.parametrize("method", ["full", "static", "kv-direct", "h2o", "snapkv+verified"])
def test_another_text_without_a_reset_is_refused(method: str) -> None:
    """As a pipeline would give it: transformers cuts what the cache has read, and is left with nothing."""
    cache = KeepCache(tiny("llama"), method, None if method == "full" else 128)
    wanted = generate("llama", cache, prompt(1, 20)).sequences
    read = cache.get_seq_length()
    for share in (0.2, 0.4, 0.6, 0.9, 1.0):  # cut by what was read, of some something is left
        with pytest.raises(UsageError, match=rf"already holds {read} tokens, and this text has \d+.*reset\(\)"):
            generate("llama", cache, prompt(1, int(share * read), seed=4))
    with pytest.raises(UsageError, match=rf"mask covers 20 tokens, but the cache holds {read} and .*3 more"):
        step("llama", cache, prompt(1, 3), torch.ones(1, 20, dtype=torch.int64))
    other = prompt(1, 40, seed=9)
    other[:, :3] = wanted[:, :3]
    other[:, 3] = (wanted[:, 3] + 1) % VOCABULARY
    with pytest.raises(UsageError, match=r"already holds \d+ tokens of another text"):
        generate("llama", cache, other)
    with pytest.raises(UsageError, match="holds a batch of 1, and the input is a batch of 2"):
        generate("llama", cache, torch.cat([wanted, wanted]))
    assert cache.stream.record.text == digest_text(wanted[:, :-1])  # token by token as at once
    longer = torch.cat([wanted, prompt(1, 5)], 1)
    goes_on = generate("llama", cache, longer).sequences[:, longer.shape[1] :]  # the same text goes on
    new = torch.cat([wanted[:, read:], prompt(1, 30)], 1)  # and so it does where the new tokens come alone
    alone = KeepCache(tiny("llama"), method, None if method == "full" else 128)
    generate("llama", alone, prompt(1, 20))
    told = generate("llama", alone, new[:, : longer.shape[1] - read], torch.ones_like(longer)).sequences
    assert torch.equal(told[:, longer.shape[1] - read :], goes_on)
    if method not in ("static", "h2o"):
        with pytest.raises(UsageError, match="assisted decoding would read them again"):
            generate("llama", cache, torch.cat([longer, goes_on, new], 1), prompt_lookup_num_tokens=3)
    generate("llama", alone, new, torch.ones(1, alone.get_seq_length() + new.shape[1], dtype=torch.int64))
    if method not in ("static", "h2o"):
        cache.crop(-4)
        step("llama", cache, prompt(1, 4, seed=5))  # what a model reads by itself is not what generate has told
        generate("llama", cache, torch.cat([longer, longer], 1))
    cache.reset()
    assert torch.equal(generate("llama", cache, prompt(1, 20)).sequences, wanted)


def test_a_crop_of_what_is_not_there_is_refused() -> None:
    for method, budget in (("kv-direct", 16), ("full", None)):
        cache = KeepCache(tiny("llama"), method, budget)
        step("llama", cache, prompt(1, 30))
        for tokens in (5, -31, -1000):
            with pytest.raises(UsageError, match="negative number, at least -30"):
                cache.crop(tokens)
        assert cache.get_seq_length() == 30


# -- checkpoints --------------------------------------------------------------------------------------


def test_a_capacity_makes_it_lossy_and_says_so() -> None:
    cache = KeepCache(tiny("llama"), "kv-direct", 16, where="host", capacity=64)
    step("llama", cache, prompt(1, 60))
    assert cache.exactness == "exact"
    step("llama", cache, prompt(1, 60))
    assert cache.exactness == "lossy" and {report.exactness for report in cache.describe()} == {"lossy"}
    assert max(rows.length - rows.first for _, rows in cache.checkpoint_rows()) == 64


@pytest.mark.parametrize("kind", KINDS)
def test_a_crop_below_what_is_resident(kind: str) -> None:
    """A rollback deeper than the budget is exact too: the rest is recalled."""
    text, again = prompt(1, 80), prompt(1, 9, seed=4)
    cache = KeepCache(tiny("qwen2"), "kv-direct", 16, checkpoint=kind, where="host")
    step("qwen2", cache, text)
    cache.crop(-50)
    whole = torch.cat([text[:, :30], again], 1)
    for low in (30, 33, 36):
        ours = step("qwen2", cache, whole[:, low : low + 3])
        assert_near(ours[:, -1], expected("qwen2", whole)[:, low + 2])


def test_vectors_instead_of_ids() -> None:
    text = prompt(1, 60)
    vectors = tiny("llama").get_input_embeddings()(text[:, 20:50]).detach() * 1.3
    results = [
        [step("llama", cache, part) for part in (text[:, :20], vectors, text[:, 50:])][-1]
        for cache in (stock("llama"), *(KeepCache(tiny("llama"), "kv-direct", 16, checkpoint=kind) for kind in KINDS))
    ]
    for ours in results[1:]:
        assert_near(ours, results[0])


@pytest.mark.parametrize("kind", ["kv", "residual"])
def test_a_disk_that_fills_up_in_the_middle_of_a_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails with one sentence, and once there is room the same step can be taken again, exactly."""
    text = prompt(1, 330)
    cache = KeepCache(tiny("llama"), "kv-direct", 16, checkpoint=kind, where="disk")
    step("llama", cache, text[:, :250])
    honest, calls = Disk.allocate, []

    def full_at_the_second(self: Any, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise StoreError("Checkpoints cannot be kept: the disk is full.")
        return honest(self, *arguments)

    monkeypatch.setattr(Disk, "allocate", full_at_the_second)
    with pytest.raises(StoreError, match="disk is full"):
        step("llama", cache, text[:, 250:])
    done = cache.get_seq_length()
    assert 250 <= done < 330 and len(calls) == 2
    assert_near(step("llama", cache, text[:, done:])[:, -1], expected("llama", text)[:, -1])


# -- callers --------------------------------------------------------------------------------------------


def test_hidden_states_of_a_chunked_input_are_refused() -> None:
    with pytest.raises(UsageError, match="output_hidden_states"):
        step("llama", KeepCache(tiny("llama"), budget=16), prompt(1, 40), output_hidden_states=True)


def test_a_call_with_gradients_is_answered_without_them() -> None:
    cache = KeepCache(tiny("llama"), "kv-direct", 16, checkpoint="residual", where="host")
    tiny("llama")(prompt(1, 60), cache=cache)
    assert not any(part.requires_grad for held in cache.holdings for part in held.state().values())


def test_threads_do_not_see_each_other() -> None:
    """Two conversations at once on one model, as in a server."""

    def talk(seed: int) -> list[int]:
        cache = KeepCache(tiny("llama"), budget=16, checkpoint=("kv", "tokens")[seed % 2], where="host")
        ours, theirs = (
            tiny("llama").generate(prompt(1, 60, seed), do_sample=False, max_new_tokens=9, cache=own)
            for own in (cache, KeepCache(tiny("llama")))
        )
        assert ours.tolist() == theirs.tolist()
        return ours[0].tolist()

    alone = [talk(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(talk, range(4))) == alone


@pytest.mark.parametrize("method", ["streaming-llm", "kvreviver", "h2o+checkpoint", "snapkv+verified", "quantized:4"])
def test_padding_longer_than_the_first_chunks_in_every_row(method: str) -> None:
    """As tokenizers make it with padding="max_length": what is read is what is read without it."""
    budget = 130 if method == "quantized:4" else 64
    ids, mask = (rows[1:] for rows in padded([200, 50, 45]))
    cache, alone = (KeepCache(tiny("llama"), method, budget, chunk=16) for _ in range(2))
    ours = generate("llama", cache, ids, mask)
    theirs = generate("llama", alone, ids[:, 150:], mask[:, 150:])
    assert_near(torch.stack(ours.logits), torch.stack(theirs.logits))
    assert cache.get_seq_length() == alone.get_seq_length() + 150


@pytest.mark.parametrize("method", ["h2o", "snapkv"])
def test_rows_that_are_repeated_leave_nothing_of_before(method: str) -> None:
    """Not in the tensors in which layers with one selector are ranked together."""
    cache = KeepCache(tiny("llama"), method, 40, chunk=16)
    for count in (100, 1):
        step("llama", cache, prompt(1, count))
    cache.batch_repeat_interleave(2)
    assert counted(cache) == allocated(cache)


@pytest.mark.parametrize("method", ["h2o", "kv-direct", "snapkv+verified"])
@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_sliding_layers_are_within_a_budget_in_bytes(family: str, method: str) -> None:
    """What is behind a window counts, and not the window alone: after every chunk, every step, and after drafts."""
    model, seen = tiny(family), []
    cache = KeepCache(model, method, "24KB", checkpoint="kv" if method != "h2o" else None)

    def check(length: int) -> None:
        assert counted(cache) == allocated(cache)
        seen.append(cache.memory().resident_bytes)

    cache.stream.record.tell(check)
    step(family, cache, prompt(1, 150))
    for token in range(3):
        step(family, cache, prompt(1, 3)[:, token : token + 1])
    assert len(seen) >= 5 and 12_000 < max(seen) <= 24_000
    cache.reset()
    drafted(model, cache, prompt(1, 45))
    assert cache.memory().resident_bytes + cache.memory().compressed_bytes <= 24_000


def test_a_cache_cannot_be_pickled() -> None:
    cache = KeepCache(tiny("llama"), "kv-direct", 16)
    step("llama", cache, prompt(1, 20))
    with pytest.raises(UsageError, match="cannot be pickled"):
        pickle.dumps(cache)


def test_freed_memory_is_returned_while_a_long_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    monkeypatch.setattr(stream, "TRIM_TOKENS", 32)
    monkeypatch.setattr(stream, "trim_memory", lambda: lengths.append(cache.get_seq_length()))
    model = tiny("llama")
    cache = KeepCache(model, "kv-direct", 64)
    with torch.no_grad():
        for part in prompt(1, 80).split(20, dim=1):
            model(part, cache=cache, use_cache=True)
        assert lengths == [40, 80]
        cache.crop(-50)
        model(prompt(1, 34), cache=cache, use_cache=True)
    assert lengths == [40, 80, 64]


@pytest.mark.parametrize("method", ["kv-direct", "endless+passages:count=2,size=32,exact=128"])
def test_a_fork_shares_whole_blocks_of_a_checkpoint_on_disk_until_one_cache_changes_them(method: str) -> None:
    model, ids = tiny("llama"), prompt(1, 440)
    with torch.no_grad():

        def read(cache: KeepCache, *tokens: torch.Tensor) -> torch.Tensor:
            return torch.cat([model(one, cache=cache, use_cache=True).logits[:, -1] for one in tokens])

        cache = KeepCache(model, method, 32, where="disk")
        read(cache, ids)
        fork, alone = cache.fork(), KeepCache(model, method, 32, where="disk")
        read(alone, ids)
        rows = [dict(one.checkpoint_rows()) for one in (cache, fork)]
        for name, mine in rows[0].items():
            assert isinstance(mine, PagedRows) and isinstance(rows[1][name], PagedRows)
            stop = mine.length // mine.smallest * mine.smallest
            lent = [page.data_ptr() for page in mine.pages]
            assert sum(page.shape[-2] for page in rows[1][name].pages if page.data_ptr() in lent) == stop > 0
        if method == "kv-direct":
            for one in (cache, alone):
                one.crop(-70)
        more = prompt(1, 9, seed=3)
        assert torch.equal(read(cache, more, more[:, :1]), read(alone, more, more[:, :1]))
        cache.reset()
        intact = KeepCache(model, method, 32, where="disk")
        read(intact, ids)
        assert torch.equal(read(fork, more, more[:, :1]), read(intact, more, more[:, :1]))
