"""The contract of bits: where a cache says ``same_bits``, every logit is that of one token at a time without a budget.

Texts are longer than a block of the attention kernel (512 entries), and read in chunks, as a padded row of a batch and
beside one: by exact methods that have every selector, fate, recall and family (others for each KVKEEP_TURN). Every
combination of registered parts whose class is exact reads a shorter text and writes on.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from cases import CASES, DRAFTING, ELSEWHERE, EXACT, LOSSY, TURN, covering, taken
from conftest import tokenizer
from families import FAMILIES, VOCABULARY, tiny
from helpers import drafted
from kvkeep_lab.bits import greatest_difference, one_at_a_time
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvkeep import KeepCache
from kvkeep.contracts.exactness import Exactness
from kvkeep.errors import BudgetError, UsageError
from kvkeep.models.loading import load
from kvkeep.policies.methods import parts, resolve
from kvkeep.policies.registry import PRESETS

LENGTH = 530
EVEN = (
    "llama", "gemma2", "gemma3", "phi3", "gemma3n", "gemma4", "qwen2", "qwen3", "mistral", "lfm2", "gpt_oss",
    "falcon_h1",
)  # fmt: skip
"""Families all of whose matrices are packed, so that a token's products are the same beside any others."""
WIDER = {
    "gemma4": {"hidden_size_per_layer_input": 16},
    "falcon_h1": {"mamba_d_state": 16},
    "deepseek_v3": {"first_k_dense_replace": 4, "q_lora_rank": 32},  # experts are no linear layers
}
"""What the tiny configs need for that: kernels multiply matrices whose inputs are multiples of 16."""
pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A maker of tiny models with packed weights, as they are loaded: each made once."""

    @cache
    def make(family: str, weights: str = "bfloat16") -> Any:
        folder = tmp_path_factory.mktemp(family)
        torch.manual_seed(0)
        config = FAMILIES[family]()
        for name, value in {"max_position_embeddings": 1024, **WIDER.get(family, {})}.items():
            setattr(config, name, value)
        model = AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(6.0)
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        return load(folder, weights=weights, device="cpu").model

    return make


@pytest.fixture(scope="module")
def single(packed: Any) -> Any:
    """A reader of the text one token at a time without a budget: logits (n, vocabulary), computed once for a family."""
    return cache(lambda family: one_at_a_time(packed(family), TEXT, KeepCache(packed(family), "full")))


TEXT = torch.randint(2, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(3))


def new_cache(model: Any, name: str) -> KeepCache:
    """A cache of a case for a text of this length, read in larger pages."""
    case = CASES[name]
    options = {option: value for option, value in case.options.items() if option != "page"}
    budget = 2 * LENGTH if case.spec == "static" else case.budget
    return KeepCache(model, case.spec, **({"budget": budget, "chunk": case.chunk} | options))


def rotated() -> list[tuple[str, str]]:
    found = []
    for row, name in enumerate(name for name in EXACT | DRAFTING if CASES[name].promise == "exact"):
        own = [family for family in EVEN if taken(name, family)]
        found.append((name, own[(row + TURN) % len(own)]))
    return covering(found, 13)


# The unbounded cache, and rounds over a checkpoint, meet every family.
ANYWHERE = [(name, family) for name in ("full", "h2o+merge+verified") for family in EVEN]
ANYWHERE += [(name, "deepseek_v3") for name in ("full", "static", "paged")]  # others expand latents in the step


@pytest.mark.turns(8)
@pytest.mark.parametrize(("name", "family"), list(dict.fromkeys([*ANYWHERE, *rotated()])))
def test_logits_are_those_of_one_token_at_a_time(name: str, family: str, packed: Any, single: Any) -> None:
    model = packed(family)
    assert all(report.same_bits for report in new_cache(model, name).describe())
    apart = greatest_difference(model, TEXT, single(family), lambda: new_cache(model, name), seed=TURN)
    assert apart == (0.0, 0.0)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_weights_have_the_same_bits(weights: str, packed: Any) -> None:
    """A tied embedding is packed as well; a matrix that is no whole groups is so in bfloat16."""
    model, text = packed("qwen3", weights), TEXT[:, :90]
    reference = one_at_a_time(model, text, KeepCache(model, "full"))
    cache = new_cache(model, "residual")
    assert all(report.same_bits for report in cache.describe())
    assert greatest_difference(model, text, reference, lambda: new_cache(model, "residual")) == (0.0, 0.0)


def test_no_other_cache_promises_bits(packed: Any) -> None:
    """One that is not exact, one that expands latents, float32, and a family whose products are torch's."""
    model = packed("llama")
    others = [*LOSSY, *(name for name in EXACT | DRAFTING if CASES[name].promise != "exact")]
    for name in others:
        if taken(name, "llama") and "fisher" not in name and not CASES[name].gradients:
            assert not any(report.same_bits for report in new_cache(model, name).describe()), name
    for name in ("kv", "h2o+merge+verified"):
        assert not any(report.same_bits for report in new_cache(packed("deepseek_v3"), name).describe()), name
    for other in (tiny("llama"), *map(packed, ("gpt2", "qwen3_moe")), copy.deepcopy(tiny("llama")).bfloat16()):
        assert not any(report.same_bits for report in KeepCache(other, "full").describe())


def test_a_lossy_cache_differs(packed: Any, single: Any) -> None:
    """The comparison can tell."""
    apart = greatest_difference(packed("llama"), TEXT, single("llama"), lambda: new_cache(packed("llama"), "window"))
    assert min(apart) > 0.01


def test_answers_with_drafts_have_the_same_bits(packed: Any, single: Any) -> None:
    """The logits that verify drafts are those of one token at a time."""
    model, ids = packed("llama"), TEXT[:, : LENGTH - 20]
    for name in ("snapkv+verified, kv", "h2o+quantize:8+verified"):
        answer = drafted(model, new_cache(model, name), ids, 12)
        assert answer.drafted
        wanted = one_at_a_time(model, answer.sequences[:, :-1], KeepCache(model, "full"))
        assert torch.equal(torch.cat(answer.logits), wanted[ids.shape[1] - 1 :].to(answer.logits[0].dtype))


# -- every combination whose class is exact ---------------------------------------------------------------

KINDS = ("kv", "residual", "residual:3", "tokens")
SHORT, NEW = TEXT[:, :150], 4
STEPS = (90, 40, 15, 1, 1, 1)
"""Tokens of the short text that are read at once, before the last two."""


def exact_combinations() -> dict[str, list[str]]:
    """Return all methods made of registered parts whose class is exact, by their selector or preset."""
    known = parts()
    fates, recalls = ([*(f"+{name}" for name in known[kind]), ""] for kind in ("fates", "recalls"))
    found: dict[str, list[str]] = {}
    for first in (*known["selectors"], *PRESETS):
        for fate in [""] if first in PRESETS else fates:
            for spec in () if first in ELSEWHERE else (first + fate + recall for recall in recalls):
                try:
                    method = resolve(spec)
                except UsageError:  # the parts mean nothing together
                    continue
                pieces = method.selector.reconstruction
                if pieces is not None and pieces.during is not None:  # packed weights have no gradients
                    continue
                if method.exactness is Exactness.EXACT:
                    found.setdefault(first, []).append(spec)
    return found


COMBINATIONS = exact_combinations()


@pytest.fixture(scope="module")
def layer_scores(tmp_path_factory: pytest.TempPathFactory, packed: Any) -> Any:
    """A file with a number a layer, for ``h2o-fisher``: packed weights have no gradients."""
    path = tmp_path_factory.mktemp("scores") / "layers.txt"
    path.write_text("\n".join(str(1 + layer) for layer in range(packed("llama").config.num_hidden_layers)))
    return path


@pytest.fixture(scope="module")
def written(packed: Any) -> tuple[Tensor, Tensor]:
    """The short text and what ``full`` writes behind it, (1, n), and its logits one token at a time."""
    model, cache = packed("llama"), KeepCache(packed("llama"), "full")
    ids, logits = SHORT, one_at_a_time(model, SHORT, cache)
    for _ in range(NEW):
        ids = torch.cat([ids, logits[None, -1:].argmax(-1)], 1)
        logits = torch.cat([logits, one_at_a_time(model, ids[:, -1:], cache)])
    return ids, logits


def smallest(model: Any, spec: str, kind: str) -> KeepCache:
    """Return a cache of a method with the smallest of some budgets that is enough for it."""
    method = resolve(spec)
    options = {"checkpoint": kind, "where": "host"} if method.checkpoints and not method.kind else {}
    if not method.budgeted:
        return KeepCache(model, spec)
    for budget in (200,) if method.selector.keeps_all else (40, 64, 120, 155):
        try:
            return KeepCache(model, spec, budget, **options)
        except BudgetError as error:
            reason = error
    raise reason


def test_combinations_are_found() -> None:
    every = {spec for specs in COMBINATIONS.values() for spec in specs}
    assert every >= {"full", "static", "paged", "kv-direct", "h2o+checkpoint", "tova+quantize+verified"}
    assert not every & {"h2o", "snapkv+checkpoint+pages"}


@pytest.mark.turns(5)
@torch.inference_mode()
@pytest.mark.parametrize("first", COMBINATIONS)
def test_whatever_is_called_exact_has_the_bits_of_full(
    first: str, packed: Any, written: tuple[Tensor, Tensor], layer_scores: Any
) -> None:
    """It says so of itself, reads with these bits, and writes with them, with drafts where it has some."""
    model, (ids, wanted) = packed("llama"), written
    for row, spec in enumerate(COMBINATIONS[first]):
        kind = "kv" if resolve(spec).reading is not None else KINDS[(row + TURN) % len(KINDS)]
        cache = smallest(model, spec.replace("h2o-fisher", f"h2o-fisher:scores={layer_scores}"), kind)
        assert all(report.exactness == "exact" and report.same_bits for report in cache.describe()), (spec, kind)
        start = 0
        for count in STEPS:
            logits = model(ids[:, start : start + count], cache=cache).logits[0]
            assert torch.equal(logits, wanted[start : start + count]), (spec, kind, start)
            start += count
        prompt = ids[:, : SHORT.shape[1]]
        answer = drafted(model, cache, prompt, NEW)
        assert torch.equal(answer.sequences, ids), (spec, kind)
        logits = torch.cat(answer.logits).to(wanted.dtype)
        assert torch.equal(logits, wanted[SHORT.shape[1] - 1 : -1]), (spec, kind)
