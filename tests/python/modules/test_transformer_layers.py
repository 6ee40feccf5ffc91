"""ikattn.MultiheadAttention inside torch's transformer layers."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import ikattn
from attention_cases import E, H, L, N, causal, each_kernel, explicit

learned_kernels = pytest.mark.parametrize("kernel", ["rbf", "implicit"])


def encoder_layer(kernel, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        E, H, 16, dropout=0.0, batch_first=True, dtype=torch.float64, **options
    )
    return ikattn.convert(layer, kernel, p=3.0, num_frequencies=7, seed=0)


def sources():
    """x [N, L, E] and a left-aligned padding mask, True beyond the lengths 5, 3, 1."""
    torch.manual_seed(1)
    ends = torch.tensor([L, 3, 1])
    return torch.randn(N, L, E, dtype=torch.float64), torch.arange(L) >= ends[:, None]


def with_explicit_attention(model):
    """The model, its attention computed by the formulas."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, ikattn.MultiheadAttention):
            module.forward = functools.partial(explicit, module)
    return model


@pytest.mark.parametrize("norm_first", [False, True])
@each_kernel
def test_encoder_layer_gives_the_same_in_train_and_eval(kernel, norm_first):
    layer, (x, padding) = encoder_layer(kernel, norm_first=norm_first), sources()
    for masks in (
        {},
        {"src_key_padding_mask": padding},
        {"src_mask": causal(L), "is_causal": True},
    ):
        expected = with_explicit_attention(layer)(x, **masks)
        torch.testing.assert_close(layer.train()(x, **masks), expected)
        torch.testing.assert_close(layer.eval()(x, **masks), expected)
        with torch.no_grad():
            torch.testing.assert_close(layer(x, **masks), expected)


@learned_kernels
def test_a_lost_hook_raises_rather_than_computing_another_kernel(kernel):
    layer, (x, _) = encoder_layer(kernel).eval(), sources()
    layer.self_attn._forward_pre_hooks.clear()
    with torch.no_grad(), pytest.raises(RuntimeError, match=f"dot-product.*kernel='{kernel}'"):
        layer(x)


def test_the_dot_kernel_stays_on_the_fused_path():
    layer, (x, _) = encoder_layer("dot").eval(), sources()
    layer.self_attn.forward = None
    with torch.no_grad():
        assert layer(x).shape == x.shape


@pytest.mark.parametrize("is_converted_whole", [True, False])
@each_kernel
def test_encoder_with_padding_gives_the_same_in_train_and_eval(kernel, is_converted_whole):
    """In eval without grad nn.TransformerEncoder nests padded input, unless told otherwise."""
    x, padding = sources()
    encoder = nn.TransformerEncoder(encoder_layer(kernel), num_layers=2)
    if is_converted_whole:
        ikattn.convert(encoder, kernel)
    expected = with_explicit_attention(encoder)(x, src_key_padding_mask=padding)
    trained = encoder.train()(x, src_key_padding_mask=padding)
    torch.testing.assert_close(trained, expected)
    is_nested = []
    encoder.layers[0].register_forward_pre_hook(lambda _, args: is_nested.append(args[0].is_nested))
    with torch.no_grad():
        evaluated = encoder.eval()(x, src_key_padding_mask=padding)
    torch.testing.assert_close(evaluated[~padding], trained[~padding])
    assert is_nested == [kernel == "dot" or not is_converted_whole]


@each_kernel
def test_nested_tensors_need_no_padding(kernel):
    module, (x, padding) = encoder_layer(kernel).self_attn.eval(), sources()
    pieces = [row[~hidden] for row, hidden in zip(x, padding, strict=True)]
    with torch.no_grad():
        nested = torch.nested.as_nested_tensor(pieces)
        output, weights = module(nested, nested, nested)
        expected, expected_weights = module(x, x, x, padding)
    assert output.is_nested
    for row, wanted, hidden in zip(output.unbind(), expected, padding, strict=True):
        torch.testing.assert_close(row, wanted[~hidden])
    torch.testing.assert_close(weights[~padding], expected_weights[~padding])
    with torch.no_grad(), pytest.raises(RuntimeError, match="Need attn_mask if specifying"):
        module(nested, nested, nested, is_causal=True, need_weights=False)


@learned_kernels
def test_nested_tensors_with_masks_or_mixed_with_padded_ones_are_refused(kernel):
    module, (x, padding) = encoder_layer(kernel).self_attn.eval(), sources()
    nested = torch.nested.as_nested_tensor(list(x))
    with pytest.raises(AssertionError, match="takes no masks"):
        module(nested, nested, nested, padding)
    with pytest.raises(AssertionError, match="must all be nested, of one layout"):
        module(nested, x, x)
    module.batch_first = False
    with pytest.raises(AssertionError, match="needs batch_first=True"):
        module(nested, nested, nested)


@pytest.mark.parametrize("batch_first", [True, False])
@each_kernel
def test_a_whole_transformer_equals_the_formulas_and_trains(kernel, batch_first):
    torch.manual_seed(0)
    model = nn.Transformer(
        E, H, 2, 2, 16, dropout=0.0, batch_first=batch_first, dtype=torch.float64
    )
    ikattn.convert(model, kernel, p=3.0, num_frequencies=7)
    source, padding = sources()
    target = torch.randn(N, 4, E, dtype=torch.float64)
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    masks = {
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
        "tgt_mask": causal(4),
        "tgt_is_causal": True,
    }
    expected = with_explicit_attention(model)(source, target, **masks)
    output = model(source, target, **masks)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    assert all(w.grad is not None and w.grad.isfinite().all() for w in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(source, target, **masks), expected)


def largest(module):
    return max(w.abs().max().item() for w in module.spectral.frequencies())


def test_frequencies_survive_the_initialisation_of_nn_transformer():
    """It runs xavier_uniform_ on every parameter with more than one axis."""
    layer = nn.TransformerEncoderLayer(64, 4, 32, batch_first=True)
    layer.self_attn = ikattn.MultiheadAttention(64, 4, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=2)
    before = [w.clone() for w in layer.self_attn.spectral.parameters()]
    model = nn.Transformer(64, 4, custom_encoder=encoder, num_decoder_layers=1, batch_first=True)
    for clone in model.encoder.layers:
        for w, original in zip(clone.self_attn.spectral.parameters(), before, strict=True):
            assert torch.equal(w, original)
            assert w is not original
    whole = ikattn.convert(nn.Transformer(64, 4, 1, 1, 32), num_frequencies=64)
    for module in whole.modules():
        if isinstance(module, ikattn.MultiheadAttention):
            assert 0.98 / 16 < largest(module) <= 1 / 16


def jagged(pieces):
    return torch.nested.nested_tensor(list(pieces), layout=torch.jagged)


@pytest.mark.parametrize("need_weights", [False, True])
@each_kernel
def test_jagged_tensors(kernel, need_weights):
    module, (x, padding) = encoder_layer(kernel).self_attn.eval(), sources()
    pieces = [row[~hidden] for row, hidden in zip(x, padding, strict=True)]
    tokens = torch.cat(pieces).requires_grad_()
    ends = torch.tensor([0, *(len(piece) for piece in pieces)]).cumsum(0)
    nested = torch.nested.nested_tensor_from_jagged(tokens, offsets=ends)
    output, weights = module(nested, nested, nested, need_weights=need_weights)
    expected = [module(piece, piece, piece) for piece in pieces]
    assert output.layout == torch.jagged
    assert output.shape == nested.shape
    torch.testing.assert_close(output.values(), torch.cat([row for row, _ in expected]))
    (gradient,) = torch.autograd.grad(output.values().square().sum(), tokens)
    assert gradient.isfinite().all()
    assert gradient.any()
    assert (weights is not None) == need_weights
    if need_weights:
        torch.testing.assert_close(weights[0, : len(pieces[0]), : len(pieces[0])], expected[0][1])


@learned_kernels
@pytest.mark.parametrize("nested", [jagged, torch.nested.as_nested_tensor], ids=["jagged", ""])
@torch.no_grad()
def test_nested_queries_may_attend_to_other_nested_keys(nested, kernel):
    module, (x, padding) = encoder_layer(kernel).self_attn.eval(), sources()
    pieces = [row[~hidden] for row, hidden in zip(x, padding, strict=True)]
    queries = [x[0, :2], x[1], x[2, :3]]
    memory = nested(pieces)
    output, _ = module(nested(queries), memory, memory, need_weights=False)
    for row, query, piece in zip(output.unbind(), queries, pieces, strict=True):
        torch.testing.assert_close(row, module(query, piece, piece)[0])


def test_jagged_tensors_may_have_holes():
    module, (x, padding) = encoder_layer("implicit").self_attn.eval(), sources()
    pieces = [row[~hidden] for row, hidden in zip(x, padding, strict=True)]
    memory = jagged(pieces)
    starts, lengths = torch.tensor([1, 0, 1]), torch.tensor([2, 3, 2])
    holes = torch.nested.narrow(x, 1, starts, lengths, layout=torch.jagged)
    output, _ = module(holes, holes, holes, need_weights=False)
    row = x[2, 1:3]
    torch.testing.assert_close(output.unbind()[2], module(row, row, row)[0])
    assert (output + holes).size(1) == holes.size(1)  # as a residual connection does
    with pytest.raises(AssertionError, match="of one layout"):
        module(memory, memory, x, need_weights=False)
    with pytest.raises(AssertionError, match="key and value must have the same lengths"):
        module(memory, memory, jagged(pieces[::-1]), need_weights=False)
