"""Padding never enters the pooling of Mikan."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ikattn
from attention_cases import E, H, L, N, batch, make
from ikattn.spectral import Mikan
from spectral_cases import M, generator, perturbed, tokens, two_layers


@pytest.mark.parametrize("value", [7.0, math.nan, math.inf])
def test_padding_never_enters_the_pooling(value):
    source = generator(Mikan).eval()
    q, k = tokens(seed=5), tokens(seed=6)
    padding = torch.arange(L) >= torch.tensor([[3], [L], [1]])
    expected = source(q, k, padding, padding)
    for x in (q, k):
        x[padding[:, None].expand(-1, H, -1)] = value
    for got, wanted in zip(source(q, k, padding, padding), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    alone = source(q[:1, :, :3], k[:1, :, :3], None, None)
    torch.testing.assert_close(expected[0][:1], alone[0])
    everything = torch.ones(N, L, dtype=torch.bool)
    assert all(x.isfinite().all() for x in source(q, k, everything, everything))


@pytest.mark.parametrize("training", [False, True])
def test_output_does_not_depend_on_how_much_a_sequence_is_padded(training):
    module = make("implicit", spectral=perturbed(Mikan(H, E // H, M, dtype=torch.float64), 0.2))
    module.train(training)
    x = batch(L, 1, E)
    torch.manual_seed(0)
    expected = module(x, x, x)[0]
    longer = torch.cat([x, torch.full((4, 1, E), 3.0, dtype=torch.float64)])
    padding = torch.arange(L + 4)[None] >= L
    for mask in (padding, torch.zeros(1, L + 4).double().masked_fill(padding, -math.inf)):
        torch.manual_seed(0)
        output = module(longer, longer, longer, key_padding_mask=mask)[0]
        torch.testing.assert_close(output[:L], expected)


PADDING = torch.arange(L) >= torch.tensor([[L], [3], [1]])


COPIES = {
    "clones": lambda x: (x, x.clone(), x.clone()),
    "the same sum thrice": lambda x: (x + 1, x + 1, x + 1),
    "detached, as by checkpointing": lambda x: (x.detach(), x.detach(), x.detach()),
    "keys of other padding": lambda x: (x, x.masked_fill(PADDING[..., None], 9.0), x),
}


MASKS = {
    "bool": PADDING,
    "-inf": torch.zeros(N, L).masked_fill(PADDING, -math.inf),
    "the lowest float32": torch.zeros(N, L).masked_fill(PADDING, torch.finfo(torch.float32).min),
    "-1e9": torch.zeros(N, L).masked_fill(PADDING, -1e9),
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("value", [9.0, math.nan])
def test_padding_is_left_out_of_queries_that_are_copies_of_the_keys(
    value, copies, mask, batch_first
):
    source = perturbed(Mikan(H, E // H, M, dtype=torch.float64), 0.2)
    module = make("implicit", spectral=source, batch_first=batch_first).eval()
    seen = []
    module.spectral.register_forward_hook(lambda _, args, output: seen.append(output[0]))
    x = batch(N, L, E)
    for padding_value in (0.0, value):
        x = x.masked_fill(PADDING[..., None], padding_value)
        arguments = [y if batch_first else y.transpose(0, 1) for y in copies(x)]
        module(*arguments, key_padding_mask=mask)
    assert torch.equal(seen[0], seen[1])
    # but other queries are all averaged, in the samples where they differ
    if batch_first:
        other = copies(x.nan_to_num())[0] + torch.tensor([[[0.0]], [[1.0]], [[0.0]]])
        module(other, *arguments[1:], key_padding_mask=mask)
        assert [torch.equal(a, b) for a, b in zip(seen[2], seen[0], strict=True)] == [
            True,
            False,
            True,
        ]


def test_copies_are_found_under_compile_and_export():
    module = make("implicit", spectral="mikan", num_frequencies=M, batch_first=True).eval()
    perturbed(module.spectral, 0.2)
    x = batch(N, L, E)
    arguments = (x, x.clone(), x.clone(), PADDING)
    expected = module(x, x, x, PADDING)[0]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(module, arguments).module()
    for run in (compiled, exported):
        torch.testing.assert_close(run(*arguments)[0], expected)


@pytest.mark.parametrize("key_lengths", [(4, 2), None], ids=["keys of their own", "the same"])
def test_nested_input_is_averaged_as_far_as_it_goes(key_lengths):
    module = make("implicit", spectral=Mikan(H, E // H, M, dtype=torch.float64), batch_first=True)
    perturbed(module.spectral, 0.2)
    module.eval()
    queries = [batch(length, E) for length in (3, 6)]
    keys = queries if key_lengths is None else [batch(length, E) for length in key_lengths]
    with torch.no_grad():
        q = torch.nested.nested_tensor(queries)
        k = q if key_lengths is None else torch.nested.nested_tensor(keys)
        output, _ = module(q, k, k, need_weights=False)
        for query, key, got in zip(queries, keys, output.unbind(), strict=True):
            torch.testing.assert_close(got, module(query, key, key)[0])


def test_padding_is_left_out_when_a_checkpoint_computes_again():
    encoder = two_layers()
    perturbed(encoder, 0.1)
    grads = []
    for run in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=True)):
        x = batch(N, L, E, dtype=torch.float32).requires_grad_()
        torch.manual_seed(0)
        run(lambda x: encoder(x, src_key_padding_mask=PADDING), x)[~PADDING].sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_half_precision_averages_long_sequences():
    module = ikattn.MultiheadAttention(E, H, spectral="mikan", num_frequencies=M, seed=0)
    with torch.no_grad():
        module.in_proj_bias.fill_(14.0)  # of which 5000 make more than 65504
    x = batch(6000, 1, E, dtype=torch.float16)
    padding = torch.arange(6000)[None] >= 5000
    for mask in (None, padding):
        output = module.half().eval()(x, x, x, key_padding_mask=mask, need_weights=False)[0]
        assert output.isfinite().all()
