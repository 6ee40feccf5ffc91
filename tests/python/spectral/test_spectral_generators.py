"""ikattn.spectral: generators of frequencies, against formulas in float64 and by measurement."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

import ikattn
from attention_cases import E, H, L, N, batch, ignore
from ikattn.spectral import Direct, Ikan, Mikan
from ikattn.spectral.factory import SOURCES
from ikattn.spectral.networks import OddNetwork
from spectral_cases import D, M, each_generator, generator, leaky, perturbed, tokens


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


@pytest.mark.parametrize("mean", [0.0, 30.0])
@pytest.mark.parametrize("size", [8, 64, 128])
def test_initial_frequencies_have_the_same_scale_at_every_head_size(size, mean):
    torch.manual_seed(0)
    source = Mikan(8, size, 64).train()
    q, k = mean + torch.randn(2, 4, 8, 10, size)
    for w in source(q, k, None)[:2]:
        angle = 2 * math.pi * math.sqrt(size) * w.std()  # of a token of standard normal numbers
        assert 0.5 < angle < 2
    w = Direct(1, size, 64, initial="unit angle", seed=0).w1
    assert abs(2 * math.pi * math.sqrt(size) * w.std() - 1) < 0.1
    with pytest.raises(ValueError, match=r"initial must be one of .*, got 'wide'"):
        Direct(1, size, 64, initial="wide")


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
def test_eval_is_deterministic_and_leaves_the_random_stream_alone(kind):
    source = generator(kind).eval()
    q = tokens()
    state = torch.get_rng_state()
    first, second = (source(q, q, None) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    if kind is Mikan:  # a sample's frequencies do not depend on its neighbours
        torch.testing.assert_close(first[0][1:], source(q[1:], q[1:], None)[0])


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
    with pytest.raises(ValueError, match=r"evaluation must be one of .*, got 'point'"):
        trained.evaluation = "point"
    assert trained.evaluation == "random"


def test_fixed_points_are_normal_and_the_same_in_every_type():
    one, other = Ikan(8, 16, 64), Ikan(8, 16, 64, dtype=torch.float64)
    torch.testing.assert_close(one.points.double(), other.points, rtol=1e-6, atol=1e-6)
    assert abs(one.points.mean()) < 0.02
    assert abs(one.points.std() - 1) < 0.02
    assert torch.equal(other.points, Mikan(8, 16, 64, seed=5, dtype=torch.float64).points)


@each_generator
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_parameters_of_another_type_may_stand_in(kind, dtype, training):
    """FSDP with mixed precision does so, and no method of the module hears of it."""
    source = generator(kind).float().train(training)
    expected = copy.deepcopy(source).to(dtype)
    parameters = {name: w.to(dtype) for name, w in source.named_parameters()}
    q = tokens().to(dtype)
    before = source(q.float(), q.float(), None)[0] if not training else None
    torch.manual_seed(3)
    found = torch.func.functional_call(source, parameters, (q, q, None))
    torch.manual_seed(3)
    for a, b in zip(found, expected(q, q, None), strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, b)
    if before is not None:
        assert torch.equal(source(q.float(), q.float(), None)[0], before)


@each_generator
def test_a_seed_fixes_initial_values_and_draws_nothing_else(kind):
    state = torch.get_rng_state()
    one, two = kind(H, D, M, seed=3), kind(H, D, M, seed=3, dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=0)
    assert not torch.equal(one.network1.weights, one.network2.weights)
    assert not torch.equal(one.network1.weights, kind(H, D, M, seed=4).network1.weights)


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
