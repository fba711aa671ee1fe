"""Mixes the residual streams of Gemma 3n (AltUp; Baykal et al., arXiv:2301.13310) in one order, whatever the tokens.

torch chooses a product of matrices by its shape, and the sums' order with it. Here each stream's multiples are added
from the first stream to the last, in float32, so the bits of a token depend on no other. As in fused.py, each module is
first compared with its own function on random inputs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import trial
from kvkeep.models.norms import ours


class Predict:
    """Replaces ``predict`` of an AltUp module: to each stream it adds multiples of all streams, with factors that
    depend on the active stream."""

    def __init__(self, module: Any) -> None:
        self.module, config = module, module.config
        self.active, self.count, self.width = config.altup_active_idx, config.altup_num_inputs, config.hidden_size

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Return the predicted streams of ``hidden_states``, (streams, batch, tokens, hidden_size) both."""
        if not ours(hidden_states) or self.module.training:
            return self.stock(hidden_states)
        return self.mixed(hidden_states)

    def stock(self, hidden_states: Tensor) -> Tensor:
        """Return the streams that the module's function in transformers predicts."""
        found: Tensor = type(self.module).predict(self.module, hidden_states)
        return found

    def mixed(self, hidden_states: Tensor) -> Tensor:
        """Return the same up to rounding, with sums in one order."""
        module = self.module
        factors = module.prediction_coefs(module.compute_router_modalities(hidden_states[self.active])).float()
        # (batch, tokens, to, from) to (from, to, batch, tokens, 1)
        factors = factors.unflatten(-1, (self.count, self.count)).permute(3, 2, 0, 1)[..., None]
        terms = (stream.float() * factor for stream, factor in zip(hidden_states, factors, strict=True))
        return functools.reduce(torch.add, terms).to(hidden_states.dtype) + hidden_states


@torch.no_grad()
def replace_altup(model: Any) -> None:
    """Replace ``predict`` of a model's AltUp modules, where both agree."""
    for module in model.modules():
        if not hasattr(module, "prediction_coefs"):
            continue
        with trial("AltUp"):
            made = Predict(module)
            x = torch.randn(made.count, 2, 3, made.width, generator=torch.Generator().manual_seed(4))
            wanted = made.stock(x)
            near = 1e-3 * float((wanted - x).abs().max()) + 1e-6  # of what is added to the streams
            if bool(((made.mixed(x) - wanted).abs() <= near).all()):
                module.predict = made
