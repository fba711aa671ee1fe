"""Recurrent states: short convolutions, linear attention, and Mamba. Their size does not depend on the text's length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from kvkeep.contracts.entries import EntryState
from kvkeep.errors import UsageError
from kvkeep.memory.extent import ShapeError, fits
from kvkeep.memory.inference import outside_inference_mode
from kvkeep.memory.meter import storage_bytes

_KINDS = ("conv", "recurrent")


class RecurrentState(LinearAttentionLayer):
    """The recurrent state of one layer, as transformers computes it.

    elements: of one row, of the convolution and of the recurrence; None: not known. A state has up to two tensors: the last inputs of a convolution, (batch, channels, kernel), in the model's dtype,
    and the state of a recurrence, (batch, heads, ...), in float32. A pass replaces both, so tokens cannot be removed;
    a copy of an earlier state can be restored.
    """

    is_kvkeep = True
    is_sliding = False
    compressed_bytes = bookkeeping_bytes = 0

    def __init__(self, elements: tuple[int, int] | None = None, number_of_states: int = 1) -> None:
        super().__init__(number_of_states)
        self.elements = elements

    # transformers writes states in place, which a tensor made in inference mode does not allow later
    update_conv_state = outside_inference_mode(LinearAttentionLayer.update_conv_state)
    update_recurrent_state = outside_inference_mode(LinearAttentionLayer.update_recurrent_state)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for kind, tensors in zip(_KINDS, (self.conv_states, self.recurrent_states), strict=True):
            yield from ((f"{kind}.{number}", tensor) for number, tensor in tensors.items() if tensor is not None)

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 before the first token."""
        return next((len(tensor) for _, tensor in self._named()), 0)

    @property
    def resident_bytes(self) -> int:
        """Bytes allocated for the state."""
        return storage_bytes(*(tensor for _, tensor in self._named()))

    def entry_states(self, length: int, batch: int) -> Tensor:
        """Return (batch, 1, ``length``) int8 codes: every token is part of the state, and counts as resident."""
        return torch.full((batch, 1, length), EntryState.RESIDENT, dtype=torch.int8)

    def select(self, index: Tensor) -> None:
        """Make the batch the rows of ``index``."""
        if self.rows:
            self.reorder_cache(index)

    def state(self) -> dict[str, Tensor]:
        """Return the state's tensors by name ("conv.0", "recurrent.0"), as views."""
        return {
            name: tensor[..., -self.conv_kernel_size[int(name[5:])] :] if name.startswith("conv.") else tensor
            for name, tensor in self._named()
        }

    def copied(self) -> dict[str, Tensor]:
        """Return :meth:`state` in separate memory."""
        return {name: tensor.clone() for name, tensor in self.state().items()}

    @outside_inference_mode
    def restore(self, state: dict[str, Tensor], length: int) -> None:
        """Replace the state by a copy of what :meth:`state` returned; without tensors it is empty. Raises ShapeError
        for tensors of other names, sizes or dtypes."""
        self._check(state)
        empty = dict.fromkeys(range(self.number_of_states))
        self.conv_states, self.recurrent_states = dict(empty), dict(empty)
        for name, tensor in state.items():
            kind, _, number = name.partition(".")
            (self.conv_states if kind == "conv" else self.recurrent_states)[int(number)] = tensor.clone()
        self.is_conv_states_initialized = {number: one is not None for number, one in self.conv_states.items()}
        self.is_recurrent_states_initialized = {number: one is not None for number, one in self.recurrent_states.items()}
        self.has_previous_state = dict(self.is_conv_states_initialized)
        for number, conv in self.conv_states.items():
            if conv is not None:
                self.conv_kernel_size[number], self.dtype, self.device = conv.shape[-1], conv.dtype, conv.device

    def _check(self, state: dict[str, Tensor]) -> None:
        """Raise ShapeError unless ``state`` is empty or has the names and sizes of a state."""
        if not state:
            return
        convs = [name for name in state if name.startswith("conv.")]
        if not convs or set(state) - {f"{kind}.{n}" for kind in _KINDS for n in range(self.number_of_states)}:
            raise ShapeError(f"a recurrent state has no tensors {', '.join(sorted(state))}")
        rows = len(state[convs[0]]) if state[convs[0]].ndim else 0
        for name, tensor in state.items():
            axes = 3 if name in convs else tensor.ndim
            fits(name, tensor, (rows, *[None] * (axes - 1)))
        if self.elements is None:
            return
        sizes = {kind: sum(one[0].numel() for name, one in state.items() if name.startswith(kind)) for kind in _KINDS}
        if (sizes["conv"], sizes["recurrent"]) != self.elements:
            raise ShapeError(f"a recurrent state has {self.elements} elements, and this has {tuple(sizes.values())}")

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise UsageError if the last tokens cannot be removed."""
        if tokens_to_remove and self.rows and not (self.record_past and self.is_croppable):
            raise UsageError(
                "This model has recurrent layers, whose state cannot go back, so tokens cannot be removed from the "
                "end; call reset() and read the text again, or rewind() to a state that was kept."
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of a convolution that records its inputs. Raises UsageError as
        :meth:`check_crop`."""
        self.check_crop(tokens_to_remove)
        if self.record_past and self.rows:
            super().crop(tokens_to_remove)


class HybridHolding:
    """What a layer holds that has attention and a recurrence side by side: entries, and a recurrent state."""

    def __init__(self, entries: Any, recurrent: RecurrentState) -> None:
        self.entries, self.recurrent = entries, recurrent

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 before the first token."""
        return int(self.entries.rows)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the entries that attention reads directly, and of the recurrent state."""
        return int(self.entries.resident_bytes + self.recurrent.resident_bytes)

    @property
    def compressed_bytes(self) -> int:
        """Bytes of entries in a smaller form."""
        return int(self.entries.compressed_bytes)

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes of positions and tables."""
        return int(self.entries.bookkeeping_bytes)

    def entry_states(self, length: int, batch: int) -> Tensor:
        """Return the states of the entries, (batch, kv_heads, ``length``) int8 codes."""
        codes: Tensor = self.entries.entry_states(length, batch)
        return codes

    def select(self, index: Tensor) -> None:
        """Make the batch the rows of ``index``."""
        self.entries.select(index)
        self.recurrent.select(index)

    def state(self) -> dict[str, Any]:
        """Return the tensors of both, by name."""
        return {**self.entries.state(), **self.recurrent.state()}

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        """Restore what :meth:`state` returned."""
        recurrent = {name: tensor for name, tensor in state.items() if name.partition(".")[0] in _KINDS}
        self.recurrent.restore(recurrent, length)
        self.entries.restore({name: tensor for name, tensor in state.items() if name not in recurrent}, length)
