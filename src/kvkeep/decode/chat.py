"""A conversation on one cache: each turn reads only tokens that the cache does not hold."""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

from transformers import Cache

from kvkeep.cache import KeepCache
from kvkeep.decode.generate import Generation, generate
from kvkeep.decode.past import Past
from kvkeep.decode.prompt import Messages, encode
from kvkeep.decode.session import Session, Where, check_savable, load_session, save_session
from kvkeep.decode.session_file import SessionFile
from kvkeep.errors import SessionError
from kvkeep.models.fingerprint import fingerprint_of_tokenizer


class Conversation:
    """Messages, the cache (also one of transformers' own), and the token ids it has processed."""

    def __init__(self, model: Any, tokenizer: Any, cache: Cache, *, system: str | None = None) -> None:
        self.model, self.tokenizer, self.past = model, tokenizer, Past(cache)
        self.messages: Messages = [] if system is None else [{"role": "system", "content": system}]

    @property
    def cache(self) -> Cache:
        """What holds the entries."""
        return self.past.cache

    @property
    def ids(self) -> list[int]:
        """The token ids that the cache has processed."""
        return self.past.ids

    @classmethod
    def resume(cls, model: Any, tokenizer: Any, where: Where) -> Conversation:
        """Continue the conversation saved at a path, or in a session that is open for writing. Raises SessionError,
        also for other sessions."""
        told = fingerprint_of_tokenizer(tokenizer)
        session, path = load_session(where, model, told), where.path if isinstance(where, SessionFile) else where
        messages = session.notes.get("messages")
        if session.cache.rows > 1:
            raise SessionError(
                f"The session '{path}' is of {session.cache.rows} texts, and no conversation; name another."
            )
        if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
            raise SessionError(f"The session '{path}' holds no conversation; name another.")
        talk = cls(model, tokenizer, session.cache)
        talk.messages = list(messages)
        talk.past.ids = session.ids[0] if session.ids else []
        return talk

    def save(self, where: Where) -> None:
        """Save to a path, or to a session that is open for writing, at once or not at all; raises SessionError."""
        self.check_savable()
        ids = [self.ids] if self.ids else []
        save_session(where, Session(cast(KeepCache, self.cache), ids, {"messages": self.messages}, self._tokenizer))

    @cached_property
    def _tokenizer(self) -> str:
        return fingerprint_of_tokenizer(self.tokenizer)

    def check_savable(self) -> None:
        """Raise SessionError if a cache of this kind cannot be saved."""
        check_savable(self.cache)

    def prompt(self, question: str) -> list[int]:
        """Return all token ids up to the place where the answer to ``question`` starts."""
        return encode(self.tokenizer, [*self.messages, {"role": "user", "content": question}])

    def answer(self, question: str, prompt: list[int] | None = None, **options: Any) -> Generation:
        """Answer ``question`` (options as in :func:`kvkeep.decode.generate.generate`) and remember both.

        After an error or interrupt the conversation is as before the question.
        """
        prompt = self.prompt(question) if prompt is None else prompt
        self.past.align(prompt)
        known = self.cache.get_seq_length()
        try:
            result = generate(self.model, self.tokenizer, prompt, self.cache, **options)
        except BaseException:
            self.past.recover(known)
            self.past.settle(prompt)
            raise
        self.past.settle(result.sequence)
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": result.text}]
        return result

    def reset(self) -> None:
        """Forget the conversation, but not the system prompt."""
        self.cache.reset()
        self.past.settle([])
        self.messages = [message for message in self.messages if message["role"] == "system"]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))
