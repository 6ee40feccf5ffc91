"""ikattn.spectral: generators of frequencies, against formulas in float64 and by measurement."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ikattn
from attention_cases import E, H, L, N, batch, causal, ignore, make
from ikattn.spectral import (
    SOURCES,
    Direct,
    Generator,
    Ikan,
    Mikan,
    OddNetwork,
    Stationary,
    correlation_factor,
    gaussian_copula_log_density,
    gaussian_kl,
)

D, M = 5, 8  # head size and frequencies of the generators below

each_generator = pytest.mark.parametrize("kind", [Ikan, Mikan])


def perturbed(module: nn.Module, size: float = 0.5) -> nn.Module:
    """The same module with every parameter moved, so that none is at a special value."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return module


def generator(kind: type[Generator], **options) -> Generator:
    return perturbed(kind(H, D, M, dtype=torch.float64, seed=0, **options))


def tokens(count: int = N, length: int = L, seed: int = 5) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(count, H, length, D, dtype=torch.float64)


def leaky(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.2 * x)


# Networks


def test_odd_network_is_its_formula_and_odd():
    network = perturbed(OddNetwork(D, dtype=torch.float64))
    z = torch.randn(2, H, D, M, dtype=torch.float64)
    weights, biases = network.weights.view(3, D, D), network.biases.view(3, D)
    expected = torch.empty_like(z)
    for b in range(2):
        for h in range(H):
            for m in range(M):
                x = z[b, h, :, m].abs()
                x = leaky(weights[0].mv(x) + biases[0])
                x = leaky(weights[1].mv(x) + biases[1])
                x = weights[2].mv(x) + biases[2]
                expected[b, h, :, m] = torch.where(z[b, h, :, m] < 0, -x, x)
    torch.testing.assert_close(network(z), expected)
    assert torch.equal(network(-z), -network(z))


@pytest.mark.parametrize("size", [8, 64, 128])
def test_initial_frequencies_have_the_same_scale_at_every_head_size(size):
    torch.manual_seed(0)
    source = Mikan(8, size, 64).train()
    q, k = torch.randn(2, 4, 8, 10, size)
    for w in source(q, k, None)[:2]:
        angle = 2 * math.pi * math.sqrt(size) * w.std()  # of a token of standard normal numbers
        assert 0.5 < angle < 2


def test_direct_frequencies_may_start_with_unit_angles():
    for size in (8, 128):
        w = Direct(1, size, 64, initial="unit angle", seed=0).w1
        assert abs(2 * math.pi * math.sqrt(size) * w.std() - 1) < 0.1
    with pytest.raises(ValueError, match=r"initial must be one of .*, got 'wide'"):
        Direct(1, 8, 64, initial="wide")


# Copula


def random_correlation(heads: int) -> Tensor:
    torch.manual_seed(3)
    factor = correlation_factor(torch.randn(heads, heads, dtype=torch.float64))
    return factor @ factor.mT


def test_factor_gives_unit_diagonal_and_positive_definite_matrices():
    factor = correlation_factor(10 * torch.randn(50, H, H, dtype=torch.float64))
    correlation = factor @ factor.mT
    torch.testing.assert_close(
        correlation.diagonal(dim1=-2, dim2=-1), torch.ones(50, H, dtype=torch.float64)
    )
    assert torch.linalg.eigvalsh(correlation).min() > 0
    torch.testing.assert_close(torch.linalg.cholesky(correlation), factor)


def test_copula_density_is_the_joint_density_over_the_marginals():
    correlation = random_correlation(H)
    x = torch.randn(20, H, dtype=torch.float64)
    joint = torch.distributions.MultivariateNormal(x.new_zeros(H), correlation).log_prob(x)
    marginals = torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(-1)
    torch.testing.assert_close(gaussian_copula_log_density(x, correlation), joint - marginals)


def test_mean_copula_density_is_the_regulariser():
    source = generator(Mikan)
    _, _, factor = source.infer(tokens(), tokens(seed=6))
    factor = factor[0, 0].detach()
    scores = torch.randn(200_000, H, dtype=torch.float64) @ factor.mT
    density = gaussian_copula_log_density(scores, factor @ factor.mT)
    expected = -torch.linalg.slogdet(factor @ factor.mT).logabsdet / 2
    assert expected > 0.1
    assert abs(density.mean() - expected) < 4 * density.std() / math.sqrt(len(density))


def test_divergence_is_torchs():
    location, log_scale = torch.randn(2, 30, dtype=torch.float64)
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(
        normal(location, log_scale.exp()), normal(0.0, 0.3)
    )
    torch.testing.assert_close(gaussian_kl(location, log_scale, 0.3), expected)


@pytest.mark.parametrize(
    ("correlation", "message"),
    [
        (torch.tensor([[1.0, 2.0], [2.0, 1.0]]), r"positive definite.*smallest eigenvalue is -1"),
        (torch.tensor([[2.0, 0.0], [0.0, 1.0]]), r"unit diagonal, got 2"),
        (torch.tensor([[1.0, 0.5], [0.0, 1.0]]), "symmetric"),
        (torch.tensor([[1.0, math.nan], [math.nan, 1.0]]), "finite"),
        (torch.ones(3, 2), r"\[\.\.\., H, H\], got \[3, 2\]"),
    ],
)
def test_what_is_no_correlation_matrix_is_refused(correlation, message):
    with pytest.raises(ValueError, match=message):
        gaussian_copula_log_density(torch.zeros(2), correlation)


def test_the_matrix_that_is_not_positive_definite_is_named():
    good, bad = torch.eye(2), torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"of matrix \[1, 2\]"):
        gaussian_copula_log_density(
            torch.zeros(2), torch.stack([good, good, good, good, good, bad]).view(2, 3, 2, 2)
        )


# Values


def normal_draws(shape: tuple[int, ...], seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64)


def test_ikan_is_its_formula():
    source = generator(Ikan, prior_scale=0.7, kl_weight=0.3).train()
    q, noise = tokens(), normal_draws((H, D, M), seed=8)
    torch.manual_seed(8)
    w1, w2, regularization = source(q, q, None)
    location, scale = source.location.view(H, D), source.log_scale.view(H, D).exp()
    gain = source.gain.view(H, D)
    divergence = 0.0
    for h in range(H):
        for i in range(D):
            ratio, shift = scale[h, i] / 0.7, location[h, i] / 0.7
            divergence += (ratio**2 + shift**2 - 1) / 2 - torch.log(ratio)
        for m in range(M):
            sign = 1 if m < M // 2 else -1
            z = sign * location[h] + scale[h] * noise[h, :, m]
            for w, network in ((w1, source.network1), (w2, source.network2)):
                expected = gain[h] * network(z.unsqueeze(-1)).squeeze(-1)
                torch.testing.assert_close(w[h, :, m], expected)
    torch.testing.assert_close(regularization, 0.3 * divergence)


@pytest.mark.parametrize("pool", ["both", "key"])
def test_mikan_is_its_formula(pool):
    """Through the uniform variables of the copula, sample by sample."""
    options = {"prior_scale": 0.7, "kl_weight": 0.3, "copula_weight": 0.6}
    source = generator(Mikan, pool=pool, **options).train()
    q, k = tokens(seed=5), tokens(length=L + 2, seed=6)
    padding = ignore(N, L + 2)
    noise = normal_draws((N, H, D, M), seed=8)
    torch.manual_seed(8)
    w1, w2, regularization = source(q, k, padding, None)
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    first, *rest = source.posterior.weights.split([D * source.posterior.inputs] + 3 * [D * D])
    biases = source.posterior.biases.view(4, D)
    total = 0.0
    for b in range(N):
        location, log_scale, a = [], [], []
        for h in range(H):
            pooled = k[b, h, ~padding[b]].mean(0)
            if pool == "both":
                pooled = torch.cat([q[b, h].mean(0), pooled])
            hidden = leaky(first.view(D, -1).mv(pooled) + biases[0])
            outputs = [
                weight.view(D, D).mv(hidden) + bias
                for weight, bias in zip(rest, biases[1:], strict=True)
            ]
            location.append(outputs[0])
            log_scale.append(outputs[1] + math.log(0.7))
            a.append(outputs[2].tanh())
        location, log_scale, a = (torch.stack(x) for x in (location, log_scale, a))
        x = torch.empty(H, D, M, dtype=torch.float64)
        for i in range(D):
            lower = torch.eye(H, dtype=torch.float64)
            for h in range(H):
                for other in range(h):
                    lower[h, other] = 4 * a[h, i] * a[other, i]
            factor = lower / lower.square().sum(1, keepdim=True).sqrt()
            x[:, i] = factor @ noise[b, :, i]
            total += 0.6 * -torch.linalg.slogdet(factor @ factor.mT).logabsdet / 2
        u = normal.cdf(x)
        sign = torch.tensor([1.0] * (M // 2) + [-1.0] * (M // 2), dtype=torch.float64)
        z = sign * location.unsqueeze(-1) + log_scale.exp().unsqueeze(-1) * normal.icdf(u)
        for w, network in ((w1, source.network1), (w2, source.network2)):
            expected = source.gain.view(H, D, 1) * network(z)
            torch.testing.assert_close(w[b], expected, rtol=1e-6, atol=1e-8)  # u loses the tails
        mine = torch.distributions.Normal(location, log_scale.exp())
        prior = torch.distributions.Normal(0.0, 0.7)
        total += 0.3 * torch.distributions.kl_divergence(mine, prior).sum()
    torch.testing.assert_close(regularization, total / N)


def test_heads_of_mikan_are_correlated_as_inferred_and_their_marginals_are_normal():
    source = Mikan(3, 2, 100_000, dtype=torch.float64, seed=0).train()
    q, k = (torch.randn(1, 3, 4, 2, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        source.posterior.biases[6:].fill_(0.8)
        location, log_scale, factor = source.infer(q, k)
        z = {}
        source.network1.register_forward_hook(lambda _, args, output: z.update(z=args[0]))
        torch.manual_seed(0)
        w1 = source(q, k, None, None)[0][0]
    scores = (z["z"] - source.about_halves(location)) / log_scale.exp().unsqueeze(-1)
    for i in range(2):
        measured = torch.corrcoef(scores[0, :, i])
        expected = (factor @ factor.mT)[0, i]
        assert expected[1, 0] > 0.6
        torch.testing.assert_close(measured, expected, rtol=0, atol=0.02)
        # and so are the frequencies themselves, of which it is done
        assert torch.corrcoef(w1[:, i].abs()).tril(-1).abs().max() > 0.2
    uniform = torch.special.ndtr(scores[0]).flatten(0, 1)
    grid = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    for u in uniform:
        torch.testing.assert_close(torch.quantile(u, grid), grid, rtol=0, atol=0.01)


@each_generator
def test_densities_of_frequencies_are_symmetric(kind):
    source = kind(2, 3, 40_000, dtype=torch.float64, seed=1).train()
    with torch.no_grad():
        biases = source.location if kind is Ikan else source.posterior.biases[3:6]
        biases.fill_(0.9)  # far from zero, so that the halves differ
        torch.manual_seed(1)
        q = torch.zeros(1, 2, 4, 3, dtype=torch.float64)
        w1 = source(q, q, None)[0].view(2, 3, -1)
    for w in w1.flatten(0, 1):
        assert w[:20_000].mean().abs() > 0.1 * w.std()  # one half alone is not
        assert w.mean().abs() < 0.03 * w.std()
        low, high = torch.quantile(w, torch.tensor([0.1, 0.9], dtype=torch.float64))
        assert (low + high).abs() < 0.05 * w.std()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_copula_density_in_every_type(dtype):
    correlation, scores = random_correlation(H).to(dtype), torch.randn(20, H).to(dtype)
    got = gaussian_copula_log_density(scores, correlation)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got, gaussian_copula_log_density(scores.double(), correlation.double()).to(dtype)
    )


def test_a_factor_keeps_what_a_nearly_singular_correlation_matrix_loses():
    factor = correlation_factor(torch.tensor([[0.0, 0.0], [1e4, 0.0]]))
    noise = torch.randn(5, 2, dtype=torch.float64)
    scores = noise @ factor.double().mT
    with pytest.raises(ValueError, match=r"positive definite.*pass factor"):
        gaussian_copula_log_density(scores, factor @ factor.mT)
    squares = (scores.square() - noise.square()).sum(-1)
    expected = squares / 2 - factor.diagonal().double().log().sum()
    torch.testing.assert_close(gaussian_copula_log_density(scores, factor=factor), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "expected one of correlation and factor, got none"),
        ({"correlation": torch.eye(2), "factor": torch.eye(2)}, "got both"),
        ({"factor": 2 * torch.eye(2)}, "factor must be lower triangular"),
        ({"factor": torch.eye(2).flip(0)}, "factor must be lower triangular"),
        ({"factor": torch.ones(2)}, r"factor must have shape \[\.\.\., H, H\], got \[2\]"),
    ],
)
def test_factors_of_correlation_matrices_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        gaussian_copula_log_density(torch.zeros(2), **arguments)


# Padding


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


def test_nested_queries_are_averaged_as_far_as_they_go():
    module = make("implicit", spectral=Mikan(H, E // H, M, dtype=torch.float64), batch_first=True)
    perturbed(module.spectral, 0.2)
    module.eval()
    queries, keys = ([batch(length, E) for length in lengths] for lengths in ((3, 6), (4, 2)))
    with torch.no_grad():
        q, k = map(torch.nested.nested_tensor, (queries, keys))
        output, _ = module(q, k, k, need_weights=False)
        for query, key, got in zip(queries, keys, output.unbind(), strict=True):
            torch.testing.assert_close(got, module(query, key, key)[0])


def test_nested_input_is_pooled_as_far_as_it_goes():
    module = make("implicit", spectral=Mikan(H, E // H, M, dtype=torch.float64), batch_first=True)
    module.eval()
    rows = [batch(length, E) for length in (3, 6)]
    with torch.no_grad():
        nested = torch.nested.nested_tensor(rows)
        output, _ = module(nested, nested, nested, need_weights=False)
        for row, got in zip(rows, output.unbind(), strict=True):
            torch.testing.assert_close(got, module(row, row, row)[0])


def test_a_sequence_of_padding_alone_gives_finite_frequencies():
    source = generator(Mikan)
    everything = torch.ones(N, L, dtype=torch.bool)
    assert all(x.isfinite().all() for x in source(tokens(), tokens(), everything, everything))


# Random numbers


@each_generator
def test_eval_is_deterministic_and_leaves_the_random_stream_alone(kind):
    source = generator(kind).eval()
    q = tokens()
    state = torch.get_rng_state()
    first, second = (source(q, q, None) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_frequencies_of_a_sample_do_not_depend_on_its_neighbours():
    source, q = generator(Mikan).eval(), tokens()
    together, alone = (source(x, x, None)[0] for x in (q, q[1:]))
    torch.testing.assert_close(together[1:], alone)


@each_generator
def test_training_is_reproducible_and_differs_from_call_to_call(kind):
    source = generator(kind).train()
    q = tokens()
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(source(q, q, None)[0])
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@each_generator
def test_each_kind_of_evaluation(kind):
    q = tokens()
    found = {}
    for evaluation in ("points", "mean", "random"):
        source = generator(kind, evaluation=evaluation).eval()
        torch.manual_seed(3)
        found[evaluation] = source(q, q, None)[0]
    assert not torch.equal(found["points"], found["random"])
    half = M // 2
    mean = found["mean"]
    torch.testing.assert_close(mean[..., :1].expand_as(mean[..., :half]), mean[..., :half])
    torch.testing.assert_close(mean[..., half:], -mean[..., :half])
    trained = generator(kind, evaluation="random").train()
    torch.manual_seed(3)
    assert torch.equal(trained(q, q, None)[0], found["random"])


def test_fixed_points_are_normal_and_the_same_in_every_type():
    one, other = Ikan(8, 16, 64), Ikan(8, 16, 64, dtype=torch.float64)
    torch.testing.assert_close(one.points.double(), other.points, rtol=1e-6, atol=1e-6)
    assert abs(one.points.mean()) < 0.02
    assert abs(one.points.std() - 1) < 0.02
    assert torch.equal(other.points, Mikan(8, 16, 64, seed=5, dtype=torch.float64).points)


@each_generator
def test_a_seed_fixes_initial_values_and_draws_nothing_else(kind):
    state = torch.get_rng_state()
    one, two = kind(H, D, M, seed=3), kind(H, D, M, seed=3, dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=0)
    assert not torch.equal(one.network1.weights, one.network2.weights)
    assert not torch.equal(one.network1.weights, kind(H, D, M, seed=4).network1.weights)


# Gradients


@each_generator
@pytest.mark.parametrize("stationary", [False, True])
def test_gradients_are_those_of_the_values(kind, stationary):
    source = generator(kind, stationary=stationary).eval()
    q, k = (tokens(2, 3, seed).requires_grad_() for seed in (5, 6))
    padding = torch.tensor([[False, False, True], [False, False, False]])
    parameters = list(source.parameters())

    def outputs(q, k, *_):
        return tuple(x for x in source(q, k, padding) if x is not None)

    inputs = (q, k, *parameters)
    assert torch.autograd.gradcheck(outputs, inputs)
    for parameter in parameters:
        assert parameter.grad is None


def test_every_parameter_learns_through_the_attention():
    for name in SOURCES:
        module = ikattn.MultiheadAttention(E, H, spectral=name, num_frequencies=M, p="learned")
        perturbed(module, 0.1)
        x = batch(L, N, E, dtype=torch.float32)
        loss = module(x, x, x)[0].square().sum() + ikattn.regularization_loss(module)
        loss.backward()
        for parameter_name, parameter in module.named_parameters():
            assert parameter.grad is not None, (name, parameter_name)
            assert parameter.grad.abs().max() > 0, (name, parameter_name)
            assert parameter.grad.isfinite().all(), (name, parameter_name)


# In the attention


@pytest.mark.parametrize("name", SOURCES)
def test_attention_uses_the_frequencies_of_its_source(name):
    module = make("implicit", spectral=name, num_frequencies=M, batch_first=True, p=2.0).eval()
    x = batch(N, L, E)
    output, weights = module(x, x, x)
    q, k, v = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (q, k, v))
    w1, w2 = module.spectral(q, k, None)[:2]
    expected = ikattn.reference.implicit_kernel_attention(q, k, v, w1, w2)
    expected = module.out_proj(expected.transpose(1, 2).flatten(2))
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(weights.sum(-1), torch.ones(N, L, dtype=torch.float64))
    assert (w2 is None) == (name == "stationary")


def test_stationary_is_direct_with_one_set_of_frequencies():
    one = ikattn.MultiheadAttention(E, H, spectral="stationary", seed=1)
    other = ikattn.MultiheadAttention(E, H, stationary=True, seed=1)
    assert isinstance(one.spectral, Stationary)
    assert isinstance(other.spectral, Direct)
    assert torch.equal(one.spectral.w1, other.spectral.w1)
    assert one.state_dict().keys() == other.state_dict().keys()


def test_a_function_makes_the_source_with_options_of_its_own():
    def source(attention):
        return Stationary(attention.num_heads, attention.head_dim, M, initial="unit angle", seed=1)

    module = ikattn.MultiheadAttention(E, H, spectral=source)
    expected = Direct(H, E // H, M, stationary=True, initial="unit angle", seed=1)
    assert torch.equal(module.spectral.w1, expected.w1)
    assert ikattn.MultiheadAttention(E, H, spectral=lambda _: "ikan").spectral.regularizes


def test_stationary_is_no_option_of_a_module():
    with pytest.raises(ValueError, match=r"stationary=True is for 'direct', .* got it with a Ikan"):
        ikattn.MultiheadAttention(E, H, spectral=Ikan(H, E // H, M), stationary=True)


@pytest.mark.parametrize("name", ["ikan", "mikan"])
def test_the_whole_transformer_keeps_the_scale_of_frequencies(name):
    """nn.Transformer draws every parameter with more than one axis again."""
    layer = ikattn.convert(nn.TransformerEncoderLayer(E, H), spectral=name, seed=0)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    whole = nn.Transformer(E, H, custom_encoder=encoder, num_decoder_layers=1)
    kept = whole.encoder.layers[0].self_attn.spectral
    for (key, a), b in zip(
        kept.named_parameters(), layer.self_attn.spectral.parameters(), strict=True
    ):
        assert torch.equal(a, b), key


@pytest.mark.parametrize("name", ["ikan", "mikan"])
@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))],
    ids=["deepcopy", "pickle"],
)
def test_a_module_that_has_run_can_be_copied(name, clone):
    module = ikattn.MultiheadAttention(E, H, spectral=name, num_frequencies=M)
    x = batch(L, N, E, dtype=torch.float32)
    module(x, x, x)
    assert module.regularization.requires_grad
    twin = clone(module)
    assert twin.regularization is None
    assert torch.equal(twin.eval()(x, x, x)[0], module.eval()(x, x, x)[0])


@pytest.mark.parametrize("name", ["ikan", "mikan"])
def test_state_holds_parameters_alone_and_stock_checkpoints_load(name):
    options = {"spectral": name, "num_frequencies": M, "p": "learned"}
    module, twin = (ikattn.MultiheadAttention(E, H, **options).eval() for _ in range(2))
    assert set(module.state_dict()) == {key for key, _ in module.named_parameters()}
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file, weights_only=True))
    x = batch(L, N, E, dtype=torch.float32)
    assert torch.equal(twin(x, x, x)[0], module(x, x, x)[0])
    module.load_state_dict(nn.MultiheadAttention(E, H).state_dict(), strict=True)


@pytest.mark.parametrize("name", ["ikan", "mikan"])
def test_meta_device_materialises(name):
    module = ikattn.MultiheadAttention(
        E, H, spectral=name, num_frequencies=M, device="meta", seed=3
    )
    module.to_empty(device="cpu").reset_parameters()
    same = ikattn.MultiheadAttention(E, H, spectral=name, num_frequencies=M, seed=3)
    assert torch.equal(module.spectral.points, same.spectral.points)
    for a, b in zip(module.spectral.parameters(), same.spectral.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["ikan", "mikan"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_loads_into_a_module_made_on_meta(name, assign):
    options = {"spectral": name, "num_frequencies": M}
    source = ikattn.MultiheadAttention(E, H, **options).eval()
    module = ikattn.MultiheadAttention(E, H, **options, device="meta").eval()
    if not assign:
        module.to_empty(device="cpu")
    module.load_state_dict(source.state_dict(), assign=assign)
    x = batch(L, N, E, dtype=torch.float32)
    assert torch.equal(module(x, x, x)[0], source(x, x, x)[0])
    assert torch.equal(module.double().spectral.points, source.double().spectral.points)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["ikan", "mikan"])
def test_meta_device_runs(name, training):
    module = ikattn.MultiheadAttention(E, H, spectral=name, num_frequencies=M, device="meta")
    x = torch.empty(L, N, E, device="meta")
    assert module.train(training)(x, x, x)[0].shape == x.shape


def test_half_precision_averages_long_sequences():
    module = ikattn.MultiheadAttention(E, H, spectral="mikan", num_frequencies=M, seed=0)
    with torch.no_grad():
        module.in_proj_bias.fill_(14.0)  # of which 5000 make more than 65504
    x = batch(6000, 1, E, dtype=torch.float16)
    padding = torch.arange(6000)[None] >= 5000
    for mask in (None, padding):
        output = module.half().eval()(x, x, x, key_padding_mask=mask, need_weights=False)[0]
        assert output.isfinite().all()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["ikan", "mikan"])
def test_torch_compile_takes_generators_in_one_graph(name, training):
    torch._dynamo.reset()
    module = make("implicit", spectral=name, num_frequencies=M, batch_first=True, p="learned")
    module.train(training)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (5, 7):
        x, padding = batch(N, length, E), ignore(N, length)
        got = compiled(x, x, x, padding, need_weights=False)[0]
        got.sum().backward()
        found = ikattn.regularization_loss(module).detach()
        expected = module(x, x, x, padding, need_weights=False)[0]
        torch.testing.assert_close(found, ikattn.regularization_loss(module).detach())
        if not training:  # otherwise the draws differ
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ["ikan", "mikan"])
def test_export(name):
    module = make("implicit", spectral=name, num_frequencies=M, batch_first=True).eval()
    x = batch(N, L, E)
    program = torch.export.export(module, (x, x, x))
    torch.testing.assert_close(program.module()(x, x, x)[0], module(x, x, x)[0])


def test_autocast_does_not_round_frequencies():
    module = ikattn.MultiheadAttention(E, H, spectral="mikan", num_frequencies=M).eval()
    x = batch(L, N, E, dtype=torch.float32)
    seen = []
    module.spectral.register_forward_hook(lambda _, args, output: seen.append(output[0]))
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x, x, x)[0].isfinite().all()
    module(x, x, x)
    assert seen[0].dtype == torch.float32
    torch.testing.assert_close(seen[0], seen[1], rtol=0.1, atol=2e-3)


def test_recording_takes_the_frequencies_of_the_call():
    module = ikattn.MultiheadAttention(E, H, spectral="mikan", num_frequencies=M, p="learned")
    perturbed(module, 0.2).eval()
    x = batch(L, N, E, dtype=torch.float32)
    model = nn.Sequential()
    model.attention = module
    with torch.no_grad(), ikattn.record(module, maps=("per_head",)) as recording:
        module(x, x, x)
    _, weights = module(x, x, x, average_attn_weights=False)
    maps = recording.batches[0][recording.names[0]]
    v = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)[2]
    value = v.transpose(0, 1).unflatten(-1, (H, -1)).transpose(1, 2)
    expected = ikattn.contributions(
        weights, value, module.out_proj.weight, maps=("per_head",), per_head=True
    )
    torch.testing.assert_close(maps.per_head, expected.per_head, rtol=1e-4, atol=1e-5)


# Regularisation


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


def two_layers(**options):
    layer = nn.TransformerEncoderLayer(E, H, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2)
    return ikattn.convert(encoder, spectral="mikan", num_frequencies=M, seed=0, **options)


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


def test_models_without_generators_have_no_regulariser():
    for kernel in ("dot", "implicit"):
        module = ikattn.MultiheadAttention(E, H, kernel=kernel)
        assert ikattn.regularization_loss(nn.Sequential(module)) == 0
    assert ikattn.regularization_loss(nn.Identity()) == 0


def test_asking_before_the_first_call_is_an_error():
    model = nn.ModuleDict({"block": ikattn.MultiheadAttention(E, H, spectral="ikan")})
    with pytest.raises(RuntimeError, match="block has no regulariser: call the model first"):
        ikattn.regularization_loss(model)


class WithRegularizer(Direct):
    def forward(self, query, key, key_padding_mask):
        return *self.frequencies(), self.w1.square().sum()


def test_users_module_may_have_a_regulariser():
    module = make("implicit", spectral=WithRegularizer(H, E // H, M, dtype=torch.float64))
    x = batch(L, N, E)
    module(x, x, x)
    expected = module.spectral.w1.square().sum()
    torch.testing.assert_close(ikattn.regularization_loss(module), expected)


class WithParameter(WithRegularizer):
    def forward(self, query, key, key_padding_mask):
        return *self.frequencies(), self.term


def test_a_parameter_may_be_the_regulariser():
    source = WithParameter(H, E // H, M, dtype=torch.float64)
    source.term = nn.Parameter(torch.tensor(3.0))
    module, x = make("implicit", spectral=source), batch(L, N, E)
    for _ in range(2):
        module(x, x, x)
        ikattn.regularization_loss(module).backward()
    assert source.term.grad == 2
    assert [name for name, _ in module.named_parameters()].count("regularization") == 0


# Errors


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
        (
            lambda w: (w, w, w.sum() * math.nan),
            ValueError,
            "regularization must be finite, got nan",
        ),
        (lambda w: (w, w, w), TypeError, "scalar tensor or None as regularization"),
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
    ],
)
def test_bad_options_say_what_was_expected_and_got(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**{"num_heads": H, "head_dim": D, "num_frequencies": M, **options})
