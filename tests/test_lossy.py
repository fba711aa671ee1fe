"""The contract of methods that drop: what must hold although their output is not the unbounded cache's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from families import VOCABULARY, leave_in_the_middle, tiny
from transformers import set_seed

from kvkeep import KeepCache
from kvkeep.errors import UsageError
from kvkeep.stores.layer import Layer
from kvkeep.contracts import EntryState

PROMPT, NEW, BUDGET, CHUNK = 45, 12, 16, 16
SELECTORS = [
    "lru",
    "window",
    "streaming-llm:positions=absolute",
    "h2o",
    "snapkv:window=6,kernel=3",
    "tova",
    "pyramidkv:window=4,kernel=3",
    "knorm",
    "random",
]
# Methods whose recall is selective: what left is in checkpoints, and not all of it is attended.
RECALLS = ["h2o+pages:1", "snapkv:window=6,kernel=3+certified:0.5", "kv-lru", "tova+checkpoint:residual+missed:3"]
# Methods in which what leaves goes into what stays.
JOINED = ["h2o+merge", "snapkv:window=6,kernel=3+merge:slot", "tova+merge", "h2o+cam:2"]
# Methods that merge neighbours, in families whose keys can be turned.
MERGED = ["kvslimmer:sinks=2,slack=3", "asymkv:sinks=1,cap=0", "kvslimmer-exact:sinks=2,cap=3"]
# Methods that keep what leaves in a count sketch, which attention sees the estimates of.
SKETCHES = ["h2o+sketch", "kvreviver", "h2o:recent=0.2+sketch:vague=0.4,swap=1,estimate=shrunk,by=mean,keys=signed"]
# Their pages are of slots, and "random" draws by slot: with padding they are compared with as much padding.
BY_SLOT = ["random", *RECALLS, "h2o+cam:2"]
FAMILIES = ["llama", "gemma3", "gpt2", "deepseek_v3", "gemma4", "phi3"]
EVERY = list(itertools.product(FAMILIES, SELECTORS))
# Each selector on two families and each family with two selectors or more.
SOME = [
    (FAMILIES[(number + step) % len(FAMILIES)], selector)
    for number, selector in enumerate(SELECTORS)
    for step in (0, 3)
]
ROTARY = ["llama", "gemma3", "phi3"]
RECALLED = [
    *itertools.product(FAMILIES, RECALLS),
    *((FAMILIES[number], method) for number, method in enumerate(JOINED)),
    *((ROTARY[(number + step) % len(ROTARY)], method) for number, method in enumerate(MERGED) for step in (0, 1)),
    *((FAMILIES[(number + step) % 6], sketch) for number, sketch in enumerate(SKETCHES) for step in (0, 2, 4)),
]
ANY = [*SELECTORS, *RECALLS, *JOINED, *MERGED, *SKETCHES]


# Where a norm follows the projection, all keys of a fresh model are as long, but for rounding: "knorm" is then a throw
# of dice that falls otherwise in another batch.
NORMED = [("gemma3", "knorm"), ("gemma4", "knorm"), ("deepseek_v3", "knorm")]


# -- helpers ----------------------------------------------------------------------------------------


def new_cache(family: str, method: str, budget: int = BUDGET, **options: Any) -> KeepCache:
    return KeepCache(tiny(family), method, budget, **({"chunk": CHUNK} | options))


def prompt(rows: int = 1, length: int = PROMPT) -> torch.Tensor:
    """Rows of tokens, no token twice where there are enough: equal tokens have keys of equal norm."""
    generator = torch.Generator().manual_seed(rows)
    if length > VOCABULARY - 2:
        return torch.randint(2, VOCABULARY, (rows, length), generator=generator)
    return torch.stack([torch.randperm(VOCABULARY - 2, generator=generator)[:length] + 2 for _ in range(rows)])


def padded(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of these lengths, padded at the left."""
    ids = prompt(len(lengths), max(lengths))
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length] = mask[row, : max(lengths) - length] = 0
    return ids, mask


def generate(family: str, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> Any:
    set_seed(5)
    return tiny(family).generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        past_key_values=cache,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        output_logits=True,
        **({"do_sample": False} | options),
    )


def step(family: str, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return tiny(family)(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1).logits


def forced(family: str, cache: Any, inputs: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Read all but the last ``NEW`` tokens (or vectors) at once and those one by one; return their logits."""
    length = inputs.shape[1]
    mask = torch.ones(inputs.shape[:2], dtype=torch.long) if mask is None else mask
    positions, logits = (mask.cumsum(1) - 1).clamp(min=0), []
    for low, high in ((0, length - NEW), *((place, place + 1) for place in range(length - NEW, length))):
        name = "input_ids" if inputs.ndim == 2 else "inputs_embeds"
        with torch.no_grad():
            output = tiny(family)(
                **{name: inputs[:, low:high]},
                attention_mask=mask[:, :high],
                position_ids=positions[:, low:high],
                past_key_values=cache,
                logits_to_keep=1,
            )
        logits.append(output.logits)
    return torch.cat(logits, 1)


def selected(cache: KeepCache) -> list[Layer]:
    found = [layer for layer in cache.layers if isinstance(layer, Layer)]
    assert found
    return found


def slots_of(layer: Layer) -> list[list[int]]:
    """The slots each lane holds, read from the banks themselves."""
    lanes: dict[int, list[int]] = {}
    for bank in layer.resident.banks:
        owners = range(bank.slots.shape[0]) if bank.lanes is None else bank.lanes.tolist()
        for lane, slots in zip(owners, bank.slots.tolist(), strict=True):
            assert lane not in lanes
            lanes[lane] = [slot for slot in slots if slot >= 0]
    assert sorted(lanes) == list(range(len(lanes)))
    return [lanes[lane] for lane in sorted(lanes)]


def assert_sound(cache: KeepCache, budget: int = BUDGET) -> None:
    """What holds after every step, for every layer and lane, whatever was done before."""
    budgets = cache.budgets
    assert budgets is not None
    assert sum(sum(own) / len(own) for own in budgets) <= budget * len(budgets)
    for layer in selected(cache):
        assert layer.pending is None and layer.length == cache.get_seq_length()
        (limit,) = budgets[layer.index]
        lanes = slots_of(layer)
        for slots in lanes:
            assert len(slots) == len(set(slots)) <= limit
            assert all(slot < layer.length for slot in slots)
        for bank in layer.resident.banks:
            assert bank.keys.shape[:2] == bank.values.shape[:2] == bank.slots.shape
            assert bank.columns <= limit
            assert (bank.slots[:, bank.used :] < 0).all()
            assert bank.vacant >= int((bank.slots[:, : bank.used] < 0).sum(1).max())
        held = layer.resident.held()
        assert held.shape == (len(lanes), layer.length)
        assert [flags.nonzero().flatten().tolist() for flags in held] == [sorted(slots) for slots in lanes]
        widths = sum(bank.keys.shape[2] + bank.values.shape[2] for bank in layer.resident.banks.banks[:1])
        assert layer.resident_bytes <= len(lanes) * limit * widths * 4


def watched(cache: KeepCache, budget: int = BUDGET) -> list[int]:
    """Check the cache after every chunk and every token; return the lengths at which that was done."""
    lengths: list[int] = []

    def check(length: int) -> None:
        assert_sound(cache, budget)
        lengths.append(length)

    cache.stream.on_progress = check
    return lengths


def assert_close(ours: Any, theirs: Any, mine: slice = slice(None), yours: slice = slice(None)) -> None:
    """Compare the new tokens and all their logits, of rows ``mine`` and ``yours``."""
    assert ours.sequences[mine, -NEW:].tolist() == theirs.sequences[yours, -NEW:].tolist()
    for one, other in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(one[mine], other[yours], atol=2e-4, rtol=2e-4)


# -- the budget -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "method"), [*EVERY, *RECALLED])
def test_the_budget_holds_after_every_chunk_and_token(family: str, method: str) -> None:
    cache = new_cache(family, method)
    lengths = watched(cache)
    ids, mask = padded([45, 20])
    generate(family, cache, ids, mask)
    assert lengths == [13, 29, *range(45, 45 + NEW)]
    assert cache.get_seq_length() == PROMPT + NEW - 1
    for layer in selected(cache):  # and it is used: rows longer than the budget fill it
        (own,) = cache.budgets[layer.index]
        slack = getattr(layer.evicted, "slack", 1) - 1  # merged layers have room for a while
        assert {len(slots) for slots in slots_of(layer)} <= set(range(own - slack, own + 1))
    assert cache.memory().peak_cache_bytes >= cache.memory().resident_bytes


@pytest.mark.parametrize(("family", "method"), [*SOME, *RECALLED])
def test_several_turns_on_one_cache(family: str, method: str) -> None:
    cache = new_cache(family, method)
    watched(cache)
    conversation = prompt()
    for turn in range(3):
        conversation = generate(family, cache, torch.cat([conversation, prompt(1, 6 + turn)], 1)).sequences
    assert cache.get_seq_length() == conversation.shape[1] - 1


@pytest.mark.parametrize("method", SELECTORS)
def test_peak_is_the_budget_and_one_chunk_of_one_layer(method: str) -> None:
    cache = new_cache("llama", method)
    step("llama", cache, prompt(1, 200))
    for token in range(5):
        step("llama", cache, prompt(1, 200)[:, token : token + 1])
    whole = cache.geometry.kv_bytes_per_token
    assert cache.memory().resident_bytes <= BUDGET * whole
    assert cache.memory().peak_cache_bytes <= BUDGET * whole + CHUNK * whole // 4
    assert sum(cache.memory().checkpoint_bytes.values()) == cache.memory().compressed_bytes == 0


@pytest.mark.parametrize("method", ANY)
def test_a_budget_of_nothing_is_refused_or_works(method: str) -> None:
    """With nothing recalled, not even the token in hand would be attended."""
    try:
        cache = KeepCache(tiny("llama"), method, 0, chunk=7)
    except UsageError as error:
        assert "budget" in str(error).lower()
        return
    out = generate("llama", cache, prompt())
    assert all(logits.isfinite().all() for logits in out.logits)


# -- rows of a batch --------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "method"), [pair for pair in [*EVERY, *RECALLED] if pair not in NORMED])
def test_a_padded_row_is_what_it_is_alone(family: str, method: str) -> None:
    """Padded by whole chunks, so that each row's own tokens are taken in the same pieces as without padding."""
    lengths = [45 + NEW, 29 + NEW, 13 + NEW]
    ids, mask = padded(lengths)
    cache = new_cache(family, method)
    watched(cache)
    batch = forced(family, cache, ids, mask)
    for row, length in enumerate(lengths):
        own, start = slice(row, row + 1), lengths[0] - length
        # "random" draws by slot, and padding takes slots: it is compared with as much padding.
        alone = (ids[own], mask[own]) if method in BY_SLOT else (ids[own, start:], None)
        torch.testing.assert_close(
            batch[own], forced(family, new_cache(family, method), *alone), atol=2e-4, rtol=2e-4, msg=f"row {row}"
        )


@pytest.mark.parametrize(("family", "method"), [(family, method) for family, method in SOME if method != "knorm"])
def test_a_padded_row_generates_what_it_does_alone(family: str, method: str) -> None:
    """Padded by any number of slots, where the whole prompt is taken at once."""
    lengths = [45, 38, 21]
    ids, mask = padded(lengths)
    batch = generate(family, new_cache(family, method, 48, chunk=48), ids, mask)
    for row, length in enumerate(lengths):
        own = slice(row, row + 1)
        alone = (ids[own], mask[own]) if method in BY_SLOT else (ids[own, 45 - length :], None)
        assert_close(batch, generate(family, new_cache(family, method, 48, chunk=48), *alone), own)


@pytest.mark.parametrize(("family", "method"), [pair for pair in [*SOME, *RECALLED] if pair not in NORMED])
def test_rows_of_a_batch_do_not_see_each_other(family: str, method: str) -> None:
    ids = prompt(3, PROMPT + NEW)
    batch = forced(family, new_cache(family, method), ids)
    other = torch.cat([ids[2:], prompt(2, PROMPT + NEW)[:1]])
    torch.testing.assert_close(forced(family, new_cache(family, method), other)[:1], batch[2:], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(("family", "method"), [pair for pair in [*SOME, *RECALLED] if pair not in NORMED])
def test_rows_in_another_order_are_the_same_rows(family: str, method: str) -> None:
    """Reordered before the prompt, or between two steps: with padding, the outputs are the same, permuted."""
    ids, mask = padded([40, 9, 33])
    order = torch.tensor([2, 0, 1])
    one, other = new_cache(family, method), new_cache(family, method)
    watched(one)
    step(family, one, ids, mask)
    step(family, other, ids[order], mask[order])
    one.reorder_cache(order)
    ids, mask = ids[order], mask[order]
    for number in range(6):
        mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
        token = ids[:, 30 + number : 31 + number]
        torch.testing.assert_close(
            step(family, one, token, mask), step(family, other, token, mask), atol=2e-4, rtol=2e-4
        )
    for mine, yours in zip(selected(one), selected(other), strict=True):
        assert [set(slots) for slots in slots_of(mine)] == [set(slots) for slots in slots_of(yours)]


@pytest.mark.parametrize(("family", "method"), [pair for pair in [*SOME, *RECALLED] if pair not in NORMED])
def test_repeated_and_selected_rows_go_on_as_before(family: str, method: str) -> None:
    ids = prompt(3)
    cache, plain = new_cache(family, method), new_cache(family, method)
    watched(cache)
    for each in (cache, plain):
        step(family, each, ids[:, :40])
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([True, False, False, True, True, False]))  # rows 0, 1 and 2 again
    cache.batch_select_indices(torch.tensor([1, 1, 2]))
    rows = torch.tensor([1, 1, 2])
    for number in range(40, 44):
        ours = step(family, cache, ids[rows, number : number + 1])
        theirs = step(family, plain, ids[:, number : number + 1])
        torch.testing.assert_close(ours, theirs[rows], atol=2e-4, rtol=2e-4)


# -- decoding in other ways -------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "method"), [*SOME, *RECALLED])
def test_beams(family: str, method: str) -> None:
    ids, mask = padded([45, 30])

    def beams() -> list[list[int]]:
        cache = new_cache(family, method)
        lengths = watched(cache)
        out = generate(family, cache, ids, mask, num_beams=3, num_return_sequences=2)
        assert lengths[-1] == PROMPT + NEW - 1
        assert {layer.rows for layer in selected(cache)} == {6}
        return out.sequences.tolist()

    assert beams() == beams()


@pytest.mark.parametrize(("family", "method"), [*SOME, *RECALLED])
def test_sampling_with_a_seed(family: str, method: str) -> None:
    options = {"do_sample": True, "temperature": 0.7, "top_k": 0}
    cache = new_cache(family, method)
    watched(cache)
    out = generate(family, cache, *padded([45, 30]), **options)
    assert (
        out.sequences.tolist() == generate(family, new_cache(family, method), *padded([45, 30]), **options)[0].tolist()
    )


@pytest.mark.parametrize(("family", "method"), [*SOME, *RECALLED])
def test_assisted_decoding(family: str, method: str) -> None:
    """Drafts are taken in and cropped again: what they drove out is gone, the rest stays sound."""
    cache, crops = new_cache(family, method), []
    watched(cache)
    own = cache.crop

    def crop(tokens_to_remove: int) -> None:
        own(tokens_to_remove)
        crops.append(tokens_to_remove)
        assert_sound(cache)

    cache.crop = crop
    out = generate(family, cache, prompt().repeat(1, 2), prompt_lookup_num_tokens=4)
    assert out.sequences.shape[1] == 2 * PROMPT + NEW
    assert cache.get_seq_length() in (2 * PROMPT + NEW - 1, 2 * PROMPT + NEW)
    assert min(crops) < 0


@pytest.mark.parametrize(
    ("family", "method", "gone"),
    [(*pair, (1, 9, 25)[number % 3]) for number, pair in enumerate([*SOME, *RECALLED])],
)
def test_crop_and_go_on(family: str, method: str, gone: int) -> None:
    """Cropped slots are forgotten, those dropped before stay away, and what comes next takes their places."""
    cache = new_cache(family, method)
    cache.activate_past_recording()
    watched(cache)
    ids = prompt(2)
    step(family, cache, ids[:, :16])
    if any(cache.is_sliding):  # sliding windows record one round only
        step(family, cache, ids[:, 16:20])
        gone = min(gone, 3)
    else:
        step(family, cache, ids[:, 16:40])
    length = cache.get_seq_length()
    before = [slots_of(layer) for layer in selected(cache)]
    cache.crop(-gone)
    assert cache.get_seq_length() == length - gone
    assert_sound(cache)
    for layer, lanes in zip(selected(cache), before, strict=True):
        for now, then in zip(slots_of(layer), lanes, strict=True):
            kept = [slot for slot in then if slot < length - gone]
            assert now == kept or (method in JOINED and set(now) <= set(kept))  # what has joined cannot be taken out
    logits = [
        step(family, cache, ids[:, low:high]) for low, high in ((20, 23), *((at, at + 1) for at in range(23, 30)))
    ]
    assert all(each.isfinite().all() for each in logits)
    cache.crop(0)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.resident_bytes() == 0


@pytest.mark.parametrize("method", ANY)
def test_a_crop_that_undoes_an_append_undoes_it_wholly(method: str) -> None:
    """While nothing has left, what follows is what follows on a cache that never saw the rest (but for what an
    accumulating selector noted of its attention)."""
    one, other = new_cache("llama", method, 200), new_cache("llama", method, 200)
    ids = prompt(2)
    step("llama", one, ids[:, :4])
    step("llama", one, ids[:, 20:23])
    one.crop(-3)
    step("llama", other, ids[:, :4])
    for layer in selected(one):
        assert slots_of(layer) == [[0, 1, 2, 3]] * layer.rows * layer.heads
    for low, high in ((4, 6), (6, 7)):
        torch.testing.assert_close(step("llama", one, ids[:, low:high]), step("llama", other, ids[:, low:high]))


@pytest.mark.parametrize(("family", "method"), [*SOME, *RECALLED])
def test_reset_forgets_everything(family: str, method: str) -> None:
    cache = new_cache(family, method)
    fresh = generate(family, cache, prompt(2))
    cache.reset()
    assert cache.resident_bytes() == 0
    watched(cache)
    generate(family, cache, prompt(3))
    cache.reset()
    assert_close(generate(family, cache, prompt(2)), fresh)


@pytest.mark.parametrize(("family", "method"), [*SOME, *RECALLED])
def test_two_runs_are_the_same_to_the_bit(family: str, method: str) -> None:
    one, other = (generate(family, new_cache(family, method), prompt(2)) for _ in range(2))
    assert all((mine == yours).all() for mine, yours in zip(one.logits, other.logits, strict=True))


@pytest.mark.parametrize("method", ANY)
def test_a_step_that_was_left_can_be_taken_again(method: str) -> None:
    cache = new_cache("llama", method)
    ids = prompt(2)
    step("llama", cache, ids[:, :30])
    leave_in_the_middle(cache, lambda: step("llama", cache, ids[:, 30:35]))
    assert cache.get_seq_length() == 30
    assert_sound(cache)
    watched(cache)
    assert step("llama", cache, ids[:, 30:35]).isfinite().all()


# -- what a selector is told ------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_all_attention_given_is_counted(family: str) -> None:
    """Each query gives a weight of one to what it attends to, in every layer that reads the entries: where nothing
    leaves, what "h2o" adds up is how many queries there were, of prompts and of single tokens."""
    cache = new_cache(family, "h2o", 100)
    queries: dict[int, int] = {}
    own = cache.stream.attend

    def attend(module: Any, query: torch.Tensor, *args: Any) -> torch.Tensor:
        source = cache.geometry.layers[module.layer_idx].source
        queries[source] = queries.get(source, 0) + query.shape[2]
        return own(module, query, *args)

    cache.stream.attend = attend
    for low, high in ((0, 40), (40, 41), (41, 42), (42, 45)):
        step(family, cache, prompt(2)[:, low:high])
        for layer in selected(cache):
            for bank in layer.resident.banks:
                assert bank.scores is not None
                total = bank.scores[:, : bank.used].sum(1)
                torch.testing.assert_close(total, torch.full_like(total, queries[layer.index]), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_that_took_anothers_place_keeps_what_it_received(family: str) -> None:
    """The first attention a decoded token gets is its own; it counts whether the token was appended or replaced one."""
    marks = []
    for budget in (42, 44):  # full after the prompt, and with room for two more
        cache = new_cache(family, "h2o", budget, chunk=42)
        for low, high in ((0, 42), (42, 43)):
            step(family, cache, prompt(1)[:, low:high])
        own = []
        for layer in selected(cache):
            (bank,) = layer.resident.banks
            assert bank.scores is not None
            own.append(bank.scores[bank.slots == 42])
        marks.append(torch.cat(own))
    assert (marks[0] > 0).all() and (marks[1] > 0).all()


# -- a mask of the caller's own ---------------------------------------------------------------------


@pytest.mark.parametrize("method", ANY)
def test_a_mask_of_ones_changes_nothing(method: str) -> None:
    one, other = new_cache("llama", method), new_cache("llama", method)
    ids = prompt(2)
    for low, high in ((0, 40), (40, 41), (41, 42), (42, 45)):
        mask = torch.ones(2, high, dtype=torch.long)
        torch.testing.assert_close(
            step("llama", one, ids[:, low:high], mask), step("llama", other, ids[:, low:high]), atol=0, rtol=0
        )


@pytest.mark.parametrize("method", ANY)
def test_a_row_that_was_padded_attends_as_many_entries_as_one_that_was_not(method: str) -> None:
    """A decoded token takes its place before it attends, in padded batches too: the budget includes it."""
    cache = new_cache("llama", method)
    ids, mask = padded([45, 30])
    step("llama", cache, ids, mask)
    attended: list[int] = []
    for layer in selected(cache):
        own: Callable[..., Iterator[Any]] = layer.resident.pieces

        def pieces(*given: Any, own: Callable[..., Iterator[Any]] = own, layer: Layer = layer) -> Iterator[Any]:
            assert layer.pending is None  # settled before it is attended
            for piece in own(*given):
                attended.append(piece.keys.shape[2])
                yield piece

        layer.resident.pieces = pieces
    step("llama", cache, ids[:, :1], torch.cat([mask, mask.new_ones(2, 1)], 1))
    slack = max(getattr(layer.evicted, "slack", 1) - 1 for layer in selected(cache))
    assert all(own - slack <= n <= own for n, (own,) in zip(attended, cache.budgets or (), strict=True))


# -- memory ------------------------------------------------------------------------------------------


def allocated(cache: KeepCache) -> int:
    """Bytes of all tensors that can be reached from the cache's layers and ledger, each storage once."""
    seen: dict[int, int] = {}

    def walk(value: Any, depth: int = 0) -> None:
        if isinstance(value, torch.Tensor):
            seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict | list | tuple):
            for item in value.values() if isinstance(value, dict) else value:
                walk(item, depth + 1)
        elif type(value).__module__.startswith("kvkeep") and depth < 20 and type(value).__name__ not in _SHARED:
            walk(dict(vars(value)), depth + 1)

    walk([layer for layer in cache.layers if isinstance(layer, Layer)])
    walk([cache.ledger, cache.checkpoint])
    return sum(seen.values())


_SHARED = ("Adapter", "Request")


@pytest.mark.parametrize(("family", "method"), [*SOME, *RECALLED])
def test_memory_is_what_is_allocated(family: str, method: str) -> None:
    cache = new_cache(family, method)
    generate(family, cache, prompt(2))
    memory = cache.memory()
    windows = sum(
        layer.resident_bytes for layer, sliding in zip(cache.layers, cache.is_sliding, strict=True) if sliding
    )
    told = memory.resident_bytes + memory.compressed_bytes + memory.bookkeeping_bytes
    told += sum(memory.checkpoint_bytes.values())
    assert told - windows == allocated(cache)


@pytest.mark.parametrize("method", ANY)
def test_rows_allocate_what_they_need(method: str) -> None:
    """Row by row, in blocks of 128 columns up to the budget: hand-computed for 300 tokens beside 20."""
    budget, ids, mask = 256, *padded([300, 20])
    cache = new_cache("llama", method, budget, chunk=64)
    entry = 2 * 2 * 8 * 4  # keys and values, two heads of 8 floats
    lengths = watched(cache, budget)
    step("llama", cache, ids, mask)
    assert lengths[-1] == 300
    budgets = [own for (own,) in cache.budgets or ()]
    assert cache.resident_bytes() == sum(min(own, 384) + min(own, 128) for own in budgets) * entry
    if "pyramid" in method:
        assert budgets == sorted(budgets, reverse=True) and budgets[0] > budget > budgets[-1]
        assert [layer.resident_bytes for layer in selected(cache)] == [
            (min(own, 384) + min(own, 128)) * entry for own in budgets
        ]
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.resident_bytes() == sum(min(own, 384) + min(own, 128) for own in budgets) * entry
    cache.batch_select_indices(torch.tensor([0]))  # the short row
    assert cache.resident_bytes() == sum(min(own, 128) for own in budgets) * entry
    mask = torch.cat([mask[1:], mask.new_ones(1, 1)], 1)
    step("llama", cache, ids[:1, :1], mask)
    for layer, own in zip(selected(cache), budgets, strict=True):
        assert [len(slots) for slots in slots_of(layer)] == [min(own, 21)] * 2


@pytest.mark.parametrize("method", ANY)
@pytest.mark.parametrize("lengths", [[300, 172, 44], [300, 236, 172]])
def test_ragged_rows_are_what_they_are_alone(method: str, lengths: list[int]) -> None:
    """Rows in banks of their own, that grow at different times, give what each gives without the others."""
    inputs = torch.randn(3, 300 + NEW, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 300 + NEW, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, : 300 - length] = 0  # whole chunks
    cache = new_cache("llama", method, 256, chunk=64)
    watched(cache, 256)
    batch = forced("llama", cache, inputs, mask)
    for row, length in enumerate(lengths):
        own = slice(row, row + 1)
        alone = (inputs[own], mask[own]) if method in BY_SLOT else (inputs[own, 300 - length :], None)
        torch.testing.assert_close(
            batch[own],
            forced("llama", new_cache("llama", method, 256, chunk=64), *alone),
            atol=2e-4,
            rtol=2e-4,
            msg=f"row {row}",
        )


@pytest.mark.parametrize("method", ANY)
def test_memory_grows_with_the_text_up_to_the_budget(method: str) -> None:
    cache = new_cache("llama", method, 300, chunk=100)
    budgets, held = [own for (own,) in cache.budgets or ()], []
    for low in range(0, 500, 50):
        step("llama", cache, prompt(1, 500)[:, low : low + 50])
        blocks = -(-(low + 50) // 128) * 128  # what so many tokens need
        held.append([layer.resident_bytes // 128 for layer in selected(cache)])
        assert held[-1] == [min(own, blocks) for own in budgets]
    assert held[0] == [min(own, 128) for own in budgets] and held[-1] == [min(own, 512) for own in budgets]


@pytest.mark.parametrize("family", FAMILIES)
def test_pyramidkv_allocates_less_with_depth(family: str) -> None:
    cache = new_cache(family, "pyramidkv:window=4,kernel=3", 40)
    step(family, cache, prompt(2, 100))
    widths = {layer.index: 0 for layer in selected(cache)}
    for layer in selected(cache):
        bank = layer.resident.banks.banks[0]
        widths[layer.index] = 2 * layer.heads * 4 * (bank.keys.shape[2] + bank.values.shape[2])  # two rows
    full = len(widths)
    mean, least = 40 - 4, (40 - 4) / 20
    shares = [depth / (full - 1) if full > 1 else 0.5 for depth in range(full)]
    expected = [4 + int(2 * mean - least + (2 * least - 2 * mean) * share) for share in shares]
    assert [layer.resident_bytes for layer in selected(cache)] == [
        own * width for own, width in zip(expected, widths.values(), strict=True)
    ]


# -- what it says of itself --------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "method"), [*SOME, *RECALLED])
def test_whereabouts_are_those_of_the_layers(family: str, method: str) -> None:
    cache = new_cache(family, method)
    lengths = [45, 20]
    generate(family, cache, *padded(lengths))
    found, length = cache.entry_states(), cache.get_seq_length()
    assert len(found) == len(cache.geometry.layers)
    for layer, codes in zip(cache.geometry.layers, found, strict=True):
        own = cache.layers[layer.source]
        assert codes.shape[0] == 2 and codes.shape[2] == length and codes.dtype == torch.int8
        if not isinstance(own, Layer):
            continue
        assert codes.shape[1] == own.heads
        flat = codes.flatten(0, 1)
        if method in (*JOINED, *MERGED):
            assert (own.resident.held() | (flat != EntryState.RESIDENT)).all()
            assert (flat[own.heads :, : PROMPT - 20] == EntryState.DROPPED).all()  # padding
            assert (flat[own.heads :, PROMPT - 20 :] != EntryState.DROPPED).all() and (flat[: own.heads] > 0).all()
            assert (flat == EntryState.MERGED).any()
            continue
        assert ((flat == EntryState.RESIDENT) == own.resident.held()).all()
        gone = EntryState.CHECKPOINTED if method in RECALLS else EntryState.DROPPED
        gone = EntryState.SKETCHED if method in SKETCHES else gone
        padding = torch.zeros(codes.shape, dtype=torch.bool)
        padding[1, :, : PROMPT - 20] = True
        away = ~own.resident.held() if method not in SKETCHES else ~own.resident.held() & ~padding.flatten(0, 1)
        assert (flat[away] == gone).all()
        assert (codes[padding] == (EntryState.DROPPED if method in SKETCHES else gone)).all()
        assert (codes[..., -1] == EntryState.RESIDENT).all() or method.startswith(("random", "knorm", "tova"))


@pytest.mark.parametrize(("family", "method"), SOME)
def test_describe_says_lossy(family: str, method: str) -> None:
    cache = new_cache(family, method)
    assert cache.exactness == cache.method.exactness == "lossy"
    for report, layer in zip(cache.describe(), cache.geometry.layers, strict=True):
        if layer.kind == "full":
            assert report.exactness == "lossy"
            assert (report.requested, report.effective, report.requested_budget) == (method, method, str(BUDGET))
            assert report.entries is not None
        else:
            assert report.note


@pytest.mark.parametrize("family", FAMILIES)
def test_describe_tells_each_layers_own_budget(family: str) -> None:
    cache = new_cache(family, "pyramidkv:window=4,kernel=3", 40)
    reports = [report.entries for report in cache.describe() if report.kind == "full"]
    assert reports == [layer.resident.banks.budgets[0] for layer in selected(cache)]
