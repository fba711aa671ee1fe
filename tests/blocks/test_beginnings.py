"""A prompt's beginning that another cache has read is taken from blocks, and the cache goes on as if it had read it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import RECURRENT
from families import tiny
from helpers import assert_near, prompt, step

from kvkeep import KeepCache
from kvkeep.blocks.beginnings import begin, begins, find, keep, watch
from kvkeep.blocks.folder import BlockFolder
from kvkeep.memory.rows import BLOCK

LENGTH = BLOCK + 60
METHODS = ("full", "paged", "static", "kv-direct", "window+checkpoint:kv", "snapkv+verified")


def cache_of(family: str, method: str) -> KeepCache:
    budget = {"full": None, "paged": None, "static": 2000}.get(method, 100)
    return KeepCache(
        tiny(family), method, budget, checkpoint="kv" if budget == 100 and "+check" not in method else None
    )


def stored(folder: Path, family: str, method: str, ids: torch.Tensor) -> BlockFolder:
    blocks, cache = BlockFolder(folder), cache_of(family, method)
    watch(cache)
    step(family, cache, ids)
    keep(blocks, "owner", cache, ids[0].tolist())
    return blocks


@pytest.mark.turns(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gemma3", *RECURRENT])
def test_a_cache_that_begins_with_blocks_goes_on_as_one_that_has_read_them(
    family: str, method: str, tmp_path: Path
) -> None:
    ids = prompt(1, LENGTH + 30)
    blocks = stored(tmp_path, family, method, ids[:, :LENGTH])
    wanted = cache_of(family, method)
    watch(wanted)
    step(family, wanted, ids[:, :LENGTH])
    cache, text = cache_of(family, method), ids[0].tolist()
    assert begin(blocks, cache, find(blocks, "owner", cache, text), text) == LENGTH == cache.get_seq_length()
    for low, high in ((LENGTH, LENGTH + 20), *((at, at + 1) for at in range(LENGTH + 20, LENGTH + 30))):
        assert_near(step(family, cache, ids[:, low:high]), step(family, wanted, ids[:, low:high]))


@pytest.mark.parametrize("family", ["llama", "gemma3", *RECURRENT])
def test_another_text_takes_only_the_blocks_that_it_shares(family: str, tmp_path: Path) -> None:
    ids = prompt(1, LENGTH + 30)
    blocks = stored(tmp_path, family, "kv-direct", ids[:, :LENGTH])
    other = ids.clone()
    other[0, LENGTH - 10] += 1
    cache, text = cache_of(family, "kv-direct"), other[0].tolist()
    held = begin(blocks, cache, find(blocks, "owner", cache, text), text)
    assert held == (BLOCK if cache.stream.moving else LENGTH - 10)
    wanted = cache_of(family, "kv-direct")
    watch(wanted)
    step(family, wanted, other[:, :held])
    assert_near(step(family, cache, other[:, held:]), step(family, wanted, other[:, held:]))
    assert find(blocks, "stranger", cache_of(family, "full"), text) == []


def test_a_damaged_block_ends_the_beginning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, ids = tiny("llama", positions=1024), prompt(1, 2 * BLOCK + 40)
    blocks, cache, text = BlockFolder(tmp_path), KeepCache(model, "full"), [*ids[0].tolist(), 5]
    step(model, cache, ids)
    keep(blocks, "owner", cache, ids[0].tolist())
    cache = KeepCache(model, "full")
    names = find(blocks, "owner", cache, text)
    assert len(names) == 3
    path = blocks.path(names[1])
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    assert begin(blocks, cache, names, text) == BLOCK
    assert "read from token 256 on" in caplog.text and not path.exists()


def test_of_a_text_larger_than_the_quota_the_beginning_is_stored(tmp_path: Path) -> None:
    model, ids = tiny("llama", positions=2048), prompt(1, 4 * BLOCK + 40)
    cache, text = KeepCache(model, "full"), [*ids[0].tolist(), 5]
    step(model, cache, ids)
    keep(BlockFolder(tmp_path / "all"), "owner", cache, ids[0].tolist())
    whole = BlockFolder(tmp_path / "all").count()[1]
    for share, held in ((2, 0.6), (3, 0.9)):
        blocks = BlockFolder(tmp_path / str(share), int(held * whole))
        for _ in range(2):
            keep(blocks, "owner", cache, ids[0].tolist())
        begun = KeepCache(model, "full")
        assert begin(blocks, begun, find(blocks, "owner", begun, text), text) == share * BLOCK


def test_a_prompt_keeps_a_token_to_read(tmp_path: Path) -> None:
    ids = prompt(1, LENGTH)
    blocks = stored(tmp_path, "llama", "full", ids)
    for length, held in ((BLOCK, 0), (BLOCK + 1, BLOCK), (LENGTH, LENGTH - 1)):
        cache, text = cache_of("llama", "full"), ids[0, :length].tolist()
        assert begin(blocks, cache, find(blocks, "owner", cache, text), text) == held


@pytest.mark.parametrize("method", ["h2o", "kv-direct"])
def test_only_exact_caches_of_entries_begin_with_blocks(method: str, tmp_path: Path) -> None:
    cache = KeepCache(tiny("llama"), method, 100, checkpoint="residual" if method == "kv-direct" else None)
    assert not begins(cache)
    ids = prompt(1, LENGTH)
    step("llama", cache, ids)
    blocks = BlockFolder(tmp_path)
    keep(blocks, "owner", cache, ids[0].tolist())
    assert blocks.count() == (0, 0)
