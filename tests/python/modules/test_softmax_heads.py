"""ikattn.MultiheadAttention in which some heads compute softmax: what calibrate(keep=...) makes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikattn

E, H, N, L = 16, 4, 3, 6
KEPT = torch.tensor([True, False, False, True])


def module(**options: Any) -> ikattn.MultiheadAttention:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"num_frequencies": 8, "seed": 0, "batch_first": True}
    made = ikattn.MultiheadAttention(E, H, dtype=torch.float64, **settings | options)
    with torch.no_grad():
        made.in_proj_weight.mul_(3.0)
    return made.eval()


def tokens() -> Tensor:
    return torch.randn(N, L, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


PADDING = torch.arange(L) >= torch.tensor([[L], [4], [5]])
CAUSAL = torch.ones(L, L, dtype=torch.bool).triu(1)
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "both": {"key_padding_mask": PADDING, "attn_mask": CAUSAL, "is_causal": True},
    "by head": {"attn_mask": (torch.rand(N * H, L, L) < 0.3) & ~torch.eye(L, dtype=torch.bool)},
    "values": {"attn_mask": torch.randn(L, L, dtype=torch.float64)},
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("options", [{}, {"p": "learned"}, {"spectral": "mikan"}], ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
def test_each_head_has_its_own_kernel(options, masks, need_weights):
    if "spectral" in options:  # which refuses the hint that there is no future
        masks = {name: mask for name, mask in masks.items() if name != "is_causal"}
    implicit, x = module(**options), tokens()
    hybrid, softmax = copy.deepcopy(implicit), copy.deepcopy(implicit)
    hybrid.keep_softmax(KEPT)
    softmax.set_kernel("dot")
    # without the out-projection heads stay in their places
    for part in (implicit, hybrid, softmax):
        part.out_proj = nn.Identity()  # type: ignore[assignment]
        part.out_proj.weight = part.out_proj.bias = None  # type: ignore[assignment]
    outputs, weights = [], []
    for part in (implicit, hybrid, softmax):
        torch.manual_seed(2)  # of mikan's noise
        output, own = part(x, x, x, need_weights=need_weights, average_attn_weights=False, **masks)
        outputs.append(output.unflatten(-1, (H, -1)))
        weights.append(own)
    expected = torch.where(KEPT[:, None], outputs[2], outputs[0])
    torch.testing.assert_close(outputs[1], expected)
    if need_weights:
        expected = torch.where(KEPT[:, None, None], weights[2], weights[0])
        torch.testing.assert_close(weights[1], expected)


def test_mean_weights_gradients_and_nested_sequences() -> None:
    hybrid, x = module(), tokens()
    hybrid.keep_softmax(KEPT)
    _, by_head = hybrid(x, x, x, average_attn_weights=False)
    output, mean = hybrid(x, x, x)
    torch.testing.assert_close(mean, by_head.mean(1))
    output.square().sum().backward()
    w1 = hybrid.spectral.w1.grad.view(H, -1)
    assert not w1[KEPT].any()
    assert w1[~KEPT].any()
    lengths = [L, 4, 5]
    nested = torch.nested.nested_tensor(
        [x[i, :n] for i, n in enumerate(lengths)], layout=torch.jagged
    )
    found = hybrid(nested, nested, nested, need_weights=False)[0]
    for i, n in enumerate(lengths):
        alone = hybrid(x[i : i + 1, :n], x[i : i + 1, :n], x[i : i + 1, :n])[0]
        torch.testing.assert_close(found[i], alone[0])


def test_checkpoints_hold_which_heads(tmp_path: Any) -> None:
    hybrid, x = module(), tokens()
    hybrid.keep_softmax(KEPT)
    with pytest.raises(RuntimeError, match="heads compute softmax there; call keep_softmax"):
        module().load_state_dict(hybrid.state_dict())
    again = module()
    again.keep_softmax(~KEPT)
    again(x, x, x)
    again.load_state_dict(hybrid.state_dict())
    torch.testing.assert_close(again(x, x, x), hybrid(x, x, x))
    assert hybrid.split_heads() == ((0, 3), (1, 2))
    hybrid.keep_softmax(None)
    assert "softmax_heads" not in hybrid.state_dict()
    again.set_kernel("implicit", num_frequencies=8)
    assert again.split_heads() is None
    again.keep_softmax(KEPT)
    again.remove_kernel()
    assert type(again) is nn.MultiheadAttention
    assert not hasattr(again, "softmax_heads")
    nn.MultiheadAttention(E, H, dtype=torch.float64).load_state_dict(again.state_dict())


def test_maps_are_those_of_the_heads() -> None:
    model = nn.TransformerEncoderLayer(E, H, 32, batch_first=True, dtype=torch.float64).eval()
    model = ikattn.convert(model, num_frequencies=8, seed=0, p="learned")
    model.self_attn.keep_softmax(KEPT)
    x = tokens()
    with ikattn.record(model, maps=("weights", "summed", "similarity"), check="all") as recording:
        model(x, src_key_padding_mask=PADDING)
    (maps,) = recording.batches[0].values()
    expected = model.self_attn(x, x, x, PADDING, average_attn_weights=False)[1]
    rows = ~PADDING[:, None, :, None] & ~PADDING[:, None, None, :]
    torch.testing.assert_close(maps.weights.double() * rows, expected * rows)


def test_calibration_keeps_the_heads_whose_error_stays_large() -> None:
    torch.manual_seed(0)
    model = ikattn.convert(
        nn.TransformerEncoderLayer(E, H, 32, batch_first=True), num_frequencies=2, seed=0
    )
    x = torch.randn(20, L, E)
    (free,) = ikattn.calibrate(copy.deepcopy(model), [x], steps=20, output_steps=0)
    bound = free.after.sort().values[1:3].mean().item()
    (report,) = ikattn.calibrate(model, [x], steps=20, output_steps=5, keep=bound)
    assert report.softmax_heads == tuple((free.after > bound).nonzero().flatten().tolist())
    assert len(report.softmax_heads) == 2
    assert model.self_attn.split_heads().softmax == report.softmax_heads
    (again,) = ikattn.calibrate(model, [x], steps=2, output_steps=0)
    assert again.softmax_heads == report.softmax_heads
    (none,) = ikattn.calibrate(model, [x], steps=2, output_steps=0, keep=10.0)
    assert none.softmax_heads == ()
    assert model.self_attn.split_heads() is None


@pytest.mark.parametrize(
    "heads", [[0, 1], torch.ones(2, 2) > 0, torch.ones(3) > 0], ids=["numbers", "axes", "number"]
)
def test_heads_are_a_mask(heads: Any) -> None:
    with pytest.raises(ValueError, match=r"keep_softmax: heads must be bool \[4\], got"):
        module().keep_softmax(heads)
    pyg = pytest.importorskip("ikattn.integrations.pyg")
    assert not hasattr(pyg.ImplicitKernelTransformerConv, "keep_softmax")  # which reads none


@pytest.mark.parametrize("extra", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_appended_keys_are_seen_in_causal_calls(extra: dict[str, Any]) -> None:
    x = tokens()
    masks: dict[str, Any] = {"attn_mask": CAUSAL, "is_causal": True}
    implicit = module(**extra)
    hybrid = copy.deepcopy(implicit)
    hybrid.keep_softmax(KEPT)
    alone = hybrid(x, x, x, need_weights=False, **masks)[0]
    torch.testing.assert_close(alone, hybrid(x, x, x, **masks)[0])
