"""Options that several commands share, declared once."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.cli import completion
from kvkeep.errors import UsageError

Model = Annotated[
    str, typer.Option("--model", "-m", help="An embedded model's name, a GGUF file, a folder, or a hub id.")
]
Weights = Annotated[
    str,
    typer.Option(
        help="auto (a GGUF file in its own bits; bfloat16 models as they are), float32, bfloat16, float16, int8, int4."
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps; by default cuda where there is one.")]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        "-x",
        help="See 'kvkeep methods'; stock is transformers' own cache.",
        show_default="kv-direct with a budget, full without",
        autocompletion=completion.methods,
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        "-e",
        help="The same tokens as the unbounded cache, by draft and verify; --method (default snapkv) drafts.",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget", "-b", help="Entries per layer (512), bytes (64MB), a share of prompt and answer (25%), 0, or auto."
    ),
]
Memory = Annotated[
    str | None, typer.Option(help="For --budget auto: bytes for the cache (64MB).", show_default="half of what is free")
]
BudgetTokens = Annotated[
    int | None,
    typer.Option(
        "--kv-budget-tokens", min=0, help="The budget of method kv-lru in entries per layer; 0 is off. As in llama.cpp."
    ),
]
BudgetMB = Annotated[
    int | None,
    typer.Option("--kv-budget-mb", min=0, help="The budget of method kv-lru in megabytes; 0 is off. As in llama.cpp."),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        "-c",
        help="What is stored of evicted entries: kv, residual, residual:STRIDE, tokens.",
        show_default="the smaller of kv and residual",
    ),
]
Where = Annotated[
    str | None,
    typer.Option(
        "--where",
        "-w",
        help="Where checkpoints are stored: device, host, disk.",
        show_default="disk beside a CPU model, else host",
    ),
]
Capacity = Annotated[
    int | None, typer.Option(help="Entries the checkpoint may hold; older ones are lost, which makes the cache lossy.")
]
Folder = Annotated[
    str | None, typer.Option(help="The folder for --where disk.", show_default="the user's cache folder")
]
Chunk = Annotated[
    int | None, typer.Option(help="Prompt tokens taken at a time.", show_default="512, or the budget if smaller")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="The most tokens to generate.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy; above, tokens are sampled.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Sessions = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="A folder of sessions by name; by default $KVKEEP_DATA/sessions."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else.")]


def split_list(texts: list[str], option: str) -> list[str]:
    """Return what is listed in ``texts``, in order; "none" is an empty list. Raises UsageError for nothing.

    Commas separate, except that ``key=value`` after a comma is one more parameter of the method before it:
    ``h2o:recent=0.5,halflife=64,window`` is two methods.
    """
    found: list[str] = []
    for part in (part.strip() for text in texts for part in text.split(",") if part.strip()):
        named, equals, _ = part.partition("=")
        if found and equals and not set(named) & set(":+"):
            found[-1] += f",{part}"
        else:
            found.append(part)
    if not found:
        raise UsageError(f"{option} lists nothing; name something, separated by commas.")
    return [] if found == ["none"] else found
