"""Models with packed weights: transformers reads a model, and each matrix is packed before the next one is read.

A quantiser registered with transformers takes the matrices of linear layers and embeddings. transformers does the rest
(names, missing weights, ties, buffers). The loaded model is not marked as quantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvkeep.errors import UsageError
from kvkeep.models.experts import Experts, PackedExperts, experts_of, packed_experts
from kvkeep.models.matrices import in_float32, matrices, outer, packed_bits
from kvkeep.models.packed import Blocks, Packed, PackedEmbedding, PackedLinear, quantised
from kvkeep.native.library import trim_memory


@register_quantization_config("kvkeep")
class Packing(QuantizationConfigMixin):
    """Requests packed weights of 4, 8 or 16 ``bits`` from ``from_pretrained``; None: the bits of a GGUF file, else
    16."""

    def __init__(self, bits: int | None = None, **kwargs: Any) -> None:
        self.quant_method = "kvkeep"
        self.bits = bits


@register_quantizer("kvkeep")
class Packer(HfQuantizer):
    """Packs matrices while transformers loads."""

    def __init__(self, quantization_config: Packing, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.bits = quantization_config.bits
        self.places: dict[str, nn.Module] = {}
        self.outer: set[str] = set()
        self.made: dict[str, PackedLinear] = {}
        """The packed matrices by module name."""
        self.experts: dict[str, Experts] = {}
        self.of_experts: dict[str, list[Packed]] = {}
        """The packed matrices of experts, by the name of their parameter."""
        self.misshapen: set[str] = set()

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self.places, self.outer, self.experts = matrices(model), outer(model), experts_of(model)
        self.strict = model._keep_in_fp32_modules_strict
        exact = in_float32(model)
        if self.bits in (4, 8):  # these are rounded once, from the stored values
            exact |= {f"{name}.weight$" for name in self.places}
            exact |= {f"{name}.{one}$" for name, experts in self.experts.items() for one in experts.form.matrices}
        model._keep_in_fp32_modules_strict = exact

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Return whether the parameter is a matrix to pack."""
        place, _, name = param_name.rpartition(".")
        experts = self.experts.get(place)
        matrix = place in self.places if experts is None else name in experts.form.matrices
        return param_name not in self.misshapen and matrix and (experts is not None or name == "weight")

    def get_quantize_ops(self) -> ConversionOps:
        """Return the operation that receives each matrix."""
        return _Pack(self)

    def pack(self, name: str, value: Tensor | Sequence[Blocks], expected: Tensor) -> bool:
        """Pack and store the matrix ``name``, or those of experts; return whether it has the shape of ``expected``."""
        parts = [value] if isinstance(value, Tensor) else value
        place, _, attribute = name.rpartition(".")
        experts = self.experts.get(place)
        blocks = isinstance(parts[0], Blocks)
        shape = tuple(expected.shape) if experts is None or not blocks else experts.form.shape(expected.shape)
        if _shape(parts, shape) != shape:
            self.misshapen.add(name)
            return False
        bits = packed_bits(self.bits or 16, place in self.outer)
        if experts is None:
            first = parts[0]
            self.made[place] = PackedLinear(_joined(parts) if isinstance(first, Blocks) else quantised(first, bits))
        else:
            rows = [one if isinstance(one, Blocks) else experts.form.rows(attribute, one) for one in parts]
            self.of_experts[name] = packed_experts(rows, bits, len(expected))
        expected._is_hf_initialized = True  # type: ignore[attr-defined]
        trim_memory()
        return True

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        model._keep_in_fp32_modules_strict = self.strict
        for name, packed in self._shared(model).items():
            module = self.places[name]
            if isinstance(module, nn.Embedding):
                scale = float(getattr(module, "scalar_embed_scale", 1.0))
                model.set_submodule(name, PackedEmbedding(packed, scale, module.padding_idx))
                continue
            if module.bias is not None:
                packed.bias = module.bias.detach().to(torch.bfloat16)  # type: ignore[operator]
            model.set_submodule(name, packed)
        for name, experts in self.experts.items():
            keys = [f"{name}.{one}" for one in experts.form.matrices]
            made = [self.of_experts[key] for key in keys if key in self.of_experts]
            if len(made) == 2:  # otherwise transformers reports what is missing
                model.set_submodule(name, PackedExperts(experts, made[0], *made[1]))
        self.remove_quantization_config(model)
        for module in model.modules():
            if hasattr(module, "config"):
                vars(module.config).pop("_is_quantized", None)
        model.save_pretrained = _refuse
        return model

    def _shared(self, model: Any) -> dict[str, PackedLinear]:
        """Return the packed matrices. Modules that transformers has tied, or whose equal matrices occur twice in the
        files, share one."""
        for name, other in getattr(model, "all_tied_weights_keys", {}).items():
            mine, source = (self.made.get(one.removesuffix(".weight")) for one in (name, other))
            if mine is not None and source is not None and torch.equal(mine.data, source.data):
                self.made[name.removesuffix(".weight")] = source
        by_weight = {id(self.places[name].weight): packed for name, packed in self.made.items()}
        tied = {name: by_weight.get(id(module.weight)) for name, module in self.places.items()}
        return {name: packed for name, packed in tied.items() if packed is not None}

    @property
    def is_trainable(self) -> bool:
        """Codes have no gradient."""
        return False

    def is_serializable(self, safe_serialization: Any = None) -> bool:
        """Packed weights cannot be saved."""
        return False


def _shape(parts: Sequence[Tensor | Blocks], expected: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a matrix of these parts; of experts, their rows are one after the other."""
    rows = sum(part.shape[0] for part in parts)
    if len(expected) == 3 and all(isinstance(part, Blocks) for part in parts) and rows % expected[0] == 0:
        return (expected[0], rows // expected[0], parts[0].shape[1])
    return (rows, *parts[0].shape[1:])


def _joined(parts: Sequence[Any]) -> Blocks:
    """Return one matrix whose rows are those of blocks of one kind."""
    first: Blocks = parts[0]
    return first if len(parts) == 1 else replace(first, rows=torch.cat([one.rows for one in parts]))


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise UsageError(
        "Packed weights cannot be saved; keep the files that they came from, or load them with weights float32."
    )


class _Pack(ConversionOps):
    def __init__(self, packer: Packer) -> None:
        self.packer = packer

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], model: Any = None, missing_keys: Any = None, **kwargs: Any) -> Any:
        left = {}
        for name, values in input_dict.items():
            value = values[0] if isinstance(values, list) else values
            if not self.packer.param_needs_quantization(model, name):
                left[name] = value
            elif self.packer.pack(name, value, model.get_parameter(name)):
                missing_keys.discard(name)
            else:
                left[name] = torch.empty(value.shape, device="meta")  # transformers reports it as missing
        return left
