"""What KeepCache promises beyond the contract: accounts, descriptions, capacity, recovery."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES, tiny

from kvkeep import BudgetError, KeepCache, ModelGeometry, UsageError
from kvkeep.cache import check_request, new_cache
from kvkeep.stores.bounded import BoundedLayer


def step(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache, logits_to_keep=1).logits


def ids(count: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(2, 97, (rows, count), generator=torch.Generator().manual_seed(count))


def test_without_a_budget_nothing_is_streamed() -> None:
    cache = KeepCache(tiny("llama"))
    assert cache.method.name == "full" and not cache.streams


def test_with_a_budget_it_is_kv_direct() -> None:
    assert KeepCache(tiny("llama"), budget=32).method.name == "kv-direct"


@pytest.mark.parametrize("family", FAMILIES)
def test_describe_tells_every_layer(family: str) -> None:
    cache = KeepCache(tiny(family), "kv-direct", "25%", checkpoint="kv", context=200)
    reports = cache.describe()
    geometry = ModelGeometry.from_config(tiny(family).config)
    assert [report.kind for report in reports] == [layer.kind for layer in geometry.layers]
    for report in reports:
        assert report.requested == "kv-direct" and report.requested_budget == "25%"
        if report.kind == "full":
            assert (report.effective, report.entries, report.exactness) == ("kv-direct", 50, "exact")
        else:
            assert report.note  # where less is done than asked for, it says why


@pytest.mark.parametrize("kind", ["kv", "residual", "tokens"])
def test_resident_bytes_are_the_budgets(kind: str) -> None:
    """Eq. 28's first term, 2 B L n_kv d_head b, and never more however long the text."""
    model = tiny("llama")
    cache = KeepCache(model, "kv-direct", 32, checkpoint=kind, where="host")
    for low in range(0, 200, 40):
        step(model, cache, ids(40))
        assert cache.memory().resident_bytes == 32 * cache.geometry.kv_bytes_per_token
        assert low + 40 == cache.get_seq_length()
    one_layer = cache.geometry.kv_bytes_per_token // len(cache.layers)
    assert cache.memory().peak_cache_bytes <= 32 * cache.geometry.kv_bytes_per_token + cache.chunk * one_layer


@pytest.mark.parametrize("kind", ["kv", "residual"])
def test_recall_workspace_does_not_grow_with_the_text(kind: str) -> None:
    model, peaks = tiny("llama"), []
    for count in (100, 200, 400):
        cache = KeepCache(model, "kv-direct", 16, checkpoint=kind, where="host", page=20)
        step(model, cache, ids(count))
        step(model, cache, ids(1))
        peaks.append(cache.memory().peak_workspace_bytes)
    assert peaks[0] == peaks[1] == peaks[2] <= 20 * 2 * 2 * 8 * 4  # one page of one layer


def test_tokens_workspace_is_residuals_and_one_layer() -> None:
    model = tiny("llama")
    cache = KeepCache(model, "kv-direct", 16, checkpoint="tokens", page=20)
    step(model, cache, ids(400))
    step(model, cache, ids(1))
    evicted, geometry = 401 - 16, cache.geometry
    one_layer = evicted * geometry.kv_bytes_per_token // len(cache.layers)
    assert cache.memory().peak_workspace_bytes <= evicted * geometry.residual_bytes_per_token + one_layer
    assert cache.memory().checkpoint_bytes["device"] >= 4 * 401


@pytest.mark.parametrize("kind", ["kv", "residual"])
def test_a_capacity_makes_it_lossy_and_says_so(kind: str) -> None:
    model = tiny("llama")
    cache = KeepCache(model, "kv-direct", 16, checkpoint=kind, where="host", capacity=64)
    step(model, cache, ids(60))
    assert cache.exactness == "exact"
    step(model, cache, ids(60))
    assert cache.exactness == "lossy"
    assert {report.exactness for report in cache.describe()} == {"lossy"}
    held = [rows.length - rows.first for _, rows in cache.checkpoint_rows()]
    assert max(held) == 64


@pytest.mark.parametrize("kind", ["kv", "residual", "residual:3", "tokens"])
def test_a_crop_below_what_is_resident(kind: str) -> None:
    """A rollback deeper than the budget is exact too: the rest is recalled."""
    model, text = tiny("qwen2"), ids(80)
    cache = KeepCache(model, "kv-direct", 16, checkpoint=kind, where="host")
    step(model, cache, text)
    cache.crop(-50)
    other = KeepCache(model)
    step(model, other, text[:, :30])
    for _ in range(3):
        torch.testing.assert_close(step(model, cache, ids(9)), step(model, other, ids(9)), atol=1e-4, rtol=1e-4)


def test_embeddings_instead_of_ids() -> None:
    model, text = tiny("llama"), ids(60)
    vectors = model.get_input_embeddings()(text[:, 20:50]).detach() * 1.3
    results = []
    for cache in (KeepCache(model), KeepCache(model, "kv-direct", 16, checkpoint="tokens")):
        step(model, cache, text[:, :20])
        with torch.no_grad():
            model(inputs_embeds=vectors, past_key_values=cache)
        results.append(step(model, cache, text[:, 50:]))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


def test_an_interrupted_step_is_rolled_back() -> None:
    model, text = tiny("llama"), ids(64)
    cache = KeepCache(model, "kv-direct", 16, checkpoint="residual", where="host")
    step(model, cache, text[:, :40])

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[2].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        step(model, cache, text[:, 40:44])
    handle.remove()
    assert cache.get_seq_length() == 40
    other = KeepCache(model)
    step(model, other, text[:, :40])
    torch.testing.assert_close(step(model, cache, text[:, 40:44]), step(model, other, text[:, 40:44]))


def test_a_custom_mask_over_the_past() -> None:
    """A caller's own 4-D mask is obeyed on recalled entries too."""
    model, text = tiny("llama"), ids(40)
    mask = torch.ones(1, 1, 4, 40, dtype=torch.bool).tril(36)
    mask[..., 3:9] = False
    results = []
    for cache in (KeepCache(model), KeepCache(model, "kv-direct", 16, checkpoint="kv", where="host")):
        step(model, cache, text[:, :36])
        with torch.no_grad():
            results.append(model(text[:, 36:], attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


def test_hidden_states_of_a_chunked_input_are_refused() -> None:
    cache = KeepCache(tiny("llama"), budget=16)
    with pytest.raises(UsageError, match="output_hidden_states"):
        tiny("llama")(ids(40), past_key_values=cache, output_hidden_states=True)


def test_a_call_with_gradients_is_answered_without_them() -> None:
    model = tiny("llama")
    cache = KeepCache(model, "kv-direct", 16, checkpoint="residual", where="host")
    model(ids(60), past_key_values=cache)
    layer = cache.layers[0]
    assert isinstance(layer, BoundedLayer) and not layer._keys.data.requires_grad  # type: ignore[union-attr]


def test_a_bytes_budget_counts_all_layers_and_rows() -> None:
    model = tiny("llama")
    per_token = ModelGeometry.from_config(model.config, 4).kv_bytes_per_token
    assert KeepCache(model, budget=f"{64 * per_token}B").entries == 64
    assert KeepCache(model, budget=f"{64 * per_token}B", batch=2).entries == 32


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"method": "kvdirect"}, "did you mean kv-direct"),
        ({"method": "full", "budget": 5}, "takes no budget"),
        ({"method": "static"}, "needs a budget"),
        ({"method": "kv-direct"}, "needs a budget"),
        ({"budget": 16, "checkpoint": "residuals"}, "did you mean residual"),
        ({"budget": 16, "checkpoint": "residual:0"}, "whole number of layers"),
        ({"budget": 16, "checkpoint": "kv:2"}, "only 'residual' has one"),
        ({"budget": 16, "where": "dsk"}, "did you mean disk"),
        ({"budget": 16, "checkpoint": "tokens", "capacity": 9}, "rebuild later entries"),
        ({"budget": 16, "where": "host", "folder": "/tmp"}, "for '--where disk'"),
    ],
)
def test_bad_requests_are_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        KeepCache(tiny("llama"), **options)


def test_a_budget_below_one_chunk_names_the_smallest() -> None:
    with pytest.raises(BudgetError, match="smallest is 16"):
        KeepCache(tiny("llama"), budget=3)
    with pytest.raises(BudgetError, match="64"):
        KeepCache(tiny("llama"), "h2o", budget=32, chunk=64)
    assert KeepCache(tiny("llama"), budget=32, chunk=64).chunk == 64, "exact in chunks of any size"
    assert KeepCache(tiny("llama"), budget=4, chunk=4).entries == 4


def test_a_static_cache_that_is_full_says_so() -> None:
    cache = KeepCache(tiny("llama"), "static", 20)
    step(tiny("llama"), cache, ids(20))
    with pytest.raises(UsageError, match="holds 20 entries and 21 are needed"):
        step(tiny("llama"), cache, ids(1))


def test_stock_takes_no_options() -> None:
    with pytest.raises(UsageError, match="takes no budget"):
        new_cache(tiny("llama"), "stock", budget="64")
    assert type(new_cache(tiny("llama"), "stock", budget=None)).__name__ == "DynamicCache"


def test_requests_are_checked_before_a_model_is_loaded() -> None:
    for bad in (
        ("fll", None, None, None),
        (None, "-3", None, None),
        (None, None, "kw", None),
        (None, None, None, "moon"),
    ):
        with pytest.raises(UsageError):
            check_request(*bad)
    check_request("stock", None, None, None)


def test_threads_do_not_see_each_other() -> None:
    """Two conversations at once on one model, as in a server."""
    from concurrent.futures import ThreadPoolExecutor

    model = tiny("llama")
    bind_once = KeepCache(model, budget=16)
    assert bind_once.streams

    def talk(seed: int) -> list[int]:
        text = torch.randint(2, 97, (1, 60), generator=torch.Generator().manual_seed(seed))
        options = [{}, {"method": "kv-direct", "budget": 16, "checkpoint": ("kv", "tokens")[seed % 2], "where": "host"}]
        answers = [
            model.generate(
                text, attention_mask=torch.ones_like(text), do_sample=False, max_new_tokens=12,
                past_key_values=KeepCache(model, **chosen),
            )[0].tolist()
            for chosen in options
        ]  # fmt: skip
        assert answers[0] == answers[1]
        return answers[1]

    alone = [talk(seed) for seed in range(6)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(talk, range(6))) == alone


def test_after_an_interrupt_other_caches_are_not_affected() -> None:
    """An interrupt leaves no trace in the model: the next pass with stock attention is stock."""
    model, text = tiny("llama"), ids(30)
    expected = step(model, KeepCache(model), text)
    broken = KeepCache(model, budget=16)

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        step(model, broken, text)
    handle.remove()
    assert torch.equal(step(model, KeepCache(model), text), expected)
    torch.testing.assert_close(step(model, broken, text), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["kv", "residual"])
def test_a_disk_that_fills_up_in_the_middle_of_a_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails with one sentence, and once there is room the same step can be taken again, exactly."""
    from kvkeep import StoreError
    from kvkeep.stores.places import Disk

    model, text = tiny("llama"), ids(330)
    cache = KeepCache(model, "kv-direct", 16, checkpoint=kind, where="disk")
    step(model, cache, text[:, :250])
    honest, calls = Disk.allocate, []

    def full_at_the_second(self: Any, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise StoreError("Checkpoints cannot be kept: the disk is full.")
        return honest(self, *arguments)

    monkeypatch.setattr(Disk, "allocate", full_at_the_second)
    before = cache.get_seq_length()
    with pytest.raises(StoreError, match="disk is full"):
        step(model, cache, text[:, 250:])
    done = cache.get_seq_length()
    assert before <= done < 330 and len(calls) == 2
    other = KeepCache(model)
    step(model, other, text[:, :done])
    torch.testing.assert_close(
        step(model, cache, text[:, done:]), step(model, other, text[:, done:]), atol=1e-4, rtol=1e-4
    )


def test_a_positive_crop_is_refused() -> None:
    cache = KeepCache(tiny("llama"), budget=16)
    step(tiny("llama"), cache, ids(30))
    with pytest.raises(UsageError, match="negative number"):
        cache.crop(5)
    assert cache.get_seq_length() == 30
