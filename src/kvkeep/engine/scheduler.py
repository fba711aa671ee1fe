"""Answers in steps: whose turn it is, how prompts are cut, and what reads in one pass.

A step reads one token, or one verifying run, of every answer that is being written, and one chunk of one prompt, in
turn. Chunks are cut as they are for a session alone, or shorter where the answer cannot depend on it, so an answer does
not depend on what else runs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvkeep.engine.answer import Answer
from kvkeep.engine.batch import CHUNK, Read, chunk_of, forward, forward_one, packs, part_of


class ScheduledAnswer:
    """An answer in a scheduler: what it wants to read next, in chunks. shared: others may wait for its chunks."""

    def __init__(self, answer: Answer, shared: bool) -> None:
        self.answer, self.shared = answer, shared
        self._reads = answer.reads()
        self._chunks: deque[int] = deque()  # sizes of the chunks of what is wanted that are to come
        self._want(next(self._reads))

    def _want(self, read: Read) -> None:
        """Note what it wants to read next, in chunks as they are cut for it alone: the first takes the remainder."""
        chunk = chunk_of(read.cache) if self.shared else read.cache.stream.chunk
        count, rest = divmod(len(read.ids), chunk)
        self._wanted, self._chunks = read, deque(([rest] if rest else []) + [chunk] * count)

    @property
    def writes(self) -> bool:
        """Whether its prompt is read."""
        return bool(self.answer.tokens)

    def shorten(self) -> None:
        """Let the next chunk be a short one where it may: others write, and wait for it."""
        chunks, part = self._chunks, part_of(self._wanted.cache)
        if chunks[0] > part:
            chunks[0] -= part
            chunks.appendleft(part)

    @property
    def ends_turn(self) -> bool:
        """Whether with the next chunk as many tokens of a prompt were read as one may before it is another's turn."""
        left = sum(self._chunks)
        return -(-(left - self._chunks[0]) // CHUNK) < -(-left // CHUNK)

    def next(self) -> Read:
        """Return the next chunk of what it wants to read."""
        read, chunks = self._wanted, self._chunks
        if len(chunks) == 1 and chunks[0] == len(read.ids):
            return read
        start, last = len(read.ids) - sum(chunks), len(chunks) == 1
        return Read(read.cache, read.ids[start : start + chunks[0]], read.keep if last else 0, not last)

    def give(self, result: Tensor | Exception) -> bool:
        """Take the logits of a chunk, and note what is wanted next; return whether the answer is complete. Raises what
        its pass failed by."""
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
        """End the answer where it is. Raises KvkeepError where an unfinished round cannot be undone."""
        self._reads.close()


@dataclass(frozen=True)
class Result:
    """What came of a chunk."""

    scheduled: ScheduledAnswer
    read: Read
    logits: Tensor | Exception
    """Of its last tokens, (keep, vocabulary); or what its pass failed by."""


class Scheduler:
    """Reads for the ``answers`` of one model, in steps.

    packed: tokens of all answers that can share a pass do; without, each has a pass of its own, in chunks as its cache
    cuts them.
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
        """Schedule an answer no more, and end it where it is."""
        self.answers.remove(scheduled)
        scheduled.close()

    def step(self) -> list[Result]:
        """Read once for everybody whose turn it is; results are to be given to their answers. Raises what
        :func:`~kvkeep.engine.batch.forward` does."""
        turn = self._turn()
        reads = [scheduled.next() for scheduled in turn]
        results: dict[int, Tensor | Exception] = {}
        shared = [number for number, read in enumerate(reads) if self.packed and _shares_pass(read)]
        if shared:
            results |= zip(shared, forward(self.model, [reads[number] for number in shared]), strict=True)
        for number, read in enumerate(reads):
            if number not in results:
                results[number] = forward_one(self.model, read)
        return [Result(scheduled, reads[number], results[number]) for number, scheduled in enumerate(turn)]

    def _turn(self) -> list[ScheduledAnswer]:
        """Return whose turn it is: all that write, and one that reads a prompt, in turn."""
        writing = [one for one in self.answers if one.writes]
        reading = [one for one in self.answers if not one.writes]
        if reading and writing:
            reading[0].shorten()
        if reading and reading[0].ends_turn:
            self.answers.remove(reading[0])
            self.answers.append(reading[0])
        return writing + reading[:1]


def _shares_pass(read: Read) -> bool:
    return packs(read.cache) and read.cache.geometry.steady(None)
