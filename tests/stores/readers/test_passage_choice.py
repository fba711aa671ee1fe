"""The choice of passages by words: BM25 of token ids and pairs, against the formula, and what keeps a choice."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvkeep.memory.ledger import Ledger
from kvkeep.stores.readers.passage_choice import K1, WRITTEN, PassageChoice, best_passages, word_scores


def _ids(*ids: int) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32)


def _ledger(ids: Tensor) -> Ledger:
    ledger = Ledger()
    ledger.append(ids, None, None, None)
    return ledger


def _bm25(ids: list[int], query: list[int], weight: list[float], size: int) -> list[float]:
    """BM25 of words and pairs, term by term. A pair belongs to the passage in which it begins."""
    passages = len(ids) // size
    weights: dict[tuple[int, ...], float] = {}
    for place in range(len(query)):
        for term in (tuple(query[place : place + 1]), tuple(query[place - 1 : place + 1]) if place else ()):
            if term:
                weights[term] = max(weights.get(term, 0.0), weight[place])
    scores = [0.0] * passages
    for term, factor in weights.items():
        counts = [0] * passages
        for place in range(len(ids) - len(term) + 1):
            counts[place // size] += tuple(ids[place : place + len(term)]) == term
        holders = sum(count > 0 for count in counts)
        rarity = math.log(1 + (passages - holders + 0.5) / (holders + 0.5))
        for passage, count in enumerate(counts):
            scores[passage] += factor * rarity * count * (K1 + 1) / (count + K1)
    return scores


def test_scores_are_bm25_of_words_and_pairs() -> None:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 12, (160,), generator=draw).int()
    for query in (torch.randint(0, 14, (20,), generator=draw).int(), _ids(3), _ids(99, 98)):
        weight = torch.rand(len(query), generator=draw)
        wanted = torch.tensor(_bm25(ids.tolist(), query.tolist(), weight.tolist(), 16))
        assert torch.allclose(word_scores(ids, query, weight, 16), wanted, atol=1e-4)


def _best(*scores: float, count: int) -> list[int]:
    found: list[int] = best_passages(torch.tensor([scores]), count)[0].tolist()
    return found


def test_the_best_blocks_come_with_the_next_ones_and_ties_go_to_the_newest() -> None:
    assert _best(0, 0, 5, 0, 0, 3, 0, 0, count=5) == [0, 2, 3, 5, 6]
    assert _best(0, 0, 5, 4, 0, 3, 0, 0, count=5) == [0, 2, 3, 4, 5]
    assert _best(9, 0, 0, 0, 0, 0, 0, 7, count=4) == [0, 1, 7]
    assert _best(0, 0, 0, 0, 0, 0, 0, 0, count=3) == [0, 6, 7]


def test_blocks_far_below_the_best_are_left_out_unless_another_row_needs_as_many() -> None:
    one, all_of_them = [0.0, 0, 5, 0, 2, 0, 1, 0], [0.0, 3, 0, 3, 0, 3, 0, 3]
    assert _best(*one, count=8) == [0, 2, 3]
    assert best_passages(torch.tensor([one, all_of_them]), 6).tolist() == [[0, 2, 3, 4, 5, 6], [0, 3, 4, 5, 6, 7]]


def test_the_best_other_passage_is_recalled_though_the_first_one_matches_better() -> None:
    """The words of a chat template, with which each question ends, are in the first passage of a text."""
    assert _best(9.0, 0, 4, 0, 0, 3, 0, 0, count=8) == [0, 1, 2, 3]
    assert _best(9.0, 0, 0, 0, 0, 0, 0, 0, count=8) == [0, 1]


def test_the_first_passages_are_recalled_unless_they_are_lost() -> None:
    scores = torch.tensor([[0.0, 0, 0, 0, 9, 0, 0, 0]])
    assert best_passages(scores, 5, first=3).tolist() == [[0, 1, 2, 4, 5]]
    assert best_passages(scores.index_fill(1, torch.tensor([1]), -1.0), 5, first=3).tolist() == [[0, 2, 4, 5]]


def _read(ledger: Ledger, choice: PassageChoice, *ids: int) -> list[int]:
    """Read ``ids`` in one pass, and return the passages that the first row recalls."""
    ledger.append(torch.tensor([ids]), None, None, None)
    choice.choose(20, len(ids), (0, 0))
    assert choice.numbers is not None
    found: list[int] = choice.numbers[0].tolist()
    return found


def test_a_choice_serves_the_tokens_that_are_written_after_it() -> None:
    ledger = _ledger(torch.arange(320)[None] + 100)
    choice = PassageChoice(ledger, 4, 16)
    assert not choice.holds
    assert _read(ledger, choice, 120, 121, 122) == [0, 1, 2]  # the question's words are in passage 1
    numbers = choice.numbers
    for _ in range(WRITTEN):
        assert _read(ledger, choice, 241) == [0, 1, 2] and choice.numbers is numbers and choice.holds
    found = _read(ledger, choice, 242)  # in passage 8, like 241
    assert {1, 8} < {*found} and choice.numbers is not numbers


def test_a_question_that_is_cut_into_chunks_chooses_as_one_pass() -> None:
    """The last chunk of a prompt may have only the tokens of the template. A copy made before it goes on, too."""
    whole, parts = (PassageChoice(_ledger(torch.arange(320)[None] + 100), 4, 16) for _ in range(2))
    wanted = _read(whole.ledger, whole, 900, 180, 181, 7, 8)
    assert 5 in wanted  # 180 and 181
    parts.ledger.continues = True
    _read(parts.ledger, parts, 900, 180, 181)
    parts.ledger.continues = False
    saved, parts = parts.state, PassageChoice(parts.ledger, 4, 16)
    parts.restore(saved)
    assert _read(parts.ledger, parts, 7, 8) == wanted and parts.state[:2].tolist() == [320, 325]
    _read(parts.ledger, parts, 250, 251)  # the next question
    assert parts.state[:2].tolist() == [325, 327]


def test_a_choice_follows_from_its_state_and_the_ledger() -> None:
    ledger = _ledger(torch.arange(320)[None] + 100)
    choice = PassageChoice(ledger, 4, 16)
    _read(ledger, choice, 120, 121, 122)
    wanted = _read(ledger, choice, 241)
    again = PassageChoice(ledger, 4, 16)
    again.restore(choice.state)
    assert _read(ledger, again, 242) == wanted
    choice.truncate(323)  # the question stays
    ledger.truncate(323)
    assert _read(ledger, choice, 243) == wanted
    choice.truncate(321)
    ledger.truncate(321)
    assert not choice.holds and choice.state.tolist()[:4] == [0, 0, 0, 0]


def test_a_question_whose_last_token_is_read_again_chooses_as_it_did() -> None:
    """For another answer, also after a long one, during which other passages were chosen."""
    ledger = _ledger(torch.arange(320)[None] + 100)
    choice = PassageChoice(ledger, 4, 16)
    wanted = _read(ledger, choice, 120, 121, 122)
    state = choice.state
    for _ in range(WRITTEN):
        _read(ledger, choice, 241)
    _read(ledger, choice, 242)
    assert choice.numbers is not None and choice.numbers[0].tolist() != wanted
    choice.truncate(322)
    ledger.truncate(322)
    assert _read(ledger, choice, 122) == wanted and torch.equal(choice.state, state)


def test_rows_choose_by_their_own_words() -> None:
    ids = torch.stack([torch.arange(160), torch.arange(160).flip(0)])
    ledger = _ledger(torch.cat([ids, torch.tensor([[40, 41], [40, 39]])], 1))
    choice = PassageChoice(ledger, 3, 16)
    choice.choose(10, 2, (0, 0))
    assert choice.numbers is not None and choice.numbers.tolist() == [[0, 2, 3], [0, 7, 8]]
    choice.choose(2, 2, (0, 0))
    assert choice.numbers.tolist() == [[0, 1], [0, 1]]


def test_a_lost_block_is_no_neighbour() -> None:
    """The passage after the best one is lost, and the text goes on far behind it."""
    ledger = _ledger(torch.arange(320)[None] + 100)
    choice = PassageChoice(ledger, 4, 16)
    ledger.append(torch.tensor([[120, 121]]), None, None, None)
    choice.choose(20, 2, (2, 9))
    assert choice.numbers is not None and choice.numbers.tolist() == [[0, 1]]
    choice.choose(10, 2, (2, 9))
    assert choice.numbers.tolist() == [[0, 1, 9]]


def test_a_question_counts_that_was_asked_while_all_entries_were_attended() -> None:
    """It is among the tokens before the first choice, whatever pass has read them."""
    ledger = _ledger(torch.cat([torch.arange(320), torch.tensor([20, 21]), torch.full((62,), -1)])[None] + 100)
    choice = PassageChoice(ledger, 4, 16)
    for _ in range(2 * WRITTEN):
        ledger.append(torch.tensor([[99]]), None, None, None)
        choice.choose(20, 1, (0, 0))
        assert choice.numbers is not None and choice.numbers.tolist() == [[0, 1, 2]]
