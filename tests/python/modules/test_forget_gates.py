"""Modules that make gates for what causal attention remembers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ikattn
from agreement import assert_close


def test_a_module_forgets() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dtype=torch.float64)
    model = ikattn.convert(nn.TransformerEncoder(layer, 2), num_frequencies=4, forget=True).eval()
    x, mask = torch.randn(2, 30, 16).double(), torch.ones(30, 30).triu(1).bool()
    gates = model.layers[0].self_attn.forget
    assert gates.bias.tolist() == [2.0, 4.0, 6.0, 8.0]
    nn.init.normal_(gates.weight)
    before = model(x, mask=mask, is_causal=True)
    with ikattn.record(model, maps=("weights", "summed")) as recording:
        assert torch.equal(model(x, mask=mask, is_causal=True), before)
    first = model.layers[0].self_attn
    padding = torch.arange(30) >= torch.tensor([[30], [20]])
    given = {"key_padding_mask": padding, "attn_mask": mask, "is_causal": True}
    output, weights = first(x, x, x, average_attn_weights=False, **given)
    assert_close(weights[0], recording[0].weights[0].double(), 1e-6)
    assert torch.equal(first(x, x, x, need_weights=False, **given)[0], output)
    output.square().sum().backward()
    assert bool(gates.weight.grad.any())
    again = ikattn.convert(nn.TransformerEncoder(layer, 2), num_frequencies=4, forget=True).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x, mask=mask, is_causal=True), before)
    with pytest.raises(ValueError, match=r"forget=True wants causal .* is_causal=False"):
        first(x, x, x)
    first.keep_softmax(torch.tensor([True, False, False, False]))
    with pytest.raises(NotImplementedError, match="does not work with keep_softmax"):
        first(x, x, x, attn_mask=mask, is_causal=True)
    ikattn.revert(model)
    assert not [name for name, _ in model.named_parameters() if "forget" in name]


def test_modules_that_cannot_forget() -> None:
    x = torch.randn(5, 1, 16)
    decoder = ikattn.convert(nn.TransformerDecoderLayer(16, 4, 8), forget=True)
    with pytest.raises(ValueError, match=r"forget=True wants causal .* got is_causal=False"):
        decoder(x, x, tgt_mask=torch.ones(5, 5).triu(1).bool(), tgt_is_causal=True)
    with pytest.raises(ValueError, match="has gates"):
        ikattn.calibrate(decoder, [(x, x)])
    with pytest.raises(ValueError, match="forget must be False for kernel='rbf'"):
        ikattn.MultiheadAttention(16, 4, kernel="rbf", forget=True)
