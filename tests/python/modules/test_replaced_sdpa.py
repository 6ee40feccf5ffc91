"""The dot kernel is torch's own: what replaces SDPA reaches it; fused layers add float masks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ikattn

E, H, N, L = 16, 4, 2, 7


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How often a function in SDPA's place has been called."""
    real, made = F.scaled_dot_product_attention, []

    def replaced(*args: Any, **kwargs: Any) -> Tensor:
        made.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", replaced)
    return made


def test_what_replaces_sdpa_after_import_is_called(calls: list[Any]) -> None:
    x, stock = torch.randn(N, L, E), nn.MultiheadAttention(E, H, batch_first=True)
    expected, _ = stock(x, x, x, need_weights=False)
    assert len(calls) == 1
    found, _ = ikattn.convert(stock, "dot")(x, x, x, need_weights=False)
    assert len(calls) == 2
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kernel", ["rbf", "implicit"])
def test_other_kernels_refuse_context_parallelism(kernel, monkeypatch):
    if not torch.distributed.is_available():
        pytest.skip("torch has no torch.distributed")
    from torch.distributed.tensor.experimental import _context_parallel

    wrapper = _context_parallel._attention._distribute_function
    attention = ikattn.MultiheadAttention(E, H, kernel=kernel, batch_first=True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", wrapper)  # of that module
    x = torch.randn(N, L, E)
    with pytest.raises(RuntimeError, match=f"kernel='{kernel}' does not work under torch's cont"):
        attention(x, x, x, need_weights=False)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_float_masks_with_values_are_added_on_the_fused_path(norm_first, activation):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        E, H, 32, 0.0, batch_first=True, norm_first=norm_first, activation=activation
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no nested tensors with norm_first
        encoder = ikattn.convert(nn.TransformerEncoder(layer, 2), "dot")
    x, i = torch.randn(N, L, E), torch.arange(float(L))
    padding = torch.zeros(N, L)
    padding[:, -2:] = -0.7
    for masks in (
        {"mask": -0.5 * (i[:, None] - i).abs()},
        {"mask": -0.5 * (i[:, None] - i).abs(), "src_key_padding_mask": padding},
    ):
        expected = encoder.train()(x, **masks).detach()
        with torch.no_grad():
            found = encoder.eval()(x, **masks)
        assert type(found) is Tensor
        torch.testing.assert_close(found, expected)


def test_bool_masks_keep_the_fused_path(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = ikattn.convert(nn.TransformerEncoderLayer(E, H, 32, batch_first=True), "dot").eval()
    fused, made = torch._transformer_encoder_layer_fwd, []

    def noting(*args: Any) -> Tensor:
        made.append(args)
        return fused(*args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", noting)
    mask = torch.zeros(L, L).masked_fill(torch.ones(L, L).triu(1).bool(), -torch.inf)
    with torch.no_grad():
        layer(torch.randn(N, L, E), src_mask=mask)
    assert len(made) == 1
    assert type(made[0][-2]) is Tensor
