"""Vectors of heads in as many dimensions as there are heads, for maps made in many blocks.

Norms of sums of a token's vectors f_h(x_j) = W_O^h v_j^h, ``[H, D]``, depend on nothing but the
triangular factor of these, ``[H, H]``. ``streamed_contributions`` makes it from D dimensions once
for every call. A block that is given the factor's columns as values has the same maps, and does not
pay for D again: of a block of 256 queries of 32 heads in 4096 dimensions that is nine tenths.

Sizes: B batch, G key/value heads, H query heads, S keys, d_v head size of value, D model size.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ikattn.recorder.calls.attention_call import AttentionCall

MOST_NUMBERS = 1 << 22  # of [B, keys, H, D], held at a time


def pays(call: AttentionCall, projection: Tensor, blocks: int) -> bool:
    """Whether the factors, made here, cost less than what the blocks would make of D dimensions.

    Not on a GPU, where torch factors one token after the other, nor with gradients.
    """
    is_plain = call.value.device.type == "cpu" and not torch.is_grad_enabled()
    is_plain = is_plain and call.gate is None
    return is_plain and blocks > 2 and projection.size(0) > 2 * call.sizes[1]


def in_own_coordinates(call: AttentionCall, projection: Tensor) -> tuple[AttentionCall, Tensor]:
    """Returns a run with values ``[B, H, S, H]``, and the out-projection ``[H, H H]`` for it.

    ``projection [D, H d_v]`` has a D of at least H. Maps without a residual, norms and mixing
    ratios are those of ``call``.
    """
    B, H, _, S = call.sizes
    D, groups = projection.size(0), H // call.key.size(1)
    by_head = projection.to(call.value.dtype).unflatten(1, (H, -1)).permute(1, 2, 0)  # [H, d_v, D]
    value = call.value.repeat_interleave(H // call.value.size(1), 1)
    factors = value.new_empty(B, H, S, H)
    keys = max(1, MOST_NUMBERS // max(1, B * H * D))
    for first in range(0, S, keys):
        part = slice(first, first + keys)
        vectors = (value[:, :, part] @ by_head).transpose(1, 2).contiguous()  # [B, keys, H, D]
        columns = torch.linalg.qr(vectors.mT, mode="r").R  # [B, keys, H, H]
        factors[:, :, part] = columns.permute(0, 3, 1, 2)
    own = torch.eye(H).to(factors).repeat(1, H)
    key = call.key.repeat_interleave(groups, 1)
    return dataclasses.replace(call, key=key, value=factors), own
