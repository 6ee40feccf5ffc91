"""The operators under torch's transformations: derivatives, torch.func, compilers, autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import ikattn
from operator_samples import SAMPLES, Options, Sample, differentiable, error, mask, options

attention = ikattn.implicit_kernel_attention
SEED = torch.tensor([5, 9])
TINY = [
    Sample("tiny", L=3, S=4, H=2, G=2, d=3, d_v=2, M=2),
    Sample("tiny stationary", L=3, S=4, H=2, G=2, d=3, d_v=2, M=2, stationary=True),
    Sample("tiny mask", L=3, S=4, H=2, G=1, d=3, d_v=2, M=2, options=mask("L", "S", kind="float")),
    Sample(
        "tiny dropout",
        L=3,
        S=3,
        H=2,
        G=2,
        d=3,
        d_v=2,
        M=2,
        options=options(dropout_p=0.3, dropout_seed=SEED, is_causal=True, p=3.0),
    ),
]
tiny = pytest.mark.parametrize("sample", TINY, ids=lambda sample: sample.name)


def flat(sample: Sample) -> tuple[Any, list[Tensor]]:
    """The operator as a function of its differentiable arguments alone."""
    tensors, opts = sample.make()
    inputs = differentiable(tensors, opts)
    names = [name for name, value in opts.items() if isinstance(value, Tensor)]
    names = [name for name in names if opts[name].requires_grad]

    def call(*arguments: Tensor) -> Tensor:
        count = len(tensors)
        extra = dict(zip(names, arguments[count:], strict=True))
        return attention(*arguments[:count], **{**opts, **extra})

    return call, inputs


@tiny
def test_first_and_second_derivatives_equal_finite_differences(sample: Sample) -> None:
    call, inputs = flat(sample)
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@tiny
def test_forward_mode_equals_reverse_mode(sample: Sample) -> None:
    call, inputs = flat(sample)
    tangents = [torch.randn_like(x) for x in inputs]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.detach(), t) for x, t in zip(inputs, tangents, strict=True)]
        tangent = forward_ad.unpack_dual(call(*duals)).tangent
    direction = torch.randn_like(tangent)
    gradients = torch.autograd.grad(call(*inputs), inputs, direction)
    pulled = sum((g * t).sum() for g, t in zip(gradients, tangents, strict=True))
    torch.testing.assert_close((tangent * direction).sum(), pulled)


@tiny
def test_torch_func_grad_and_jvp_equal_autograd(sample: Sample) -> None:
    call, inputs = flat(sample)
    detached = tuple(x.detach() for x in inputs)
    everything = tuple(range(len(inputs)))
    gradients = torch.func.grad(lambda *x: call(*x).square().sum(), argnums=everything)(*detached)
    expected = torch.autograd.grad(call(*inputs).square().sum(), inputs)
    for got, truth in zip(gradients, expected, strict=True):
        assert error(got, truth) < 1e-11
    tangents = tuple(torch.randn_like(x) for x in detached)
    _, pushed = torch.func.jvp(call, detached, tangents)
    direction = torch.randn_like(pushed)
    pulled = torch.autograd.grad(call(*inputs), inputs, direction)
    total = sum((g * t).sum() for g, t in zip(pulled, tangents, strict=True))
    torch.testing.assert_close((pushed * direction).sum(), total)


def test_vmap_is_a_loop() -> None:
    tensors, _ = Sample("vmap").make()
    query, *rest = [x.detach() for x in tensors]
    queries = torch.stack([query, 2 * query, -query])
    mapped = torch.func.vmap(lambda q: attention(q, *rest))(queries)
    for i in range(3):
        assert error(mapped[i], attention(queries[i], *rest)) < 1e-12
    per_sample = torch.func.vmap(torch.func.grad(lambda q: attention(q, *rest).sum()))(queries)
    leaf = queries[1].clone().requires_grad_()
    (expected,) = torch.autograd.grad(attention(leaf, *rest).sum(), leaf)
    assert error(per_sample[1], expected) < 1e-11


def forward_cases() -> list[tuple[str, Any, tuple[Any, ...], Options]]:
    ops = torch.ops.ikattn
    cases: list[tuple[str, Any, tuple[Any, ...], Options]] = []
    for sample in [s for s in SAMPLES if s.L * s.S < 1500][::4]:
        tensors, opts = sample.make()
        cases.append((sample.name, ops.implicit_kernel_attention, tuple(tensors), opts))
        (query, key, _, *spectrum) = tensors
        arguments = (query, key, *spectrum)
        averaged = {**opts, "average_heads": len(cases) % 4 == 0}
        cases.append((sample.name, ops.implicit_kernel_weights, arguments, averaged))
    (x, _, _, *spectrum), _ = Sample("features").make()
    cases.append(("features", ops.spectral_features, (x, *spectrum), {}))
    cases.append(("mask", ops.dropout_keep_mask, (SEED, 2, 3, 4, 5, 0.2), {}))
    return cases


@pytest.mark.parametrize("case", forward_cases(), ids=lambda case: f"{case[1]}: {case[0]}")
def test_operators_pass_torchs_own_checks(case: tuple[str, Any, tuple[Any, ...], Options]) -> None:
    _, operator, arguments, opts = case
    torch.library.opcheck(operator, arguments, opts)


@pytest.mark.parametrize(
    "sample",
    [s for s in SAMPLES if s.L * s.S < 3000][::3],
    ids=lambda sample: sample.name,
)
def test_backward_operators_pass_torchs_own_checks(sample: Sample) -> None:
    tensors, opts = sample.make()
    tensors = [x.detach() for x in tensors]
    opts = {k: v.detach() if isinstance(v, Tensor) else v for k, v in opts.items()}
    ops = torch.ops.ikattn
    output, log_normalizer = ops.implicit_kernel_attention(*tensors, **opts)
    has_mask = "attn_mask" in opts and opts["attn_mask"].is_floating_point()
    others = [len(tensors) == 5, "key_bias" in opts, has_mask]
    for keep in (True, False):
        wanted = [True, keep, True, keep, *others]
        w2 = tensors[4] if len(tensors) == 5 else None
        saved = (*tensors[:4], w2, output, log_normalizer)
        torch.library.opcheck(
            ops.implicit_kernel_attention_backward,
            (torch.randn_like(output), *saved),
            {**opts, "wanted": wanted},
        )
    query, key, _, w1, *_ = tensors
    gradient = torch.randn(sample.B, sample.L, sample.S, dtype=torch.float64)
    torch.library.opcheck(
        ops.implicit_kernel_weights_backward,
        (gradient, query, key, w1, w2),
        {**opts, "average_heads": True, "wanted": [True, True, True, *others]},
    )
    if sample.G == sample.H:
        phi = ops.spectral_features(query, w1, w2)
        torch.library.opcheck(
            ops.spectral_features_backward, (phi, query, w1, w2, [True, True, w2 is not None])
        )


@pytest.mark.parametrize("sample", SAMPLES[::5], ids=lambda sample: sample.name)
def test_results_on_the_meta_device_have_shape_type_and_strides_of_real_ones(
    sample: Sample,
) -> None:
    tensors, opts = sample.make(torch.bfloat16)
    real = torch.ops.ikattn.implicit_kernel_attention(*tensors, **opts)
    meta_opts = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in opts.items()}
    meta = torch.ops.ikattn.implicit_kernel_attention(*[x.to("meta") for x in tensors], **meta_opts)
    for a, b in zip(real, meta, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_compiled_training_has_one_graph_for_every_length() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def loss(*inputs: Tensor, shown: Tensor) -> Tensor:
        return attention(*inputs, attn_mask=shown, is_causal=True, dropout_p=0.1).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for length in (7, 12, 33):
        tensors, _ = Sample("compiled", L=length, S=length + 2).make(torch.float32)
        shown = torch.rand(2, 1, 1, length + 2) > 0.2
        torch.manual_seed(1)
        got = torch.autograd.grad(compiled(*tensors, shown=shown), tensors)
        torch.manual_seed(1)
        expected = torch.autograd.grad(loss(*tensors, shown=shown), tensors)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1]


def test_exported_program_takes_other_batch_sizes() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1 = torch.nn.Parameter(0.1 * torch.randn(2, 8, 16))

        def forward(self, x: Tensor) -> Tensor:
            return attention(x, x, x, self.w1, is_causal=True)

    model, batch = Model(), torch.export.Dim("batch", min=2)
    x = torch.randn(3, 2, 5, 8)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: batch}})
    other = torch.randn(6, 2, 5, 8)
    torch.testing.assert_close(program.module()(other), model(other))


def test_autocast_lowers_tokens_and_leaves_frequencies() -> None:
    tensors, _ = Sample("autocast").make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = attention(*tensors)
        weights = ikattn.implicit_kernel_weights(*tensors[:2], *tensors[3:])
        phi = ikattn.spectral_features(tensors[0], *tensors[3:])
    assert output.dtype == weights.dtype == phi.dtype == torch.bfloat16
    lowered = [x.bfloat16() for x in tensors[:3]]
    assert torch.equal(output, attention(*lowered, *tensors[3:]))
    gradients = torch.autograd.grad(output.float().sum(), tensors)
    assert all(g.dtype == torch.float32 and torch.isfinite(g).all() for g in gradients)


def test_checkpointing_repeats_its_dropout() -> None:
    tensors, _ = Sample("checkpoint").make()

    def call(*x: Tensor) -> Tensor:
        return attention(*x, dropout_p=0.4).square().sum()

    torch.manual_seed(2)
    expected = torch.autograd.grad(call(*tensors), tensors)
    torch.manual_seed(2)
    got = torch.autograd.grad(checkpoint(call, *tensors, use_reentrant=False), tensors)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_the_authors_variant_drops_norms_only_where_asked() -> None:
    tensors, _ = Sample("authors").make()
    plain = ikattn.reference.implicit_kernel_attention
    assert error(plain(*tensors, norm_dropout_p=0.0), attention(*tensors)) < 1e-12
    torch.manual_seed(0)
    assert error(plain(*tensors, norm_dropout_p=0.1), attention(*tensors)) > 1e-4
