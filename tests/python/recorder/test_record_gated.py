"""Heads that a model multiplies, divides or subtracts before their out-projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ikattn
from agreement import assert_close

B, L, D, H = 2, 5, 16, 4


class Gated(nn.Module):
    """Attention whose merged heads ``[B, L, D]`` go through ``gate`` before the out-projection."""

    def __init__(self, gate: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.to_gate, self.to_heads = nn.Linear(D, D), nn.Linear(D, H)
        self.apply_gate = gate

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        merged = F.scaled_dot_product_attention(*self.heads(x), is_causal=True)
        return self.apply_gate(self, merged.transpose(1, 2).flatten(2), x)


class Block(nn.Module):
    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.n1, self.n2, self.attn = nn.LayerNorm(D), nn.LayerNorm(D), Gated(gate)
        self.up, self.down = nn.Linear(D, 32), nn.Linear(32, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x))))


def by_channel(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return m.o(y * torch.sigmoid(m.to_gate(x)))


def in_place(m: Any, y: Tensor, x: Tensor) -> Tensor:
    y *= F.softplus(m.to_gate(x))
    return m.o(y)


def by_head(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return m.o((y.view(B, L, H, -1) * m.to_heads(x).tanh().unsqueeze(-1)).view(B, L, D))


def by_norm_of_heads(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return m.o(F.rms_norm(y.view(B, L, H, -1), (D // H,)).flatten(2) * 0.3)


def by_norm_of_tokens(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return m.o(y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) / 2)


def turned(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return m.o(y.view(B, L, H, -1).flip(0).flip(0).transpose(2, 3).flatten(2))


def differential(m: Any, y: Tensor, x: Tensor) -> Tensor:
    one, two = y.view(B, L, H, -1).chunk(2, 2)
    return F.linear((one - 0.7 * two).flatten(2), m.o.weight[:, : D // 2], m.o.bias)


def functional(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return F.linear(y, m.o.weight, m.o.bias)


def product(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return torch.sigmoid(m.to_gate(x)) * y @ m.o.weight.T


GATES = (by_channel, in_place, by_head, by_norm_of_heads, by_norm_of_tokens, differential)


def vectors(attention: Gated, x: Tensor) -> Tensor:
    """What every pair adds to the output, ``[B, L, S, D]``, by taking all other pairs away.

    A gate that reads the heads, such as a norm's divisor, is that of all pairs.
    """
    q, k, v = attention.heads(x)
    hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
    weights = (q @ k.mT / (D / H) ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    whole = (weights @ v).transpose(1, 2).flatten(2)

    def linear_part(heads: Tensor) -> Tensor:
        """The derivative of what the layer makes of its heads, its gate being fixed."""
        gate = attention.apply_gate
        if gate is by_norm_of_heads:
            rms = whole.view(B, L, H, -1).pow(2).mean(-1, keepdim=True)
            divisor = (rms + torch.finfo(x.dtype).eps).sqrt().expand(B, L, H, D // H).flatten(2)
            return attention.o(heads / divisor * 0.3) - attention.o.bias
        if gate is by_norm_of_tokens:
            divisor = (whole.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
            return attention.o(heads / divisor / 2) - attention.o.bias
        zero = gate(attention, torch.zeros_like(heads), x)
        return gate(attention, heads.clone(), x) - zero

    pairs = [
        linear_part((weights[..., j : j + 1] * v[:, :, j : j + 1]).transpose(1, 2).flatten(2))
        for j in range(L)
    ]
    return torch.stack(pairs, 2)


@pytest.mark.parametrize("gate", [*GATES, functional, product])
@torch.no_grad()
def test_maps_of_gated_heads_are_those_of_explicit_vectors(gate: Any) -> None:
    torch.manual_seed(0)
    block = Block(gate).double().eval()
    x = torch.randn(B, L, D, dtype=torch.float64)
    expected = block(x)
    with ikattn.record(block, "all", check="all") as recording:
        found = block(x)
    torch.testing.assert_close(found, expected)
    y = vectors(block.attn, block.n1(x))
    maps = recording["attn"]
    assert maps.summed is not None
    assert_close(maps.summed, y.norm(dim=-1), 1e-9, "summed")
    if gate is product:  # the bias stands alone there, and so the sum is not looked for
        return
    assert maps.with_residual is not None
    assert maps.per_head is not None
    assert (maps.per_head >= 0).all()
    own = torch.arange(L)
    y[:, own, own] += x
    assert_close(maps.with_residual, y.norm(dim=-1), 1e-9, "with_residual")
    assert recording.layers["attn"].block == "pre"
    others = y.sum(2) - y[:, own, own]
    ratio = others.norm(dim=-1) / (others.norm(dim=-1) + y[:, own, own].norm(dim=-1))
    assert_close(maps.mixing_ratio["with_residual"], ratio, 1e-9, "mixing_ratio")
    with ikattn.record(block, "with_residual", reduce="diagonal") as recording:
        block(x)
    diagonal = y[:, own, own].norm(dim=-1)
    assert_close(recording["attn"].reduced["with_residual"], diagonal, 1e-9, "diagonal")


@torch.no_grad()
def test_a_gate_is_seen_in_every_call_and_in_half_precision() -> None:
    torch.manual_seed(0)
    block, x = Block(by_channel).eval(), torch.randn(3, B, L, D)
    with ikattn.record(block, "summed") as recording:
        for each in x:
            block(each)
    half = Block(by_channel).eval().bfloat16()
    half.load_state_dict(block.state_dict())
    for number, each in enumerate(x):
        expected = vectors(block.attn, block.n1(each)).norm(dim=-1)
        found = recording.batches[number]["attn"].summed
        assert_close(found, expected, 1e-5, "summed")
        with ikattn.record(half, "summed") as recorded:
            half(each.bfloat16())
        assert_close(recorded["attn"].summed, expected, 0.05, "in bfloat16")


def added(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return m.o(y + x)


def by_einsum(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("bld,ed->ble", y, m.o.weight)


def reordered(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return m.o(y[:, torch.tensor([1, 0, 2, 3, 4])])


def twice(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return m.o(y) + m.to_gate(y)


def gated_by_heads(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return m.o(y * m.to_gate(y).sigmoid())


@pytest.mark.parametrize(
    ("gate", "reason"),
    [
        (added, "'add'"),
        (by_einsum, "'einsum'"),
        (reordered, "another order"),
        (twice, "no one out-projection"),
        (gated_by_heads, "no one out-projection"),
    ],
)
def test_what_is_no_multiple_of_heads_is_named(gate: Any, reason: str) -> None:
    block = Block(gate).eval()
    with ikattn.record(block), pytest.raises(RuntimeError, match=reason):
        block(torch.randn(B, L, D))
    block(torch.randn(B, L, D))


SIZES = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "head_dim": 4},
    **{"num_key_value_heads": 2, "vocab_size": 40, "pad_token_id": 0, "num_hidden_layers": 2},
    **{"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
}
MIXED = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2},
    **{"linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4},
}


@pytest.mark.parametrize("family", ["Qwen3Next", "Afmoe", "Laguna", "DiffLlama", "BitNet"])
@torch.no_grad()
def test_gated_families_of_transformers_are_recorded(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    more = MIXED if family == "Qwen3Next" else {}
    config = getattr(transformers, f"{family}Config")(**SIZES, **more)
    model = getattr(transformers, f"{family}Model")(config).eval()
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    call = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    expected = model(**call)[0]
    with ikattn.record(model, "all", check="all") as recording:
        found = model(**call)[0]
    torch.testing.assert_close(found, expected)
    maps = recording[recording.names[-1]]
    assert maps.with_residual is not None
    assert maps.encoder is not None
    assert maps.weights is not None
    torch.testing.assert_close(maps.weights[0].sum(-1), torch.ones(4, 4))
