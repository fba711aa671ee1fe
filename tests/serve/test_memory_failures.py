"""Memory runs out: by a limit of the process, and by single allocations that fail."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from answering import Client, small, text
from conftest import saved, tokenizer
from families import tiny
from running import BODY, KEYS, bearer, program

import kvkeep
from kvkeep import KeepCache, transfer
from kvkeep.cli import startup
from kvkeep.decode import prompt as prompts
from kvkeep.decode.prompt import encode
from kvkeep.errors import KvkeepError, ModelTooLarge, OutOfMemory, out_of_memory, ran_out_of_memory
from kvkeep.models import loading
from kvkeep.models.adapter import decoder_of, layers_of
from kvkeep.native import room
from kvkeep.serve import session_pool
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.errors import api_error
from kvkeep.serve.session import Finished

FIXTURE = Path(__file__).parents[1] / "fixtures" / "failing_memory.c"
SIZES = (14, 450)
"""MB of address space in which kvkeep cannot start."""
BEYOND = (0, 40, 1000)
"""MB of address space beyond what kvkeep asks for before it loads a model."""
limited = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")


@pytest.fixture(scope="module")
def long_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama, with positions for whole blocks of the store."""
    return saved(tiny("llama", positions=4096), tmp_path_factory.mktemp("long-llama"))


def limits(megabytes: int) -> Callable[[], None]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    return limit


def command(*arguments: str) -> tuple[list[str], dict[str, str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "2"}
    return [sys.executable, "-m", "kvkeep", *arguments], environment


def asked_for() -> int:
    """MB of address space with which kvkeep begins to load a model: its libraries, and what it takes until then."""
    libraries = sum(file.stat().st_size for file in Path(torch.__file__).with_name("lib").glob("*.so*"))
    return (libraries + startup.OTHER_LIBRARIES_BYTES >> 20) + 50


# ---- under a limit ---------------------------------------------------------------------------------------------------


@limited
@pytest.mark.slow
def test_a_command_under_any_limit_answers_or_says_that_memory_is_short(model_folder: Path) -> None:
    given, environment = command("generate", "-m", str(model_folder), "-p", "the river", "--max-tokens", "4")
    expected, ended = None, list[bool]()
    for size in (*SIZES, *(asked_for() + more for more in BEYOND)):
        done = subprocess.run(given, env=environment, capture_output=True, text=True, preexec_fn=limits(size))
        assert done.returncode in (0, 1), f"{size} MB: {done.returncode} {done.stderr}"
        assert "Traceback" not in done.stderr, f"{size} MB: {done.stderr}"
        if done.returncode:
            assert "memory" in done.stderr and "damaged" not in done.stderr, f"{size} MB: {done.stderr}"
            assert not done.stdout.strip(), f"{size} MB: {done.stdout}"
        else:
            expected = expected or done.stdout
            assert done.stdout == expected
        ended.append(done.returncode == 0)
    assert ended[-1] and not ended[0]


@limited
@pytest.mark.slow
def test_a_server_under_any_limit_answers_or_says_that_memory_is_short(long_model_folder: Path) -> None:
    """And it answers ``/health``, and ends in order."""
    answered = set[str]()
    options = ("-m", str(long_model_folder), "--memory", "20MB", "-x", "full")
    for more in (0, 45, 65, 90, 1000):
        with ExitStack() as stack:
            try:
                running = stack.enter_context(program(*options, limit=limits(asked_for() + more)))
            except AssertionError as error:  # it ended before it was ready
                assert "memory" in str(error) and "Traceback" not in str(error), more
                continue
            for response in [asked(running.address, running.model, count) for count in (1, 300, 1)]:
                if response.status_code == 200:
                    answered.add(response.json()["choices"][0]["message"]["content"])
                    continue
                assert response.status_code == 503 and "memory" in response.json()["error"]["message"]
                assert response.json()["error"]["code"] == "out_of_memory"
            assert httpx.get(f"{running.address}/health", timeout=30).status_code == 200
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(30) == 0, running.said()
            assert "Traceback" not in running.said()
    assert len(answered) == 2  # with the most memory: both texts, and with less no other answers


def asked(address: str, model: str, count: int) -> httpx.Response:
    body = BODY | {"model": model, "messages": [{"role": "user", "content": "the river and the stone " * count}]}
    return httpx.post(f"{address}/v1/chat/completions", json=body, headers=bearer(KEYS[0]), timeout=60)


# ---- allocation by allocation ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("no C compiler on this machine")
    library = tmp_path_factory.mktemp("shim") / "failing_memory.so"
    if subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, FIXTURE], capture_output=True).returncode:
        pytest.skip("the C library is not glibc")
    return library


@pytest.mark.turns(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("least", "stride", "count"),
    [(4096, 90, 1), (1024, 320, 1), (16384, 50, 20), (65536, 7, 2000)],
    ids=["any", "small", "a-row", "for-long"],
)
def test_answers_while_allocations_fail_are_right_or_name_memory(
    least: int, stride: int, count: int, shim: Path, long_model_folder: Path, tmp_path: Path
) -> None:
    """Of five sessions of four methods that write together; afterwards each continues to the same tokens."""
    given = [sys.executable, str(Path(__file__).with_name("failing_answers.py")), str(long_model_folder), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LD_PRELOAD": str(shim)}
    environment["OMP_NUM_THREADS"] = "1"
    given += [str(least), str(stride), str(count)]
    done = subprocess.run(given, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["wrong"], found
    assert found["failed"] and found["refused"] and found["answered"] > found["refused"]


KERNEL = """
import ctypes, torch
from kvkeep.errors import OutOfMemory
from kvkeep.native.library import kernels
from kvkeep.step.native.calls import Call
from kvkeep.step.plan import Span
kernels()
shim = ctypes.CDLL(None)
shim.memory_fails.argtypes = [ctypes.c_size_t, ctypes.c_long, ctypes.c_long]
torch.manual_seed(0)
made = [torch.randn(2, rows, 64).bfloat16() for rows in (4, 700, 700)]
def attention(): return Call(made[0][:, None], [Span(*made[1:], 0, 700)], 0.1, 696).attend()
number, failed = 0, 0
while True:
    shim.memory_fails(4096, number, 1)
    try:
        found = attention()
    except (MemoryError, RuntimeError) as error:
        failed += isinstance(error, OutOfMemory)
        number += 1
        continue
    break
shim.memory_fails(2**62, 0, 0)
print(failed, *(torch.equal(a, b) for a, b in zip(found, attention())))
"""


THREADS = """
import ctypes, torch
from kvkeep.native.library import kernels
from kvkeep.step.native.calls import Call
from kvkeep.step.plan import Span
torch.manual_seed(0)
made = [torch.randn(2, rows, 64).bfloat16() for rows in (400, 3000, 3000)]
def attention(): return Call(made[0][:, None], [Span(*made[1:], 0, 3000)], 0.1, 2600).attend()
kernels().kvkeep_use_openmp(None, None)
kernels().kvkeep_set_threads(1)
expected = attention()
kernels().kvkeep_set_threads(6)
for left in (0, 1, 0, 1000):
    ctypes.CDLL(None).threads_left(left)
    print(*(torch.equal(a, b) for a, b in zip(attention(), expected)))
"""


@pytest.mark.usefixtures("kernels")
def test_the_library_goes_on_with_the_threads_that_it_can_start(shim: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LD_PRELOAD": str(shim)}
    done = subprocess.run([sys.executable, "-c", THREADS], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 8


@pytest.mark.usefixtures("kernels")
def test_a_kernel_without_scratch_memory_raises_and_the_next_call_has_the_same_bits(shim: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LD_PRELOAD": str(shim)}
    done = subprocess.run([sys.executable, "-c", KERNEL], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    failed, *same = done.stdout.split()
    assert int(failed) >= 3 and same == ["True", "True"]


# ---- what is asked before a library ends the process -----------------------------------------------------------------


def test_a_text_for_whose_tokens_there_is_no_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "has_room", lambda nbytes: nbytes < prompts.LEAST_BYTES + 10**6)
    made, one = tokenizer(), [{"role": "user", "content": "the river"}]
    assert encode(made, one)
    with pytest.raises(OutOfMemory, match="not enough memory for encoding a text of [0-9,]+ bytes"):
        encode(made, [{"role": "user", "content": "the river " * 1000}])


class PanicException(BaseException):
    """As pyo3 raises it."""


@pytest.mark.parametrize(
    ("said", "kind", "sentence"),
    [("memory allocation failed: out of memory", OutOfMemory, "memory"), ("unwrap of the river", KvkeepError, "Panic")],
)
def test_a_panic_of_the_tokenizer_is_an_error(said: str, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence) as raised, prompts.encoding("the river"):
        raise PanicException(said)
    assert "river" not in str(raised.value)


def test_room_is_what_the_process_may_have() -> None:
    assert room.has_room(1 << 20) and not room.has_room(1 << 60)


def test_a_model_for_which_there_is_no_memory_is_named(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever transformers takes the error for."""

    def failing(*_: Any, **__: Any) -> Any:
        try:
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"
            )
        except RuntimeError as error:
            raise OSError("Unable to load weights from the checkpoint file; it may be corrupted.") from error

    monkeypatch.setattr(loading, "read_weights", failing)
    with pytest.raises(ModelTooLarge, match="not enough memory to load the model .* are free; .*smaller model"):
        loading.load(model_folder)


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("can't start new thread"), True),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), True),
        (out_of_memory("reading 3 tokens"), True),
        (RuntimeError("out of luck"), False),
        (OSError(28, "No space left on device"), False),
        (FileNotFoundError(2, "No such file or directory", "out of memory.txt"), False),
        (KvkeepError("The file 'out of memory' is empty."), False),
        (KvkeepError("The file is damaged."), False),
    ],
    ids=str,
)
def test_errors_for_lack_of_memory_are_known(error: Exception, short: bool) -> None:
    assert ran_out_of_memory(error) is short
    wrapped = KvkeepError("It is damaged.")
    wrapped.__cause__ = error
    assert ran_out_of_memory(wrapped) is short
    assert (api_error(wrapped).status_code == 503) is short


# ---- the engine ------------------------------------------------------------------------------------------------------


@pytest.fixture
def started() -> Iterator[Engine]:
    engine = Engine(small(), 10**9)
    engine.start()
    yield engine
    engine.stop(0)
    engine.join()


def waited(client: Client) -> Any:
    for _ in range(3000):
        if client.done:
            return client.events[-1]
        threading.Event().wait(0.01)
    raise AssertionError("it hangs")


@pytest.mark.parametrize("place", ["step", "_take_in", "_begin_answers", "_report_saved"])
def test_memory_that_runs_out_anywhere_in_a_step_does_not_end_the_engine(
    place: str, started: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = waited(Client(started, text(40, 1), 12))
    owner = started.scheduler if place == "step" else started
    real, failing = getattr(owner, place), threading.Event()

    def once(*given: Any) -> Any:
        done = real(*given)
        if failing.is_set() and started.scheduler.answers:
            failing.clear()
            raise MemoryError
        return done

    monkeypatch.setattr(owner, place, once)
    failing.set()
    found = waited(Client(started, text(40, 1), 12))
    assert isinstance(found, OutOfMemory) and re.search("ran out of memory while .*40 tokens of prompt", str(found))
    again = waited(Client(started, text(40, 1), 12))
    assert isinstance(again, Finished) and again.tokens == expected.tokens and started.fault is None


def test_with_next_to_no_memory_the_newest_answer_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(small(), 10**9)
    clients = [Client(engine, text(40, seed), 12) for seed in range(2)]
    while not all(client.job.writes for client in clients):
        engine.step()
    monkeypatch.setattr(session_pool, "has_room", lambda nbytes: len(engine.running) < 2)
    engine.step()
    assert isinstance(clients[1].events[-1], OutOfMemory) and not clients[0].done
    while not clients[0].done:
        engine.step()
    assert clients[0].ended.written == 12
    engine.close()


def test_a_generation_for_which_memory_runs_out_raises_and_the_cache_goes_on() -> None:
    model, prompt = tiny("llama"), text(40, 1)
    expected = kvkeep.generate(model, tokenizer(), prompt, KeepCache(model), max_new_tokens=12).tokens
    cache, calls = KeepCache(model), list[None]()

    def failing(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 6:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes.")

    hook = layers_of(decoder_of(model))[2].mlp.register_forward_pre_hook(failing)
    try:
        with pytest.raises(OutOfMemory, match="not enough memory for reading 1 tokens after 44"):
            kvkeep.generate(model, tokenizer(), prompt, cache, max_new_tokens=12)
    finally:
        hook.remove()
    read = cache.get_seq_length()
    assert read == 44
    more = kvkeep.generate(model, tokenizer(), [*prompt, *expected[:5]], cache, max_new_tokens=7).tokens
    assert [*expected[:5], *more] == expected


def test_a_save_for_which_memory_runs_out_leaves_the_former_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = tiny("llama"), text(40, 1)
    cache = KeepCache(model, "h2o", 24, chunk=16)
    first = kvkeep.generate(model, tokenizer(), prompt, cache, max_new_tokens=4)
    ids = first.sequence[: cache.get_seq_length()]
    kvkeep.save_session(tmp_path / "talk", kvkeep.Session(cache, [ids]))
    kvkeep.generate(model, tokenizer(), [*first.sequence, *text(20, 2)], cache, max_new_tokens=4)

    def failing(*_: Any) -> Any:
        raise MemoryError

    for place in ("tensor_of", "parts"):
        with monkeypatch.context() as patch:
            patch.setattr(transfer, place, failing)
            with pytest.raises(OutOfMemory, match="memory for saving a session"):
                kvkeep.save_session(tmp_path / "talk", kvkeep.Session(cache, [[0] * cache.get_seq_length()]))
    assert kvkeep.load_session(tmp_path / "talk", model).ids == [ids]
