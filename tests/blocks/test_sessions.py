"""Sessions of a store: what they share, what they forget, and that no cache sees what another one does to its blocks.
That a cache goes on as if it had never been saved is in the contract (``tests/test_contract.py``), for every method."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, new_cache
from conftest import tokenizer
from families import tiny
from helpers import assert_near, bounded, padded, prompt, step
from storing import (
    IDS,
    LENGTH,
    METHODS,
    TURNS,
    block_bytes,
    check_whole,
    files,
    filled,
    following,
    kept,
    model,
    next_logits,
    session,
    store_text,
)

from kvkeep import (
    Conversation,
    KeepCache,
    Session,
    SessionError,
    UsageError,
    load_session,
    save_session,
    transfer,
)
from kvkeep.blocks import beginnings
from kvkeep.blocks.folder import BlockName
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import Store
from kvkeep.errors import SessionDamaged

SOME = [
    *(("full", "llama"), ("static", "gpt2"), ("paged", "qwen3"), ("kv", "gemma3"), ("kv", "mistral")),
    *(("residual", "llama"), ("tokens", "qwen2"), ("h2o+kv", "phi3"), ("snapkv+verified, kv", "llama")),
    *(("h2o", "deepseek_v3"), ("streaming-llm", "llama"), ("kvzip", "llama"), ("revive", "llama")),
    *(("quest", "llama"), ("kvreviver", "qwen3"), ("kvslimmer", "llama"), ("cam", "llama")),
    *(("kv", "gemma4"), ("quantized", "gpt2"), ("kvzip+quantize:8", "llama")),
]  # fmt: skip
EXACT = ["full", "kv-direct"]


def loaded(store: Store, name: str) -> Session:
    with StoredSession(store, name) as stored:
        return stored.load(model(), "tokenizer")


def blocks_of(store: Store, name: str) -> list[Path]:
    """Return the files of a session's blocks in order, and that of its state."""
    with StoredSession(store, name) as stored:
        assert stored.about is not None
        return [store.blocks.path(stored.block(key)) for key in (*stored.about["blocks"], stored.about["state"])]


# -- turns ------------------------------------------------------------------------------------------------


@pytest.mark.turns(2)
@pytest.mark.parametrize(("name", "family"), SOME)
def test_saved_by_turns_it_is_as_if_it_had_never_been(name: str, family: str, tmp_path: Path) -> None:
    """Each turn goes on with the session that was saved after the one before; some are cropped before."""
    case, cache = CASES[name], new_cache(name, family)
    ids = prompt(1, case.length + 40, seed=3)
    cuts = [0, *(case.length + turn for turn in (0, 9, 14, 15, 31))]
    past = cache
    for number, (low, high) in enumerate(itertools.pairwise(cuts)):
        if number == 2 and case.equals and not any(cache.is_sliding):
            for one in (past, cache):
                one.crop(-3)
            low -= 3
        own = step(family, cache, ids[:, low:high])
        if past is not cache:
            assert_near(step(family, past, ids[:, low:high]), own)
        save_session(tmp_path / "s", Session(past, ids[:, :high].tolist(), {"turn": number}))
        past = load_session(tmp_path / "s", tiny(family)).cache
    again = load_session(tmp_path / "s", tiny(family))
    assert again.ids == ids[:, : cuts[-1]].tolist() and again.notes == {"turn": len(cuts) - 2}
    with StoredSession.at(tmp_path / "s") as stored:
        assert stored.saves == len(cuts) - 1


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", EXACT)
def test_a_turn_writes_what_is_new_and_sessions_share_the_rest(name: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store_text(store, "me/a", name, TURNS[0])
    [first, _] = blocks_of(store, "me/a")
    written = first.stat()
    store_text(store, "me/a", name)
    store_text(store, "me/b", name)
    a, b = blocks_of(store, "me/a"), blocks_of(store, "me/b")
    assert a[:2] == b[:2] and a[0] == first and a[2] != b[2] and first.stat().st_ino == written.st_ino
    assert len([path for path in files(tmp_path) if path.suffix == ".block"]) == 4
    store_text(store, "you/a", name)
    assert not {*blocks_of(store, "you/a")} & {*a}
    for session_name in ("me/a", "me/b", "you/a"):
        assert check_whole(store, session_name, name) == LENGTH


@pytest.mark.usefixtures("kernels")
def test_notes_of_a_program_are_its_own(tmp_path: Path) -> None:
    store, one = Store(tmp_path), session(kept("full", 3), said=["a"])
    with StoredSession(store, "s", writing=True) as stored:
        stored.save(one)
        one.notes["said"].append("b")
        again = stored.load(model())
        again.notes["said"].append("c")
        assert stored.load(model()).notes == {"said": ["a"]}


@pytest.mark.usefixtures("kernels")
def test_a_reader_gets_the_turn_that_was_saved_meanwhile(tmp_path: Path) -> None:
    """A lossy cache's state goes with the turn after it."""
    store = Store(tmp_path)
    store_text(store, "me/talk", "h2o", TURNS[0])
    with StoredSession(store, "me/talk") as reader:
        store_text(store, "me/talk", "h2o")
        again = reader.load(model(), "tokenizer")
    assert again.ids == IDS[:, :LENGTH].tolist() and again.notes == {"length": LENGTH}
    assert torch.equal(next_logits(again.cache), following("h2o"))


# -- shared blocks ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", [*METHODS])
def test_what_a_cache_does_to_its_blocks_no_other_cache_sees(name: str, tmp_path: Path) -> None:
    """Its crop ends in a block that another cache holds, and what it reads then would be written there."""
    store = Store(tmp_path)
    store_text(store, "me/talk", name)
    before = [path.read_bytes() for path in files(tmp_path) if path.suffix == ".block"]
    one, other, early = loaded(store, "me/talk").cache, loaded(store, "me/talk").cache, filled(name)
    for cache in (one, early):
        if name != "h2o":
            cache.crop(200 - LENGTH)
        else:
            cache.crop(-1)
    more = prompt(1, 100, seed=5)
    assert torch.equal(*(step(model(), cache, more, logits_to_keep=0) for cache in (one, early)))
    assert torch.equal(next_logits(other), following(name))
    assert torch.equal(next_logits(loaded(store, "me/talk").cache), following(name))
    assert [path.read_bytes() for path in files(tmp_path) if path.suffix == ".block"] == before


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", EXACT)
def test_a_cache_goes_on_while_its_blocks_are_removed(name: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store_text(store, "me/talk", name)
    for path in blocks_of(store, "me/talk"):
        os.utime(path, (1, 1))
    cache = loaded(store, "me/talk").cache
    assert all(path.stat().st_mtime > 1 for path in blocks_of(store, "me/talk"))  # a load is a use
    Store(tmp_path, quota=0).evict()
    assert not any(path.exists() for path in blocks_of(store, "me/talk"))
    shutil.rmtree(tmp_path)
    fork = cache.fork()
    assert torch.equal(next_logits(cache), following(name)) and torch.equal(next_logits(fork), following(name))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", EXACT)
def test_rows_of_different_lengths(name: str, tmp_path: Path) -> None:
    """Nothing is read again of them, but they are saved and continued; their blocks are theirs alone."""
    ids, mask = padded([530, 300])
    cache = KeepCache(model(), METHODS[name][0], METHODS[name][1], **METHODS[name][2])
    step(model(), cache, ids, mask)
    store = Store(tmp_path)
    with StoredSession(store, "me/rows", writing=True) as stored:
        stored.save(Session(cache, ids.tolist()))
        one, other = stored.load(model()).cache, stored.load(model()).cache
    one.reorder_cache(torch.tensor([1, 0]))
    mask, more = torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], 1), prompt(2, 3, seed=4)
    own = step(model(), cache, more, mask)
    assert torch.equal(step(model(), other, more, mask), own)
    assert torch.equal(step(model(), one, more.flip(0), mask.flip(0)).flip(0), own)
    with StoredSession(store, "me/rows") as stored:
        assert torch.equal(step(model(), stored.load(model()).cache, more, mask), own)
    blocks_of(store, "me/rows")[1].unlink()
    with StoredSession(Store(tmp_path), "me/rows") as stored, pytest.raises(SessionDamaged):
        load_session(stored, model())


@pytest.mark.usefixtures("kernels")
def test_a_lossy_cache_names_no_block_that_it_has_changed(tmp_path: Path) -> None:
    """Rows of a batch have blocks of random names; after a crop or another order these are of another text."""
    ids, store = torch.cat([IDS[:, :LENGTH]] * 2), Store(tmp_path)
    embeddings = model().get_input_embeddings()(ids).detach()
    cache = KeepCache(model(), "full")
    step(model(), cache, embeddings)
    for number in range(3):
        with StoredSession(store, "me/rows", writing=True) as stored:
            stored.save(Session(cache, ids.tolist()))
            again = stored.load(model()).cache
        more = prompt(2, 3, seed=number)
        assert torch.equal(step(model(), cache.fork(), more), step(model(), again, more)), number
        cache = again
        cache.crop(-3)
        if number == 0:
            cache.crop(300 - LENGTH)
            step(model(), cache, embeddings[:, 300:] * torch.tensor([1.5, 0.5])[:, None, None].to(embeddings.dtype))
        else:
            cache.reorder_cache(torch.tensor([1, 0]))


# -- texts that are more than their ids -------------------------------------------------------------------


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("how", ["itself", "fork", "fork of another kind", "beginning"])
@pytest.mark.parametrize("name", EXACT)
def test_entries_of_embeddings_are_taken_for_no_text(name: str, how: str, tmp_path: Path) -> None:
    cache = KeepCache(model(), METHODS[name][0], METHODS[name][1], **METHODS[name][2])
    step(model(), cache, model().get_input_embeddings()(IDS[:, :LENGTH]).detach() * 1.5)
    if how == "fork":
        cache = cache.fork()
    elif how == "fork of another kind":
        cache = transfer.fork(cache, ("kv-direct", 32, {"checkpoint": "kv", "where": "host"}))
    elif how == "beginning" and name == "full":
        cache = transfer.begun(cache, LENGTH)
    store = Store(tmp_path)
    for session_name in ("me/a", "me/b"):  # the second after a restart
        with StoredSession(store, session_name, writing=True) as stored:
            stored.save(Session(cache, IDS[:, :LENGTH].tolist(), {"length": LENGTH}, "tokenizer"))
        cache = loaded(store, session_name).cache
    assert beginnings.keep(store.blocks, "me", cache, IDS[0, :LENGTH].tolist()) in (0, None)
    store_text(store, "me/text", name)
    assert check_whole(store, "me/text", name) == LENGTH
    own = next_logits(cache)
    assert torch.equal(next_logits(loaded(store, "me/b").cache), own) and not torch.equal(own, following(name))
    blocks_of(store, "me/b")[0].unlink()
    with StoredSession(Store(tmp_path), "me/b") as stored, pytest.raises(SessionDamaged, match="cannot be read again"):
        load_session(stored, model())


def test_embeddings_are_saved_too(tmp_path: Path) -> None:
    own, ids = tiny("llama"), torch.arange(2, 60).unsqueeze(0)
    cache = KeepCache(own, "kv-direct", 16, checkpoint="tokens")
    step(own, cache, ids[:, :20])
    step(own, cache, own.get_input_embeddings()(ids[:, 20:50]).detach() * 1.5)
    save_session(tmp_path / "s", Session(cache, ids[:, :50].tolist()))
    again = load_session(tmp_path / "s", own).cache
    torch.testing.assert_close(step(own, again, ids[:, 50:52]), step(own, cache, ids[:, 50:52]))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", EXACT)
def test_a_prompt_begins_with_the_blocks_of_any_session_of_its_owner(name: str, tmp_path: Path) -> None:
    store, ids = Store(tmp_path), IDS[0, :LENGTH].tolist()
    store_text(store, "me/talk", "full")
    for space, number in (("me", 2 * 256), ("you", 0)):
        cache = KeepCache(model(), METHODS[name][0], METHODS[name][1], **METHODS[name][2])
        begun = beginnings.begin(store.blocks, cache, beginnings.find(store.blocks, space, cache, ids), ids)
        assert begun // 256 * 256 == number
        step(model(), cache, IDS[:, begun:LENGTH])
        assert torch.equal(next_logits(cache), following(name))


# -- what is removed --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kernels")
def test_forgetting_a_turn_removes_its_text_unless_another_session_has_it(tmp_path: Path) -> None:
    store, cache = Store(tmp_path), filled("full")
    store_text(store, "me/a", "full")
    store_text(store, "me/b", "full", TURNS[0])
    shared, own, state = blocks_of(store, "me/a")
    cache.crop(-LENGTH)
    step(model(), cache, prompt(1, 20, seed=8))
    for forget in (False, True):
        with StoredSession(store, "me/a", writing=True) as stored:
            stored.save(Session(cache, prompt(1, 20, seed=8).tolist(), {"length": 20}), forget=forget)
        assert not state.exists() and shared.exists() and own.exists() != forget
        if not forget:
            store_text(store, "me/a", "full")
            state = blocks_of(store, "me/a")[-1]
    assert check_whole(store, "me/b", "full") == TURNS[0]
    store.remove("me/b")
    store.remove("me/a")
    assert not [path for path in files(tmp_path) if path.suffix == ".block"]


@pytest.mark.usefixtures("kernels")
def test_a_session_larger_than_the_quota_keeps_its_beginning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store_text(Store(tmp_path / "other"), "me/a", "full")
    with StoredSession(Store(tmp_path / "other"), "me/a") as stored:
        state, blocks = stored.bytes
    store = Store(tmp_path / "store", quota=(state + 3 * blocks // 4) * 16 // 15)
    for _ in range(3):
        store_text(store, "me/a", "full")
    (warning,) = [record.message for record in caplog.records]
    assert "larger than the quota" in warning and "after its first 256 tokens" in warning
    info = store.info("me/a")
    assert (info.missing, info.saves) == (1, 3) and block_bytes(store) <= (store.blocks.quota or 0)
    with StoredSession(store, "me/a") as stored:
        assert stored.load(model()).cache.get_seq_length() == 256


@pytest.mark.slow
def test_blocks_that_a_checkpoint_has_dropped_are_no_part_of_the_session(tmp_path: Path) -> None:
    """A turn writes what is new, also after a restart, and the store has what the checkpoint has."""
    one, ids = tiny("llama", positions=4096), torch.randint(3, 90, (1, 2400))
    cache = KeepCache(one, "endless+passages:count=2,size=16,exact=64", 24, chunk=16, capacity=1400)
    store, before = Store(tmp_path), set[Path]()
    for low, high in itertools.pairwise((0, 1500, 1530, 1900, 2400)):
        with torch.no_grad():
            one(ids[:, low:high], cache=cache)
        with StoredSession(store, "me/a", writing=True) as stored:
            stored.save(Session(cache, ids[:, :high].tolist()))
            assert stored.bytes[0] < 600 * cache.geometry.kv_bytes_per_token  # the state
        *blocks, _ = blocks_of(store, "me/a")
        assert len(blocks) == high // 256 - cache.checkpoint.first(0) // 256 > 2
        assert len([path for path in files(tmp_path) if path.suffix == ".block"]) == len(blocks) + 1
        assert before & {*blocks} or not low
        before = {*blocks}
        with StoredSession(store, "me/a") as stored:
            cache = stored.load(one).cache
        assert cache.get_seq_length() == high and cache.lost_tokens


def test_a_session_needs_the_ids_of_all_rows(tmp_path: Path) -> None:
    cache, ids = KeepCache(tiny("llama"), "full"), prompt(2, 300)
    step("llama", cache, ids)
    for wrong in ([], ids[:1].tolist(), ids[[0, 1, 1]].tolist(), ids[:, 1:].tolist()):
        with pytest.raises(UsageError, match="ids of all 300 tokens"):
            save_session(tmp_path / "s", Session(cache, wrong))
    save_session(tmp_path / "s", Session(cache, ids.tolist()))
    assert load_session(tmp_path / "s", tiny("llama")).ids == ids.tolist()


def test_others_are_refused(tmp_path: Path) -> None:
    cache = KeepCache(tiny("llama"), "full")
    step("llama", cache, torch.arange(2, 9).unsqueeze(0))
    save_session(tmp_path / "s", Session(cache, [list(range(2, 9))]))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "text").write_text("what another program wrote")
    (tmp_path / "file").write_bytes(b"what another program wrote")
    for name, family, sentence in (
        ("s", "mistral", "another model"),
        ("other", "llama", "no session|not|other"),
        ("none", "llama", "no session"),
        ("file", "llama", "is a file"),
    ):
        with pytest.raises((SessionError, UsageError), match=sentence) as refused:
            load_session(tmp_path / name, tiny(family))
        assert len(str(refused.value).splitlines()) == 1
    with pytest.raises(UsageError, match="ids of all 7 tokens"):
        save_session(tmp_path / "s", Session(cache, [[1, 2]]))


@pytest.mark.parametrize("change", ["", "more places", "more exact entries"])
def test_heads_that_divide_the_budget_have_no_more_than_it(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A layer may have more places for codes than the average. A session whose layers have more together, as one of a
    version that divided otherwise, is read again."""
    ids, exact = prompt(1, 400, seed=2), ",exact=0.5" if change == "more exact entries" else ""
    cache = KeepCache(tiny("llama"), f"kvzip+quantize:4{exact}", 80, chunk=32)
    step("llama", cache, ids)
    stores = [layer.evicted for layer in bounded(cache)]
    assert exact or any(store.places(2) > 2 * store.max_entries for store in stores)
    if change == "more places":
        stores[0].banks[0].store.capacity += 9
    save_session(tmp_path / "s", Session(cache, ids.tolist()))
    if exact:
        with StoredSession.at(tmp_path / "s", writing=True) as stored:
            assert stored.about is not None
            stored.commit(stored.about | {"method": "kvzip+quantize:4"})
    found = load_session(tmp_path / "s", tiny("llama")).cache
    assert found.get_seq_length() == 400
    assert ("it has more entries than its budget" in caplog.text) == bool(change)
    if not exact:
        assert all(map(torch.equal, found.entry_states(), cache.entry_states()))


def test_another_tokenizer_rotation_or_budget_is_refused(tmp_path: Path) -> None:
    own = tiny("llama")
    talk = Conversation(own, tokenizer(), KeepCache(own, "h2o", 16))
    talk.answer("the of and", max_new_tokens=3)
    talk.save(tmp_path / "s")
    other = tokenizer()
    other.add_tokens(["another"])
    with pytest.raises(SessionError, match="another tokenizer"):
        Conversation.resume(own, other, tmp_path / "s")
    before = dict(own.config.rope_parameters)
    try:
        own.config.rope_parameters = before | {"rope_theta": 12345.0}
        with pytest.raises(SessionError, match="another model"):
            Conversation.resume(own, tokenizer(), tmp_path / "s")
    finally:
        own.config.rope_parameters = before
    with StoredSession.at(tmp_path / "s", writing=True) as stored:
        assert stored.about is not None
        stored.commit(stored.about | {"chunk": stored.about["chunk"] + 1})
    with pytest.raises(SessionError, match="Start a new session"):
        Conversation.resume(own, tokenizer(), tmp_path / "s")


def test_a_crafted_block_gives_no_beginning(tmp_path: Path) -> None:
    """Its name and its checksums are right, and its entries are not those of the model."""
    own, ids = tiny("llama", 2, 2048), prompt(1, 300)
    cache = KeepCache(own, "full")
    step(own, cache, ids)
    store: Any = Store(tmp_path)
    beginnings.keep(store.blocks, "me", cache, ids[0].tolist())
    names = beginnings.find(store.blocks, "me", KeepCache(own, "full"), ids[0].tolist())
    whole = store.blocks.read(names[0])
    for name, tensor in [*whole.items(), ("more", torch.zeros(1))]:
        for other in (tensor.double(), tensor[..., :-1], tensor[None]):
            crafted = {key: one.clone() for key, one in whole.items()} | {name: other}
            again = Store(tmp_path / "other").blocks
            again.remove(BlockName("me", names[0].key))
            again.write(names[0], crafted)
            fresh = KeepCache(own, "full")
            begun = beginnings.begin(again, fresh, names[:1], ids[0].tolist())
            assert begun == fresh.get_seq_length() == 0
