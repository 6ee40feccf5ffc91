"""Mixtures of attention heads: each token has the heads of the experts that it is routed to.

Such a layer (JetMoE) is attention with the heads of all experts; those that a token lacks see no
key. The router multiplies heads before the out-projection, which has a block of columns an expert.

Sizes as elsewhere, with E experts, k experts of a token, and G heads of an expert.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ikattn._precision import widened
from ikattn.recorder.calls.attention_call import AttentionCall
from ikattn.recorder.calls.modes import as_the_model_runs
from ikattn.recorder.calls.projection import Projection, probing


def experts_of(module: nn.Module) -> Any:
    """Returns the experts of a layer whose out-projection is theirs; None of other layers."""
    experts = getattr(module, "experts", None)
    weight = getattr(getattr(experts, "output_linear", None), "weight", None)
    has_router = isinstance(getattr(experts, "router", None), nn.Module)
    return experts if has_router and isinstance(weight, Tensor) and weight.dim() == 3 else None


class RoutedHeads(NamedTuple):
    """Places of a token's heads among those of all experts.

    Attributes:
        experts: The module that has the router and the projections.
        chosen: ``[B, L, k, E]``, 1 where a token's j-th expert is that one, else 0.
        gate: ``[B, L, E]``, what the router multiplies an expert's heads with; 0: it has none.
    """

    experts: Any
    chosen: Tensor
    gate: Tensor

    @staticmethod
    def of(experts: Any, x: Tensor) -> RoutedHeads:
        """Asks the router about tokens ``x [B, L, D]`` again, as the layer has asked it."""
        with probing(experts), as_the_model_runs(gradients=torch.is_grad_enabled()):
            slots, _, weights, counts, _ = experts.router(x.reshape(-1, x.size(-1)))
        # Slots, a token's first expert before its second, stand in the order of experts.
        numbers = torch.arange(len(counts), device=x.device)
        sorted_experts = numbers.repeat_interleave(torch.tensor(counts, device=x.device))
        of_slots = torch.empty_like(slots).scatter(0, slots, sorted_experts)
        in_turn = torch.empty_like(weights).scatter(0, slots, weights)
        sizes = *x.shape[:2], -1, 1
        chosen = (of_slots.view(sizes) == numbers).to(widened(x).dtype)
        return RoutedHeads(experts, chosen, (chosen * in_turn.view(sizes)).sum(-2))

    def _of_experts(self, x: Tensor) -> Tensor:
        """Moves heads ``[B, L, k, ..]`` to those of all experts, ``[B, L, E, ..]``."""
        chosen = self.chosen.mT
        return (chosen @ widened(x).flatten(3)).view(*chosen.shape[:3], *x.shape[3:])

    def call(self, own: AttentionCall) -> AttentionCall:
        """Returns the call ``own``, of k G heads that share G keys, as one of E G heads."""
        k, E = self.chosen.shape[-2:]
        heads = own.query.unflatten(1, (k, -1)).permute(0, 3, 1, 2, 4)  # [B, L, k, G, d]
        G = heads.size(3)
        gate = self.gate.transpose(1, 2).repeat_interleave(G, 1).unsqueeze(-1)  # [B, E G, L, 1]
        is_there, mask = gate != 0, own.attn_mask
        if mask is None or mask.dtype == torch.bool:
            mask = is_there if mask is None else mask & is_there
        else:
            mask = mask.masked_fill(~is_there, -torch.inf)
        return dataclasses.replace(
            own,
            query=self._of_experts(heads).permute(0, 2, 3, 1, 4).flatten(1, 2),
            key=own.key[:, :G].repeat(1, E, 1, 1),
            value=own.value[:, :G].repeat(1, E, 1, 1),
            attn_mask=mask,
            gate=gate,
        )

    def context(self, merged: Tensor) -> Tensor:
        """Returns heads that the model has computed, merged, as ``[B, L, E G d_v]``."""
        heads = merged.unflatten(-1, (self.chosen.size(-2), -1))
        return self._of_experts(heads).flatten(2).to(merged.dtype)

    def gated(self, context: Tensor) -> Tensor:
        """Multiplies heads ``[B, L, E G d_v]`` by the router's weights."""
        of_experts: Tensor = context.unflatten(-1, (self.gate.size(-1), -1))
        return (of_experts * self.gate.unsqueeze(-1)).flatten(2).to(context.dtype)

    @property
    def projection(self) -> Projection:
        """The out-projections of all experts, ``[E, D, G d_v]``, as one."""
        weight = self.experts.output_linear.weight.transpose(0, 1).flatten(1)
        return Projection(weight, getattr(self.experts, "bias", None))
