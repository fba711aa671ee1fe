"""A server, conversations with it, and what is done to both meanwhile. Every answer is compared with one of a server
that nothing disturbs."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from disk_faults import DiskFaults
from running import TEXT, Program, bearer, program, raw, streamed

from kvkeep.blocks.store import MARKER

KINDS: tuple[dict[str, Any], ...] = (
    {"method": "full"},
    {"method": "kv-direct", "budget": 24},
    {"method": "endless+passages:8", "budget": 64},
    {"method": "kv-direct", "budget": 64},
)
MEGA = 1 << 20
EXCUSES = ("out_of_memory", "entries_lost", "store_unavailable", "session_in_use", "queue_full", "stopping", "loading")
"""Codes of errors that a disturbance explains; the client asks again."""


@dataclass(frozen=True)
class Turn:
    """A request, and what an undisturbed server answers: its text and the bits of its log-probabilities."""

    body: dict[str, Any]
    wanted: tuple[str, tuple[float, ...]] | None = None


def scripts(dice: random.Random, count: int, turns: int) -> list[list[Turn]]:
    """Conversations of some kinds of caches; every fourth begins as three others do."""
    common = dice.choices(range(5, 97), k=300)
    made = []
    for number in range(count):
        prompt = [*common] if number % 4 else dice.choices(range(5, 97), k=300)
        script = []
        for _ in range(turns):
            prompt = prompt + dice.choices(range(5, 97), k=dice.randint(20, 240))
            body = {"prompt": prompt, "max_tokens": dice.randint(4, 24), "seed": number, "logprobs": 0}
            script.append(Turn(body | {"kvkeep": KINDS[number % len(KINDS)]}))
        made.append(script)
    return made


class Answered(Exception):
    """A server has answered with an error; ``code`` is OpenAI's."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(f"{status} {error}")
        self.status, self.code, self.message = status, str(error.get("code")), str(error.get("message"))


def answer(running: Program, turn: Turn, session: str | None, stream: bool, leave: int = 0) -> Any:
    """Return an answer's text and log-probabilities; None after leaving within the answer. Raises Answered, and
    httpx.TransportError if the server is gone."""
    body = {**turn.body, "model": running.model}
    if session is not None:
        body["kvkeep"] = {**body["kvkeep"], "session": session}
    if not stream:
        found = httpx.post(running.address + TEXT, json=body, headers=bearer(), timeout=60)
        given = found.json()
        if found.status_code != 200:
            raise Answered(found.status_code, given["error"])
        choice = given["choices"][0]
        return choice["text"], tuple(choice["logprobs"]["token_logprobs"])
    text, logprobs, ended = "", list[float](), False
    with streamed(running.address, body, TEXT, timeout=60) as found:
        if found.status_code != 200:
            raise Answered(found.status_code, json.loads(found.read())["error"])
        for count, line in enumerate(one for one in found.iter_lines() if one.startswith("data: {")):
            event = json.loads(line[6:])
            if "error" in event:
                raise Answered(200, event["error"])
            choice = event["choices"][0]
            text, ended = text + choice["text"], choice["finish_reason"] is not None
            logprobs += (choice.get("logprobs") or {"token_logprobs": []})["token_logprobs"]
            if leave and count >= leave:
                return None
    if not ended:
        raise httpx.ReadError("the stream broke off")
    return text, tuple(logprobs)


def begins(whole: Any, part: Any) -> bool:
    """Return whether an answer is the first part of another, to the bits of its log-probabilities."""
    return bool(whole[0].startswith(part[0].rstrip("\ufffd")) and whole[1][: len(part[1])] == part[1])


@dataclass
class World:
    """A server that is disturbed, and what came of it."""

    model: Path
    folder: Path
    scripts: list[list[Turn]]
    dice: random.Random
    options: tuple[str, ...] = ()
    done: Counter[str] = field(default_factory=Counter)
    """How often each thing was done to it."""
    ended: Counter[str] = field(default_factory=Counter)
    """How requests ended: right, wrong, left, gone, or the code of an error."""
    cached: int = 0
    problems: list[str] = field(default_factory=list)
    running: Program | None = None
    deaths: int = 0
    said: list[str] = field(default_factory=list)
    faults: DiskFaults = field(init=False)
    _stack: ExitStack = field(default_factory=ExitStack)
    _over: threading.Event = field(default_factory=threading.Event)
    _going: threading.Event = field(default_factory=threading.Event)
    _asking: Counter[int] = field(default_factory=Counter)
    _slow: list[ExitStack] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.faults = DiskFaults(str(self.folder))

    # -- the server -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the server, while no thread of this process asks: it is forked."""
        if self.folder.exists() and not (self.folder / MARKER).exists():  # a start refuses it beside a foreign file
            self.done["store of which a removal left parts"] += 1
            shutil.rmtree(self.folder, ignore_errors=True)
        options = ["--model", str(self.model), "--sessions", str(self.folder), *self.options]
        self.running = self._stack.enter_context(program(*options, fork=True, before=self.faults.install))
        self._going.set()

    def end(self, how: signal.Signals | None) -> None:
        """End the server by a signal (None: it has ended), and wait until nobody asks it."""
        assert self.running is not None
        self._going.clear()
        process = self.running.process
        if how is None:
            self.deaths += 1
            self.problems.append(f"the server ended with {process.returncode}: {self.running.said()[-2000:]}")
        else:
            process.send_signal(how)
        process.wait(60)
        for one in self._slow:
            one.close()
        self._slow.clear()
        while self._asking.total():
            time.sleep(0.01)
        self.said.append(self.running.said())
        self._stack.close()

    # -- its clients ----------------------------------------------------------------------------------------

    def references(self) -> None:
        """Ask a server that nothing disturbs, and that has no store."""
        with program("--model", str(self.model), *self.options, "--private", fork=True) as calm:
            for number, script in enumerate(self.scripts):
                self.scripts[number] = [Turn(one.body, answer(calm, one, None, stream=False)) for one in script]

    def talk(self, number: int) -> None:
        """Play conversations, again and again, each turn until it is answered."""
        dice, played = random.Random(number), 0
        while not self._over.is_set():
            script = dice.choice(self.scripts)
            session = f"talk-{number}-{played}" if played % 2 else None
            played += 1
            for turn in script:
                while not self._over.is_set() and not self._asked(number, turn, session, dice):
                    time.sleep(0.02)

    def _asked(self, number: int, turn: Turn, session: str | None, dice: random.Random) -> bool:
        """Ask once; return whether it was answered, rightly or wrongly."""
        if not self._going.wait(0.1):
            return False
        self._asking[number] += 1
        try:
            if not self._going.is_set() or self.running is None:
                return False
            leave = dice.randint(1, 6) if dice.random() < 0.08 else 0
            found = answer(self.running, turn, session, dice.random() < 0.5 or leave > 0, leave)
        except Answered as error:
            self.ended[error.code] += 1
            if error.code not in EXCUSES:
                self.problems.append(str(error))
            return False
        except (httpx.TransportError, json.JSONDecodeError) as error:
            self.ended[f"gone ({type(error).__name__})"] += 1
            return False
        except Exception as error:
            self.problems.append(f"a client failed: {error!r}")
            raise
        finally:
            self._asking[number] -= 1
        if found is None:
            self.ended["left by the client"] += 1
            return False
        if found != turn.wanted and not self._going.is_set() and begins(turn.wanted, found):
            self.ended["cut by SIGTERM"] += 1
            return False
        self.ended["right" if found == turn.wanted else "wrong"] += 1
        if found != turn.wanted:
            self.problems.append(f"{turn.body['kvkeep']} {session}: {found} instead of {turn.wanted}")
        return True

    # -- the run --------------------------------------------------------------------------------------------

    def run(self, seconds: float, talks: int, progress: Callable[[str], None]) -> None:
        """Disturb the server for so many seconds beside ``talks`` conversations; then all of them end rightly."""
        self.start()
        threads = [threading.Thread(target=self.talk, args=(number,)) for number in range(talks)]
        for thread in threads:
            thread.start()
        until, told = time.monotonic() + seconds, time.monotonic()
        try:
            while time.monotonic() < until and not self.problems:
                assert self.running is not None
                if self.running.process.poll() is not None:
                    self.end(None)
                    self.start()
                name = self.dice.choices([*DISTURBANCES], [weight for weight, _ in DISTURBANCES.values()])[0]
                with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    if DISTURBANCES[name][1](self):
                        self.done[name] += 1
                time.sleep(self.dice.uniform(0.005, 0.08))
                if time.monotonic() - told > 20:
                    told = time.monotonic()
                    progress(f"{self.done.total()} disturbances, {self.ended['right']} answers")
        finally:
            self._over.set()
            for thread in threads:
                thread.join(120)
        self.faults.set(0, 0)
        assert self.running is not None
        if self.running.process.poll() is not None:
            self.end(None)
        if self.problems:
            return
        for script in self.scripts:  # what is left in the store gives no wrong bits either
            for turn in script:
                found = answer(self.running, turn, None, stream=False)
                self.ended["right" if found == turn.wanted else "wrong"] += 1
                if found != turn.wanted:
                    self.problems.append(f"at the end, {turn.body['kvkeep']}: {found} instead of {turn.wanted}")
        self.end(signal.SIGTERM)


# -- what is done -------------------------------------------------------------------------------------------------


def _files(world: World, suffix: str) -> list[Path]:
    return sorted(path for path in world.folder.rglob(f"*{suffix}") if path.is_file() and not path.is_symlink())


def _file(world: World, suffix: str) -> Path:
    """Return a file, most often one that was used just now. Raises FileNotFoundError."""
    found = _files(world, suffix)
    if not found:
        raise FileNotFoundError
    return world.dice.choice(found)


def _to_file(act: Callable[[World, Path], None], suffix: str = ".block") -> Callable[[World], bool]:
    def disturb(world: World) -> bool:
        act(world, _file(world, suffix))
        return True

    return disturb


def _truncate(world: World, path: Path) -> None:
    os.truncate(path, world.dice.choice([0, 4096, path.stat().st_size // 2]))


def _grow(world: World, path: Path) -> None:
    os.truncate(path, path.stat().st_size + world.dice.choice([1, 4096]))


def _overwrite(world: World, path: Path) -> None:
    with open(path, "r+b") as file:
        size = path.stat().st_size
        start = world.dice.randrange(size) if size else 0
        file.seek(start)
        file.write(world.dice.randbytes(min(world.dice.choice([1, 512, 65536]), max(1, size - start))))


def _replace(world: World, path: Path) -> None:
    shutil.copyfile(_file(world, path.suffix), path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def _remove(world: World, path: Path) -> None:
    path.unlink()


def _link(world: World, path: Path) -> None:
    link = path.with_suffix(".tmp")
    link.symlink_to(_file(world, path.suffix))
    os.replace(link, path)  # the server may write the block anew at any time


def _remove_store(world: World) -> bool:
    shutil.rmtree(world.folder, ignore_errors=True)
    return True


def _move_store(world: World) -> bool:
    away = world.folder.with_name("away")
    shutil.rmtree(away, ignore_errors=True)
    os.rename(world.folder, away)
    return True


def _restore_store(world: World) -> bool:
    """Put back what was copied or moved earlier, or copy it."""
    away = world.folder.with_name("away")
    if not away.exists():
        with suppress(shutil.Error, OSError):
            shutil.copytree(world.folder, away, symlinks=True)
        return False
    for _ in range(100):
        shutil.rmtree(world.folder, ignore_errors=True)
        with suppress(OSError):  # the server has created it again meanwhile
            os.rename(away, world.folder)
            return True
    return False


def _foreign_files(world: World) -> bool:
    folders = [path for path in world.folder.rglob("*") if path.is_dir()]
    target = world.dice.choice([world.folder, *folders]) / f"foreign-{world.dice.randrange(9)}"
    match world.dice.randrange(4):
        case 0:
            target.write_bytes(b"mine")
        case 1:
            target.with_suffix(".block").mkdir(exist_ok=True)
        case 2:
            with suppress(FileExistsError):
                target.symlink_to("/etc")
        case _:
            with suppress(FileExistsError):
                os.mkfifo(target.with_suffix(".json"))
    return True


def _checkpoint(world: World) -> bool:
    """Cut short a mapped file that has no name, as a disk that fails does to whoever reads it. Only root can."""
    assert world.running is not None
    mapped = Path(f"/proc/{world.running.process.pid}/map_files")
    with suppress(PermissionError, FileNotFoundError, ProcessLookupError):
        names = [one for one in os.listdir(mapped) if "checkpoints/" in os.readlink(mapped / one)]
        for name in world.dice.sample(names, min(3, len(names))):
            descriptor = os.open(mapped / name, os.O_RDWR)
            os.ftruncate(descriptor, 0)
            os.close(descriptor)
        return bool(names)
    return False


def _disk_faults(world: World) -> bool:
    error = world.dice.choice([errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EMFILE, errno.ESTALE])
    before = world.faults.count
    world.faults.set(error, world.dice.choice([0.02, 0.2, 1.0]))
    time.sleep(world.dice.uniform(0.05, 0.4))
    world.faults.set(0, 0)
    world.done["calls on the disk that failed"] += world.faults.count - before
    return world.faults.count > before


def _memory_limit(world: World) -> bool:
    """Leave the process little more memory than it has, for a moment."""
    assert world.running is not None
    pid = world.running.process.pid
    with suppress(ProcessLookupError, FileNotFoundError):
        status = Path(f"/proc/{pid}/status").read_text()
        size = int(status.partition("VmSize:")[2].split()[0]) * 1024
        resource.prlimit(pid, resource.RLIMIT_AS, (size + world.dice.choice([0, 1, 8]) * MEGA, resource.RLIM_INFINITY))
        time.sleep(world.dice.uniform(0.02, 0.3))
        resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return True
    return False


def _slow_reader(world: World) -> bool:
    """A client that asks for a long stream and reads nothing of it; some of the earlier ones leave."""
    assert world.running is not None
    while len(world._slow) >= 6:
        world._slow.pop(0).close()
    stack = ExitStack()
    body = {**world.dice.choice(world.scripts)[0].body, "model": world.running.model, "max_tokens": 400, "stream": True}
    with suppress(OSError):
        stack.enter_context(raw(world.running.address, body | {"logprobs": 20}, TEXT))
        world._slow.append(stack)
        return True
    return False


def _kill(world: World) -> bool:
    world.end(signal.SIGKILL)
    world.start()
    return True


def _terminate(world: World) -> bool:
    world.end(signal.SIGTERM)
    world.start()
    return True


DISTURBANCES: dict[str, tuple[float, Callable[[World], bool]]] = {
    "block cut short": (10, _to_file(_truncate)),
    "block overwritten in place": (10, _to_file(_overwrite)),
    "block grown": (4, _to_file(_grow)),
    "block replaced by another": (8, _to_file(_replace)),
    "block removed": (6, _to_file(_remove)),
    "block replaced by a link": (2, _to_file(_link)),
    "session's file overwritten": (3, _to_file(_overwrite, ".json")),
    "session's file cut short": (3, _to_file(_truncate, ".json")),
    "session's file removed": (3, _to_file(_remove, ".json")),
    "checkpoint that cannot be read": (6, _checkpoint),
    "store removed": (1, _remove_store),
    "store moved away": (1, _move_store),
    "store put back": (1.5, _restore_store),
    "foreign file": (2, _foreign_files),
    "disk faults": (5, _disk_faults),
    "memory limit": (4, _memory_limit),
    "slow reader": (3, _slow_reader),
    "kill -9": (0.6, _kill),
    "SIGTERM": (0.3, _terminate),
}
"""What is done, and how often: weights, and functions that return whether it could be done."""


@contextmanager
def world(model: Path, folder: Path, seed: int, count: int = 8, turns: int = 5) -> Iterator[World]:
    """A server with conversations whose undisturbed answers are known."""
    dice = random.Random(seed)
    made = World(
        model, folder, scripts(dice, count, turns), dice, ("--memory", "3MB", "-x", "full", "--weights", "bfloat16")
    )
    made.references()
    try:
        yield made
    finally:
        made._stack.close()
