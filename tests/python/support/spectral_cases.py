"""Small generators and tokens for the tests of ikattn.spectral."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ikattn
from attention_cases import E, H, L, N
from drawing import moved
from ikattn.spectral import Generator, Ikan, Mikan

D, M = 5, 8  # head size and frequencies of the generators below


each_generator = pytest.mark.parametrize("kind", [Ikan, Mikan])


def perturbed(module: nn.Module, size: float = 0.5) -> nn.Module:
    """Moves every parameter of a module, so that none is at a special value."""
    torch.manual_seed(2)
    return moved(module, size)  # type: ignore[no-any-return]


def generator(kind: type[Generator], **options) -> Generator:
    return perturbed(kind(H, D, M, dtype=torch.float64, seed=0, **options))


def tokens(count: int = N, length: int = L, seed: int = 5) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(count, H, length, D, dtype=torch.float64)


def leaky(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.2 * x)


def two_layers(**options):
    layer = nn.TransformerEncoderLayer(E, H, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2)
    return ikattn.convert(encoder, spectral="mikan", num_frequencies=M, seed=0, **options)
