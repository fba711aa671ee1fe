"""A conversation on one cache. Each turn reads only the tokens that the cache does not hold."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

from transformers.cache_utils import Cache

from kvkeep.blocks.beginnings import watch
from kvkeep.blocks.sessions import Session, StoredSession, Where, check_savable, save_session
from kvkeep.cache import KeepCache
from kvkeep.decode.cached_text import CachedText, common_prefix
from kvkeep.decode.generate import Generation, generate, positions_of
from kvkeep.decode.instructions import instruction_tokens
from kvkeep.decode.prompt import Messages, encode
from kvkeep.engine.answer import end_ids, message_end
from kvkeep.engine.pieces import pieces_of
from kvkeep.errors import SessionError, UsageError
from kvkeep.models.fingerprint import fingerprint_of_tokenizer, name_of
from kvkeep.policies.names import SYSTEM, Pin


@dataclass(frozen=True)
class Last:
    """The last answer."""

    sequence: list[int]
    """Ids of the prompt and the answer."""
    written: int
    """The number of ids that belong to the answer."""
    stopped: str
    """Why the answer ended, as in :class:`Generation`."""


class Conversation:
    """Messages, their cache (also one of transformers' caches), and the token ids that the cache has processed."""

    def __init__(
        self, model: Any, tokenizer: Any, cache: Cache, *, system: str | None = None, pin: Pin | None = None
    ) -> None:
        """pin: "system", or the number of first tokens, to be pinned in every cache of the conversation
        (:meth:`~kvkeep.cache.KeepCache.pin`); None: each cache has its own."""
        self.pin = pin
        self.model, self.tokenizer, self.past = model, tokenizer, CachedText(cache)
        self.messages: Messages = [] if system is None else [{"role": "system", "content": system}]
        self.last: Last | None = None  # None after a change of the messages
        self._forgot = False  # whether messages were forgotten after the last save
        self._fingerprint = ""  # of the tokenizer, from the first save on

    def __repr__(self) -> str:
        return f"Conversation(turns={self.turns}, tokens={len(self.ids)}, cache={self.cache!r})"

    @property
    def cache(self) -> Cache:
        """The cache of the conversation."""
        return self.past.cache

    @property
    def ids(self) -> list[int]:
        """The token ids that the cache has processed."""
        return self.past.ids

    @property
    def system(self) -> str | None:
        """The system prompt; None without one."""
        return self.messages[0]["content"] if self._head else None

    @property
    def turns(self) -> int:
        """The number of answered questions."""
        return (len(self.messages) - len(self._head)) // 2

    @property
    def positions(self) -> int | None:
        """The number of tokens that the model can read and generate with this cache; None: no limit."""
        return positions_of(self.model, self.cache)

    @property
    def used(self) -> int:
        """The number of tokens of the conversation, in the cache or to be read again."""
        if self.last is not None:
            return len(self.last.sequence)
        return len(self._encoded(self.messages, None)) if self.turns else len(self.ids)

    # -- sessions -----------------------------------------------------------------------------------

    @classmethod
    def resume(cls, model: Any, tokenizer: Any, where: Where) -> Conversation:
        """Continue the conversation saved at a path, or in a session open for writing. If blocks are missing or
        damaged, the log says so, and the model reads their text before its next answer. Raises SessionError, also for a
        session that is not a conversation."""
        with nullcontext(where) if isinstance(where, StoredSession) else StoredSession.at(where) as stored:
            session = stored.load(model, fingerprint_of_tokenizer(tokenizer))
            assert stored.about is not None
            path, saved = stored.path, stored.about["ids"]
        messages = session.notes.get("messages")
        if len(saved) > 1:
            raise SessionError(
                f"The session '{path}' holds {len(saved)} texts instead of a conversation; name another."
            )
        if not isinstance(messages, list) or not all(
            isinstance(one, dict) and all(isinstance(one.get(name), str) for name in ("role", "content"))
            for one in messages
        ):
            raise SessionError(f"The session '{path}' holds no conversation; name another.")
        talk = cls(model, tokenizer, session.cache)
        talk.messages = messages
        pin = session.notes.get("pin")
        talk.pin = pin if pin == SYSTEM or (type(pin) is int and pin >= 0) else None
        talk.past.ids = session.ids[0] if session.ids else []
        talk.last = _last(session.notes.get("last"), saved[0] if saved else [])
        return talk

    def save(self, where: Where) -> None:
        """Save to a path, or to a session open for writing, as one transaction. Raises SessionError. If messages were
        forgotten, their blocks are removed, too."""
        check_savable(self.cache)
        last, known = self.last, len(self.ids)
        notes: dict[str, Any] = {"messages": self.messages, "last": None, "model": name_of(self.model)}
        if self.pin is not None:
            notes["pin"] = self.pin
        if last is not None and last.sequence[:known] == self.ids:  # what the cached ids do not say of it
            notes["last"] = {"ahead": last.sequence[known:], "written": last.written, "stopped": last.stopped}
        self._fingerprint = self._fingerprint or fingerprint_of_tokenizer(self.tokenizer)
        ids = [self.ids] if self.ids else []
        save_session(where, Session(cast(KeepCache, self.cache), ids, notes, self._fingerprint), forget=self._forgot)
        self._forgot = False

    def pinned(self, prompt: Sequence[int]) -> int | None:
        """Return the number of first tokens of a prompt of the conversation that are pinned; None: as its cache has
        it."""
        return instruction_tokens(self.tokenizer, prompt, self.messages) if self.pin == SYSTEM else self.pin

    # -- turns --------------------------------------------------------------------------------------

    def prompt(self, question: str) -> list[int]:
        """Return all token ids up to the start of the answer to ``question``."""
        return self._encoded(self.messages, question)

    def answer(self, question: str, prompt: list[int] | None = None, **options: Any) -> Generation:
        """Answer ``question`` (options as in :func:`kvkeep.decode.generate.generate`), and append both to the messages.

        After an error or interrupt, the conversation is as before the question.
        """
        prompt = self.prompt(question) if prompt is None else prompt
        result = self._generate(prompt, **options)
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": result.text}]
        self.last = Last(result.sequence, len(result.tokens), result.stopped)
        return result

    def retry(self, **options: Any) -> Generation:
        """Answer the last question again, and replace its answer. After an error or interrupt, the old answer remains.
        Raises UsageError if there is none."""
        prompt = self.last_prompt()
        result = self._generate(prompt, again=True, **options)
        self.messages = [*self.messages[:-1], {"role": "assistant", "content": result.text}]
        self.last = Last(result.sequence, len(result.tokens), result.stopped)
        return result

    def continue_answer(self, **options: Any) -> Generation:
        """Continue the last answer, which was cut off; return the new part. Raises UsageError if there is no answer, or
        if the model ended it."""
        last = self.unfinished()
        result = self._generate(last.sequence, last.written, again=True, **options)
        written = result.sequence[len(last.sequence) - last.written :]
        pieces = pieces_of(self.tokenizer, result.sequence[: -len(written)])
        text = pieces.add(written) + pieces.rest()
        self.messages = [*self.messages[:-1], {"role": "assistant", "content": text}]
        self.last = Last(result.sequence, len(written), result.stopped)
        return result

    def unfinished(self) -> Last:
        """Return the last answer, to be continued. Raises UsageError if there is none, or if the model ended it."""
        if self.last is None:
            prompt, (*before, answer) = self.last_prompt(), self.messages
            sequence = encode(self.tokenizer, before, answer=answer["content"])
            return Last(sequence, len(sequence) - common_prefix(prompt, sequence), "length")
        if self.last.stopped == "eos":
            raise UsageError("The last answer is complete: the model ended it, so there is nothing to continue.")
        return self.last

    def last_prompt(self) -> list[int]:
        """Return all token ids up to the start of the last answer. Raises UsageError if there is none."""
        if not self.turns:
            raise UsageError("There is no answer yet; ask a question first.")
        return encode(self.tokenizer, self.messages[:-1])

    def undo(self) -> str:
        """Forget the last question and its answer; return the question. Raises UsageError if there is none."""
        if not self.turns:
            raise UsageError("There is nothing to undo: the conversation has no question.")
        question = self.messages[-2]["content"]
        self._changed(self.messages[:-2])
        return question

    def reset(self) -> None:
        """Forget the conversation and keep the system prompt."""
        self._changed(self._head)

    def _generate(self, prompt: list[int], written: int = 0, again: bool = False, **options: Any) -> Generation:
        """Answer ``prompt``, whose last ``written`` tokens belong to the answer. again: to the last question."""
        self.past.align(prompt, self.pinned(prompt))
        known = self.cache.get_seq_length()
        if isinstance(self.cache, KeepCache):
            # undo() goes back to what precedes the last question, and retry() to the question's end.
            before = sorted(self.cache.stream.record.ends)[:1] if again else [known]
            end = message_end(prompt[: len(prompt) - written], end_ids(self.model))
            watch(self.cache, *before, len(prompt) - written - 1, message_end=end)
        try:
            result = generate(self.model, self.tokenizer, prompt, self.cache, **options)
        except BaseException:
            self.past.recover(known)
            self.past.settle(prompt)
            self._crop()
            raise
        self.past.settle(result.sequence)
        return result

    # -- messages and cache -----------------------------------------------------------------------------

    def set_system(self, text: str | None) -> None:
        """Replace or remove the system prompt. The prompt starts the text, so the model reads the whole conversation
        again. Raises UsageError if the model's template takes no system prompt."""
        head: Messages = [] if text is None else [{"role": "system", "content": text}]
        self._encoded(head, "?")
        self._changed([*head, *self.messages[len(self._head) :]])

    def use(self, cache: Cache) -> None:
        """Continue the conversation in ``cache``, which has read the same tokens as the previous cache, or none."""
        self.past = CachedText(cache, self.ids[: cache.get_seq_length()])

    def excess(self, question: str | None, limit: int) -> tuple[int, int]:
        """Return how many of the oldest turns must be removed so that the prompt has at most ``limit`` tokens, and its
        length then. If that is impossible, return all removable turns. question: the next question; None: the last
        answer continues."""

        def tokens(turns: int) -> int:
            return len(self._encoded(self._without(turns), question))

        low, high = 0, max(0, self.turns - (question is None))
        while low < high:  # binary search: each step encodes the conversation
            middle = (low + high) // 2
            low, high = (low, middle) if tokens(middle) <= limit else (middle + 1, high)
        return low, tokens(low)

    def forget(self, turns: int) -> None:
        """Forget the oldest ``turns`` turns."""
        self._changed(self._without(turns))

    @property
    def _head(self) -> Messages:
        return [message for message in self.messages[:1] if message["role"] == "system"]

    def _without(self, turns: int) -> Messages:
        head = self._head
        return [*head, *self.messages[len(head) + 2 * turns :]]

    def _encoded(self, messages: Messages, question: str | None) -> list[int]:
        added = [] if question is None else [{"role": "user", "content": question}]
        return encode(self.tokenizer, [*messages, *added])

    def _changed(self, messages: Messages) -> None:
        """Replace the messages; remove the others from the cache and from what is saved."""
        self.messages, self.last, self._forgot = list(messages), None, True
        self._crop()

    def _crop(self) -> None:
        """Remove from the cache what the conversation does not have."""
        texts = [self._encoded(self.messages, "?")[:-1]] if self.turns else []
        texts += [] if self.last is None else [self.last.sequence]
        self.past.cut(max((common_prefix(self.ids, ids) for ids in texts), default=0))


def _last(notes: Any, ids: Sequence[int]) -> Last | None:
    """Return the last answer from a session's notes, or None."""
    if not isinstance(notes, dict):
        return None
    ahead, written, stopped = (notes.get(name) for name in ("ahead", "written", "stopped"))
    if not isinstance(ahead, list) or not all(type(one) is int and one >= 0 for one in ahead):
        return None
    sequence = [*ids, *ahead]
    if type(written) is not int or not 0 <= written <= len(sequence) or not isinstance(stopped, str):
        return None
    return Last(sequence, written, stopped)
