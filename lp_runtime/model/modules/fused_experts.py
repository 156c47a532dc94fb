"""Fused experts and router of a mixture of experts on a GPU: experts in three launches, the router in two or three.

fusing.py puts them into a model.

Letters: T tokens, E hidden size, F an expert's inner size, X experts, k experts that a token chooses.
"""

from __future__ import annotations

import torch
from torch import nn

from lp_runtime.kernels.dispatch import kernels_for
from lp_runtime.kernels.types import Routing
from lp_runtime.model.modules.fused_blocks import ACTIVATIONS, Block

CLAMPED = "clamped"  # gpt-oss's gate: sigmoid linear units with limits


def activation_of(experts: Block) -> str | None:
    """Return the kernels' name of the experts' activation; None if they have none."""
    if not hasattr(experts, "act_fn"):
        return CLAMPED
    return next((name for name, kinds in ACTIVATIONS.items() if isinstance(experts.act_fn, kinds)), None)


class FusedExperts(nn.Module):
    """Experts of a layer, [T, E] to [T, E]. Passes of more than MAX_TOKENS tokens are left to the replaced block.

    Replaces blocks that `use_experts_implementation` of transformers has decorated: gate and up projections of all
    experts are one parameter, [X, 2 F, E] or, transposed, [X, E, 2 F].
    """

    def __init__(self, experts: Block):
        super().__init__()
        kernels, activation = kernels_for(experts.down_proj.device), activation_of(experts)
        assert kernels is not None and activation is not None
        for name, parameter in experts.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self._block = (experts,)  # in a tuple, so that torch does not register its weights twice
        self._kernels = kernels
        self._weights = kernels.ExpertWeights(
            experts.gate_up_proj.detach(),
            experts.down_proj.detach(),
            experts.gate_up_proj_bias.detach() if experts.has_bias else None,
            experts.down_proj_bias.detach() if experts.has_bias else None,
            is_transposed=experts.is_transposed,
            is_interleaved=not experts.is_concatenated,
            activation=activation,
            **({"alpha": experts.alpha, "limit": experts.limit} if activation == CLAMPED else {}),
        )

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of the chosen experts' outputs, each times its weight.

        Args:
            hidden_states: [T, E].
            top_k_index: [T, k] the experts that each token chose.
            top_k_weights: [T, k] what their outputs are multiplied by.
        """
        if len(hidden_states) > self._kernels.MAX_TOKENS or hidden_states.dtype != self._weights.down.dtype:
            return self._block[0](hidden_states, top_k_index, top_k_weights)
        return self._kernels.feed_experts(hidden_states.contiguous(), top_k_index, top_k_weights, self._weights)


class FusedRouter(nn.Module):
    """Router of a layer: one product, and one kernel for everything after it.

    Scores have the logits' dtype, or float32 if `is_float32`. With a correction (DeepSeek V3's bias of each expert's
    score), logits are computed in float32, from a second copy of the weights (7 MB a layer in DeepSeek V3).
    """

    def __init__(self, router: Block, routing: Routing, is_float32: bool = False):
        super().__init__()
        kernels = kernels_for(router.weight.device)
        assert kernels is not None
        self.weight = router.weight
        self.bias = getattr(router, "bias", None)
        self.e_score_correction_bias: torch.Tensor | None = getattr(router, "e_score_correction_bias", None)
        self._kernels = kernels
        self._routing, self._is_float32 = routing, is_float32
        is_exact = self.e_score_correction_bias is not None
        self._product_weight = self.weight.detach().float() if is_exact else self.weight.detach()

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ([T, X] logits, [T, k] scores of the chosen experts, [T, k] the chosen experts)."""
        states = hidden_states.reshape(-1, hidden_states.shape[-1]).to(self._product_weight.dtype)
        logits = nn.functional.linear(states, self._product_weight, self.bias)
        dtype = torch.float32 if self._is_float32 else logits.dtype
        correction = self.e_score_correction_bias
        scores, experts = self._kernels.choose_experts(logits, self._routing, dtype, correction)
        return logits, scores, experts
