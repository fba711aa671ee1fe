"""A session of a damaged store continues with the right bits, or is refused by one sentence."""

from __future__ import annotations

import copy
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from storing import IDS, METHODS, files, following, model, next_logits, store_text

from kvkeep import SessionError, UsageError, load_session
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import MARKER, Store

CASES = 60
pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a session of each method, which share the blocks of an owner, or have their own."""
    folder = tmp_path_factory.mktemp("whole") / "store"
    for name in METHODS:
        store_text(Store(folder), f"me/{name}", name)
        store_text(Store(folder), f"you/{name}", name, 300)
    return folder


@pytest.fixture(scope="module")
def others() -> list[Any]:
    """Models of the same sizes: one bit of the weights differs, or a setting of the rotation."""
    made = []
    for place in (1, 77, -1):
        other = copy.deepcopy(model())
        weights = [tensor for _, tensor in other.named_buffers() if tensor.dtype in (torch.uint8, torch.int8)]
        data = max([*other.parameters(), *weights], key=torch.numel).detach()
        data.view(-1).view(torch.uint8)[place] ^= 1
        made.append(other)
    rotated = copy.deepcopy(model())
    rotated.config.rope_parameters = rotated.config.rope_parameters | {"rope_theta": 12345.0}
    return [*made, rotated]


def replace(path: Path, data: bytes) -> None:
    """Write another file: sessions loaded before have mapped the one that is there."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def restore(folder: Path, content: dict[Path, bytes]) -> None:
    """Make the files of a store what they were; those that still are stay."""
    for path in {*files(folder)} - {*content}:
        path.unlink()
    for path, data in content.items():
        if not path.exists() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(path, data)


def change_bytes(path: Path, kind: str, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    place = draw.randrange(len(data)) if data else 0
    if kind == "flip" and data:
        data[place] ^= 1 << draw.randrange(8)
    elif kind == "zero":
        data[place : place + 512] = bytes(len(data[place : place + 512]))
    elif kind == "truncate":
        del data[place:]
    elif kind == "append":
        data += draw.randbytes(draw.randrange(1, 100))
    replace(path, data)


def damage(folder: Path, draw: random.Random) -> str:
    """Do one thing to the files of a store; return what."""
    paths = files(folder)
    blocks = [path for path in paths if path.suffix == ".block"]
    references = [path for path in paths if path.suffix == ".json"]
    kind = draw.choice("flip zero truncate append remove swap_blocks copy_block swap_references rename".split())  # noqa: SIM905
    pair = draw.sample(references if kind == "swap_references" else blocks, 2)
    if kind.startswith("swap"):
        first, second = (path.read_bytes() for path in pair)
        replace(pair[0], second)
        replace(pair[1], first)
    elif kind == "copy_block":
        replace(pair[1], pair[0].read_bytes())
    elif kind == "rename":
        pair[0].rename(pair[0].with_stem(f"{draw.randrange(16**32):032x}"))
    elif kind == "remove":
        draw.choice(paths).unlink()
    else:
        change_bytes(draw.choice([*paths, *blocks, *references]), kind, draw)
    return kind


def loaded(folder: Path, name: str, own: Any, tokenizer: str, again: bool) -> str:
    """Load a session of a damaged store; return what came of it. again: with the text that is missing read again."""
    method = name.partition("/")[2]
    try:
        with StoredSession(Store(folder), name) as stored:
            session = load_session(stored, own, tokenizer) if again else stored.load(own, tokenizer)
    except SessionError as error:
        assert len(str(error).splitlines()) == 1
        return "refused"
    except UsageError as error:  # the folder is no store any more
        assert (str(folder) in str(error) and not (folder / MARKER).exists()) or (
            folder / MARKER
        ).read_bytes() != b"1\n"
        return "refused"
    length = session.cache.get_seq_length()
    if length:
        assert session.ids == IDS[:, :length].tolist()
        assert torch.equal(next_logits(session.cache), following(method, length))
    assert not again or length == {"me": 530, "you": 300}[name.partition("/")[0]]
    return f"{length} tokens"


def test_damage_gives_the_right_bits_or_a_sentence(whole: Path, others: list[Any], tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    folder = Path(shutil.copytree(whole, tmp_path / "store"))
    content = {path: path.read_bytes() for path in files(folder)}
    for case in range(CASES):
        draw = random.Random(case)
        name = f"{draw.choice(['me', 'you'])}/{draw.choice([*METHODS])}"
        restore(folder, content)
        if case % 8:
            kind = " and ".join(damage(folder, draw) for _ in range(draw.choice((1, 1, 2))))
            print(case, kind, name)
            seen[loaded(folder, name, model(), "tokenizer", again=case % 10 == 9)] += 1
        elif case % 16:
            assert loaded(folder, name, draw.choice(others), "tokenizer", again=True) == "refused"
        else:
            assert loaded(folder, name, model(), "another", again=True) == "refused"
    assert seen["refused"] > CASES // 50 and seen["530 tokens"] + seen["300 tokens"] > CASES // 4
    assert seen["256 tokens"] and seen["0 tokens"], seen


def test_a_damaged_block_is_written_again(whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "store"))
    store = Store(folder)
    with StoredSession(store, "me/full") as stored:
        assert stored.about is not None
        path = store.blocks.path(stored.block(stored.about["blocks"][1]))
    content = path.read_bytes()
    change_bytes(path, "zero", random.Random(3))
    with StoredSession(store, "me/full", writing=True) as stored:
        session = load_session(stored, model())
        assert "is read again: The block" in caplog.text and not path.exists()
        stored.save(session)
    assert path.read_bytes() == content
    assert loaded(folder, "me/full", model(), "tokenizer", again=False) == "530 tokens"
