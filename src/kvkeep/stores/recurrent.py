"""Recurrent states of short convolutions, linear attention and Mamba. Their size is fixed, however long the text is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from kvkeep.contracts.entries import EntryState
from kvkeep.errors import UsageError
from kvkeep.memory.extent import ShapeError, fits
from kvkeep.memory.inference import outside_inference_mode
from kvkeep.memory.meter import storage_bytes

STATE = "state."
"""The beginning of the names of a state's tensors."""
NOTES = 8
"""The maximum number of states of an unbounded cache that are noted, one for each token of a pass with drafts."""
_KINDS = ("conv", "recurrent")
_CONV = ".conv."


class RecurrentState(LinearAttentionLayer):
    """The recurrent state of one layer, as transformers computes it.

    A state has up to two tensors: the last inputs of a convolution, (batch, channels, kernel), in the model's dtype,
    and the state of a recurrence, (batch, heads, ...), in float32. A pass overwrites both, so tokens cannot be removed;
    a copy of an earlier state can be restored. elements: of both tensors of one row; None: not known. in_order: the
    module computes in the order of the text, so that no bit depends on how many tokens are read at once.
    """

    is_kvkeep = True
    is_sliding = False
    compressed_bytes = bookkeeping_bytes = 0
    record_past: bool

    def __init__(
        self, elements: tuple[int, int] | None = None, number_of_states: int = 1, in_order: bool = False
    ) -> None:
        super().__init__(number_of_states)
        self.elements, self.in_order = elements, in_order
        self._noted: list[dict[str, Tensor]] = []
        self._cut = False  # whether inputs of the convolution before the present state are lost
        self._callers = False  # whether drafts are expected while the caller records the past

    # transformers writes states in place, which a tensor made in inference mode does not allow later
    update_conv_state = outside_inference_mode(LinearAttentionLayer.update_conv_state)
    update_recurrent_state = outside_inference_mode(LinearAttentionLayer.update_recurrent_state)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for kind, tensors in zip(_KINDS, (self.conv_states, self.recurrent_states), strict=True):
            yield from ((f"{STATE}{kind}.{number}", tensor) for number, tensor in tensors.items() if tensor is not None)

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 before the first token."""
        return next((len(tensor) for _, tensor in self._named()), 0)

    @property
    def resident_bytes(self) -> int:
        """Bytes allocated for the state, and for copies of it (:meth:`note`)."""
        noted = (tensor for state in self._noted for tensor in state.values())
        return storage_bytes(*(tensor for _, tensor in self._named()), *noted)

    def entry_states(self, length: int, batch: int) -> Tensor:
        """Return (batch, 1, ``length``) int8 codes: every token is part of the state, and counts as resident."""
        return torch.full((batch, 1, length), EntryState.RESIDENT, dtype=torch.int8)

    def select(self, index: Tensor) -> None:
        """Make the batch the rows of ``index``."""
        if self.rows:
            self.reorder_cache(index)

    def state(self) -> dict[str, Tensor]:
        """Return the state's tensors by name ("state.conv.0", "state.recurrent.0"), as views."""
        return {
            name: tensor[..., -self.conv_kernel_size[int(name.rpartition(".")[2])] :] if _CONV in name else tensor
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
        self._cut = True
        empty, before = dict.fromkeys(range(self.number_of_states)), dict(self._named())
        self.conv_states, self.recurrent_states = dict(empty), dict(empty)
        for name, tensor in state.items():
            _, kind, number = name.split(".")
            states = self.conv_states if kind == "conv" else self.recurrent_states
            states[int(number)] = _copied(tensor, before.get(name))
        self.is_conv_states_initialized = {number: one is not None for number, one in self.conv_states.items()}
        self.is_recurrent_states_initialized = {
            number: one is not None for number, one in self.recurrent_states.items()
        }
        self.has_previous_state = dict(self.is_conv_states_initialized)
        for place, conv in self.conv_states.items():
            if conv is not None:
                self.conv_kernel_size[place], self.dtype, self.device = conv.shape[-1], conv.dtype, conv.device

    def activate_past_recording(self) -> None:
        """Keep the inputs of a convolution from now on, until a :meth:`crop`."""
        self._cut = self._cut or (self.rows > 0 and not self.record_past)
        super().activate_past_recording()

    def record_as(self, other: RecurrentState) -> None:
        """Record as ``other``, of whose text this is a copy, and copy the inputs that it has recorded."""
        if other.record_past:
            self.record_past, self._cut = True, other._cut
            self.conv_states = {
                number: None if conv is None else conv.clone() for number, conv in other.conv_states.items()
            }

    def layout(self) -> Sequence[Tensor] | None:
        """Return the state's tensors, which every pass over a token writes in place; None where it does not: before the
        first token, and while inputs are recorded."""
        return None if self.record_past or not self.rows else [tensor for _, tensor in self._named()]

    def note(self) -> None:
        """Keep a copy of the present state, until :meth:`forget_drafts` or :meth:`go_back`."""
        self._noted.append(self.copied())

    def expect_drafts(self) -> None:
        """Keep what removing some of the next tokens needs, until :meth:`forget_drafts`: the inputs of a convolution
        that computes in order, otherwise a copy of the state before each token."""
        self._callers = self.record_past
        if self.in_order and self.is_croppable:
            self.activate_past_recording()
        else:
            self.note()

    def forget_drafts(self) -> None:
        """Keep of earlier states only what the caller records."""
        self._noted = []
        if self.in_order and self.record_past and not self._callers:
            self.record_past = False
            self.restore(self.state(), 0)
        self._callers = False

    def go_back(self) -> None:
        """Go back to the first noted state; without one, nothing changes."""
        if self._noted:
            self.restore(self._noted[0], 0)
            self._noted = []

    @property
    def noted(self) -> bool:
        """Whether copies of states are kept: then one is needed before each token."""
        return bool(self._noted)

    def _check(self, state: dict[str, Tensor]) -> None:
        """Raise ShapeError unless ``state`` is empty or has the names and sizes of a state."""
        if not state:
            return
        convs = [name for name in state if _CONV in name]
        if not convs or set(state) - {f"{STATE}{kind}.{n}" for kind in _KINDS for n in range(self.number_of_states)}:
            raise ShapeError(f"a recurrent state has no tensors {', '.join(sorted(state))}")
        rows = len(state[convs[0]]) if state[convs[0]].ndim else 0
        for name, tensor in state.items():
            axes = 3 if name in convs else tensor.ndim
            fits(name, tensor, (rows, *[None] * (axes - 1)))
        if self.elements is None:
            return
        sizes = [sum(one[0].numel() for name, one in state.items() if f".{kind}." in name) for kind in _KINDS]
        if tuple(sizes) != self.elements:
            raise ShapeError(f"a recurrent state has {self.elements} elements, and this has {tuple(sizes)}")

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise UsageError if the last tokens cannot be removed."""
        if -tokens_to_remove <= len(self._noted):  # a state before each of the last tokens
            return
        if self.rows and not self._recorded(-tokens_to_remove):
            raise UsageError(
                "This model has recurrent layers, whose state cannot go back, so tokens cannot be removed from the "
                "end; call reset() and read the text again, or rewind() to a state that was kept."
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens, if the states before them were noted, or a convolution records
        its inputs. Raises UsageError as :meth:`check_crop`."""
        self.check_crop(tokens_to_remove)
        if self._callers and tokens_to_remove and self.rows and self._recorded(-tokens_to_remove):
            self.conv_states = {
                number: None if conv is None else conv[..., :tokens_to_remove]
                for number, conv in self.conv_states.items()
            }
        elif tokens_to_remove and -tokens_to_remove <= len(self._noted):
            self.restore(self._noted[tokens_to_remove], 0)
            del self._noted[tokens_to_remove:]
        elif self.record_past and self.rows:
            super().crop(tokens_to_remove)
            self._cut = True

    def _recorded(self, tokens: int) -> bool:
        """Return whether the convolution has recorded its inputs before the last ``tokens``."""
        convs = [(conv, self.conv_kernel_size[number]) for number, conv in self.conv_states.items() if conv is not None]
        enough = all(conv.shape[-1] >= kernel + tokens for conv, kernel in convs)
        return self.record_past and self.is_croppable and (enough or not self._cut)


def _copied(state: Tensor, before: Tensor | None) -> Tensor:
    """Return a copy of a state, on a GPU in the memory of the one ``before``, where a CUDA graph finds it."""
    if before is None or before.device.type == "cpu" or before.requires_grad or before.shape != state.shape:
        return state.clone()
    return before.copy_(state)
