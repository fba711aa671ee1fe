"""Copies follow the longest earlier occurrence of the last tokens, or a source that is rewritten with its changes."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from kvkeep.engine.drafts import GRAM, LONGEST_CHANGE, LONGEST_MATCH, OCCURRENCES, CopiedText, Rewriting

NAME, OTHER = 1000, 2000
"""The first token of a name that is changed, and of the one in its place."""


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 6))
def test_a_copy_follows_the_longest_of_the_newest_occurrences(tokens: list[int], count: int) -> None:
    text, end = CopiedText(tokens), len(tokens)

    def matching(source: int) -> int:
        return next((n for n in range(source) if tokens[source - 1 - n] != tokens[end - 1 - n]), source)

    longest = max(map(matching, range(1, end)), default=0)
    wanted = min(longest, GRAM)
    sources = [source for source in range(end - 1, 0, -1) if matching(source) >= wanted][:OCCURRENCES]
    found, match = text.copy(count)
    if not longest:
        assert not found and not match
        return
    best = max(sources, key=lambda source: (min(matching(source), LONGEST_MATCH), source))
    assert match == min(matching(best), LONGEST_MATCH)
    assert found == [(tokens[best:] * count)[number] for number in range(count)]


@given(st.lists(st.integers(3, 9), min_size=3, max_size=5), st.integers(1, LONGEST_CHANGE), st.integers(0, 3))
def test_a_change_is_made_again_once_it_was_learned(gaps: list[int], size: int, written: int) -> None:
    """The source has a name in several places, between tokens that differ, and the text another one in its place."""
    old, new = range(NAME, NAME + size), range(OTHER, OTHER + written)
    others, parts = iter(range(NAME)), list[list[int]]()
    for gap in [*gaps, 9]:
        parts.append([next(others) for _ in range(gap)])
    source = [*chain.from_iterable([*part, *old] for part in parts[:-1]), *parts[-1]]
    wanted = [*chain.from_iterable([*part, *new] for part in parts[:-1]), *parts[-1]]
    text = CopiedText([*source, -1])
    rewriting, right = Rewriting(text), 0
    for done, token in enumerate(wanted):
        copy, match = rewriting.copy(len(wanted) - done)
        assert 0 <= match <= LONGEST_MATCH and bool(copy) == bool(match)
        if done >= len(parts[0]) + written + GRAM:  # the first change was learned
            right += bool(copy) and copy == wanted[done : done + len(copy)]
        text.add([token])
        rewriting.follow(1)
    assert right == len(wanted) - len(parts[0]) - written - GRAM


def test_where_a_change_is_not_made_the_source_goes_on() -> None:
    source = [*range(10, 20), NAME, *range(20, 30), NAME, *range(30, 40), NAME, *range(40, 50)]
    written = [*range(10, 20), OTHER, *range(20, 30), NAME, *range(30, 40)]
    text = CopiedText([*source, -1])
    rewriting = Rewriting(text)
    wanted = {20: [29, OTHER, *range(30, 40)], 22: [*range(30, 40), OTHER, 40], 32: [OTHER, 40]}
    for place, token in enumerate([*written, OTHER]):
        if place in wanted:
            assert rewriting.copy(len(wanted[place]))[0] == wanted[place]
        text.add([token])
        rewriting.follow(1)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=30), st.integers(1, 20))
def test_any_text_can_be_followed_in_parts_of_any_size(parts: list[list[int]], count: int) -> None:
    text = CopiedText([0, 1, 2, 3, 0, 1, 3, 2] * 3)
    rewriting = Rewriting(text)
    for part in parts:
        copy, match = rewriting.copy(count)
        assert len(copy) <= count and bool(copy) <= bool(match)
        text.add(part)
        rewriting.follow(len(part))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12))
def test_what_is_followed_does_not_depend_on_how_many_tokens_come_at_once(sizes: list[int]) -> None:
    """A text that is the source's, with its changes."""
    source, texts = [*range(10, 20), NAME, *range(20, 40), NAME, *range(40, 60)], list[CopiedText]()
    written = [OTHER if token == NAME else token for token in source][: 14 + sum(sizes)]
    copies = []
    for split in (sizes, [1] * sum(sizes)):
        texts.append(text := CopiedText([*source, -1]))
        rewriting, place = Rewriting(text), 14
        for token in written[:14]:
            text.add([token])
            rewriting.follow(1)
        for size in split:
            part = written[place : place + size]
            place += size
            text.add(part)
            rewriting.follow(len(part))
        copies.append(rewriting.copy(40))
    assert copies[0][0] == copies[1][0]
