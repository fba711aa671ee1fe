"""Options that several commands share, declared as types or as fields of a dataclass."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from typer import Option

from kvkeep.cli.output import note
from kvkeep.errors import UsageError
from kvkeep.models.model_names import check_device, checked_format, place_of
from kvkeep.plugins import PARTS, points
from kvkeep.policies.names import METHODS

if TYPE_CHECKING:
    from kvkeep.models.loading import Loaded

CACHE, ADVANCED = "Cache", "Model and sampling"
"""The panels in ``--help`` below the common options."""


def complete_methods(incomplete: str) -> list[str]:
    """Return completions of the last method in a list separated by commas."""
    *before, name = incomplete.split(",")
    known = [*METHODS, *(point.name for point in points(PARTS))]
    return [",".join([*before, one]) for one in known if one.startswith(name)]


Model = Annotated[
    str,
    Option("--model", "-m", metavar="NAME", help="A named model ('kvkeep models'), a GGUF file, a folder or a hub id."),
]
Weights = Annotated[
    str,
    Option(
        metavar="FORMAT",
        help="Format of the weights: float32, bfloat16, float16, int8, int4, or auto (that of the model's file).",
        rich_help_panel=ADVANCED,
    ),
]
Device = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Device of the model: cpu, cuda, cuda:1, mps.",
        show_default="cuda if there is one, else cpu",
        rich_help_panel=ADVANCED,
    ),
]
Pre = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Pre-tokenizer of a GGUF file by llama.cpp's name (qwen2, llama-bpe).",
        show_default="the one that the file states",
        rich_help_panel=ADVANCED,
    ),
]
Method = Annotated[
    str | None,
    Option(
        "--method",
        "-x",
        metavar="NAME",
        help="Cache method ('kvkeep methods'); 'stock' is transformers' own cache.",
        show_default="kv-direct with a budget, full without",
        autocompletion=complete_methods,
    ),
]
Budget = Annotated[
    str | None,
    Option(
        "--budget",
        "-b",
        metavar="SIZE",
        help="Cache budget: entries per layer (512), bytes (64MB), a share of prompt and answer (25%; in a chat of "
        "the context length), 0 (every entry is evicted), or auto (full if it fits in --memory, else kv-direct).",
    ),
]
PinOption = Annotated[
    str | None,
    Option(
        "--pin",
        metavar="system|N",
        help="Never evict the entries of the system prompt and the tools, or of the first N tokens.",
        show_default="none",
        rich_help_panel=CACHE,
    ),
]
Checkpoint = Annotated[
    str | None,
    Option(
        "--checkpoint",
        "-c",
        metavar="KIND",
        help="Kind of checkpoint for evicted entries: kv, residual, residual:STRIDE, tokens.",
        show_default="the smaller of kv and residual; on a GPU kv",
        rich_help_panel=CACHE,
    ),
]
Where = Annotated[
    str | None,
    Option(
        "--where",
        "-w",
        metavar="PLACE",
        help="Where evicted entries are stored: device, host, disk.",
        show_default="disk for a model on the CPU, else host",
        rich_help_panel=CACHE,
    ),
]
Chunk = Annotated[
    int | None,
    Option(
        metavar="N",
        help="Prompt tokens processed in one pass.",
        show_default="up to 1,024 with an exact method, else 512; or the budget if smaller",
        rich_help_panel=CACHE,
    ),
]
MaxTokens = Annotated[
    int, Option("--max-tokens", "-n", min=1, metavar="N", help="Maximum number of tokens to generate.")
]


class DraftsOption(StrEnum):
    """What drafts of an answer are."""

    copies = "copies"
    none = "none"


DRAFTS = "Tokens that are read together, if the answer repeats a text: copies, or none. The answer is the same."
Drafts = Annotated[DraftsOption, Option("--drafts", help=DRAFTS, rich_help_panel=ADVANCED)]
Sessions = Annotated[
    str | None,
    Option(metavar="FOLDER", help="Folder of saved sessions and their blocks.", show_default="$KVKEEP_DATA/store"),
]
Json = Annotated[bool, Option("--json", help="Print a single JSON object on standard output, nothing else.")]


@dataclass(frozen=True)
class ModelOptions:
    """The model, the format of its weights, its device, and how its text is split."""

    model: Model = "smollm2"
    weights: Weights = "auto"
    device: Device = None
    pre: Pre = None

    def check(self) -> None:
        """Check the options as :func:`check_model` does."""
        check_model(self.model, self.weights, self.device)

    def load(self, drafts: str = DraftsOption.copies) -> Loaded:
        """Load the model, with progress on standard error. drafts: those of its answers."""
        from kvkeep.engine.drafts import without_drafts
        from kvkeep.models.loading import load

        loaded = load(self.model, weights=self.weights, device=self.device, pre=self.pre, progress=note)
        if drafts == DraftsOption.none:
            without_drafts(loaded.model)
        return loaded


def _sampling(low: float, high: float | None, metavar: str, text: str, default: float) -> Any:
    """Return an option from ``low`` to ``high`` (None: any). default: its value if the model states none."""
    shown = f"the model's own, or {default:g}"
    return Option(min=low, max=high, metavar=metavar, help=text, show_default=shown, rich_help_panel=ADVANCED)


@dataclass(frozen=True)
class SamplingOptions:
    """The sampling of tokens and their number."""

    max_tokens: MaxTokens = 128
    temperature: Annotated[float, Option(min=0.0, metavar="T", help="Sampling temperature; 0 is greedy.")] = 0.0
    seed: Annotated[
        int | None, Option(metavar="N", help="Random seed, for repeatable sampling.", rich_help_panel=ADVANCED)
    ] = None
    top_k: Annotated[int | None, _sampling(0, None, "N", "Sample from the N likeliest tokens; 0: from all.", 40)] = None
    top_p: Annotated[
        float | None,
        _sampling(0.0, 1.0, "P", "Sample from the likeliest tokens whose probabilities sum to P.", 0.95),
    ] = None
    min_p: Annotated[
        float | None, _sampling(0.0, 1.0, "P", "Leave out tokens with less than P times the highest probability.", 0.05)
    ] = None
    repetition_penalty: Annotated[
        float | None, _sampling(0.001, 100.0, "X", "Penalty for tokens that are already in the text; 1: none.", 1)
    ] = None

    def settings(self, model: Any) -> dict[str, float]:
        """Return the settings of sampling besides the temperature: those given, then the model's own, then
        llama-server's."""
        from kvkeep.engine.sampling import default_sampling, fields

        names, default = ("top_k", "top_p", "min_p", "repetition_penalty"), fields(default_sampling(model))
        return {name: default[name] if (one := getattr(self, name)) is None else one for name in names}


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return ``function`` as a command. Each field of a parameter that is a dataclass becomes an option.

    The defaults of these options come from the parameter's default value, or else from the dataclass.
    """
    hints, kind = get_type_hints(function, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if not is_dataclass(group := hints[name]):
            parameters.append(parameter.replace(kind=kind, annotation=group))
            continue
        groups[name] = group  # type: ignore[assignment] # the annotation is the class itself
        defaults = group if parameter.default is parameter.empty else parameter.default
        types = get_type_hints(group, include_extras=True)
        for field in fields(group):
            default = getattr(defaults, field.name)
            parameters.append(inspect.Parameter(field.name, kind, default=default, annotation=types[field.name]))

    def run(**given: Any) -> None:
        made = {
            name: group(**{one.name: given.pop(one.name) for one in fields(group)}) for name, group in groups.items()
        }
        function(**given, **made)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def check_model(model: str, weights: str = "auto", device: str | None = None, *, config: bool = False) -> None:
    """Check the options as far as possible without torch. config: accept a config.json without weights.

    Raises:
        UsageError: for an unknown model, weight format or device.
        ModelError: for a path without a model.
    """
    checked_format(weights)
    check_device(device)
    if not (config and model.endswith(".json") and os.path.isfile(Path(model).expanduser())):
        place_of(model)


def split_list(texts: list[str], option: str) -> list[str]:
    """Return the items of ``texts``, separated by commas; "none" is an empty list.

    ``key=value`` after a comma is a further parameter of the preceding method: ``h2o:recent=0.5,halflife=64,window``
    means two methods. Raises UsageError if there is no item.
    """
    found: list[str] = []
    for part in (part.strip() for text in texts for part in text.split(",") if part.strip()):
        name, equals, _ = part.partition("=")
        if found and equals and not set(name) & set(":+"):
            found[-1] += f",{part}"
        else:
            found.append(part)
    if not found:
        raise UsageError(f"{option} is empty; give one or more values, separated by commas.")
    return [] if found == ["none"] else found
