"""``kvkeep generate``: one answer within a cache budget."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvkeep.budget import size
from kvkeep.cli import options
from kvkeep.cli.cache_options import CacheOptions
from kvkeep.cli.options import ModelOptions, SamplingOptions
from kvkeep.cli.output import interruptible, loading, note, print_json, reading, write, write_answer
from kvkeep.cli.startup import startup
from kvkeep.decode.excerpts import CHUNK_TOKENS, excerpt
from kvkeep.errors import Interrupted, UsageError
from kvkeep.policies.names import SYSTEM


@options.command
def generate(
    *,
    question: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The question or instruction.", show_default=False)
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The same, as an option.")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", "-f", metavar="FILE", help="A text that comes before the prompt; - is standard input."),
    ] = None,
    excerpts: Annotated[
        int | None,
        typer.Option(
            min=CHUNK_TOKENS,
            metavar="N",
            help="Read at most N tokens of the file: the passages that match the prompt (BM25).",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    model: ModelOptions,
    cache: CacheOptions,
    chunk: options.Chunk = None,
    sampling: SamplingOptions,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not apply the model's chat template.", rich_help_panel=options.ADVANCED)
    ] = False,
    json: options.Json = False,
) -> None:
    """Answer a prompt, or a question about a file, within a cache budget."""
    from kvkeep.decode.prompt import encode
    from kvkeep.decode.prompt import question as ask
    from kvkeep.decode.texts import check_text, read_text

    if question is not None and prompt is not None:
        raise UsageError("There are two prompts; leave --prompt out, or put the whole question into it.")
    prompt = prompt if question is None else question
    cache.check(chunk)
    model.check()
    check_text(system or "", "the system prompt")
    text = read_text(file) if file else None
    head = [] if system is None else [{"role": "system", "content": system}]
    messages = [*head, *ask(text, prompt)]
    if excerpts is not None and not (text and prompt and prompt.strip()):
        raise UsageError("--excerpts selects passages of a file that match the prompt; give a prompt and --file.")
    with loading(model.model), startup():
        from kvkeep.decode.generate import generate as run
        from kvkeep.decode.generate import room_after
        from kvkeep.decode.instructions import instruction_tokens

        requested = cache.parse(chunk)
    with startup(model.model):  # which may download it: a wrong option is refused before
        loaded = model.load(cache.drafts)
    found = None if excerpts is None else excerpt(loaded.tokenizer, text or "", prompt or "", excerpts)
    if found is not None:
        messages = [*head, *ask(found.text, prompt)]
    ids = encode(loaded.tokenizer, messages, raw=raw)
    room_after(len(ids), requested.positions(loaded.model), _remedy(text, prompt, excerpts))
    kv_cache = requested.build(loaded.model, len(ids) + sampling.max_tokens, sampling.max_tokens)
    if requested.pin == SYSTEM:
        kv_cache.pin(_instructions(instruction_tokens(loaded.tokenizer, ids, messages, raw=raw)))
    with interruptible() as interrupted, reading(len(ids), silent=json) as advance:
        try:
            result = run(
                loaded.model,
                loaded.tokenizer,
                ids,
                kv_cache,
                max_new_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                seed=sampling.seed,
                settings=sampling.settings(loaded.model),
                on_text=None if json else write_answer,
                on_progress=advance,
                interrupted=interrupted,
            )
        except KeyboardInterrupt:
            raise Interrupted("Interrupted while the prompt was processed; there is no answer.") from None
    if json:
        read = None if found is None else {"tokens": found.tokens, "of": found.total}
        print_json(as_json(result) | {"excerpts": read})
    else:
        write("\n")
        if found is not None:
            note(f"the model has read {found.tokens:,} of the file's {found.total:,} tokens (--excerpts)")
        if requested.pin is not None and kv_cache.method.pin:
            note(f"the first {kv_cache.method.pin:,} tokens are pinned (--pin)")
        if result.stopped == "length":
            note(f"cut off after {sampling.max_tokens} tokens (--max-tokens)")
        note(summary(result))
    if result.stopped == "interrupted":
        raise Interrupted("Interrupted; the answer above is not complete.")


def _instructions(count: int) -> int:
    """Return the number of tokens before the question. Raises UsageError if there are none."""
    if not count:
        raise UsageError(
            "The prompt begins with the question, so '--pin system' pins nothing; give --system or --pin N."
        )
    return count


def _remedy(text: str | None, prompt: str | None, excerpts: int | None) -> str:
    """Return what to do about a prompt that is longer than the model's positions."""
    endless = "continue past them with the method endless (-x endless -b 1024)"
    if not text or not (prompt or "").strip():
        return endless
    fewer = "fewer --excerpts" if excerpts else "only the passages that match the prompt (--excerpts 2048)"
    return f"read {fewer}, {endless}"


def as_json(result: Any) -> dict[str, Any]:
    """Return a generation as plain types for ``--json``."""
    return {
        **{name: getattr(result, name) for name in ("text", "tokens", "prompt_tokens", "stopped", "method")},
        "class": result.exactness,
        "exact_tokens": result.exact_tokens,
        "lost_tokens": result.lost_tokens,
        "drafted": result.drafted,
        "accepted": result.accepted,
        "memory": result.memory.as_dict(),
        "timing": asdict(result.timing),
    }


def summary(result: Any) -> str:
    """Return a line on the method, speed and memory of an answer."""
    memory, timing = result.memory, result.timing
    places = [f"{size(count)} on {name}" for name, count in memory.checkpoint_bytes.items() if count]
    until = "" if result.exact_tokens is None else f", exact up to {result.exact_tokens:,} tokens"
    until += f", {result.lost_tokens:,} lost" if result.lost_tokens else ""
    line = f"{result.method} ({result.exactness}{until}): {timing.prefill_tokens} tokens read at "
    line += f"{timing.prefill_tokens_per_s:.0f}/s, "
    line += f"a second time in {timing.reconstruction_s:.1f} s, " if timing.reconstruction_s else ""
    line += f"{len(result.tokens)} written"
    line += f" at {timing.decode_tokens_per_s:.1f}/s" if len(result.tokens) > 1 else ""  # the first ends the reading
    if result.drafted:
        line += f" ({result.accepted} of {result.drafted} drafts accepted)"
    sizes = [f"resident {size(memory.resident_bytes)}"]
    if memory.compressed_bytes:
        sizes.append(f"compressed {size(memory.compressed_bytes)}")
    return f"{line}; {', '.join(sizes)}" + (f", checkpoints {', '.join(places)}" if places else "")
