"""Generates an answer, shows it, saves it, and describes it in a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvkeep.budget import size
from kvkeep.cache import KeepCache
from kvkeep.cli.chat import context_limit
from kvkeep.cli.chat.state import Chat
from kvkeep.cli.output import interruptible
from kvkeep.contracts.entries import EntryState
from kvkeep.contracts.exactness import Exactness
from kvkeep.decode.cached_text import common_prefix
from kvkeep.decode.generate import Generation
from kvkeep.policies.endless import ENDLESS

RETRY_TEMPERATURE = 0.8
"""Temperature of a further answer if answers are greedy: all greedy answers are equal."""


def ask(chat: Chat, question: str, *files: str) -> None:
    """Answer a question, after the texts of attached files and ``files``. Attached ones stay until there is an answer.
    Raises UsageError if the context is full."""
    text = "\n\n".join([*chat.attachments, *files, question])
    _make_space(chat, len(chat.talk.prompt(text)), text)
    prompt = chat.talk.prompt(text)
    if _answer(chat, prompt, lambda **options: chat.talk.answer(text, prompt, **options)):
        chat.attachments = []


def retry(chat: Chat) -> None:
    """Answer the last question again, sampled."""
    prompt = chat.talk.last_prompt()
    _make_space(chat, len(prompt), None)
    chat.retries += 1
    sampling: dict[str, Any] = {"temperature": chat.temperature or RETRY_TEMPERATURE}
    sampling |= {} if chat.seed is None else {"seed": chat.seed + chat.retries}
    _answer(chat, prompt, lambda **options: chat.talk.retry(**options | sampling))


def continue_answer(chat: Chat) -> None:
    """Continue an answer that was cut."""
    _make_space(chat, len(chat.talk.unfinished().sequence), None)
    _answer(chat, chat.talk.unfinished().sequence, chat.talk.continue_answer)


def save(chat: Chat) -> None:
    """Save the conversation if it has a session. An error is shown here, and raised at the end of the chat."""
    chat.saver.save(chat.talk)
    if chat.saver.error is not None:
        chat.screen.note(str(chat.saver.error))


def _make_space(chat: Chat, tokens: int, question: str | None) -> None:
    """Make sure that an answer to a prompt of ``tokens`` fits into the context. Raises UsageError if it does not, and
    ``chat.at_end`` cannot make space."""
    all_of_it = chat.max_tokens if chat.at_end == ENDLESS else None  # no answer is cut off where texts can continue
    if not context_limit.fits(chat, tokens, all_of_it):
        context_limit.make_space(chat, tokens, question)


def _answer(chat: Chat, prompt: Sequence[int], generate: Callable[..., Generation]) -> bool:
    """Show the answer of ``generate`` to ``prompt``, and the progress of reading tokens that the cache lacks. Save the
    answer, and show the state of the cache. Ctrl-C ends the answer; return False if that happens while the model reads:
    nothing is changed then."""
    screen, known = chat.screen, common_prefix(chat.talk.ids, prompt[:-1])
    with interruptible() as interrupted:
        try:
            with screen.reading(len(prompt) - known) as advance, screen.answer() as say:
                result = generate(
                    on_text=say,
                    on_progress=lambda done: advance(max(0, done - known)),
                    interrupted=interrupted,
                    max_new_tokens=chat.max_tokens,
                    temperature=chat.temperature,
                    seed=chat.seed,
                    settings=chat.settings,
                )
        except KeyboardInterrupt:
            screen.note("Stopped while reading; nothing was changed.")
            chat.failed = True
            return False
    save(chat)
    for text in (status(chat.talk.cache, result), remark(result, chat.talk.positions)):
        if text is not None:
            screen.note(text)
    return True


def status(cache: Any, result: Generation) -> str:
    """Return the line after an answer: "exact: 57 tokens in memory (3.1 MB), 199 on disk (12.0 MB), 41 tokens/s". The
    numbers of tokens are means over layers and heads."""
    length, memory, away, dropped, exact = cache.get_seq_length(), result.memory, 0, 0, "exact: "
    spec = cache.spec if isinstance(cache, KeepCache) else None
    if isinstance(cache, KeepCache):
        away = 0 if spec is None else _count(cache, EntryState.CHECKPOINTED)
        dropped = _count(cache, EntryState.DROPPED)
        if cache.exactness is not Exactness.EXACT:
            exact = "" if cache.exact_part is None else f"exact up to {cache.exact_part:,} tokens: "
    here, stored = length - away - dropped, 0 if spec is None else memory.checkpoint_bytes[spec.where]
    beside = 0 if spec is not None and spec.where == "device" else memory.checkpoint_bytes["device"]
    tokens = f"{'all ' if here == length else ''}{here:,} token{'' if here == 1 else 's'}"
    parts = [f"{exact}{tokens} in memory ({size(memory.resident_bytes + memory.compressed_bytes + beside)})"]
    if spec is not None and (away or stored):
        parts.append(f"{away:,} on {spec.where} ({size(stored)})" if away else f"{size(stored)} on {spec.where}")
    parts += [f"{dropped:,} dropped"] if dropped else []
    rate = result.timing.decode_tokens_per_s
    return ", ".join([*parts, f"{rate:.0f} tokens/s" if rate >= 10 else f"{rate:.1f} tokens/s"])


def _count(cache: KeepCache, state: EntryState) -> int:
    """Return the mean number of tokens in a state, over the layers of full attention, or over all layers if there are
    none."""
    layers = cache.geometry.full_layers or cache.geometry.layers
    states = cache.entry_states()
    shares = [(states[layer.index] == state).float().mean().item() for layer in layers]
    return round(cache.get_seq_length() * sum(shares) / max(len(shares), 1))


def remark(result: Generation, positions: int | None) -> str | None:
    """Return a sentence on an answer that is empty or was cut, else None."""
    if not result.text.strip():
        if result.stopped == "interrupted":
            return "Stopped before the first word; /continue resumes it, and /undo forgets the question."
        return "The model's answer is empty; /retry samples another one, and /undo forgets the question."
    return {
        "length": f"Cut off after {len(result.tokens)} tokens (--max-tokens); /continue resumes it.",
        "positions": f"Cut off: the model's context of {positions or 0:,} tokens is full; /context shows how to "
        "continue.",
        "interrupted": "Stopped; /continue resumes it.",
    }.get(result.stopped)
