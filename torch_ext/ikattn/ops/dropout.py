"""Dropout of attention weights: a function of a seed and of the weight's position alone.

Symbols as in ``ikattn.ops.attention``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw_dropout_seed(device: torch.device | str = "cpu") -> Tensor:
    """Draws a seed and an offset for dropout from torch's default generator of the device.

    Args:
        device: Where the seed is to be.

    Returns:
        int64 ``[2]``.

    Example:
        >>> import ikattn
        >>> ikattn.ops.draw_dropout_seed().shape
        torch.Size([2])
    """
    return torch.randint(torch.iinfo(torch.int64).max, (2,), dtype=torch.int64, device=device)


def dropout_keep_mask(
    dropout_seed: Tensor, shape: tuple[int, int, int, int], dropout_p: float
) -> Tensor:
    """Tells which weights dropout keeps for a seed.

    The mask is a function of seed, offset and position alone: Philox4x32-7 (Salmon et al., SC
    2011), one call per group of 4 x 4 weights, one byte per weight, dropped where the byte is below
    ``round(256 dropout_p)``.

    Args:
        dropout_seed: int64 ``[2]`` or ``[7]``, as for :func:`ikattn.implicit_kernel_attention`.
        shape: ``(B, H, L, S)`` of the weights.
        dropout_p: Probability in [0, 1).

    Returns:
        Bool ``[B, H, L, S]``, True where the weight is kept.

    Raises:
        RuntimeError, ValueError: dropout_seed or dropout_p is not as described.

    Example:
        >>> import torch, ikattn
        >>> keep = ikattn.ops.dropout_keep_mask(torch.tensor([1, 0]), (1, 2, 64, 64), 0.25)
        >>> abs(keep.float().mean().item() - 0.75) < 0.02
        True
    """
    return torch.ops.ikattn.dropout_keep_mask(  # type: ignore[no-any-return]
        dropout_seed, *shape, dropout_p
    )


def place_dropout_seed(
    dropout_seed: Tensor, *, heads: int, batch: int = 0, head: int = 0, query: int = 0, key: int = 0
) -> Tensor:
    """Makes the seed of a part of a larger call, which takes the larger call's mask.

    So the mask does not depend on how a batch, its heads or its tokens are shared out: over
    devices, or over several calls.

    Args:
        dropout_seed: int64 ``[2]``, that of the larger call.
        heads: H of the larger call.
        batch, head: Batch item and head of the larger call that the part begins with.
        query, key: Query and key that it begins with, multiples of 16.

    Returns:
        int64 ``[7]`` on the device of ``dropout_seed``.

    Raises:
        ValueError: A number is negative, head not below heads, one of the last two no multiple of
            16, or dropout_seed not as described.

    Example:
        >>> import torch, ikattn
        >>> seed = torch.tensor([1, 0])
        >>> whole = ikattn.ops.dropout_keep_mask(seed, (2, 4, 64, 64), 0.25)
        >>> part = ikattn.ops.place_dropout_seed(seed, heads=4, head=2, query=32)
        >>> keep = ikattn.ops.dropout_keep_mask(part, (2, 2, 32, 64), 0.25)
        >>> torch.equal(keep, whole[:, 2:, 32:])
        True
    """
    if dropout_seed.dtype != torch.int64 or dropout_seed.shape != (2,):
        raise ValueError(
            "place_dropout_seed: dropout_seed must be an int64 tensor of shape [2], got "
            f"{dropout_seed.dtype} {list(dropout_seed.shape)}"
        )
    if head >= heads:
        raise ValueError(f"place_dropout_seed: head must be below heads, {heads}, got {head}")
    place = {"batch": batch, "head": head, "heads": heads, "query": query, "key": key}
    for name, number in place.items():
        if number < 0:
            raise ValueError(f"place_dropout_seed: {name} must not be negative, got {number}")
        if name in ("query", "key") and number % 16 != 0:
            raise ValueError(
                f"place_dropout_seed: {name} must be a multiple of 16, for the mask is drawn in "
                f"blocks of 16 x 16 weights, got {number}"
            )
    numbers = torch.tensor(list(place.values()), dtype=torch.int64, device=dropout_seed.device)
    return torch.cat([dropout_seed, numbers])
