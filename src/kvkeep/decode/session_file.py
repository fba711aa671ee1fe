"""The file of a session: tensors by name, as pages of a :class:`~kvkeep.decode.journal.Journal`.

A tensor is a sequence of spans along the axis on which it may grow; each span is a page. A save compares the spans in
the file with the tensor, keeps the equal ones, and appends the rest. So a tensor that grew adds its new rows, a cropped
one is written from the first change, and one that changed completely is rewritten. The file is rewritten when it has
more dead bytes than live ones.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from kvkeep.decode.journal import HEADER, Journal, Writer, damaged, digest_of, unwritable
from kvkeep.decode.shared_journal import SharedWriter
from kvkeep.errors import SessionError
from kvkeep.memory.rows import Rows

NAME_OF_IDS = "session.ids"
"""The name of the tensor of token ids."""
PAGE_BYTES = 1 << 17
"""Bytes of a full page; a page has at least one row."""
SLACK_BYTES = 1 << 16
"""Dead bytes that are always allowed."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class TensorForm:
    """Shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, part: Tensor | Rows) -> TensorForm:
        """Return the form of a tensor, or of all rows of a store with at least one row."""
        if isinstance(part, Tensor):
            return cls(tuple(part.shape), part.dtype)
        _, row = next(part.read(part.first, part.first + 1))
        return cls((*row.shape[:-2], part.length - part.first, row.shape[-1]), row.dtype)

    @property
    def axis(self) -> int:
        """The axis along which such a tensor may grow: entries come before their width."""
        return len(self.shape) - (2 if len(self.shape) > 2 else 1)

    @property
    def rows(self) -> int:
        """The length along that axis; 1 for a scalar."""
        return self.shape[self.axis] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        size = self.dtype.itemsize
        for axis, length in enumerate(self.shape):
            size *= length if axis != self.axis else 1
        return size

    @property
    def page_rows(self) -> int:
        """Rows of a full page."""
        return max(1, PAGE_BYTES // max(self.row_bytes, 1))


class PageSpan(NamedTuple):
    """A span of a tensor: ``rows`` rows of the page at offset ``place``, after its first ``skip`` rows."""

    rows: int
    place: int
    skip: int


@dataclass(frozen=True)
class _StoredTensor:
    form: TensorForm
    spans: list[PageSpan]


class SessionFile:
    """A session on disk.

    about: the JSON data beside the tensors, None before the first turn; stored: shapes and dtypes by name; turns: the
    number of saves; created, saved: seconds since 1970.

    writing: open for writing, which only one program can do at a time; shared: programs on several machines use the
    file. Raises SessionError, also if another program writes.
    """

    def __init__(self, path: str | os.PathLike[str], *, writing: bool = False, shared: bool = False) -> None:
        self._journal: Journal = (SharedWriter if shared else Writer)(path) if writing else Journal(path)
        try:
            self._fold()
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
            self.close()
            raise damaged(self._journal.path) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, so that another program may write to it."""
        self._journal.close()

    def follows(self, other: SessionFile) -> bool:
        """Return whether ``other``, now closed, was the last writer of this shared session."""
        journal = self._journal
        return isinstance(journal, SharedWriter) and journal.before == other._journal.mark

    @property
    def mark(self) -> str:
        """The unique mark of the last writer."""
        return self._journal.mark.hex()

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._journal.closed

    def remove(self) -> None:
        """Remove a session that is open for writing."""
        assert isinstance(self._journal, Writer)
        self._journal.remove()

    # -- reading ------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The path of the file."""
        return str(self._journal.path)

    @property
    def stored(self) -> dict[str, TensorForm]:
        """Shapes and dtypes by name."""
        return {name: stored.form for name, stored in self._table.items()}

    def tensor(self, name: str) -> Tensor:
        """Read one tensor. Raises SessionError if its bytes differ from those written."""
        stored = self._table[name]
        form, start = stored.form, 0
        tensor = torch.empty(form.shape, dtype=form.dtype)
        for span in stored.spans:
            part = tensor.narrow(form.axis, start, span.rows) if form.shape else tensor
            part.copy_(_rows(self._journal, form, span))
            start += span.rows
        return tensor

    def _fold(self) -> None:
        """Apply all turns in order."""
        self.about: Any = None
        self.turns, self.created, self.saved = 0, time.time(), time.time()
        self._notes: Any = {}
        self._table: dict[str, _StoredTensor] = {}
        for payload in self._journal.turns:
            turn = json.loads(payload)
            self._table = {
                name: self._grown(name, _DTYPES[dtype], shape, kept, spans)
                for name, (dtype, shape, kept, spans) in turn["tensors"].items()
            }
            self._notes = _with(turn["notes"], self._notes)
            self.about = turn["about"]
            self.turns, self.created, self.saved = int(turn["turn"]), float(turn["created"]), float(turn["saved"])
        for stored in self._table.values():
            self._check(stored)
        if self._journal.turns:
            self.about = self.about | {"notes": self._notes}

    def _grown(self, name: str, dtype: torch.dtype, shape: list[int], kept: int, spans: list[Any]) -> _StoredTensor:
        before = self._table[name].spans[:kept] if kept else []
        return _StoredTensor(TensorForm(tuple(shape), dtype), [*before, *(PageSpan(*map(int, span)) for span in spans)])

    def _check(self, stored: _StoredTensor) -> None:
        """Raise ValueError unless the spans have the tensor's length, so that no more is allocated than was stored."""
        form = stored.form
        if any(type(size) is not int or size < 0 for size in form.shape):
            raise ValueError("a shape")
        for rows, place, skip in stored.spans:
            length = self._journal.pages[place][0]
            if (
                not form.row_bytes
                or length % form.row_bytes
                or rows < 1
                or not 0 <= skip <= length // form.row_bytes - rows
            ):
                raise ValueError("a span")
        if sum(span.rows for span in stored.spans) != (form.rows if form.row_bytes else 0):
            raise ValueError("spans")

    # -- writing ------------------------------------------------------------------------------------

    def save(
        self, parts: Mapping[str, Tensor | Rows], about: dict[str, Any], added: int = 0, *, anew: bool = False
    ) -> None:
        """Append the changes of ``parts`` (copied to the host one page at a time) and ``about`` (plain types). added:
        slots since the previous save, by which windows moved. After an error, the file is unchanged. anew: rewrite the
        file without its earlier data. Raises SessionError."""
        writer, notes = self._journal, json.loads(json.dumps(about.get("notes", {})))  # the caller may change its notes
        assert isinstance(writer, Writer)
        try:
            try:
                table, changes = self._append(writer, parts, self._table, added), _beyond(notes, self._notes)
                writer.commit(self._turn(self.turns + 1, table, self._table, changes, about))
            except BaseException:
                writer.undo()
                raise
        except OSError as error:
            raise unwritable(writer.path, error) from error
        self._table, self._notes, self.about = table, notes, about | {"notes": notes}
        self.turns += 1
        if (anew and self.turns > 1) or self._wasteful():
            try:
                writer.rewrite(lambda fresh: self._anew(fresh, parts, about))
                self._fold()
            except OSError as error:  # the turn is saved; the next one tries again
                if anew:
                    raise unwritable(writer.path, error) from error

    def copy(self, path: str | os.PathLike[str]) -> None:
        """Copy the session to a new file. Raises SessionError if the file exists, or if a page is damaged."""
        if self.about is None:
            raise empty(self.path)
        with SessionFile(path, writing=True) as twin:
            if twin.turns:
                raise SessionError(f"There is a session at '{path}' already; remove it, or name another file.")
            twin.turns, twin.created = self.turns - 1, self.created
            twin.save(_Tensors(self), self.about)

    def _anew(self, fresh: Writer, parts: Mapping[str, Tensor | Rows], about: dict[str, Any]) -> None:
        table = self._append(fresh, parts, {})
        fresh.commit(self._turn(self.turns, table, {}, _beyond(about.get("notes", {}), {}), about))

    @staticmethod
    def _append(
        writer: Writer, parts: Mapping[str, Tensor | Rows], before: dict[str, _StoredTensor], added: int = 0
    ) -> dict[str, _StoredTensor]:
        table = {}
        for name, part in parts.items():
            form = TensorForm.of(part)
            if form.dtype not in _NAMES:
                raise SessionError(f"The session cannot be saved: its file format has no {form.dtype} ('{name}').")
            spans = _kept(part, form, before[name], writer, added) if name in before else []
            start, total = sum(span.rows for span in spans), form.rows if form.row_bytes else 0
            for low in range(start, total, form.page_rows):
                rows = min(form.page_rows, total - low)
                data = _bytes(part, form, low, rows)
                spans.append(PageSpan(rows, writer.add([data], digest_of([data])), 0))
            table[name] = _StoredTensor(form, spans)
        return table

    def _turn(
        self,
        number: int,
        table: dict[str, _StoredTensor],
        before: dict[str, _StoredTensor],
        notes: Any,
        about: dict[str, Any],
    ) -> bytes:
        tensors = {}
        for name, stored in table.items():
            known = before[name].spans if name in before else []
            kept = next(
                (at for at, (new, old) in enumerate(zip(stored.spans, known, strict=False)) if new != old), None
            )
            kept = min(len(known), len(stored.spans)) if kept is None else kept
            tensors[name] = [_NAMES[stored.form.dtype], stored.form.shape, kept, stored.spans[kept:]]
        self.saved = time.time()
        turn = {"turn": number, "created": self.created, "saved": self.saved, "tensors": tensors}
        rest = {name: value for name, value in about.items() if name != "notes"}
        return json.dumps(turn | {"notes": notes, "about": rest}, separators=(",", ":")).encode()

    def _wasteful(self) -> bool:
        """Return whether the file has more dead bytes than live ones, or many more pages than it needs."""
        journal, places = self._journal, {span.place for stored in self._table.values() for span in stored.spans}
        living = sum(HEADER.size + journal.pages[place][0] for place in places) + len(journal.turns[-1])
        needed = sum(-(-stored.form.rows // stored.form.page_rows) for stored in self._table.values())
        return (
            journal.end > 2 * living + SLACK_BYTES
            or sum(len(stored.spans) for stored in self._table.values()) > 4 * needed + 999
        )


class _Tensors(Mapping[str, Tensor]):
    """The tensors of a session file, read one at a time."""

    def __init__(self, file: SessionFile) -> None:
        self._file = file

    def __getitem__(self, name: str) -> Tensor:
        return self._file.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.stored)

    def __len__(self) -> int:
        return len(self._file.stored)


def empty(path: str) -> SessionError:
    """Return the error for a session whose first turn was not saved."""
    return SessionError(f"There is no session at '{path}': its first turn was never saved.")


def _kept(part: Tensor | Rows, form: TensorForm, before: _StoredTensor, writer: Writer, added: int) -> list[PageSpan]:
    """Return the spans that ``part`` shares with ``before``: the first ones, or those of a window that moved."""
    if (before.form.dtype, before.form.row_bytes) != (form.dtype, form.row_bytes) or not form.shape:
        return []
    moved = added + before.form.rows - form.rows
    for gone in (0, moved) if 0 < moved < before.form.rows else (0,):
        kept: list[PageSpan] = []
        start = 0
        for rows, place, skip in before.spans:
            over = min(gone, rows)
            gone -= over
            span = PageSpan(rows - over, place, skip + over)
            if not span.rows:
                continue
            if start + span.rows > form.rows or not _same(part, form, start, span, writer):
                break
            kept.append(span)
            start += span.rows
        if kept:
            return kept
    return []


def _same(part: Tensor | Rows, form: TensorForm, start: int, span: PageSpan, writer: Writer) -> bool:
    """Return whether the rows of ``part`` from ``start`` equal those of ``span``."""
    length, digest = writer.pages[span.place]
    current = digest_of([_bytes(part, form, start, span.rows)])
    if length == span.rows * form.row_bytes:
        return current == digest
    rows = _rows(writer, form, span)
    return current == digest_of([_bytes(rows, form, 0, span.rows)])


def _rows(journal: Journal, form: TensorForm, span: PageSpan) -> Tensor:
    """Read the rows of ``span``."""
    page = torch.frombuffer(bytearray(journal.page(span.place)), dtype=form.dtype)
    if not form.shape:
        return page[0]
    shape = (*form.shape[: form.axis], -1, *form.shape[form.axis + 1 :])
    return page.view(shape).narrow(form.axis, span.skip, span.rows)


def _bytes(part: Tensor | Rows, form: TensorForm, start: int, rows: int) -> Any:
    """Return the bytes of some rows. They are copied only if they are not contiguous on the host."""
    if isinstance(part, Tensor):
        found = part.detach().narrow(form.axis, start, rows) if form.shape else part.detach()
    else:
        pieces = [piece.detach() for _, piece in part.read(part.first + start, part.first + start + rows)]
        found = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-2)
    return found.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _beyond(notes: Any, before: Any) -> dict[str, Any]:
    """Return the changes with which :func:`_with` makes ``notes`` from ``before``. A list has the items after the
    shared part."""
    changes: dict[str, Any] = {}
    for name, value in notes.items():
        old = before.get(name)
        if isinstance(value, list):
            shared = 0
            for new, other in zip(value, old if isinstance(old, list) else [], strict=False):
                if new != other:
                    break
                shared += 1
            changes[name] = [shared, value[shared:]]
        else:
            changes[name] = [None, value]
    return changes


def _with(changes: dict[str, Any], before: Any) -> dict[str, Any]:
    return {
        name: value if kept is None else [*before.get(name, [])[:kept], *value]
        for name, (kept, value) in changes.items()
    }
