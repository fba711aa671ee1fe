"""What transformers' recurrent modules ask of a cache: the states of its layers, by number."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from kvkeep.stores.recurrent import RecurrentState


class RecurrentCache(Cache):
    """A cache with recurrent states, some of them beside keys and values."""

    states: dict[int, RecurrentState]
    """The recurrent states, by layer."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Take a recurrent layer's new inputs of its convolution, (batch, channels, new), and return those that it
        reads."""
        return self.states[layer_idx].update_conv_state(conv_states, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Replace the state of a layer's recurrence, and return it."""
        return self.states[layer_idx].update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a layer's convolution; None before the first token."""
        state = self.states[layer_idx]
        return state.conv_states[state_idx] if state.has_previous_state[state_idx] else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state of a layer's recurrence; None before the first token."""
        state = self.states[layer_idx]
        return state.recurrent_states[state_idx] if state.has_previous_state[state_idx] else None

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether a recurrent layer (None: the last one) has read a token."""
        state = self.states[max(self.states) if layer_idx is None else layer_idx]
        return all(state.has_previous_state.values())

    def activate_past_recording(self) -> None:
        """Keep what the layers would discard until :meth:`crop`, where they can."""
        super().activate_past_recording()
        for state in self.states.values():
            state.activate_past_recording()

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return whether a layer keeps what it would discard until :meth:`crop`."""
        state = self.states.get(layer_idx)
        return bool(super().is_recording_past(layer_idx) if state is None else state.record_past)

    @property
    def is_croppable(self) -> bool:
        """Whether :meth:`crop` can remove tokens without a trace."""
        return bool(super().is_croppable and all(state.is_croppable for state in self.states.values()))
