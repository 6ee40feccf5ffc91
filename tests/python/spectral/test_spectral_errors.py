"""Errors name the fault of a source of frequencies, or of what it returns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import ikattn
from attention_cases import E, H, L, N, batch, causal, make
from ikattn.spectral import Direct, Ikan, Mikan
from spectral_cases import D, M, each_generator


class Wrong(nn.Module):
    def __init__(self, make_output):
        super().__init__()
        self.make_output = make_output

    def forward(self, query, key, key_padding_mask):
        heads, size = query.shape[1], query.shape[3]
        return self.make_output(query.new_zeros(query.shape[0], heads, size, M))


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (lambda w: w, TypeError, r"must return \(w1, w2\) or .*, got a tensor"),
        (lambda w: (w,), TypeError, "got a tuple of 1"),
        (lambda w: (None, w), TypeError, "w1 and w2"),
        (lambda w: (w.mT, None), ValueError, r"H, d = 3, 4, 3, got \[3, 4, 7, 3\]"),
        (lambda w: (w[:, 1:], None), ValueError, r"w1 must have shape .*, got \[3, 3, 3, 7\]"),
        (lambda w: (w[1:], None), ValueError, r"got \[2, 4, 3, 7\]"),
        (lambda w: (w[0, 0], None), ValueError, r"got \[3, 7\]"),
        (lambda w: (w, w[0]), ValueError, r"w2 must be shaped as w1, .* got \[4, 3, 7\]"),
        (lambda w: (w.long(), None), TypeError, r"w1 must be floating point, got torch\.int64"),
        (lambda w: (w, w + 0j), TypeError, r"w2 must be floating point, got torch\.complex128"),
        (lambda w: (w, w, w.sum() * math.nan), ValueError, "must be finite, got nan"),
        (lambda w: (w, w, w), TypeError, "scalar, real tensor or None as regularization"),
        (lambda w: (w, w, w.sum() + 0j), TypeError, "regularization, got a tensor .*complex128"),
    ],
)
def test_a_generator_that_returns_something_else_is_named(output, error, message, monkeypatch):
    monkeypatch.setitem(globals(), "M", 7)
    module = make("implicit", spectral=Wrong(output))
    x = batch(L, N, E)
    with pytest.raises(error, match=message) as raised:
        module(x, x, x)
    assert str(raised.value).startswith("Wrong")


def test_the_heads_and_the_layer_of_frequencies_that_are_not_finite_are_named():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, batch_first=True), 2)
    ikattn.convert(encoder)
    model = nn.ModuleDict({"encoder": encoder, "other": nn.Linear(2, 2)})
    with torch.no_grad():
        encoder.layers[1].self_attn.spectral.frequencies()[1][2, 0, 5] = math.nan
    message = (
        r"Direct 'layers\.1\.self_attn\.spectral': w2 must be finite, got 1 of \d+ that are NaN or "
        r"infinite, in heads \[2\]$"
    )
    with pytest.raises(ValueError, match=message):
        model["encoder"](batch(N, L, E, dtype=torch.float32))
    mikan = Mikan(H, D, M)
    with torch.no_grad():
        mikan.gain[D] = math.inf
    module = ikattn.MultiheadAttention(H * D, H, spectral=mikan)
    x = batch(L, N, H * D, dtype=torch.float32)
    with pytest.raises(
        ValueError, match=r"Mikan 'spectral': w1 .*in heads \[1\] of samples \[0, 1"
    ):
        module(x, x, x)


def test_of_layers_that_share_a_source_the_one_that_calls_is_named():
    model = nn.ModuleList([nn.MultiheadAttention(E, H) for _ in range(2)])
    ikattn.convert(model, spectral=(shared := Wrong(lambda w: (w + 1.0, None))))
    model[0].spectral = model[1].spectral = shared
    x = batch(L, N, E, dtype=torch.float32)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            x = self.layers[0](x, x, x)[0]
            shared.make_output = lambda w: (w * math.inf, None)
            return self.layers[1](x, x, x)[0]

    with pytest.raises(ValueError, match=r"Wrong 'layers\.1\.spectral': w1 must be finite"):
        Both()(x)


@each_generator
def test_generators_for_other_heads_are_named(kind):
    attention = nn.MultiheadAttention(E, H)
    layer = ikattn.convert(nn.ModuleDict({"a": attention}), spectral=kind(2, E // 2, M))
    x = batch(L, N, E, dtype=torch.float32)
    expected = rf"{kind.__name__} 'spectral' is for H, d = 2, 6, got queries of H, d = 4, 3"
    with pytest.raises(ValueError, match=expected):
        layer["a"](x, x, x)


def test_causal_attention_is_refused_where_the_future_would_be_seen():
    module = make("implicit", spectral="mikan", num_frequencies=M)
    x = batch(L, N, E)
    with pytest.raises(RuntimeError, match="Mikan averages over whole sequences"):
        module(x, x, x, attn_mask=causal(L), is_causal=True)
    module.set_kernel("implicit", spectral="ikan")
    assert module(x, x, x, attn_mask=causal(L), is_causal=True)[0].isfinite().all()


@pytest.mark.parametrize("returned", [Direct, lambda *_: None], ids=["class", "function"])
def test_a_function_that_makes_no_source_is_an_error(returned):
    with pytest.raises(ValueError, match=r"function given as spectral must return one of .*, got"):
        ikattn.MultiheadAttention(E, H, spectral=lambda _: returned)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.5])
def test_what_is_no_seed_is_an_error(seed):
    with pytest.raises(ValueError, match=f"seed must be an integer of 64 bits or None, got {seed}"):
        ikattn.MultiheadAttention(E, H, seed=seed)
    np = pytest.importorskip("numpy")  # whose integers are seeds
    for name in ("direct", "ikan"):
        made = (ikattn.MultiheadAttention(E, H, spectral=name, seed=s) for s in (np.int64(3), 3))
        assert all(map(torch.equal, *(module.spectral.parameters() for module in made)))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Ikan, {"num_frequencies": 7}, "even and at least 2.*got 7"),
        (Mikan, {"num_frequencies": 0}, "num_frequencies must be an integer >= 1, got 0"),
        (Direct, {"num_heads": 0}, "num_heads must be an integer >= 1, got 0"),
        (Ikan, {"head_dim": 0}, "head_dim must be an integer >= 1, got 0"),
        (Ikan, {"kl_weight": -1.0}, r"kl_weight must be a number >= 0, got -1\.0"),
        (Mikan, {"copula_weight": math.nan}, "copula_weight must be a number >= 0, got nan"),
        (Ikan, {"evaluation": "median"}, r"evaluation must be one of .*, got 'median'"),
        (Ikan, {"prior_scale": 0.0}, r"prior_scale must be positive, got 0\.0"),
        (Mikan, {"pool": "query"}, "pool must be 'both' or 'key', got 'query'"),
        (Mikan, {"faithful": "paper"}, "faithful must be None or 'code', got 'paper'"),
        (Mikan, {"faithful": "code", "stationary": True}, "needs pool='both' and stationary=False"),
        (Mikan, {"faithful": "code", "evaluation": "mean"}, "no other evaluation, got 'mean'"),
        (Ikan, {"kl_weight": "a"}, "kl_weight must be a number >= 0, got 'a'"),
        (Ikan, {"prior_scale": None}, "prior_scale must be positive, got None"),
    ],
)
def test_bad_options_say_what_was_expected_and_got(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**{"num_heads": H, "head_dim": D, "num_frequencies": M, **options})
