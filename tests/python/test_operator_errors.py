"""Wrong arguments are refused before any work, in words that name what was expected and what came."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn

Q, K, V = (torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 6))
W1, W2 = torch.randn(4, 8, 3), torch.randn(4, 8, 3)
GOOD: dict[str, Any] = {"query": Q, "key": K, "value": V, "w1": W1, "w2": W2}

# fmt: off
# ruff: noqa: E501
CASES: list[tuple[str, dict[str, Any], Any, str]] = [
    ("three axes", {"query": Q[0]}, RuntimeError, r"query must have shape \[B, H, L, d\], got \[4, 5, 8\]"),
    ("integers", {"query": Q.long()}, TypeError, r"query must be float64, float32, .* got Long"),
    ("mixed types", {"key": K.double()}, TypeError, r"key must have the dtype of query, Float, got Double"),
    ("value type", {"value": V.half()}, TypeError, r"value must have the dtype of query, Float, got Half"),
    ("batch", {"key": K[:1]}, RuntimeError, r"key must have the batch size of query, 2, got \[1, 4, 7, 8\]"),
    ("head size", {"key": K[..., :5]}, RuntimeError, r"key must have the head size of query, 8, got"),
    ("heads", {"key": K[:, :2], "value": V[:, :2]}, RuntimeError, r"key must have the heads of query, 4, got 2"),
    (
        "heads do not divide",
        {"key": K[:, :3], "value": V[:, :3], "enable_gqa": True},
        RuntimeError,
        r"heads of key must divide those of query, 4, got 3",
    ),
    ("value length", {"value": V[:, :, :6]}, RuntimeError, r"value must have shape .* \[2, 4, 7, d_v\], got \[2, 4, 6, 6\]"),
    ("w1 axes", {"w1": W1[0], "w2": None}, RuntimeError, r"w1 must have shape \[H, d, M\] or \[B, H, d, M\], got \[8, 3\]"),
    ("w1 size", {"w1": W1[:, :7]}, RuntimeError, r"w1 must have shape \[H, d, M\] with d = 8 .* got \[4, 7, 3\]"),
    ("w1 heads", {"w1": W1[:2]}, RuntimeError, r"w1 must have shape .* H = 4 .* got \[2, 8, 3\]"),
    ("w1 batch", {"w1": W1.expand(3, -1, -1, -1), "w2": None}, RuntimeError, r"leading axis of w1 must be the batch size 2, got"),
    ("no frequency", {"w1": W1[..., :0], "w2": None}, RuntimeError, r"w1 must hold at least one frequency, got \[4, 8, 0\]"),
    ("w1 type", {"w1": W1.double(), "w2": None}, TypeError, r"w1 must have the dtype of query, Float, got Double"),
    ("w2 shape", {"w2": W2[..., :2]}, RuntimeError, r"w2 must have the shape of w1, \[4, 8, 3\], got \[4, 8, 2\]"),
    ("w2 type", {"w2": W2.double()}, TypeError, r"w2 must have the dtype of w1, Float, got Double"),
    ("bias shape", {"key_bias": torch.randn(6)}, RuntimeError, r"key_bias must broadcast to .* \[2, 4, 7\], got \[6\]"),
    ("bias type", {"key_bias": torch.ones(7, dtype=torch.bool)}, TypeError, r"key_bias must be floating point, got Bool"),
    ("mask shape", {"attn_mask": torch.ones(5, 6).bool()}, RuntimeError, r"attn_mask must broadcast to .* \[2, 4, 5, 7\], got \[5, 6\]"),
    ("mask axes", {"attn_mask": torch.ones(1, 1, 1, 1, 7).bool()}, RuntimeError, r"attn_mask must broadcast to"),
    ("mask type", {"attn_mask": torch.ones(5, 7).int()}, TypeError, r"attn_mask must be bool .* or floating point .* got Int"),
    ("mask precision", {"attn_mask": torch.ones(5, 7).half()}, TypeError, r"attn_mask must have the dtype of query, Float, got Half"),
    ("p below 1", {"p": 0.5}, ValueError, r"p must be a finite number >= 1 or None, got 0.5"),
    ("p infinite", {"p": math.inf}, ValueError, r"p must be a finite number >= 1 or None, got inf"),
    ("p NaN", {"p": math.nan}, ValueError, r"p must be a finite number >= 1 or None, got nan"),
    ("eps zero", {"eps": 0.0}, ValueError, r"eps must be finite and positive, got 0"),
    ("eps NaN", {"eps": math.nan}, ValueError, r"eps must be finite and positive, got nan"),
    ("scale", {"magnitude_scale": math.inf}, ValueError, r"magnitude_scale must be finite, got inf"),
    ("dropout of 1", {"dropout_p": 1.0}, ValueError, r"dropout_p must be in \[0, 1\), got 1"),
    ("dropout below 0", {"dropout_p": -0.1}, ValueError, r"dropout_p must be in \[0, 1\), got -0.1"),
    ("dropout NaN", {"dropout_p": math.nan}, ValueError, r"dropout_p must be in \[0, 1\), got nan"),
    (
        "seed",
        {"dropout_p": 0.1, "dropout_seed": torch.zeros(3)},
        RuntimeError,
        r"dropout_seed must be an int64 tensor of shape \[2\] on cpu, got Float \[3\] on cpu",
    ),
    ("sparse", {"query": Q.to_sparse()}, (RuntimeError, NotImplementedError), r"."),
    ("device", {"key": K.to("meta")}, RuntimeError, r"key must be on the device of query, cpu, got meta"),
]
# fmt: on


@pytest.mark.parametrize(
    ("change", "error", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_wrong_argument_is_named_with_what_was_expected(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {**GOOD, **change}
    with pytest.raises(error, match=message):
        ikattn.implicit_kernel_attention(**arguments)


def test_weights_and_features_check_their_arguments_too() -> None:
    with pytest.raises(RuntimeError, match="implicit_kernel_weights: key must have the head size"):
        ikattn.implicit_kernel_weights(Q, K[..., :3], W1)
    with pytest.raises(RuntimeError, match=r"spectral_features: x must have shape \[B, H, L, d\]"):
        ikattn.spectral_features(Q[0], W1)
    with pytest.raises(RuntimeError, match="spectral_features: w1 must have shape"):
        ikattn.spectral_features(Q, W1[:3])


def test_operator_without_a_seed_says_how_to_get_one() -> None:
    with pytest.raises(ValueError, match=r"dropout_seed must be given .*draw_dropout_seed"):
        torch.ops.ikattn.implicit_kernel_attention(Q, K, V, W1, dropout_p=0.5)


def test_inputs_are_left_as_they_were() -> None:
    before = [x.clone() for x in (Q, K, V, W1, W2)]
    ikattn.implicit_kernel_attention(Q, K, V, W1, W2, is_causal=True)
    after: list[Tensor] = [Q, K, V, W1, W2]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
