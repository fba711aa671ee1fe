"""A model without memory, and its matrices that may be packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from kvkeep.errors import UnsupportedModelError
from kvkeep.models.silence import silenced


def built(config: Any, dtype: torch.dtype | None = None) -> Any:
    """Return the model of ``config`` with its weights on torch's meta device. Raises UnsupportedModelError if
    transformers cannot build it."""
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    try:
        with silenced(), without_memory():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.tie_weights(recompute_mapping=False)
        return model
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        raise UnsupportedModelError(
            f"A '{config.model_type}' model cannot be built from its config ({str(error).splitlines()[0][:160]})."
        ) from error


@contextmanager
def without_memory() -> Iterator[None]:
    """Within the block, transformers builds models with weights on torch's meta device, neither initialised nor tied.
    Tables of positions are computed, because torch would import sympy to do that on the meta device."""
    from transformers.initialization import no_init_weights

    with _WeightsOnMeta(), no_init_weights():
        yield


class _WeightsOnMeta(TorchFunctionMode):
    """Makes tensors that are allocated and not filled, as weights are, on the meta device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.empty and given.get("device") is None:
            given = given | {"device": "meta"}
        return func(*args, **given)


def matrices(model: Any) -> dict[str, nn.Module]:
    """Return the modules whose ``weight`` is packed, by name: plain linear layers of the decoder, the head, and
    embeddings of tokens (not of positions), scaled ones too."""
    from kvkeep.models.adapter import decoder_of  # imports transformers

    decoder, head, tokens = decoder_of(model), model.get_output_embeddings(), model.get_input_embeddings()
    inside = set(decoder.modules())
    found = {}
    for name, module in model.named_modules():
        linear = type(module) is nn.Linear and (module in inside or module is head)
        embedding = type(module) is nn.Embedding and module is tokens
        if linear or embedding or hasattr(module, "scalar_embed_scale"):
            found[name] = module
    return found


def outer(model: Any) -> set[str]:
    """Return the names of the head and of embeddings, which influence logits most."""
    head = model.get_output_embeddings()
    return {name for name, module in matrices(model).items() if module is head or isinstance(module, nn.Embedding)}


def in_float32(model: Any) -> set[str]:
    """Return patterns (re) of the names of weights that stay in float32 beside bfloat16: those that transformers keeps
    so (the routers of many families), and small ones that decide which experts are chosen, and how fast the states of
    Mamba-2 and of gated delta nets decay."""
    modules = [name for name, module in model.named_modules() if hasattr(module, "dt_bias")]
    found = {f"{name}.{one}$" for name in modules for one in ("A_log", "D", "dt_bias")}
    return found | {"e_score_correction_bias", "expert_bias", *(model._keep_in_fp32_modules_strict or ())}


def packed_bits(bits: int, outside: bool) -> int:
    """Return the bits of a matrix if ``bits`` were requested; at least 8 for a matrix ``outside`` the decoder's
    layers."""
    return max(bits, 8) if outside else bits
