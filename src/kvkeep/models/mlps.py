"""Runs an MLP or a mixture of experts in one call of the library.

As in fused.py, nothing is assumed of a family beyond names: each module is first compared with its own forward on
random inputs. A module that differs, or whose parts are hooked, runs as in transformers. Bits depend on no other row
and on no processor, while torch computes activations in other ways on other processors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvkeep.errors import trial
from kvkeep.models.experts import PackedExperts
from kvkeep.models.norms import ours
from kvkeep.models.packed import Packed, PackedLinear, WithPointers
from kvkeep.models.routers import LibraryRouter
from kvkeep.models.unchanged import Unchanged
from kvkeep.native.library import kernels
from kvkeep.native.structures import GELU, GELU_TANH, PANEL_OUTPUTS, RELU2, SILU, KvMatrix, KvMlp, address_of, array

_ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    SILU: functional.silu,
    GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    RELU2: lambda x: functional.relu(x).square(),
    GELU: functional.gelu,
}
"""Activations by their numbers in the library."""
_MATRICES = (
    (("gate_proj", "up_proj"), "down_proj"),  # Llama
    (("gate_up_proj",), "down_proj"),  # Phi-3
    (("w1", "w3"), "w2"),  # LFM2
    (("input_linear",), "output_linear"),  # Granite
    (("up_proj",), "down_proj"),  # Nemotron: no gates
    (("c_fc",), "c_proj"),  # StarCoder 2
    (("fc1",), "fc2"),  # Phi-2
    (("dense_h_to_4h",), "dense_4h_to_h"),  # GPT-NeoX
)
"""What families call the first matrices and the last one of an MLP."""
_ACTIVATION_NAMES = ("act_fn", "activation_fn", "activation", "act")
_SCALES = ("gate_multiplier", "down_multiplier")
"""What Falcon-H1 calls the factors of :class:`Mlp`."""
_SHARED_NAMES = ("shared_experts", "shared_expert", "shared_mlp")
"""What families call the MLP beside a mixture, within it."""


class Mlp(WithPointers):
    """The parts of an MLP, of a mixture, or of both side by side, as the library runs them."""

    pointers = ("struct", "address")

    def __init__(
        self,
        gates: Sequence[PackedLinear] = (),
        down: PackedLinear | None = None,
        activation: int = SILU,
        share: PackedLinear | None = None,
        router: LibraryRouter | None = None,
        experts: PackedExperts | None = None,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """gates: projections of gates and ups, or one of both, or that of ups without gates; joined. activation: a
        KvActivation. share: of the MLP's output, whose sigmoid is a factor of it. scales: factors of gates before their
        activation, and of the MLP's output."""
        self.gates, self.down, self.activation, self.share = gates, down, activation, share
        self.scales = scales
        self.router, self.experts = router, experts
        if down is not None:
            self.hidden, self.inner = down.out_features, down.in_features
        elif experts is not None:
            self.hidden, self.inner = experts.down.out_features // experts.num_experts, 0
        outputs = sum(one.out_features for one in gates)
        self.gated = outputs == 2 * self.inner
        matrices = [*gates, *(one for one in (down, share) if one is not None)]
        inputs = {one.in_features for one in matrices if one is not down}
        if outputs not in (self.inner, 2 * self.inner) or self.inner % 16 or inputs - {self.hidden}:
            raise TypeError("its matrices do not have the shapes of an MLP's, or its width is not a multiple of 16")
        if any(type(one) is not PackedLinear or not one.plain for one in matrices):
            raise TypeError("its matrices are not the library's")
        if share is not None and (share.out_features != 1 or share.bias is not None):
            raise TypeError("the share of its output is no single number")

    def beside(self, mixture: Mlp, share: PackedLinear | None = None) -> Mlp:
        """Return this MLP and a mixture, whose outputs are added."""
        return Mlp(self.gates, self.down, self.activation, share, mixture.router, mixture.experts, self.scales)

    @functools.cached_property
    def struct(self) -> KvMlp:
        """The MLP as a struct for the kernels. Its tensors must outlive it."""
        down, share = (KvMatrix() if one is None else one.struct for one in (self.down, self.share))
        struct = KvMlp(
            gates=tuple(one.struct for one in self.gates),
            down=down,
            gates_bias=tuple(array(one.bias) for one in self.gates),
            down_bias=array(None if self.down is None else self.down.bias),
            share=share,
            hidden=self.hidden,
            inner=self.inner,
            gated=self.gated,
            activation=self.activation,
            gate_scale=self.scales[0],
            scale=self.scales[1],
        )
        kept = [] if self.router is None or self.experts is None else [self.router.struct, self.experts.struct]
        if kept:
            struct.router, struct.experts = map(address_of, kept)
        # Keeps the buffers alive as long as the pointers, even if the modules move.
        matrices = [*self.gates, *(one for one in (self.down, self.share) if one is not None)]
        struct.kept = [*kept, *(buffer for one in matrices for buffer in one.buffers())]
        return struct

    @functools.cached_property
    def address(self) -> int:
        """The address of :attr:`struct`."""
        return address_of(self.struct)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output for ``x`` (..., hidden) bfloat16, of the same shape."""
        x = x.contiguous()
        out = torch.empty_like(x)
        kernels().kvkeep_mlp(self.address, x, out)
        return out


class FusedMlp:
    """Replaces the forward of an MLP or a mixture."""

    def __init__(self, module: Any, mlp: Mlp) -> None:
        self.module, self.mlp = module, mlp
        self._unchanged = Unchanged([module])

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's own forward returns."""
        if args or kwargs or not ours(x) or not self._unchanged():
            return type(self.module).forward(self.module, x, *args, **kwargs)
        return self.mlp(x)


def mlp_of(module: Any) -> Mlp:
    """Return an MLP or a mixture as the library runs it. Raises AttributeError or TypeError if it has other parts."""
    if isinstance(forward := vars(module).get("forward"), FusedMlp):
        return forward.mlp
    if not isinstance(getattr(module, "experts", None), PackedExperts):
        return _dense(module)
    parts = dict(module.named_children())
    experts, shared = parts.pop("experts"), [parts.pop(name) for name in _SHARED_NAMES if name in parts]
    shares = [parts.pop(name) for name in ("shared_expert_gate",) if name in parts]
    routers = [vars(one).get("forward") for one in parts.values() if not isinstance(one, nn.Identity)]
    if len(routers) != 1 or not isinstance(routers[0], LibraryRouter) or not experts.down.native:
        raise TypeError("it has more than a router and experts that the library runs")
    mixture = Mlp(router=routers[0], experts=experts)
    return mlp_of(shared[0]).beside(mixture, *shares) if shared else mixture


def _dense(module: Any) -> Mlp:
    matrices = {name: one for name, one in module.named_children() if isinstance(one, PackedLinear)}
    first, last = next((one for one in _MATRICES if {*one[0], one[1]} == {*matrices}), ((), ""))
    if not first:
        raise TypeError("it has other matrices than an MLP")
    function = next((getattr(module, name) for name in _ACTIVATION_NAMES if hasattr(module, name)), functional.silu)
    before, after = (float(getattr(module, name, 1.0)) for name in _SCALES)
    return Mlp(
        joined([matrices[name] for name in first]), matrices[last], activation_of(function), scales=(before, after)
    )


@torch.no_grad()
def activation_of(function: Any) -> int:
    """Return the number of an activation. Raises TypeError if the library lacks it."""
    x = torch.linspace(-6, 6, 97)
    for number, known in _ACTIVATIONS.items():
        if bool(((function(x) - known(x)).abs() < 1e-5).all()):  # gelu differs from its tanh approximation by 4e-4
            return number
    raise TypeError("its MLP has another activation")


@torch.no_grad()
def replace_mlps(model: Any) -> None:
    """Let the library run the MLPs and mixtures of a model with which it agrees: those beside a mixture first, so that
    a mixture is compared with its parts to the bit."""
    for module in reversed([*model.modules()]):
        if isinstance(module, PackedExperts | nn.ModuleList) or not any(
            isinstance(one, Packed | PackedExperts) for one in module.children()
        ):
            continue
        with trial("an MLP"):
            fused = FusedMlp(module, mlp_of(module))
            if _agrees(fused):
                module.forward = fused


def _agrees(fused: FusedMlp) -> bool:
    """Return whether the library computes what a module does, for random rows. A mixture has to agree to the bit, an
    MLP, and a mixture of which torch computes a share, up to rounding."""
    x = torch.randn(2, 5, fused.mlp.hidden, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    wanted = type(fused.module).forward(fused.module, x)
    if not isinstance(wanted, Tensor):
        return False
    near = 0.0 if fused.mlp.router is not None and fused.mlp.share is None else 0.03 * float(wanted.float().abs().max())
    found = fused.mlp(x)
    return found.shape == wanted.shape and bool((found.float() - wanted.float()).abs().max() <= near)


def joined(parts: Sequence[Any]) -> Sequence[Any]:
    """Return linear layers as one if their codes have the same kind. The layers are then views of it."""
    kinds = {(part.kind, part.native, part.bias is None, part.columns) for part in parts}
    panels = all(part.out_features % PANEL_OUTPUTS == 0 for part in parts)
    if len(parts) < 2 or not (panels and len(kinds) == 1 and parts[0].native):
        return parts
    made = Packed.__new__(PackedLinear)
    nn.Module.__init__(made)
    made.in_features, made.kind, made.native = parts[0].in_features, parts[0].kind, True
    made.out_features, made.columns = sum(part.out_features for part in parts), None
    for name in ("data", "bias"):
        tensors = [getattr(part, name) for part in parts]
        made.register_buffer(name, None if tensors[0] is None else torch.cat(tensors))
        start = 0
        for part, tensor in zip(parts, tensors, strict=True):
            if tensor is not None:
                setattr(part, name, getattr(made, name)[start : start + len(tensor)])
                start += len(tensor)
    for part in parts:
        part.__dict__.pop("struct", None)
    return [made]
