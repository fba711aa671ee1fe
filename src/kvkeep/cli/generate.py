"""``kvkeep generate``: one answer, within a budget."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvkeep.cli import options
from kvkeep.cli.asked import asked
from kvkeep.cli.checked import check_cache, check_model
from kvkeep.cli.output import interruptible, note, print_json, reading, write, write_answer
from kvkeep.cli.starting import starting
from kvkeep.errors import Interrupted
from kvkeep.units import size


def generate(
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The question or instruction.")] = None,
    file: Annotated[str | None, typer.Option("--file", "-f", help="A text to read first; - is standard input.")] = None,
    model: options.Model = "smollm2",
    method: options.Method = None,
    budget: options.Budget = None,
    kv_budget_tokens: options.BudgetTokens = None,
    kv_budget_mb: options.BudgetMB = None,
    exact: options.Exact = False,
    memory: options.Memory = None,
    checkpoint: options.Checkpoint = None,
    where: options.Where = None,
    capacity: options.Capacity = None,
    folder: options.Folder = None,
    chunk: options.Chunk = None,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the model's chat template.")] = False,
    weights: options.Weights = "auto",
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Answer a prompt, or a question about a file, inside a cache budget."""
    from kvkeep.decode.prompt import encode, question, read_text

    limits: dict[str, Any] = {"kv_budget_tokens": kv_budget_tokens, "kv_budget_mb": kv_budget_mb, "chunk": chunk}
    store: dict[str, Any] = {"checkpoint": checkpoint, "where": where, "capacity": capacity, "folder": folder}
    check_cache(method, budget, exact=exact, memory=memory, **limits, **store)
    check_model(model, weights, device)
    messages = question(read_text(file) if file else None, prompt)
    with starting(model):
        from kvkeep.decode.generate import generate as run
        from kvkeep.models.loading import load

        wanted = asked(method, budget, exact=exact, memory=memory, **limits, **store)
        loaded = load(model, weights=weights, device=device, progress=note)
    ids = encode(loaded.tokenizer, messages, raw=raw)
    cache = wanted.cache(loaded.model, len(ids) + max_tokens, max_tokens)
    sampling: dict[str, Any] = {"max_new_tokens": max_tokens, "temperature": temperature, "seed": seed}
    with interruptible() as interrupted, reading(len(ids), silent=json) as advance:
        watch: dict[str, Any] = {
            "on_text": None if json else write_answer,
            "on_progress": advance,
            "interrupted": interrupted,
        }
        try:
            result = run(loaded.model, loaded.tokenizer, ids, cache, **sampling, **watch)
        except KeyboardInterrupt:
            raise Interrupted("Interrupted while reading the prompt; there is no answer.") from None
    if json:
        print_json(as_json(result))
    else:
        write("\n")
        note(summary(result))
    if result.stopped == "interrupted":
        raise Interrupted("Interrupted; the answer above is not complete.")


def as_json(result: Any) -> dict[str, Any]:
    """Return a generation as plain types for ``--json``."""
    return {
        **{name: getattr(result, name) for name in ("text", "tokens", "prompt_tokens", "stopped", "method")},
        "class": result.exactness,
        "memory": result.memory.as_dict(),
        "timing": asdict(result.timing),
        "rounds": None if result.rounds is None else asdict(result.rounds),
    }


def summary(result: Any) -> str:
    """Return one line with method, speed and bytes of an answer."""
    memory, timing = result.memory, result.timing
    places = [f"{size(count)} on {name}" for name, count in memory.checkpoint_bytes.items() if count]
    rounds = result.rounds
    line = f"{result.method} ({result.exactness}): {timing.prefill_tokens} tokens read at "
    line += f"{timing.prefill_tokens_per_s:.0f}/s, "
    line += f"once more in {timing.reconstruction_s:.1f} s, " if timing.reconstruction_s else ""
    line += f"{len(result.tokens)} written at {timing.decode_tokens_per_s:.1f}/s"
    if rounds is not None:
        line += f" in {rounds.rounds} rounds ({rounds.accepted} of {rounds.drafted + rounds.copied} drafts right)"
    held = [f"resident {size(memory.resident_bytes)}"]
    if memory.compressed_bytes:
        held.append(f"compressed {size(memory.compressed_bytes)}")
    return f"{line}; {', '.join(held)}" + (f", checkpoints {', '.join(places)}" if places else "")
