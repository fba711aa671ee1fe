"""Sessions: a cache is saved to a store, and continued later without reading its tokens again.

A save writes the blocks of 256 tokens (:mod:`~kvkeep.blocks.text`) that the store does not have, one further block
with the rest of the cache's state (the last tokens, resident entries, windows, codes), and the session's reference
(:mod:`~kvkeep.blocks.references`), which names them and has the token ids. Saved blocks never change, so a save costs
what is new, and sessions with the same beginning share its blocks.

A block that is missing or damaged is a miss: the cache then holds the tokens before it, and the text after them is read
again. It never gives other entries than those that were saved.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvkeep import transfer
from kvkeep.blocks import beginnings
from kvkeep.blocks.folder import BlockName
from kvkeep.blocks.references import Reference, check_version, checked, damaged
from kvkeep.blocks.store import ONLY, Store
from kvkeep.blocks.text import (
    Block,
    Target,
    TextRows,
    belongs_to_sessions,
    chain,
    origin,
    pieces,
    session_key,
)
from kvkeep.budget import size
from kvkeep.cache import KeepCache
from kvkeep.errors import (
    BlockVersion,
    KvkeepError,
    SessionDamaged,
    SessionError,
    SessionUnwritable,
    SessionVersion,
    StoreError,
    UsageError,
    naming_memory,
    out_of_memory,
    ran_out_of_memory,
)
from kvkeep.memory.disk_rows import check_read
from kvkeep.memory.extent import ShapeError, within
from kvkeep.memory.rows import BLOCK
from kvkeep.models.adapter import processes
from kvkeep.models.fingerprint import fingerprint
from kvkeep.policies.methods import Request
from kvkeep.stores.layer import Layer

log = logging.getLogger(__name__)

_TAIL = "tail."
_END = re.compile(r"end\.([1-9][0-9]{0,9})\.(.+)")
"""The name of a tensor of a window or a recurrent state at the end of a block."""


@dataclass
class Session:
    """A cache, and the data saved with it."""

    cache: KeepCache
    ids: list[list[int]]
    """Ids of the tokens in the cache, by row."""
    notes: dict[str, Any] = field(default_factory=dict)
    """JSON data of the program."""
    tokenizer: str | None = None
    """The fingerprint of the tokenizer that made the ids; None if there was none."""


class StoredSession(Reference):
    """A session of a store. writing: open for writing, which only one program can do at a time. Raises SessionError,
    and UsageError for an invalid name."""

    def __init__(self, store: Store, name: str, *, writing: bool = False) -> None:
        self.store, self.name, self.space = store, name, store.space(name)
        super().__init__(store.place(name, writing), writing=writing)

    @classmethod
    def at(cls, path: str | os.PathLike[str], *, writing: bool = False) -> Self:
        """Return the only session of the store at ``path``."""
        store = Store(path, quota=None)
        store.check()
        if not writing and not store.files(ONLY).exists():
            raise SessionError(f"There is no session at '{path}'.")
        return cls(store, ONLY, writing=writing)

    def close(self) -> None:
        """Close the session, so that another program may write to it. A path where nothing was saved is removed."""
        super().close()
        if self.name == ONLY and self.writing and not self.saves:
            self.store.remove_empty()

    @property
    def path(self) -> str:
        """The path of the session: of its store, if that holds nothing else."""
        return str(self.store.folder if self.name == ONLY else self.files.path)

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of the session's state, and of its blocks; (0, 0) before the first turn."""
        return (0, 0) if self.about is None else (self.about["state_bytes"], self.about["block_bytes"])

    def block(self, key: str) -> BlockName:
        """Return the full name of a block of this session's owner."""
        return BlockName(self.space, key)

    # -- saving -------------------------------------------------------------------------------------------

    @naming_memory("saving a session")
    def save(self, session: Session, forget: bool = False) -> bool:
        """Save the state of ``session`` as a turn; ``forget`` as in :func:`save_session`. If the session's folder was
        removed or replaced since the last save, the session is saved as a whole. Return whether it was. Raises
        SessionError; the previous turn then remains saved."""
        cache, before = session.cache, self.about or {}
        check_savable(cache)
        if before:
            with self.naming("saved"):
                check_version(before)
        length, lengths = cache.get_seq_length(), [len(row) for row in session.ids]
        if any(lengths) if not length else lengths != [length] * cache.rows:
            raise UsageError(f"A session needs the ids of all {length} tokens of its cache, for each of its rows.")
        parts = transfer.parts(cache)
        text = TextRows(cache, parts)
        state = {name: transfer.tensor_of(part) for name, part in parts.items() if name not in text.targets}
        state |= {f"{_TAIL}{short}": rows for short, rows in text.tail().items()}
        for place, end in cache.stream.record.ends.items():
            state |= {f"end.{place}.{name}": tensor for name, tensor in end.items()}
        key, state_bytes = session_key(), sum(one.nbytes for one in state.values())
        about = {
            "fingerprint": fingerprint(cache.model),
            "tokenizer": session.tokenizer,
            "family": cache.geometry.model_type,
            "method": cache.method.name,
            "budget": None if cache.request.budget is None else str(cache.request.budget),
            "options": cache.request.options(),
            "entries": cache.entries,
            "chunk": cache.stream.chunk,
            "past": transfer.header(cache),
            "notes": session.notes,
            "ids": session.ids,
            "by_token": text.targets,
            "state": key,
            "state_bytes": state_bytes,
            "block_bytes": text.nbytes,
            "created": float(before.get("created", time.time())),
            "saved": time.time(),
        }
        self.store.create()
        if renewed := self.renew():
            log.warning("The session '%s' was removed or replaced while in use; it is saved again.", self.name)
        try:
            names = self._write(cache, text, session.ids, state_bytes)
            self.store.blocks.write(self.block(key), state, text=[*map(self.block, (*names, key))])
            cache.stream.disk.check()
            self.commit(about | {"blocks": names})
        except (StoreError, SessionError) as error:
            self.store.blocks.remove(self.block(key))
            if isinstance(error, StoreError):
                raise SessionUnwritable(f"The session '{self.path}' cannot be saved: {error}") from error
            raise
        if "state" in before:
            self.store.blocks.remove(self.block(str(before["state"])))
        unnamed = {*map(str, before.get("blocks", ()))} - {*names}
        if not forget:  # prompts may begin with the others
            unnamed = {key for key in unnamed if text.start and belongs_to_sessions(key)}
        if unnamed:
            self.store.release(self.name, unnamed)
        return renewed

    def _write(self, cache: KeepCache, text: TextRows, ids: Sequence[Sequence[int]], state_bytes: int) -> list[str]:
        """Write the blocks that the store does not have, as far as they fit into the quota beside the state; return the
        names of all of them. Raises StoreError."""
        numbers, folder = text.blocks, self.store.blocks
        if not (count := len(numbers)):
            return []
        first, fitting = origin(cache, text.forms), folder.fitting(count, text.nbytes, state_bytes)
        if first is not None:
            names = chain(first, ids[0])
            cache.stream.record.name_blocks(names)  # beyond its exact part the text goes on after them
        else:  # the entries are no function of the ids: a block belongs to this text of this cache
            before = cache.stream.record.blocks
            names = [*before, *(session_key() for _ in range(numbers.stop - len(before)))]
            cache.stream.record.name_blocks(names)
            names = names[numbers.start : numbers.stop]
            fitting = fitting if fitting == count else 0  # a part of them is of no use
        if len((self.about or {}).get("blocks", ())) <= fitting < count:
            log.warning(
                "The session '%s' is larger than the quota, %s: %s is read again when it continues.",
                self.name,
                size(folder.quota or 0),
                f"the text after its first {fitting * BLOCK} tokens" if fitting else "its text",
            )
        blocks = [self.block(name) for name in names[:fitting]]
        for place in range(folder.use(blocks), len(blocks)):
            folder.write(blocks[place], text.block(numbers.start + place, ids), text=blocks)
        return names

    # -- loading ------------------------------------------------------------------------------------------

    def request(self, model: Any, tokenizer: str | None = None) -> Request:
        """Return the cache request that the session needs to continue with ``model``. The model is not run, and no
        block is read. tokenizer: the required fingerprint of the ids' tokenizer; None: any. Raises SessionError."""
        with self.naming():
            return self._request(model, tokenizer)

    def load(self, model: Any, tokenizer: str | None = None, cache: KeepCache | None = None) -> Session:
        """Return the saved session, ready to continue with ``model``. If a block is missing or damaged, the cache holds
        fewer tokens than were saved; ``ids`` are always those that it holds. cache: an empty cache of
        :meth:`request` to fill; None: a new one is made. Raises SessionError."""
        with self.naming():
            while True:
                request, about, mark = self._request(model, tokenizer), self.about, self.mark
                assert about is not None
                cache = KeepCache(model, request=request) if cache is None else cache
                count = self._restore(cache, about)
                if count != about["past"].get("length") and not self.writing:
                    self._read()  # another program may have saved the session meanwhile
                if self.mark == mark:
                    break
                cache.reset()
            ids = [row[:count] for row in about["ids"]] if count else []
            return Session(cache, ids, copy.deepcopy(about["notes"]), about["tokenizer"])

    @contextmanager
    def naming(self, what: str = "continued") -> Iterator[None]:
        """Name the session in errors raised within the block. what: what cannot be done with it."""
        if self.about is None:
            raise SessionError(f"There is no session at '{self.path}': its first turn was never saved.")
        try:
            yield
        except SessionError as error:
            raise type(error)(f"The session '{self.path}' cannot be {what}: {error}") from error.__cause__
        except RecursionError as error:
            raise SessionDamaged(f"The session '{self.path}' cannot be {what}: its tables are too deep.") from error
        except KvkeepError as error:  # this machine lacks a method or a folder
            raise SessionError(f"The session '{self.path}' cannot be {what} here: {error}") from error

    def _request(self, model: Any, tokenizer: str | None) -> Request:
        about = checked(self.about)
        if about["fingerprint"] != fingerprint(model):
            raise SessionError(
                f"it was saved with another model (a '{about['family']}' model with other weights, dtype or layers); "
                "load that one, or start a new session."
            )
        if tokenizer is not None and about["tokenizer"] not in (None, tokenizer):
            raise SessionError(
                "it was saved with another tokenizer, whose token ids differ; load that one, or start a new session."
            )
        known = range(model.get_input_embeddings().num_embeddings)
        if any(row and not (min(row) in known and max(row) in known) for row in about["ids"]):
            raise damaged("it has token ids that the model does not have")
        with suppress(TypeError):
            request = Request.parse(about["method"], about["budget"], **about["options"])
            if request.options() == about["options"]:
                return request
        raise damaged("its options are not those of a cache")

    def _restore(self, cache: KeepCache, about: dict[str, Any]) -> int:
        """Fill the empty ``cache`` from the blocks that ``about`` names; return the number of tokens it holds then."""
        past, folder = about["past"], self.store.blocks
        names = [self.block(key) for key in about["blocks"]]
        try:
            if not past["length"]:
                return 0
            blocks, error = folder.read_first(names, transfer.home_of_blocks(cache))
            if error is not None:
                raise error
            state = folder.read(self.block(about["state"]))
            folder.use([*names, self.block(about["state"])])
            _fill(cache, about, blocks, state)
            check_read(*(tensor for block in blocks for tensor in block.values()))
        except (StoreError, ShapeError) as error:
            if ran_out_of_memory(error):  # reading the text again may give a lossy cache other entries
                raise out_of_memory(f"restoring a session of {past['length']} tokens", error) from error
            problem = str(error) if isinstance(error, StoreError) else f"It is not as kvkeep writes it ({error})."
            if isinstance(error, BlockVersion) and past.get("plain") is not True:
                raise SessionVersion(
                    f"its text cannot be read again, as it has more than token ids. {problem}"
                ) from error
        except KvkeepError:
            raise
        except Exception as error:  # restoring malformed tensors may raise anything
            if ran_out_of_memory(error):
                raise out_of_memory(f"restoring a session of {past['length']} tokens", error) from error
            problem = f"Its tensors are not those of a cache of this method ({type(error).__name__})."
        else:
            cache.stream.record.name_blocks([""] * _first_block(about) + about["blocks"])
            return int(past["length"])
        cache.reset()
        if past.get("plain") is not True:
            raise SessionDamaged(f"its text cannot be read again, as it has more than token ids. {problem}")
        log.warning("A part of the session '%s' is read again: %s", self.name, problem)
        if len(about["ids"]) > 1:
            return 0
        prompt = [*about["ids"][0], 0]
        return beginnings.begin(folder, cache, beginnings.find(folder, self.space, cache, prompt), prompt)


def _fill(cache: KeepCache, about: dict[str, Any], blocks: Sequence[Block], state: Block) -> None:
    """Fill the empty ``cache``. Raises SessionError, and ShapeError for what is not the state of such a cache."""
    past = about["past"]
    if past["shares"] is not None:
        cache.reset(past["shares"])
    if (cache.entries, cache.stream.chunk) != (about["entries"], about["chunk"]):
        raise SessionError(
            f"it was saved with {about['entries']} entries per layer and chunks of {about['chunk']} tokens; here its "
            f"budget gives {cache.entries} entries and chunks of {cache.stream.chunk}. Start a new session."
        )
    first = _first_block(about)
    tail = {name.removeprefix(_TAIL): rows for name, rows in state.items() if name.startswith(_TAIL)}
    several = {part: [*pieces(Target(*given), blocks, tail, first)] for part, given in about["by_token"].items()}
    for part in several:
        if part.startswith("layer.") and ".resident." not in part:  # (rows, kv_heads, n, width)
            several[part] = [one.unflatten(0, (past["rows"], -1)) for one in several[part]]
    rest = {name: one for name, one in state.items() if not name.startswith(_TAIL) and not _END.fullmatch(name)}
    # A cache writes to its own state; other caches may hold the same block.
    transfer.restore(cache, set(rest), lambda name: rest[name].clone(), past, several)
    if transfer.header(cache) != past or set(transfer.parts(cache)) != {*rest, *several}:
        raise ShapeError(f"it does not hold the tensors of method '{cache.method.name}'")
    for number, holding in enumerate(cache.holdings):
        if isinstance(holding, Layer):
            if holding.length != past["length"]:
                raise ShapeError(f"layer {number} has {holding.length} of {past['length']} tokens")
            holding.check()
    if past["shares"] is not None:
        _check_division(cache)
    if cache.ledger.records:  # a checkpoint may read them with the model
        within("ids", cache.ledger.ids.view(), 0, cache.model.get_input_embeddings().num_embeddings)
    cache.stream.record.keep_ends(_ends(state))


def _check_division(cache: KeepCache) -> None:
    """Raise ShapeError where the lanes of all layers have more entries together than the budget gives them."""
    assert cache.entries is not None
    resident = cache.method.division(cache.geometry, cache.entries).resident
    entries = places = 0
    for layer in cache.stream.bounded:
        lanes, budgets, store = cache.rows * layer.heads, layer.resident.banks.budgets, layer.evicted
        entries += sum(budgets) * lanes // len(budgets) - resident * lanes
        places += store.places(lanes) - (store.max_entries or 0) * lanes
    if entries > 0 or places > 0:
        raise ShapeError("it has more entries than its budget")


def _first_block(about: dict[str, Any]) -> int:
    """Return the number of a saved session's first block in its text, whose last whole block is the session's last
    one."""
    return int(about["past"]["length"]) // BLOCK - len(about["blocks"]) if about["by_token"] else 0


def _ends(state: Block) -> dict[int, dict[str, Tensor]]:
    """Return the windows and recurrent states at the ends of blocks, by the number of tokens."""
    ends: dict[int, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if match := _END.fullmatch(name):
            ends.setdefault(int(match[1]), {})[match[2]] = tensor
    return ends


Where = str | os.PathLike[str] | StoredSession
"""A path, or a session open for writing."""


def save_session(where: Where, session: Session, *, forget: bool = False) -> None:
    """Save ``session`` as one transaction. where: the path of a folder for this session, or an open session. forget:
    remove the blocks of the previous turn that are of another text, unless other sessions have them.

    Raises SessionError if the cache cannot be saved, another program has the session open, or the folder cannot be
    written, and UsageError for a folder with other files. Earlier turns then remain saved.
    """
    with nullcontext(where) if isinstance(where, StoredSession) else StoredSession.at(where, writing=True) as stored:
        stored.save(session, forget)


@naming_memory("restoring a session")
def load_session(where: Where, model: Any, tokenizer: str | None = None) -> Session:
    """Return the saved session, ready to continue with ``model``. tokenizer: the required fingerprint of the ids'
    tokenizer; None: any. What blocks do not have, because they are missing or damaged, is read by the model.

    Raises SessionError if there is no session, if its reference is damaged (SessionDamaged), or if it was saved with
    another model or tokenizer.
    """
    with nullcontext(where) if isinstance(where, StoredSession) else StoredSession.at(where) as stored:
        session = stored.load(model, tokenizer)
        assert stored.about is not None
        all_ids = stored.about["ids"]
        count = session.cache.get_seq_length()
        if all_ids and count < len(all_ids[0]):
            if len(all_ids) > 1:
                raise SessionDamaged(f"The session '{stored.path}' cannot be continued: its blocks are damaged.")
            with torch.no_grad():
                missing = torch.tensor(all_ids, device=model.device)[:, count:]
                model(input_ids=missing, cache=session.cache, use_cache=True, logits_to_keep=1)
            session.ids = all_ids
        return session


def check_savable(cache: Cache) -> None:
    """Raise SessionError if a cache of this kind cannot be saved."""
    if not isinstance(cache, KeepCache):
        raise SessionError("A session with transformers' own cache cannot be saved; use method 'full'.")
    if (parts := processes(cache.model)) > 1:
        raise SessionError(f"The session cannot be saved: its heads are split over {parts} processes.")
    if others := cache.geometry.unbounded_layers:
        raise SessionError(
            f"The session cannot be saved: '{cache.geometry.model_type}' has a '{others[0].kind}' layer, whose state "
            "is not keys and values."
        )
