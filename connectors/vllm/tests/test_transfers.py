"""What is loaded and what is saved, for requests as vLLM's scheduler has them; and what blocks are called."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kvkeep_vllm import transfers as transfers_module
from kvkeep_vllm.identity import namespace, settings_of, weights_of
from kvkeep_vllm.options import ConnectorOptions
from kvkeep_vllm.transfers import Load, TransferPlanner, Transfers, name_of, space_of

from kvkeep.blocks.folder import BlockName
from kvkeep.errors import UsageError

SIZE = 4


@dataclass
class Request:
    """As vLLM's: a key for every block whose tokens are known."""

    request_id: str
    num_tokens: int
    cache_salt: str | None = None
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    resumable: bool = False

    @property
    def block_hashes(self) -> list[bytes]:
        return [bytes([number]) for number in range(self.num_tokens // SIZE)]


def names(count: int, salt: str | None = None, first: int = 0) -> list[BlockName]:
    return [name_of(space_of("model", salt), bytes([number])) for number in range(first, count)]


class Engine:
    """A scheduler of one request, and a folder without files."""

    def __init__(self, *requests: Request, **options: bool) -> None:
        self.there: set[BlockName] = set()
        self.planner = TransferPlanner("model", SIZE, self.there.__contains__, **options)
        for request in requests:
            self.planner.begin(request)

    def admit(self, request: Request, blocks: list[int], computed: int = 0) -> Transfers:
        """Let a request in, as the scheduler does with one whose blocks are loaded between steps."""
        found = self.planner.found(request, computed)
        self.planner.admit(request, blocks, found)
        return self.planner.step([], lambda _: None)

    def step(self, request: Request, tokens: int, blocks: list[int]) -> Transfers:
        plan = self.planner.step([(request.request_id, tokens)], lambda _: blocks)
        request.num_computed_tokens += tokens
        for save in plan.saves:
            self.there |= {*save.names}
        return plan


def saved(plan: Transfers) -> list[tuple[int, list[int]]]:
    assert not plan.loads
    return [(len(save.names), save.blocks) for save in plan.saves]


def test_blocks_are_saved_in_the_step_that_fills_them() -> None:
    """A prompt in chunks, and an answer."""
    request, blocks = Request("a", 11), [7, 3, 9, 5]
    engine = Engine(request)
    assert engine.admit(request, blocks) == Transfers()
    assert saved(engine.step(request, 3, blocks)) == []
    assert saved(engine.step(request, 6, blocks)) == [(2, [7, 3])]
    assert saved(engine.step(request, 2, blocks)) == []
    request.num_tokens = 12  # the answer's first token, read in the step that it is known in
    plan = engine.step(request, 1, blocks)
    assert saved(plan) == [(1, [9])] and plan.saves[0].names == names(3, first=2)
    assert saved(engine.step(request, 5, blocks)) == []  # drafts, and tokens that are not known yet
    engine.planner.end("a")
    (use,) = engine.step(request, 8, blocks).uses
    assert use.names == names(3) and use.when > plan.saves[0].when  # its whole text was used until then
    assert engine.step(request, 8, blocks) == Transfers()


def test_blocks_are_never_used_later_than_what_they_build_upon() -> None:
    request, blocks = Request("a", 16), [0, 1, 2, 3]
    engine = Engine(request)
    engine.admit(request, blocks)
    saves = [save for tokens in (5, 3, 8) for save in engine.step(request, tokens, blocks).saves]
    assert [len(save.names) for save in saves] == [1, 1, 2]
    times = [save.when - number for save in saves for number in range(len(save.names))]
    assert times == sorted(times, reverse=True) and len({*times}) == 4


def test_what_the_engine_has_is_not_loaded_and_the_last_token_is_read() -> None:
    for tokens, there, computed, found in (
        (12, 3, 0, 8), (13, 3, 0, 12), (13, 3, 8, 4), (13, 2, 8, 0), (4, 1, 0, 0), (1, 0, 0, 0), (13, 9, 12, 0),
    ):  # fmt: skip
        request = Request("a", tokens)
        engine = Engine(request)
        engine.there |= {*names(there)}
        assert engine.planner.found(request, computed) == found, (tokens, there, computed)
        plan = engine.admit(request, [10, 11, 12, 13], computed)
        first = computed // SIZE
        keys = names(first + found // SIZE, first=first)
        assert plan.loads == ([Load("a", keys, [10 + first + number for number in range(len(keys))])] if found else [])
    gap = Request("a", 13)
    engine = Engine(gap)
    engine.there |= {*names(1), *names(3, first=2)}
    assert engine.planner.found(gap, 0) == SIZE


def test_a_waiting_request_does_not_look_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    request, asked, now = Request("a", 13), [], [100.0]
    planner = TransferPlanner("model", SIZE, lambda name: not asked.append(name))
    monkeypatch.setattr(transfers_module.time, "monotonic", lambda: now[0])
    planner.begin(request)
    assert [planner.found(request, 0) for _ in range(50)] == [12] * 50 and len(asked) == 3
    assert planner.found(request, 4) == 8 and len(asked) == 5  # the engine has more now
    now[0] += 1
    assert planner.found(request, 4) == 8 and len(asked) == 7


def test_after_a_preemption_it_is_restored_and_after_a_bad_load_it_is_read() -> None:
    request, blocks = Request("a", 17), [0, 1, 2, 3, 4]
    engine = Engine(request)
    engine.admit(request, blocks)
    engine.step(request, 17, blocks)
    request.num_tokens, request.num_preemptions, request.num_computed_tokens = 18, 1, 0
    (load,) = engine.admit(request, [5, 6, 7, 8, 9]).loads
    assert load == Load("a", names(4), [5, 6, 7, 8])
    engine.there.discard(names(4)[1])  # it was damaged: the engine computes from there, or from the start
    for computed in (0, 4):
        assert engine.planner.found(request, computed) == 0
    request.num_computed_tokens = 4
    plan = engine.step(request, 14, [5, 6, 7, 8, 9])
    assert saved(plan) == [(4, [5, 6, 7, 8])]  # all of them are offered; those that are there are left alone
    request.num_preemptions, request.num_computed_tokens = 2, 0
    assert engine.planner.found(request, 0) == 16


def test_salts_roles_and_requests_whose_keys_say_too_little() -> None:
    salted, plain, other = Request("a", 9, "salt"), Request("b", 9), Request("c", 9, "../../etc")
    engine = Engine(salted, plain, other)
    engine.there |= {*names(2, "salt")}
    assert [engine.planner.found(request, 0) for request in (salted, plain, other)] == [8, 0, 0]
    spaces = {engine.step(request, 9, [0, 1, 2]).saves[0].names[0].space for request in (salted, plain, other)}
    assert len(spaces) == 3 and all(space.count("/") == 1 and ".." not in space for space in spaces)
    assert space_of("model", "shared") != space_of("model", None) == space_of("model", "")
    assert len({name_of(space, b"of a text").key for space in spaces}) == 3  # the file of one is refused in another
    for odd in ({"lora_request": 1}, {"mm_features": [1]}, {"prompt_embeds": 1}, {"resumable": True}):
        request = Request("d", 9, **odd)
        engine = Engine(request)
        engine.there |= {*names(2)}
        assert engine.planner.found(request, 0) == 0 and engine.step(request, 9, [0, 1, 2]) == Transfers()
    for loads, saves in ((True, False), (False, True)):
        request = Request("e", 9)
        engine = Engine(request, loads=loads, saves=saves)
        engine.there |= {*names(2)}
        assert (engine.planner.found(request, 0) > 0, bool(engine.step(request, 9, [0, 1, 2]).saves)) == (loads, saves)


def test_after_a_reset_nothing_of_before_is_found() -> None:
    request = Request("a", 9)
    engine = Engine(request)
    engine.there |= {*names(2)}
    assert engine.planner.found(request, 0) == 8
    engine.planner.renew("model/since-1")
    assert engine.planner.found(request, 0) == 0
    assert engine.step(request, 9, [0, 1, 2]).saves[0].names[0].space == "model/since-1/shared"


# -- names ------------------------------------------------------------------------------------------------


def test_a_namespace_is_of_the_weights_bytes_and_of_every_setting(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="has no files of weights"):
        weights_of(str(tmp_path))
    with pytest.raises(UsageError, match="are not on this machine"):
        weights_of("nobody/nothing", hub_folder=str(tmp_path))
    file = tmp_path / "model.safetensors"
    spaces = set()
    for content in (b"one", b"two"):
        file.write_bytes(content)
        weights = weights_of(str(tmp_path))
        assert weights == weights_of(str(file)) and set(weights) == {"model.safetensors"}
        for codec in ("exact", "int8"):
            spaces.add(namespace({"weights": weights, "codec": codec}))
    assert len(spaces) == 4 and {len(space) for space in spaces} == {32}
    config = {"hidden_size": 8, "_name_or_path": "here", "transformers_version": "5"}
    assert settings_of(config, 100) == settings_of(config | {"_name_or_path": "there"}, 200) == {"hidden_size": 8}
    for rope, depends in (
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, False),
        ({"rope_parameters": {"rope_type": "longrope"}}, True),
        ({"rope_scaling": {"type": "dynamic"}}, True),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, True),
    ):
        assert (settings_of(config | rope, 100) != settings_of(config | rope, 200)) == depends, rope


def test_settings_are_understood_or_refused_by_name(tmp_path: Path) -> None:
    options = ConnectorOptions.parse({})
    assert (options.codec, options.quota, options.queue) == ("exact", 10**10, 256 * 10**6)
    assert options.folder.name == "vllm"
    given = {"folder": str(tmp_path), "quota": "1.5GiB", "codec": "int4", "queue": "1MB"}
    assert ConnectorOptions.parse(json.loads(json.dumps(given))) == ConnectorOptions(tmp_path, 3 << 29, "int4", 10**6)
    for wrong, said in (
        ({"codec": "int3"}, "Unknown codec 'int3'"),
        ({"quote": "1GB"}, "did you mean quota"),
        ({"quota": "25%"}, "The quota '25%' is not a number of bytes; give bytes"),
        ({"quota": 0}, "The quota '0'"),
        ({"queue": "lots"}, "The queue 'lots'"),
        ({"quota": None}, "The quota 'None'"),
    ):
        with pytest.raises(UsageError, match=said):
            ConnectorOptions.parse(wrong)
    options = ConnectorOptions.parse({"quota": 100, "queue": 50})
    options.check(50, 100)
    for block, said in (
        ((50, 101), r"quota of 100 bytes is smaller than one block \(101\)"),
        ((51, 9), "queue of 50 bytes is smaller"),
    ):
        with pytest.raises(UsageError, match=said):
            options.check(*block)
