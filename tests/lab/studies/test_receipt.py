"""Receipts: digests are equal on every processor path, and equal those of docs/verified.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from conftest import WORDS, saved
from families import COMMON, FAMILIES, LAYOUTS, tiny
from helpers import PLAIN_PATH
from kvkeep_lab import receipts
from kvkeep_lab.receipts import CASES, LENGTHS, NEW_TOKENS, SHOWN, ReceiptRow, prompts, rows, start
from kvkeep_lab.studies.prove import Prove
from measuring import tool
from mixtures import mixture
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvkeep import KeepCache
from kvkeep.contracts.exactness import Exactness
from kvkeep.errors import ModelError, UsageError
from kvkeep.models.fused import FusedLayer
from kvkeep.models.loading import Loaded, load
from kvkeep.native import library
from kvkeep.native.structures import NUMERICS_VERSION
from kvkeep.policies.methods import resolve

EXACT = [case for case in CASES if resolve(case.method).exactness is Exactness.EXACT]
ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "verified.md"
MOVING = """
    _to_copy _unsafe_view alias cat clone contiguous copy detach empty empty_like empty_strided expand fill flatten
    from_file full gather index index_copy index_put index_select lift_fresh masked_fill narrow new_empty new_full
    new_zeros reshape resolve_conj resolve_neg scalar_tensor scatter select slice split split_with_sizes squeeze stack
    to transpose unbind unsqueeze view where zero zeros
"""
"""Operations of torch that make, move or convert floats."""
ROUNDING = """
    abs add amax amin clamp div max_pool1d max_pool2d_with_indices maximum minimum mul neg reciprocal round rsub
    sort sqrt square sub topk
"""
"""Those that order floats, or round each element once, as IEEE defines it."""
ALLOWED = {*MOVING.split(), *ROUNDING.split()}
"""Their bits are the same on every processor."""
KNOWN = {"kvreviver": {"index_add"}}
"""By method: operations that depend on it all the same (docs/verified.md)."""
pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with positions for the longest prompt, and a text."""
    made = saved(tiny("qwen3", positions=1024), tmp_path_factory.mktemp("receipt"))
    (made / "text.txt").write_text(text())
    return made


def text() -> str:
    return " ".join(WORDS[(7 * number + number // 50) % len(WORDS)] for number in range(600))


def arguments(folder: Path) -> list[str]:
    """A command that prints a receipt."""
    given = ["-m", str(folder), "-f", str(folder / "text.txt"), "--weights", "bfloat16", "--json"]
    return ["prove", "--receipt", *given]


def read(printed: str, path: str) -> dict[str, Any]:
    """Return the receipt that a command printed on a path of the library."""
    report: dict[str, Any] = json.loads(printed)
    assert report["machine"]["path"] == path
    return report["receipt"]


@pytest.mark.slow
def test_every_processor_path_gives_the_same_receipt(
    folder: Path, choose: Callable[[str], None], run: Callable[..., tuple[int, str, str]]
) -> None:
    """torch chooses its path as it starts, so the plain one takes an interpreter."""
    paths = library.kernels().kvkeep_paths().decode().split()
    command = [sys.executable, "-m", "kvkeep", *arguments(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | PLAIN_PATH, check=True)
    plain = read(done.stdout, "plain")
    known = [row for row in plain["rows"] if row["logits"]]
    assert {"full", "h2o at 128", "snapkv at 128"} < {row["label"] for row in known} and len(known) >= len(CASES) - 2
    for path in [path for path in paths if path != "plain"]:
        choose(path)
        code, out, err = run(*arguments(folder))
        assert code == 0, err
        assert read(out, path) == plain, path


class Operations(TorchDispatchMode):
    """Collects torch's operations that return floats, by name, but for :data:`ALLOWED`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    @staticmethod
    def named(operation: Any, args: Any, kwargs: Any) -> str:
        """The name of a call, which says what would round twice: a factor of one summand, or sums at one place."""
        name = str(operation.__name__).partition(".")[0].rstrip("_")
        if name == "pow" and args[1] == 2:
            return "square"
        if kwargs.get("alpha", 1) != 1 or kwargs.get("reduce") or (name == "index_put" and any(args[3:4])):
            return f"{name} of several"
        return name

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        name = self.named(operation, args, kwargs or {})
        floats = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor) and one.is_floating_point()]
        if floats and name not in ALLOWED:
            self.found.add(name)
        return result


def test_no_operation_of_torch_depends_on_the_processor(folder: Path) -> None:
    """The library computes what a receipt hashes, besides operations of torch that round each element once."""
    loaded = load(folder, weights="bfloat16", device="cpu")
    texts = [prompt[:300] for prompt in prompts(loaded, text())]
    for case in CASES:
        cache = receipts._new_cache(loaded.model, case, 300 + NEW_TOKENS)
        cache.describe()  # tries the model, which may use anything
        with Operations() as used:
            receipts._answer(loaded.model, texts[-1], cache)
        assert used.found <= KNOWN.get(case.method, set()), case.label


MIXED = ["ernie4_5_moe", "granitemoe", "granitemoeshared", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]


@pytest.mark.parametrize("family", [*LAYOUTS, *MIXED])
def test_no_operation_of_torch_in_other_layouts_depends_on_the_processor(family: str, tmp_path: Path) -> None:
    plain = hf.AutoModelForCausalLM.from_config(LAYOUTS[family]()) if family in LAYOUTS else mixture(family)
    model = load(saved(plain, tmp_path), weights="bfloat16", device="cpu").model
    assert receipts.library_computes(model)
    cache = KeepCache(model, "full")
    cache.describe()
    with Operations() as used, torch.no_grad():
        for ids in torch.randint(2, 97, (1, 30)).split((28, 1, 1), 1):
            model(ids, cache=cache, logits_to_keep=1)
    assert not used.found


X, ROWS, FIRST = torch.rand(4), torch.rand(1, 1, 4, 4), torch.zeros(4, dtype=torch.int64)
SEEN: dict[str, Callable[[], Any]] = {
    "_softmax": lambda: X.softmax(0),
    "native_layer_norm": lambda: torch.layer_norm(X, (4,)),
    "var_mean": lambda: torch.var_mean(X),
    "pow": lambda: X**0.3,
    "mv": lambda: ROWS[0, 0] @ X,
    "rsqrt": lambda: X.rsqrt(),
    "mean": lambda: X.mean(),
    "index_add": lambda: X.index_add(0, FIRST, X),
    "add of several": lambda: X.add(X, alpha=0.3),
    "index_put of several": lambda: X.index_put((FIRST,), X, accumulate=True),
    "scatter of several": lambda: X.scatter(0, FIRST, X, reduce="multiply"),
    "_scaled_dot_product_flash_attention_for_cpu": lambda: F.scaled_dot_product_attention(ROWS, ROWS, ROWS),
}


@pytest.mark.parametrize("name", SEEN)
def test_the_detector_finds_operations_that_depend_on_the_processor(name: str) -> None:
    """Also operations with several results."""
    with Operations() as used:
        SEEN[name]()
    assert name in used.found


def test_exact_methods_have_the_digests_of_full(folder: Path) -> None:
    loaded = load(folder, weights="bfloat16", device="cpu")
    texts = prompts(loaded, text())
    assert [len(prompt) for prompt in texts] == list(LENGTHS)
    found = list(rows(loaded, EXACT, texts, lambda label, done: None))
    assert all(row.promised and row.exactness == "exact" and not row.error for row in found)
    assert len({row.logits for row in found}) == 1
    assert len({row.session for row in found}) == len(found)
    again = list(rows(loaded, EXACT[-1:], texts, lambda label, done: None))
    assert again == found[-1:], "a method that drafts depends on time"
    shifted = [[*prompt[1:], prompt[0]] for prompt in texts]
    assert not {row.logits for row in found} & {
        row.logits for row in rows(loaded, EXACT[:1], shifted, lambda label, done: None)
    }


def test_prompts_are_the_beginning_of_the_licence() -> None:
    assert len(receipts.text()) > 3000 and (ROOT / "LICENSE").read_text().startswith(receipts.text())


def test_a_receipt_is_printed_as_a_table_and_as_markdown(
    folder: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    named = f"-m {folder} -f {folder}/text.txt"
    arguments = f"prove --receipt {named} --weights int8 -x full".split()
    code, out, err = run(*arguments)
    assert code == 0 and "exact, same bits" in out and "path=" in err and "path=" not in out, err
    digest = re.search(r"Receipt ([0-9a-f]{16}) \(exact\)", out)
    code, out, err = run(*arguments, "--markdown")
    assert code == 0 and digest is not None
    assert out.startswith(f"### Receipt {digest[1]} (exact)") and "| `full` |" in out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--receipt --budget 64", "budgets of its own and takes no --budget"),
        ("--receipt -n 5", "takes no --max-tokens"),
        ("--receipt --weights float32", "multiplied by torch"),
        ("--receipt --weights int8 -x random", "no row for 'random'"),
        ("--markdown", "add --receipt"),
    ],
)
def test_unsuitable_options_are_refused(
    folder: Path, run: Callable[..., tuple[int, str, str]], options: str, sentence: str
) -> None:
    code, out, err = run("prove", "-m", str(folder), "-f", str(folder / "text.txt"), *options.split())
    assert code and not out.strip("\n") and sentence in err, (out, err)


def test_a_receipt_refuses_short_texts_and_a_missing_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(folder, weights="int8", device="cpu")
    with pytest.raises(UsageError, match="has 3 tokens"):
        prompts(loaded, "the of and")
    monkeypatch.setattr(receipts, "library", lambda: None)
    for refused in (lambda: Prove.model_validate({"receipt": True}).variant().check([]), lambda: start(loaded, [])):
        with pytest.raises(UsageError, match="needs the native library"):
            refused()


@pytest.mark.parametrize(("family", "model_type"), [("gemma4", "gemma4_text"), ("falcon_h1", "falcon_h1")])
def test_a_family_whose_layers_torch_computes_is_refused(family: str, model_type: str, tmp_path: Path) -> None:
    loaded = load(saved(tiny(family, positions=1024), tmp_path), weights="bfloat16", device="cpu")
    with pytest.raises(UsageError, match=rf"torch computes parts of the layers .*\(a {model_type} model\)"):
        start(loaded, [])


# -- the page -----------------------------------------------------------------------------------------


def tables() -> dict[str, str]:
    """The sections of the page that have a table of digests, by model."""
    written = PAGE.read_text(encoding="utf-8").partition("<!-- tables")[2].partition("<!-- end of tables")[0]
    parts = re.split(r"^### (\S+)\n", written, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def printed(section: str) -> dict[str, tuple[str, ...]]:
    """The rows of a table: class and digests by label."""
    lines = re.findall(r"^\| `(.+?)` \| (.+?) \| `(\w+)` \| `(\w+)` \|$", section, re.MULTILINE)
    return {label: tuple(rest) for label, *rest in lines}


def test_the_page_has_a_row_for_every_method() -> None:
    assert set(tables()) == {"smollm2", "gemma3-270m"}
    for section in tables().values():
        assert list(printed(section)) == [case.label for case in CASES]
        assert f"Numerics version {NUMERICS_VERSION}," in section


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2", "gemma3-270m"])
def test_exact_methods_have_the_digests_of_the_page(model: str) -> None:
    loaded = _embedded(model)
    texts, section = prompts(loaded, receipts.text()), tables()[model]
    begun, known = start(loaded, texts), printed(section)
    assert f"fingerprint {begun.fingerprint}." in section and f"prompts {begun.prompts[:SHOWN]}." in section
    for row in rows(loaded, EXACT, texts, lambda label, done: None):
        assert (f"{row.exactness}, same bits", row.logits[:SHOWN], row.session[:SHOWN]) == known[row.label], row.label


LONG = {"factor": 4.0, "original_max_position_embeddings": 32}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": LONG | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": LONG,
    "longrope": LONG | {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}


def packed(config: Any, folder: Path) -> Any:
    config.intermediate_size = 64
    return load(saved(hf.AutoModelForCausalLM.from_config(config), folder), weights="bfloat16", device="cpu").model


@pytest.mark.parametrize("kind", ROPES)
def test_a_model_whose_angles_torch_computes_has_no_receipt(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0} | ROPES[kind]
    model = packed(hf.LlamaConfig(**COMMON, head_dim=16, rope_parameters=rope), tmp_path)
    assert receipts.library_computes(model) is (kind in ("default", "linear", "llama3"))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "gpt2", "qwen3_moe"])
def test_a_receipt_needs_layers_of_the_library(family: str, tmp_path: Path) -> None:
    model = packed(FAMILIES[family](), tmp_path)
    assert receipts.library_computes(model) is (family not in ("gpt2", "qwen3_moe"))
    model.config.get_text_config().final_logit_softcapping = 30.0
    assert not receipts.library_computes(model)


def test_a_mixture_that_torch_computes_in_part_has_no_receipt(tmp_path: Path) -> None:
    """Its gates are of bfloat16 numbers."""
    model = load(saved(mixture("gpt_oss"), tmp_path), weights="bfloat16", device="cpu").model
    layers = [vars(layer).get("forward") for layer in model.model.layers]
    assert all(isinstance(one, FusedLayer) for one in layers) and not receipts.library_computes(model)


def test_updating_one_model_keeps_the_tables_of_others() -> None:
    page = PAGE.read_text("utf-8")
    made = tool("receipts").updated(page, {"smollm2": "### smollm2\n\nNew.\n"})
    assert "### smollm2\n\nNew.\n\n<!-- end of tables -->" in made
    start, end = (page.index(text) for text in ("### gemma3-270m", "### smollm2"))
    assert page[start:end] in made and tool("receipts").updated(page, {}) == page


def test_a_row_that_was_not_computed_is_an_error() -> None:
    row = ReceiptRow("full", "exact", True, error="no space left")
    with pytest.raises(SystemExit, match="smollm2: 'full' was not computed: no space left"):
        tool("receipts")._merged("smollm2", (row, row))


def test_a_line_without_a_hash_is_an_error() -> None:
    read = tool("kernel_hash").read
    assert read("rows bf16     0f255f3cdc0b866d\n") == {"rows bf16": "0f255f3cdc0b866d"}
    for line in ("rows bf16     0f255f3cdc0b866d THREADS DIFFER", "product: 3 ROWS DIFFER", "x 0f255f3c", ""):
        with pytest.raises(SystemExit, match="other lines than hashes"):
            read(f"{line}\n")


def _embedded(model: str) -> Loaded:
    try:
        return load(model, device="cpu")
    except ModelError as error:
        pytest.skip(str(error))
