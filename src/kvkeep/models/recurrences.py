"""Runs the recurrent modules of a model so that no bit depends on how many tokens are read at once.

transformers adds the terms of a convolution or of a recurrence in another order for one token than for many. Here their
order is that of the text: a state has the same bits for any chunk and batch, and on every processor. As in fused.py,
nothing is assumed of a family: each module is first compared with its own forward on random inputs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvkeep.errors import ran_out_of_memory
from kvkeep.native.library import kernels
from kvkeep.native.structures import KvDeltaNet, address_of, array

log = logging.getLogger(__name__)


class ShortConv:
    """A gated short convolution (LFM2): ``out_proj(c * conv(b * x))``, where b, c and x are the thirds of ``in_proj``.
    Each operation of torch rounds every element once; the terms are added from the oldest to the newest, in float32."""

    def __init__(self, module: Any) -> None:
        conv = module.conv
        self.module, self.taps = module, int(conv.kernel_size[0])
        width, bias = module.out_proj.in_features, conv.bias is not None
        shapes = module.in_proj.in_features, module.in_proj.out_features, tuple(conv.weight.shape)
        if shapes != (width, 3 * width, (width, 1, self.taps)) or bias:
            raise TypeError("its matrices do not have the shapes of LFM2's")

    def __call__(
        self, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Return the module's output, (batch, tokens, hidden_size)."""
        module, count = self.module, hidden_states.shape[1]
        before, after, x = module.in_proj(_unpadded(hidden_states, attention_mask)).chunk(3, dim=-1)
        seen = _seen(before * x, cache, module.layer_idx, self.taps).float()
        weight = module.conv.weight.float()
        terms = [seen[:, tap : tap + count] * weight[:, 0, tap] for tap in range(self.taps)]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return module.out_proj(after * total.to(after.dtype))


class DeltaNet:
    """A gated delta net (Qwen3-Next, Qwen 3.5; Yang et al., arXiv:2412.06464), by the native library."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.joined = hasattr(module, "in_proj_qkvz")
        keys, values = module.num_k_heads * module.head_k_dim, module.num_v_heads * module.head_v_dim
        conv, self.taps = module.conv1d, int(module.conv1d.kernel_size[0])
        shapes = tuple(conv.weight.shape), conv.bias is None, module.out_proj.in_features
        if shapes != ((2 * keys + values, 1, self.taps), True, values) or module.activation != "silu":
            raise TypeError("its matrices do not have the shapes of Qwen's")
        if module.head_k_dim % 16 or module.head_v_dim % 16:
            raise TypeError("the widths of its heads are not multiples of 16")

    @functools.cached_property
    def struct(self) -> KvDeltaNet:
        """The module as a struct for the kernel."""
        module = self.module
        with torch.no_grad():
            conv = module.conv1d.weight.float().squeeze(1).T.contiguous()
            rate, bias, norm = module.A_log.float().exp(), module.dt_bias.float(), module.norm.weight.float()
        struct = KvDeltaNet(
            conv=array(conv),
            rate=array(rate),
            step_bias=array(bias),
            norm=array(norm),
            taps=self.taps,
            key_heads=module.num_k_heads,
            value_heads=module.num_v_heads,
            key_dim=module.head_k_dim,
            value_dim=module.head_v_dim,
            eps=module.norm.variance_epsilon,
        )
        struct.kept = conv, rate, bias, norm
        return struct

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copying or saving, without pointers."""
        return {name: value for name, value in self.__dict__.items() if name != "struct"}

    def __call__(
        self, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Return the module's output, (batch, tokens, hidden_size)."""
        module = self.module
        inputs, gate, beta, decay = self._projected(_unpadded(hidden_states, attention_mask))
        seen = _seen(inputs, cache, module.layer_idx, self.taps)
        known = None if cache is None else cache.get_recurrent_state(module.layer_idx, state_idx=0)
        shape = (len(inputs), module.num_v_heads, module.head_k_dim, module.head_v_dim)
        state = inputs.new_zeros(shape, dtype=torch.float32) if known is None else known  # written in place
        out = torch.empty_like(gate)
        for row in range(len(inputs)):
            parts = (one[row].contiguous() for one in (seen, gate, beta, decay))
            kernels().kvkeep_delta_net(address_of(self.struct), *parts, state[row], out[row])
        if cache is not None and known is None:
            cache.update_recurrent_state(state, module.layer_idx)
        return module.out_proj(out)

    def _projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values of all heads (batch, tokens, channels), gates (batch, tokens, values), betas
        and decays (batch, tokens, heads)."""
        module = self.module
        if not self.joined:
            inputs, gate = module.in_proj_qkv(hidden), module.in_proj_z(hidden)
            return inputs, gate, module.in_proj_b(hidden), module.in_proj_a(hidden)
        parts = module.fix_query_key_value_ordering(module.in_proj_qkvz(hidden), module.in_proj_ba(hidden))
        query, key, value, gate = (one.flatten(2) for one in parts[:4])
        return torch.cat((query, key, value), -1), gate, *parts[4:]


def _unpadded(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return zeros for padding."""
    return hidden if mask is None else hidden * mask[:, -hidden.shape[1] :, None].to(hidden.dtype)


def _seen(inputs: Tensor, cache: Any, layer: int, taps: int) -> Tensor:
    """Return the ``inputs`` of a convolution (batch, tokens, channels), with the ``taps`` - 1 before them; the cache
    keeps the last ones."""
    found, wanted = inputs.transpose(1, 2), inputs.shape[1] + taps - 1
    if cache is not None:
        found = cache.update_conv_state(found, layer, conv_kernel_size=taps)
    found = found[..., -wanted:].transpose(1, 2)
    return functional.pad(found, (0, 0, wanted - found.shape[1], 0))


FORWARDS: dict[str, Callable[[Any], Callable[..., Tensor]]] = {"ShortConv": ShortConv, "GatedDeltaNet": DeltaNet}
"""By the end of the names of transformers' modules: what makes the forward of one. It raises AttributeError or
TypeError for another layout."""


@torch.no_grad()
def replace_recurrence(module: Any) -> None:
    """Let a recurrent module compute in the order of the text, if that agrees with its own forward."""
    made = next((made for name, made in FORWARDS.items() if type(module).__name__.endswith(name)), None)
    if made is None:
        return
    try:
        ours, generator = made(module), torch.Generator().manual_seed(0)
        width = module.out_proj.out_features
        x = torch.randn(2, 7, width, generator=generator).to(torch.bfloat16)
        wanted, found = type(module).forward(module, x), ours(x)
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        if ran_out_of_memory(error):
            raise
        log.debug("a recurrent module runs as in transformers: %s", error)
        return
    if wanted.shape == found.shape and bool((wanted - found).float().abs().max() <= 0.03 * wanted.float().abs().max()):
        module.forward, module.in_order = ours, True


def layers_in_order(model: Any) -> set[int]:
    """Return the layers whose recurrent modules were replaced."""
    return {int(module.layer_idx) for module in model.modules() if getattr(module, "in_order", False)}
