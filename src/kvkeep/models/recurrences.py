"""Runs the recurrent modules of a model so that no bit depends on how many tokens are read at once.

transformers adds the terms of a convolution or of a recurrence in another order for one token than for many. Here their
order is that of the text: a state has the same bits for any chunk and batch, and on every processor. As in fused.py,
nothing is assumed of a family: each module is first compared with its own forward on random inputs.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from kvkeep.errors import trial
from kvkeep.models.packed import WithPointers
from kvkeep.native.library import kernels
from kvkeep.native.structures import KvDeltaNet, KvMamba2, address_of, array


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
        total = functools.reduce(torch.add, terms)
        return module.out_proj(after * total.to(after.dtype))


class Scan(WithPointers, ABC):
    """A recurrent module whose convolution, states and norm the native library computes, token by token.

    module: that of transformers. inputs: channels of the convolution. inner: channels of what ``out_proj`` multiplies.
    state: the shape of the state of one row.
    """

    kernel: ClassVar[str]
    """The library's function."""

    def __init__(self, module: Any, inputs: int, inner: int, state: tuple[int, int, int]) -> None:
        self.module, self.taps, self.state_shape = module, int(module.conv1d.kernel_size[0]), state
        if tuple(module.conv1d.weight.shape) != (inputs, 1, self.taps) or module.out_proj.in_features != inner:
            raise TypeError("its matrices do not have the shapes of this kind")
        if module.activation != "silu":
            raise TypeError("its activation is not silu")
        self._places = [(part._parameters, name) for part in module.modules() for name in part._parameters]
        self._read: tuple[list[Any], list[Any]] = [], []  # the parameters as they were read, their memory and versions

    @functools.cached_property
    @abstractmethod
    def struct(self) -> Any:
        """The module as a struct for the kernel; its arrays are in ``kept``."""

    @abstractmethod
    def projected(self, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        """Return the inputs of the convolution, the gates, and what else the kernel needs, each (batch, tokens, n).
        mask: 0 for padding."""

    def __call__(
        self, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Return the module's output, (batch, tokens, hidden_size)."""
        module = self.module
        self._read_again()
        inputs, gate, *others = self.projected(_unpadded(hidden_states, attention_mask), attention_mask)
        seen = _seen(inputs, cache, module.layer_idx, self.taps)
        known = None if cache is None else cache.get_recurrent_state(module.layer_idx, state_idx=0)
        shape = (len(inputs), *self.state_shape)
        state = inputs.new_zeros(shape, dtype=torch.float32) if known is None else known  # written in place
        out = torch.empty(gate.shape, dtype=gate.dtype)
        run = getattr(kernels(), self.kernel)
        for row in range(len(inputs)):
            parts = (one[row].contiguous() for one in (seen, gate, *others))
            run(address_of(self.struct), *parts, state[row], out[row])
        if cache is not None and known is None:
            cache.update_recurrent_state(state, module.layer_idx)
        return module.out_proj(out)

    def _read_again(self) -> None:
        """Let :attr:`struct` be made again if parameters of the module were replaced, changed or moved: with another
        dtype, for one, a parameter leaves the memory to which the struct may point."""
        now = [one for parameters, name in self._places if (one := parameters.get(name)) is not None]
        state = [(one.data_ptr(), None if one.is_inference() else one._version) for one in now]
        known, before = self._read
        if state != before or not all(map(is_, now, known)):
            self.__dict__.pop("struct", None)
            self._read = now, state


class DeltaNet(Scan):
    """A gated delta net (Qwen3-Next, Qwen 3.5; Yang et al., arXiv:2412.06464)."""

    kernel = "kvkeep_delta_net"

    def __init__(self, module: Any) -> None:
        keys, values = module.num_k_heads * module.head_k_dim, module.num_v_heads * module.head_v_dim
        super().__init__(module, 2 * keys + values, values, (module.num_v_heads, module.head_k_dim, module.head_v_dim))
        self.joined = hasattr(module, "in_proj_qkvz")
        if module.conv1d.bias is not None:
            raise TypeError("its convolution has a bias")
        if module.head_k_dim % 16 or module.head_v_dim % 16:
            raise TypeError("the widths of its heads are not multiples of 16")

    @functools.cached_property
    def struct(self) -> KvDeltaNet:
        """The module as a struct for the kernel."""
        module = self.module
        with torch.no_grad():
            conv, rate = _taps_first(module.conv1d), module.A_log.double().exp().float()
            bias, norm = module.dt_bias.float(), module.norm.weight.float()
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

    def projected(self, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        """Return queries, keys and values of all heads (batch, tokens, channels), gates (batch, tokens, values), betas
        and decays (batch, tokens, heads)."""
        module = self.module
        if not self.joined:
            inputs, gate = module.in_proj_qkv(hidden), module.in_proj_z(hidden)
            return inputs, gate, module.in_proj_b(hidden), module.in_proj_a(hidden)
        parts = module.fix_query_key_value_ordering(module.in_proj_qkvz(hidden), module.in_proj_ba(hidden))
        query, key, value, gate = (one.flatten(2) for one in parts[:4])
        return torch.cat((query, key, value), -1), gate, *parts[4:]


class Mamba2(Scan):
    """A Mamba-2 layer (Granite 4, Falcon-H1, Bamba, Nemotron-H, Zamba 2; Dao and Gu, arXiv:2405.21060).

    transformers bounds the steps of a prompt (``time_step_limit``), but not that of a single token; here every step is
    bounded."""

    kernel = "kvkeep_mamba2"

    def __init__(self, module: Any) -> None:
        inner, shared = module.intermediate_size, module.n_groups * module.ssm_state_size
        super().__init__(module, inner + 2 * shared, inner, (module.num_heads, module.head_dim, module.ssm_state_size))
        if inner != module.num_heads * module.head_dim or module.num_heads % module.n_groups or module.head_dim % 4:
            raise TypeError("its heads do not have the shapes of Mamba-2's")
        if inner // module.n_groups % 16 or module.ssm_state_size % 16:
            raise TypeError("the widths of its groups and states are not multiples of 16")
        if self._normed and getattr(module.norm, "group_size", inner // module.n_groups) != inner // module.n_groups:
            raise TypeError("its norm has other groups")

    @property
    def _normed(self) -> bool:
        return hasattr(self.module.norm, "weight")  # Falcon-H1 may have none

    @functools.cached_property
    def struct(self) -> KvMamba2:
        """The module as a struct for the kernel."""
        module = self.module
        with torch.no_grad():
            conv, rate = _taps_first(module.conv1d), module.A_log.double().exp().float()
            step_bias, skip = module.dt_bias.float(), module.D.float()
            conv_bias = None if module.conv1d.bias is None else module.conv1d.bias.float()
            norm = module.norm.weight.float() if self._normed else None
        struct = KvMamba2(
            conv=array(conv),
            conv_bias=array(conv_bias),
            rate=array(rate),
            step_bias=array(step_bias),
            skip=array(skip),
            norm=array(norm),
            taps=self.taps,
            heads=module.num_heads,
            head_dim=module.head_dim,
            groups=module.n_groups,
            state_dim=module.ssm_state_size,
            gate_first=not getattr(module.norm, "norm_before_gate", False),
            eps=getattr(module.norm, "variance_epsilon", 0.0),
            smallest_step=module.time_step_limit[0],
            greatest_step=module.time_step_limit[1],
        )
        struct.kept = conv, conv_bias, rate, step_bias, skip, norm
        return struct

    def projected(self, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        """Return inputs of heads, B and C (batch, tokens, channels), gates (batch, tokens, inner), and steps (batch,
        tokens, heads): minus infinity for padding, because the convolution's bias would otherwise change the state."""
        module = self.module
        if (factor := getattr(module, "ssm_in_multiplier", None)) is not None:  # Falcon-H1
            hidden = hidden * factor
        found = module.in_proj(hidden)
        if factor is not None:
            found = (found * module.mup_vector).to(found.dtype)
        inner = module.intermediate_size
        gate, inputs, steps = found.split((inner, found.shape[-1] - inner - module.num_heads, module.num_heads), -1)
        if mask is not None:
            steps = steps.masked_fill(mask[:, -steps.shape[1] :, None] == 0, -torch.inf)
        return inputs, gate, steps


def _taps_first(conv: Any) -> Tensor:
    """Return the weights of a convolution of each channel, (taps, channels) float32."""
    return conv.weight.float().squeeze(1).T.contiguous()


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


FORWARDS: dict[str, Callable[[Any], Callable[..., Tensor]]] = {
    "ShortConv": ShortConv,
    "GatedDeltaNet": DeltaNet,
    **dict.fromkeys(("BambaMixer", "FalconH1Mixer", "HybridMambaLayer", "Mamba2Mixer", "Zamba2MambaMixer"), Mamba2),
}
"""By the end of the names of transformers' modules: what makes the forward of one. It raises AttributeError or
TypeError for another layout."""


@torch.no_grad()
def replace_recurrence(module: Any) -> None:
    """Let a recurrent module compute in the order of the text, if that agrees with its own forward."""
    made = next((made for name, made in FORWARDS.items() if type(module).__name__.endswith(name)), None)
    if made is None:
        return
    with trial("a recurrent module"):
        ours, generator = made(module), torch.Generator().manual_seed(0)
        width = module.out_proj.out_features
        x = torch.randn(2, 7, width, generator=generator).to(torch.bfloat16)
        wanted, found = type(module).forward(module, x), ours(x)
        greatest = wanted.float().abs().max()
        if wanted.shape == found.shape and bool((wanted - found).float().abs().max() <= 0.03 * greatest):
            module.forward, module.in_order = ours, True


def layers_in_order(model: Any) -> set[int]:
    """Return the layers whose recurrent modules were replaced."""
    return {int(module.layer_idx) for module in model.modules() if getattr(module, "in_order", False)}
