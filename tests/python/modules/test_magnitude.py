"""The learned order of the norm in a key's magnitude."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import ikattn
from attention_cases import E, H, L, N, batch, ignore, make
from ikattn.ops.magnitude import LearnedOrder


def at_orders(orders: list[float]) -> LearnedOrder:
    magnitude = LearnedOrder(len(orders), dtype=torch.float64)
    with torch.no_grad():
        magnitude.raw.copy_(torch.tensor(orders).sub(1).expm1().log())
    return magnitude


def test_every_head_has_the_norm_of_its_order():
    orders = [1.001, 1.5, 2.0, 7.0]
    magnitude, key = at_orders(orders), batch(N, H, L, 3)
    key[0, :, 0] = 0.0
    key[0, :, 1, 1] = 0.0
    found = magnitude(key)
    for head, p in enumerate(orders):
        expected = torch.linalg.vector_norm(key[:, head], p, dim=-1) ** 2 / (2 * math.sqrt(3))
        torch.testing.assert_close(found[:, head], expected, rtol=1e-6, atol=0)
    for size in (1e-18, 1e18):  # which neither vanish nor overflow
        key = torch.full((1, 1, 1, 4), size)
        torch.testing.assert_close(LearnedOrder(1)(key), torch.full((1, 1, 1), size * size))


def test_gradients_at_zeros_are_zero_and_right_elsewhere():
    magnitude, key = at_orders([1.2, 3.0]), batch(1, 2, 4, 3)
    assert torch.autograd.gradcheck(
        lambda key, raw: torch.func.functional_call(magnitude, {"raw": raw}, (key,)),
        (key.clone().requires_grad_(), magnitude.raw.detach().clone().requires_grad_()),
    )
    key[:, :, 0] = 0.0
    key[:, :, 1, 2] = 0.0
    key.requires_grad_()
    magnitude(key).sum().backward()
    assert key.grad[:, :, 0].eq(0).all()
    assert key.grad[:, :, 1, 2].eq(0).all()
    assert key.grad.isfinite().all()
    # what zeros leave of the gradient in p is that of the rest
    at_rest = at_orders([1.2, 3.0])
    rest = key.detach()[:, :, 2:].sum() * 0 + at_rest(key.detach()[:, :, 2:]).sum()
    (rest + at_rest(key.detach()[:, :, 1:2, :2]).sum() * math.sqrt(2 / 3)).backward()
    torch.testing.assert_close(magnitude.raw.grad, at_rest.raw.grad)
    assert torch.autograd.gradgradcheck(at_orders([1.7]), (batch(1, 1, 2, 3).requires_grad_(),))


@pytest.mark.parametrize("kernel", ["rbf", "implicit"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_a_learned_order_starts_as_two_and_attends_as_that_number(kernel, need_weights):
    learned, fixed = make(kernel, p="learned"), make(kernel, p=2.0)
    learned.load_state_dict(fixed.state_dict())
    with torch.no_grad():
        learned.magnitude.reset_parameters()
    x, padding = batch(L, N, E), ignore(N, L)
    for p in (2.0, 3.0):
        with torch.no_grad():
            learned.magnitude.raw.fill_(math.log(math.expm1(p - 1)))
        fixed.p = p
        for options in ({}, {"key_padding_mask": padding}):
            got, expected = (
                module(x, x, x, need_weights=need_weights, **options)[0]
                for module in (learned, fixed)
            )
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kernel", ["rbf", "implicit"])
def test_the_order_learns(kernel):
    module, x = make(kernel, p="learned"), batch(L, N, E)
    module(x, x, x)[0].square().sum().backward()
    gradient, size = module.magnitude.raw.grad, 1e-6
    assert gradient.ne(0).all()
    for head in range(H):
        sides = []
        for sign in (1, -1):
            with torch.no_grad():
                module.magnitude.raw[head] += sign * size
                sides.append(module(x, x, x)[0].square().sum())
                module.magnitude.raw[head] -= sign * size
        difference = (sides[0] - sides[1]) / (2 * size)
        torch.testing.assert_close(gradient[head], difference, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kernel", ["rbf", "implicit"])
def test_nan_in_padding_does_not_leak_through_the_order(kernel):
    module, x = make(kernel, p="learned"), batch(L, N, E)
    padding = torch.arange(L).expand(N, L) >= 3
    key = x.clone()
    key[3:] = math.nan
    output, _ = module(x, key, key, key_padding_mask=padding)
    torch.testing.assert_close(output, module(x, x, x, key_padding_mask=padding)[0])
    output.sum().backward()
    assert module.magnitude.raw.grad.isfinite().all()


def test_stacks_keep_learning_orders_of_their_own():
    layer = nn.TransformerEncoderLayer(E, H, batch_first=True)
    encoder = ikattn.convert(nn.TransformerEncoder(layer, 2), p="learned")
    orders = [layer.self_attn.magnitude.raw for layer in encoder.layers]
    assert orders[0] is not orders[1]
    assert [name for name, _ in encoder.named_parameters() if name.endswith("magnitude.raw")]
    ikattn.convert(encoder, kernel="dot")
    assert all(layer.self_attn.magnitude is None for layer in encoder.layers)
    softmax = ikattn.MultiheadAttention(E, H, kernel="dot", p="learned")
    assert softmax.state_dict().keys() == nn.MultiheadAttention(E, H).state_dict().keys()
    with pytest.raises(ValueError, match=r"above 1, got 1\.0"):
        LearnedOrder(2, p=1.0)  # where no learning can start
