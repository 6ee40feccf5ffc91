"""ikattn.regularization_loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ikattn
from attention_cases import E, H, L, N, batch, make
from ikattn.spectral import Direct
from spectral_cases import M, perturbed, two_layers


def test_regularisers_of_all_layers_are_gathered():
    layer = nn.TransformerEncoderLayer(E, H, batch_first=True, dropout=0.0)
    encoder = ikattn.convert(nn.TransformerEncoder(layer, 3), spectral="mikan", num_frequencies=M)
    perturbed(encoder, 0.1)
    encoder(batch(N, L, E, dtype=torch.float32))
    terms = [layer.self_attn.regularization for layer in encoder.layers]
    assert len({term.item() for term in terms}) == 3
    total = ikattn.regularization_loss(encoder)
    torch.testing.assert_close(total, sum(terms))
    total.backward()
    for layer in encoder.layers:
        assert layer.self_attn.spectral.posterior.weights.grad.abs().max() > 0


def test_a_regulariser_is_taken_once_for_each_pass():
    encoder, x = two_layers().eval(), batch(N, L, E, dtype=torch.float32)
    encoder(x)
    first = ikattn.regularization_loss(encoder)
    with pytest.raises(RuntimeError, match=r"layers\.0\.self_attn .* once for every forward pass"):
        ikattn.regularization_loss(encoder)
    encoder(x)
    torch.testing.assert_close(ikattn.regularization_loss(encoder), first)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_that_are_left_out_add_nothing(checkpointed):
    encoder, x = two_layers(), batch(N, L, E, dtype=torch.float32)
    with torch.no_grad():
        encoder.eval()(x)  # whose regularisers nobody takes
    encoder.train()
    for layers in ([1], [0, 1], [0]):
        output = x
        for index in layers:
            call = encoder.layers[index]
            output = checkpoint(call, output, use_reentrant=False) if checkpointed else call(output)
        expected = sum(encoder.layers[i].self_attn.regularization.item() for i in layers)
        loss = ikattn.regularization_loss(encoder)
        assert loss.item() == pytest.approx(expected)
        (output.square().mean() + loss).backward()
    assert encoder.layers[1].self_attn.regularization is None


def test_reentrant_checkpoints_which_would_not_train_the_generator_are_an_error():
    encoder, x = two_layers(), batch(N, L, E, dtype=torch.float32).requires_grad_()
    checkpoint(encoder, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"layers\.0\.self_attn has no .*use_reentrant=False"):
        ikattn.regularization_loss(encoder)
    checkpoint(encoder, x, use_reentrant=True)
    with torch.no_grad():
        assert ikattn.regularization_loss(encoder) > 0
    with torch.no_grad():
        encoder.eval()(x)
    assert ikattn.regularization_loss(encoder) > 0  # nothing would be trained
    for layer in encoder.train().layers:
        layer.self_attn.spectral.requires_grad_(False)
    checkpoint(encoder, x, use_reentrant=True)
    assert ikattn.regularization_loss(encoder) > 0


def test_models_without_generators_have_no_regulariser():
    for kernel in ("dot", "implicit"):
        module = ikattn.MultiheadAttention(E, H, kernel=kernel)
        assert ikattn.regularization_loss(nn.Sequential(module)) == 0
    assert ikattn.regularization_loss(nn.Identity()) == 0
    model = nn.ModuleDict({"block": ikattn.MultiheadAttention(E, H, spectral="ikan")})
    with pytest.raises(RuntimeError, match="block has no regulariser: call the model first"):
        ikattn.regularization_loss(model)


def test_a_regulariser_of_a_transformation_that_has_ended_is_an_error():
    module = ikattn.MultiheadAttention(E, H, spectral="ikan", num_frequencies=M)
    x = batch(L, N, E, dtype=torch.float32)
    several = {name: torch.stack([w, w]) for name, w in module.named_parameters()}

    def call(parameters):
        output = torch.func.functional_call(module, parameters, (x, x, x))[0]
        return output.sum() + ikattn.regularization_loss(module) * taken

    taken = 1
    assert torch.vmap(call, randomness="different")(several).isfinite().all()
    torch.vmap(
        lambda p: torch.func.functional_call(module, p, (x, x, x))[0], randomness="different"
    )(several)
    with pytest.raises(RuntimeError, match=r"no regulariser: .* same torch\.func transformation"):
        ikattn.regularization_loss(module)


class WithRegularizer(Direct):
    def forward(self, query, key, key_padding_mask):
        return *self.frequencies(), getattr(self, "term", self.w1.square().sum())


def test_users_module_may_have_a_regulariser_which_may_be_a_parameter():
    module = make("implicit", spectral=WithRegularizer(H, E // H, M, dtype=torch.float64))
    x = batch(L, N, E)
    module(x, x, x)
    expected = module.spectral.w1.square().sum()
    torch.testing.assert_close(ikattn.regularization_loss(module), expected)
    module.spectral.term = nn.Parameter(torch.tensor(3.0))
    for _ in range(2):
        module(x, x, x)
        ikattn.regularization_loss(module).backward()
    assert module.spectral.term.grad == 2
    assert [name for name, _ in module.named_parameters()].count("regularization") == 0
