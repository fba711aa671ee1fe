"""The scheduler: it runs answers in steps, decides whose turn it is, and cuts prompts into chunks.

A step reads one token, or one verifying run, for every answer in generation, and one chunk of one prompt. Prompts take
turns. A prompt is cut into the same chunks as in a separate session, or into shorter ones if the answer cannot depend
on them. So an answer does not depend on other sessions.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvkeep.cache import KeepCache
from kvkeep.engine.answer import Answer
from kvkeep.engine.batch import CHUNK, Read, can_pack, chunk_size, forward, forward_one, short_chunk_size


class ScheduledAnswer:
    """An answer in a scheduler, and the chunks that it reads next. shared: other answers may share its passes."""

    def __init__(self, answer: Answer, shared: bool) -> None:
        self.answer, self.shared = answer, shared
        self._reads = answer.reads()
        self._chunks: deque[int] = deque()  # sizes of the unread chunks
        self._want(next(self._reads))

    def _want(self, read: Read) -> None:
        """Cut the answer's next read into chunks."""
        chunks = [len(read.ids)]
        if isinstance(read.cache, KeepCache):  # transformers' own takes them at once
            chunks = read.cache.stream.chunks(len(read.ids), chunk_size(read.cache) if self.shared else None)
        self._wanted, self._chunks = read, deque(chunks)

    @property
    def writes(self) -> bool:
        """Whether the prompt has been read and the answer is in generation."""
        return bool(self.answer.tokens)

    def shorten(self) -> None:
        """Shorten the next chunk if that is allowed, because other answers wait for it."""
        chunks, part = self._chunks, short_chunk_size(self._wanted.cache)
        if chunks[0] > part:
            chunks[0] -= part
            chunks.appendleft(part)

    @property
    def ends_turn(self) -> bool:
        """Whether the next chunk completes the prompt's turn: ``CHUNK`` tokens, before another prompt's turn."""
        left = sum(self._chunks)
        return -(-(left - self._chunks[0]) // CHUNK) < -(-left // CHUNK)

    def next(self) -> Read:
        """Return the next chunk."""
        read, chunks = self._wanted, self._chunks
        if len(chunks) == 1 and chunks[0] == len(read.ids):
            return read
        start, last = len(read.ids) - sum(chunks), len(chunks) == 1
        return Read(read.cache, read.ids[start : start + chunks[0]], read.keep if last else 0, not last)

    def give(self, result: Tensor | Exception) -> bool:
        """Pass on the logits of a chunk; return whether the answer is complete. Raises the exception of a failed
        pass."""
        if isinstance(result, Exception):
            raise result
        self._chunks.popleft()
        if self._chunks:
            return False
        try:
            self._want(self._reads.send(result))
        except StopIteration:
            return True
        return False

    def close(self) -> None:
        """End the answer at its current token. Raises KvkeepError if an unfinished round cannot be undone."""
        self._reads.close()


@dataclass(frozen=True)
class Result:
    """The result of reading one chunk."""

    scheduled: ScheduledAnswer
    read: Read
    logits: Tensor | Exception
    """Logits of the chunk's last tokens, (keep, vocabulary), or the exception of its pass."""


class Scheduler:
    """Runs the ``answers`` of one model, in steps.

    packed: answers share a pass where they can; otherwise each has a separate pass, with chunks of its cache's size.
    """

    def __init__(self, model: Any, *, packed: bool = True) -> None:
        self.model, self.packed = model, packed
        self.answers: list[ScheduledAnswer] = []

    def add(self, answer: Answer) -> ScheduledAnswer:
        """Schedule an answer."""
        scheduled = ScheduledAnswer(answer, self.packed)
        self.answers.append(scheduled)
        return scheduled

    def remove(self, scheduled: ScheduledAnswer) -> None:
        """Remove an answer, and end it at its current token."""
        self.answers.remove(scheduled)
        scheduled.close()

    def step(self) -> list[Result]:
        """Run one read of every answer whose turn it is. The caller passes each result to :meth:`ScheduledAnswer.give`.
        Raises as :func:`~kvkeep.engine.batch.forward` does."""
        turn = self._turn()
        reads = [scheduled.next() for scheduled in turn]
        results: dict[int, Tensor | Exception] = {}
        shared = [
            number
            for number, read in enumerate(reads)
            if self.packed and can_pack(read.cache) and read.cache.geometry.steady(None)
        ]
        if shared:
            results |= zip(shared, forward(self.model, [reads[number] for number in shared]), strict=True)
        for number, read in enumerate(reads):
            if number not in results:
                results[number] = forward_one(self.model, read)
        return [Result(scheduled, reads[number], results[number]) for number, scheduled in enumerate(turn)]

    def _turn(self) -> list[ScheduledAnswer]:
        """Return the answers of the next step: all in generation, and one that reads its prompt."""
        writing = [one for one in self.answers if one.writes]
        reading = [one for one in self.answers if not one.writes]
        if reading and writing:
            reading[0].shorten()
        if reading and reading[0].ends_turn:
            self.answers.remove(reading[0])
            self.answers.append(reading[0])
        return writing + reading[:1]
