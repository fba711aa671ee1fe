"""``kvkeep inspect``: a page that shows the state of every token in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvkeep.budget import size
from kvkeep.cli import options
from kvkeep.cli.output import interruptible, note, print_json, reading, write
from kvkeep.cli.startup import fetch_model
from kvkeep.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from kvkeep_lab.inspection import Inspection


def inspect(
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The question or instruction.")] = None,
    file: Annotated[
        str | None, typer.Option("--file", "-f", help="A text that comes before the prompt; - is standard input.")
    ] = None,
    model: options.Model = "smollm2",
    method: options.Method = None,
    budget: options.Budget = None,
    chunk: options.Chunk = None,
    max_tokens: options.MaxTokens = 64,
    output: Annotated[
        str, typer.Option("--output", "-o", help="File of the page; an existing file is replaced.")
    ] = "cache.html",
    weights: options.Weights = "auto",
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Write an HTML page that shows what became of every token of a text, step by step, layer by layer."""
    from kvkeep.decode.prompt import encode, question
    from kvkeep.decode.texts import read_text
    from kvkeep.models.loading import load
    from kvkeep.policies.methods import requested
    from kvkeep.policies.names import STOCK
    from kvkeep.stock import new_cache
    from kvkeep_lab.inspection import inspect as run
    from kvkeep_lab.page import check_output, render, write_page

    requested(method, budget)
    if method == STOCK:
        raise UsageError(
            "Method 'stock' is transformers' own cache, which keeps every entry, so there is nothing to show; "
            "give another method."
        )
    target = check_output(output)
    messages = question(read_text(file) if file else None, prompt)
    fetch_model(model)
    loaded = load(model, weights=weights, device=device, progress=note)
    ids = encode(loaded.tokenizer, messages)
    cache = new_cache(loaded.model, method, budget=budget, chunk=chunk, context=len(ids) + max_tokens)
    with interruptible() as interrupted, reading(len(ids)) as advance:
        try:
            given: dict[str, Any] = {"on_text": None if json else write, "on_progress": advance}
            given |= {"budget": budget, "max_new_tokens": max_tokens, "interrupted": interrupted}
            found = run(loaded.model, loaded.tokenizer, ids, cache, loaded.name, **given)
        except KeyboardInterrupt:
            raise Interrupted("Interrupted while the text was read; no page was written.") from None
        write_page(target, render(found))
    if json:
        print_json(as_json(found, output))
    else:
        write("\n")
        note(summary(found, output))
    if found.generation.stopped == "interrupted":
        raise Interrupted(f"Interrupted; the page shows the {len(found.trace.steps)} steps that were finished.")


def as_json(found: Inspection, output: str) -> dict[str, Any]:
    """Return a summary as plain types for ``--json``; the counts are over all layers and heads."""
    trace, generation = found.trace, found.generation
    return {
        "output": output,
        "steps": len(trace.steps),
        "tokens": trace.tokens,
        "prompt_tokens": generation.prompt_tokens,
        "layers": len(trace.heads),
        "lanes": trace.lanes,
        "fates": trace.counts,
        "method": generation.method,
        "class": generation.exactness,
        "stopped": generation.stopped,
        "text": generation.text,
        "memory": generation.memory.as_dict(),
    }


def summary(found: Inspection, output: str) -> str:
    """Return one line about the final states of the tokens."""
    trace, generation = found.trace, found.generation
    total = sum(trace.counts.values())
    fates = ", ".join(f"{100 * count / total:.1f} % {name}" for name, count in trace.counts.items())
    return (
        f"{generation.method} ({generation.exactness}): {trace.tokens} tokens in {len(trace.steps)} steps, at the end "
        f"{fates}; resident {size(generation.memory.resident_bytes)}. Open {output} in a browser."
    )
