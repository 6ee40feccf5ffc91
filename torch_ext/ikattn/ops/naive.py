"""Implicit-kernel attention as README writes it, to be read beside the kernels.

weight_ij = (s_ij^2 + eps) exp(g_j + bias_ij) / Z_i,   s_ij = phi(q_i) . phi(k_j) / 4 M
"""

import math

import torch
from torch import Tensor


def attention(
    query: Tensor,  # [B, H, L, d]
    key: Tensor,  # [B, H, S, d]
    value: Tensor,  # [B, H, S, d_v]
    w1: Tensor,  # [H, d, M]
    w2: Tensor,  # [H, d, M]
    p: float = 2.0,
    bias: Tensor | float = 0.0,  # masks and biases of keys together, to [B, H, L, S]; -inf hides
    eps: float = 1e-5,
) -> Tensor:  # [B, H, L, d_v]
    """Returns the output; every row sees a key."""

    def features(x: Tensor) -> Tensor:
        a, b = 2 * math.pi * x @ w1, 2 * math.pi * x @ w2
        return torch.cat([a.cos() + b.cos(), a.sin() + b.sin()], -1)

    similarity = features(query) @ features(key).mT / (4 * w1.shape[-1])
    magnitude = key.norm(p, -1).square() / (2 * math.sqrt(key.shape[-1]))
    log_weights = (similarity.square() + eps).log() + magnitude.unsqueeze(-2) + bias
    output: Tensor = log_weights.softmax(-1) @ value
    return output
