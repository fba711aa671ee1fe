"""Draft and verify: the output of the unbounded cache, token for token, mostly at the speed of a bounded one.

A round: the bounded cache drafts a run of tokens; one exact pass reads the last token and the whole run, so evicted
entries are recalled once for all of them. Drafts that equal the choice of the exact pass are accepted, and its choice
replaces the first that differs. It is speculative decoding (Leviathan et al., arXiv:2211.17192) in which a model is its
own draft, as in TriForce (arXiv:2404.11912), MagicDec (arXiv:2408.11049) and QuantSpec
(arXiv:2502.10424); here for any model, any drafting method and any checkpoint.

Sampling: a sample is argmax(p / noise) with exponential noise, which is how ``torch.multinomial`` draws one. Draft and
exact pass use the same noise at the same position. So the output is argmax(p / noise) of the exact p: a sample of
exactly its distribution, whatever the draft was (Daliri et al., arXiv:2408.07978), and with the same seed it is the
token of transformers' own sampling.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
)

from kvkeep.cache import KeepCache
from kvkeep.engine.lookup import Lookup
from kvkeep.engine.pace import Pace
from kvkeep.errors import UsageError
from kvkeep.stores.readers.round import RoundStatistics


def verified(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    listener: Any = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode in rounds: ``model.generate(..., past_key_values=cache, custom_generate=kvkeep.verified)``.

    ``cache``: a :class:`~kvkeep.cache.KeepCache` of a method that ends in ``+verified``. Greedy and sampling, batches
    with left padding, logits processors, stopping criteria, streamers; ``prompt_lookup_num_tokens`` of 0 keeps it from
    copying drafts from the text. transformers 5.23 passes neither streamer nor tokenizer to a ``custom_generate``:
    ``listener`` is the streamer, and in place of ``stop_strings`` pass
    ``stopping_criteria=[StopStringCriteria(tokenizer, [...])]``. ``cache.round.statistics`` counts rounds and drafts.
    Raises UsageError for unsupported options.
    """
    cache = model_kwargs.get("past_key_values")
    if not isinstance(cache, KeepCache) or not cache.method.recall.drafts:
        raise UsageError("Decoding in rounds needs a KeepCache that drafts: a method that ends in '+verified'.")
    for wish in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, wish, None):
            raise UsageError(f"'{wish}' is not available while decoding in rounds; leave out custom_generate.")
    if (generation_config.num_beams or 1) > 1:
        raise UsageError("Beams are not decoded in rounds; leave out custom_generate, and they are exact all the same.")
    sink = streamer if listener is None else listener
    if sink is not None and len(input_ids) > 1:
        raise UsageError("A streamer takes one text; give a batch without it.")
    if synced_gpus:
        raise UsageError("Decoding in rounds does not run in step with other processes (synced_gpus).")
    if listener is not None:  # generate() passes the prompt to its own streamer only
        listener.put(input_ids.cpu())
    outputs = model._prefill(input_ids, generation_config, model_kwargs)
    cache.compress()
    run = Rounds(cache, input_ids, logits_processor, stopping_criteria, generation_config, sink)
    run.start(outputs.logits[:, -1], model_kwargs.get("attention_mask"))
    del outputs
    rounds = run.rounds()
    try:
        wanted = next(rounds, None)
        while wanted is not None:
            wanted = _next(rounds, model(**wanted._asdict(), past_key_values=cache, use_cache=True).logits)
    except BaseException:
        run.stream.abandon()
        raise
    return run.result()


class Wanted(NamedTuple):
    """What a round wants the model to read: token ids (rows, n), the mask over past and new tokens (None: all are
    there), and positions (rows, n)."""

    input_ids: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor


Reads = Generator[Wanted, Tensor, None]
"""Yields what to read, and is sent its logits (rows, n, vocabulary)."""


def _next(rounds: Reads, logits: Tensor) -> Wanted | None:
    try:
        return rounds.send(logits)
    except StopIteration:
        return None


class Rounds:
    """The rounds of one answer, after its prompt was read into ``cache``: whoever owns the model reads for them.

    prompts: (rows, tokens). streamer: gets each token. generator: of the noise that samples are drawn by; torch's own
    where there is none.
    """

    def __init__(
        self,
        cache: KeepCache,
        prompts: Tensor,
        processor: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: Any,
        generator: torch.Generator | None = None,
    ) -> None:
        assert cache.round is not None
        self.stream = cache.stream
        self.cache, self.processor, self.criteria = cache, processor, criteria
        self.config, self.streamer, self.generator = config, streamer, generator
        self.rows, self.prompt = prompts.shape
        self.longest = min(cache.round.tail, self.stream.chunk) - 1
        room = 2 * self.longest + 2
        self.tokens = torch.cat([prompts, prompts.new_zeros(self.rows, room)], 1)  # grows; drafts are behind the length
        self.lengths = [self.prompt] * self.rows
        self.finished = [False] * self.rows
        copies = config.prompt_lookup_num_tokens != 0
        self.lookups = [Lookup(row) for row in prompts.tolist()] if copies else []
        self.pace, self.done = Pace(), RoundStatistics()
        self.cache_round, cache.round.statistics = cache.round, self.done
        self.noise: dict[int, Tensor] = {}  # (rows, vocabulary) by number of the new token
        self.reported: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.rows)]  # logits and scores
        self.mask: Tensor | None = None  # (rows, slots), where some are padding
        self.positions = torch.zeros(self.rows, dtype=torch.long)

    def start(self, logits: Tensor, mask: Tensor | None) -> None:
        """Choose the first token of each row after the prompt."""
        device = self.tokens.device
        padded = mask is not None and not bool(mask.all())
        self.mask = mask if padded else None
        counts = mask.sum(1) if padded and mask is not None else torch.full((self.rows,), self.cache.get_seq_length())
        self.positions = counts.to(device)
        self._take(self._choose(logits[:, None], 0), [1] * self.rows, logits[:, None])

    # -- a round ------------------------------------------------------------------------------------

    def rounds(self) -> Reads:
        """Decode until all rows are finished."""
        while not all(self.finished):
            yield from self._round()

    def _round(self) -> Reads:
        """Draft a run, verify it, and keep the accepted tokens."""
        begin = time.perf_counter()
        self.cache_round.draft()
        copied = self._copied()
        longest = self._room()
        wanted = self.pace.length(longest) if longest else 0
        copies = copied is not None and longest > 0 and self.pace.prefers_copies(longest, wanted)
        if copies and copied is not None:
            drafts = copied[:, :longest]
            self._note_drafts(drafts)
        else:
            drafts = yield from self._drafted(wanted)
        drafted = time.perf_counter()
        self.cache_round.verify()
        last = self.tokens[torch.arange(self.rows), [length - 1 for length in self.lengths]][:, None]
        logits = yield self._wanted(torch.cat([last, drafts], 1), 0)
        chosen = self._choose(logits, drafts.shape[1])
        right = self._right(drafts, chosen)
        counts = [0 if done else count + 1 for count, done in zip(right, self.finished, strict=True)]
        if any(self.cache.is_sliding):  # sliding windows count slots, so rows advance together
            counts = [min(count for count in counts if count)] * self.rows
        active = [not done for done in self.finished]
        kept = self._take(chosen, counts, logits)
        if any(self.cache.is_sliding):
            kept = [max(kept)] * self.rows
        agreed = all(count == drafts.shape[1] + 1 for count, live in zip(counts, active, strict=True) if live)
        self._commit(kept, agreed)
        end = time.perf_counter()
        self._learn(drafts, copied, copies, right, kept, active, drafted - begin, end - drafted)

    def _room(self) -> int:
        """Return the most drafts: one less than the tokens that every row has room for."""
        shortest = min(length for length, done in zip(self.lengths, self.finished, strict=True) if not done)
        longest = self.longest
        if (limit := self.criteria.max_length) is not None:
            longest = min(longest, limit - shortest - 1)
        if (positions := self.cache.geometry.max_positions) is not None:
            longest = min(longest, positions - int(self.positions.max()) - 1)
        return max(0, longest)

    def _drafted(self, count: int) -> Generator[Wanted, Tensor, Tensor]:
        """Draft ``count`` tokens of each row from the resident entries."""
        rows = torch.arange(self.rows)
        last = self.tokens[rows, [length - 1 for length in self.lengths]][:, None]
        drafts = last[:, :0]
        for number in range(count):
            logits = yield self._wanted(last, number)
            last = self._choose(logits, 0, ahead=number)
            drafts = torch.cat([drafts, last], 1)
            self._note_drafts(drafts)
        return drafts

    def _copied(self) -> Tensor | None:
        """Return drafts copied from the text, (rows, longest), if every unfinished row has some."""
        if not self.lookups or not self.longest:
            return None
        runs = [
            [0] * self.longest if done else lookup.run(self.longest)
            for lookup, done in zip(self.lookups, self.finished, strict=True)
        ]
        return torch.tensor(runs, device=self.tokens.device) if all(runs) else None

    def _note_drafts(self, drafts: Tensor) -> None:
        """Write drafts behind the tokens, for the logits processors."""
        for row, length in enumerate(self.lengths):
            self.tokens[row, length : length + drafts.shape[1]] = drafts[row]

    def _wanted(self, ids: Tensor, before: int) -> Wanted:
        """Return that ``ids`` (rows, n) are to be read, ``before`` drafts after the tokens."""
        positions = self.positions[:, None] + torch.arange(before, before + ids.shape[1], device=ids.device)
        mask = self.mask
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(self.rows, before + ids.shape[1])], 1)
        return Wanted(ids, mask, positions)

    def _right(self, drafts: Tensor, chosen: Tensor) -> list[int]:
        """Return the number of leading drafts of each row that are right."""
        same = (drafts == chosen[:, : drafts.shape[1]]).long()
        return same.cumprod(1).sum(1).tolist()

    def _take(self, chosen: Tensor, counts: Sequence[int], logits: Tensor) -> list[int]:
        """Append the first ``counts`` chosen tokens to each row until it is finished; return the numbers appended."""
        taken = []
        longest = max(self.lengths) + chosen.shape[1] + self.longest + 2
        if longest > self.tokens.shape[1]:
            self.tokens = torch.cat([self.tokens, self.tokens.new_zeros(self.rows, longest)], 1)
        for row, tokens in enumerate(chosen.tolist()):
            count = 0
            while not self.finished[row] and count < counts[row]:
                self.tokens[row, self.lengths[row]] = tokens[count]
                self.lengths[row] += 1
                if self.lookups:
                    self.lookups[row].add(tokens[count])
                if self.config.return_dict_in_generate and (self.config.output_logits or self.config.output_scores):
                    self._report(row, logits[:, count])
                if self.streamer is not None:
                    self.streamer.put(chosen[row, count : count + 1].cpu())
                count += 1
                self.finished[row] = bool(self.criteria(self.tokens[:, : self.lengths[row]], None)[row])
            taken.append(count)
        return taken

    def _commit(self, counts: list[int], agreed: bool) -> None:
        self.cache_round.commit(counts, agreed)
        real = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
        real = real.to(self.tokens.device)
        self.positions = self.positions + real.sum(1)
        if self.mask is not None or min(counts) < max(counts):
            before = self.mask
            if before is None:
                before = torch.ones(self.rows, self.cache.get_seq_length() - max(counts), dtype=torch.long)
                before = before.to(real.device)
            self.mask = torch.cat([before, real.to(before.dtype)], 1)

    def _learn(
        self,
        drafts: Tensor,
        copied: Tensor | None,
        copies: bool,
        right: list[int],
        kept: list[int],
        active: list[bool],
        drafting_s: float,
        verifying_s: float,
    ) -> None:
        """Record seconds and acceptance of the round; copies are judged also where they were not used."""
        count, done = drafts.shape[1], self.done
        mean = sum(n for n, live in zip(right, active, strict=True) if live) // sum(active)
        self.pace.took(0 if copies else count, drafting_s, verifying_s)
        if not copies:
            self.pace.drafts.note(mean, count)
        if copied is not None:
            hits = [
                _agreeing(copied[row].tolist(), self.tokens[row, length - kept[row] : length].tolist())
                for row, length in enumerate(self.lengths)
                if active[row]
            ]
            judged = max(kept)
            self.pace.copies.note(sum(hits) // len(hits), judged)
        done.rounds += 1
        done.drafted += 0 if copies else count * sum(active)
        done.copied += count * sum(active) if copies else 0
        done.accepted += sum(n for n, live in zip(right, active, strict=True) if live)
        done.drafting_s += drafting_s
        done.verifying_s += verifying_s

    # -- choosing tokens ----------------------------------------------------------------------------

    def _choose(self, logits: Tensor, drafts: int, ahead: int = 0) -> Tensor:
        """Return the token that follows at each of the last ``drafts`` + 1 positions, (rows, positions), from logits
        (rows, positions, vocabulary); ``ahead``: drafts before the first of them."""
        if not self.processor and not self.config.do_sample:
            return logits.argmax(-1)
        columns = []
        for number in range(drafts + 1):
            scores = self._scores(logits[:, number], ahead + number)
            if self.config.do_sample:
                probabilities = scores.softmax(-1)
                scores = probabilities / self._noise(probabilities, ahead + number)
            columns.append(scores.argmax(-1, keepdim=True))
        return torch.cat(columns, 1)

    def _scores(self, logits: Tensor, ahead: int) -> Tensor:
        """Return the processed logits, (rows, vocabulary)."""
        scores = logits.new_empty(logits.shape, dtype=torch.float32)
        for length in set(self.lengths):  # processors may depend on the whole batch
            rows = [row for row in range(self.rows) if self.lengths[row] == length]
            fresh = logits.to(copy=True, dtype=torch.float32)
            scores[rows] = self.processor(self.tokens[:, : length + ahead], fresh)[rows]
        return scores

    def _noise(self, like: Tensor, ahead: int) -> Tensor:
        """Return the noise of each row's token ``ahead`` of the next; drawn once for each, in order."""
        numbers = [length - self.prompt + ahead for length in self.lengths]
        oldest = min(number for number, done in zip(numbers, self.finished, strict=True) if not done) - ahead
        for number in [number for number in self.noise if number < oldest]:
            del self.noise[number]
        for number in range(max(self.noise, default=oldest - 1) + 1, max(numbers) + 1):
            self.noise[number] = torch.empty_like(like).exponential_(1, generator=self.generator)
        rows = [self.noise.get(number, like)[row] for row, number in enumerate(numbers)]  # finished rows: anything
        return torch.stack(rows)

    # -- output ---------------------------------------------------------------------------

    def _report(self, row: int, logits: Tensor) -> None:
        """Keep logits and scores of the row's last token."""
        raw = logits.to(copy=True, dtype=torch.float32)
        scores = self.processor(self.tokens[:, : self.lengths[row] - 1], raw.clone())
        self.reported[row].append((raw[row], scores[row]))

    def result(self) -> Tensor | GenerateDecoderOnlyOutput:
        """Return the sequences, padded at the right where rows finished earlier."""
        if self.streamer is not None:
            self.streamer.end()
        longest = max(self.lengths)
        sequences = self.tokens[:, :longest].clone()
        pad = self.config._pad_token_tensor
        for row, length in enumerate(self.lengths):
            if length < longest:
                sequences[row, length:] = pad
        if not self.config.return_dict_in_generate:
            return sequences
        logits, scores = (
            tuple(
                torch.stack(
                    [own[step][part] if step < len(own) else torch.zeros_like(own[0][part]) for own in self.reported]
                )
                for step in range(longest - self.prompt)
            )
            if wanted
            else None
            for part, wanted in enumerate((self.config.output_logits, self.config.output_scores))
        )
        return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits, past_key_values=self.cache)


def _agreeing(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
