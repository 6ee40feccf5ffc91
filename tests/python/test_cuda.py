"""The operators on a GPU, against the CPU's float64 reference, over the samples all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from agreement import (
    assert_close,
    assert_gradients_accurate,
    assert_identical,
    direction,
    error,
    gradient_scales,
    gradients,
    in_float64,
)
from contribution_samples import SAMPLES as CONTRIBUTION_SAMPLES
from contribution_samples import Sample as ContributionSample
from contribution_samples import definition, named
from samples import DTYPES, FEW, LAYOUTS, SAMPLES, Arguments, Sample, converted, name_of

if not torch.cuda.is_available():
    pytest.skip("this machine has no GPU", allow_module_level=True)
if not torch._C._dispatch_has_kernel_for_dispatch_key("ikattn::spectral_features", "CUDA"):
    pytest.skip("ikattn was built without its CUDA kernels", allow_module_level=True)

reference = ikattn.reference.implicit_kernel_attention
every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=name_of)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)

# On tensor cores features are rounded to float16.
FEATURE_ROUNDING = 2**-11


def on_gpu(arguments: Arguments, layout: str = "contiguous") -> Arguments:
    """The same call there. A copy between devices is dense: a sample's layout comes after it."""

    def moved(argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        there = argument.cuda()
        return LAYOUTS[layout](there) if there.is_floating_point() else there

    return {name: moved(argument) for name, argument in arguments.items()}


def largest(x: Tensor) -> float:
    return x.double().nan_to_num().abs().max().item() if x.numel() else 0.0


@every_dtype
@every_sample
def test_output_is_as_accurate_as_the_reference(sample: Sample, dtype: torch.dtype) -> None:
    arguments = sample.arguments(dtype)
    output = ikattn.implicit_kernel_attention(**on_gpu(arguments, sample.layout))
    assert output.is_cuda
    assert output.dtype == dtype
    truth = in_float64(reference, arguments)
    allowed = 2 * error(reference(**arguments), truth) + 6 * torch.finfo(torch.float32).eps
    if dtype == torch.float64:
        allowed = 3e-14
    elif dtype.itemsize == 2:
        # The output is rounded, and before it meets the value every weight, which errs by its
        # features' roundings, too. The reference rounds neither where a row sees one key.
        roundoff = torch.finfo(dtype).eps / 2
        of_weights = (roundoff + FEATURE_ROUNDING) * largest(arguments["value"])
        allowed += roundoff + of_weights / max(largest(truth), 1e-300)
    assert_close(output.cpu(), truth, allowed)


@every_dtype
@every_sample
def test_gradients_are_as_accurate_as_the_reference(sample: Sample, dtype: torch.dtype) -> None:
    arguments = sample.arguments(dtype)
    with torch.no_grad():
        incoming = direction(reference(**arguments))
    got = gradients(
        ikattn.implicit_kernel_attention,
        on_gpu(arguments, sample.layout),
        grad_output=incoming.cuda(),
    )
    assert_gradients_accurate(
        {name: gradient.cpu() for name, gradient in got.items()},
        gradients(reference, arguments, grad_output=incoming),
        gradients(reference, converted(arguments, torch.float64), grad_output=incoming.double()),
        gradient_scales(arguments, incoming),
        dtype,
        # A score is of two features each, and a weight its square.
        extra=4 * FEATURE_ROUNDING,
    )


@pytest.fixture
def matmul() -> Iterator[Any]:
    """torch's settings of matrix products on CUDA, which are afterwards what they were."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    try:
        yield settings
    finally:
        settings.allow_tf32 = before == "tf32"  # or torch finds that the two names contradict
        settings.fp32_precision = before


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("setting", ["allow_tf32", "fp32_precision"])
def test_float32_where_torch_allows_tf32(causal: bool, setting: str, matmul: Any) -> None:
    """On tensor cores, value and incoming gradient rounded to 11 bits, of any size."""
    setattr(matmul, setting, True if setting == "allow_tf32" else "tf32")
    torch.manual_seed(0)
    shape = (2, 4, 300, 40)
    arguments: Arguments = {
        "query": torch.randn(shape),
        "key": torch.randn(shape),
        "value": 1e20 * torch.randn(shape),
        "w1": torch.randn(4, 40, 32) / 6,
        "w2": torch.randn(4, 40, 32) / 6,
        "is_causal": causal,
    }
    call = on_gpu(arguments)
    tensors = [call[name] for name in ("query", "key", "value", "w1", "w2")]
    assert ikattn.why_not_fast(*tensors, is_causal=causal) is None
    incoming = torch.randn(shape)
    output = ikattn.implicit_kernel_attention(**call)
    assert_close(output.cpu(), in_float64(reference, arguments), 2**-9)
    got = gradients(ikattn.implicit_kernel_attention, call, grad_output=incoming.cuda())
    wide = converted(arguments, torch.float64)
    expected = gradients(reference, wide, grad_output=incoming.double())
    for name, gradient in got.items():
        assert_close(gradient.cpu(), expected[name], 2**-7, name)


def drawn_on_gpu(
    batch: int, heads: int, queries: int, keys: int, d_v: int, frequencies: int, dtype: torch.dtype
) -> Arguments:
    torch.manual_seed(0)
    sizes = {"query": (queries, 64), "key": (keys, 64), "value": (keys, d_v)}
    call: Arguments = {
        name: torch.randn(batch, heads, *size, device="cuda", dtype=dtype)
        for name, size in sizes.items()
    }
    w1, w2 = torch.randn(2, heads, 64, frequencies, device="cuda") * 0.3 / 8
    return call | {"w1": w1, "w2": w2}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("frequencies", [32, 64])
@pytest.mark.parametrize("d_v", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=name_of)
def test_blocks_enough_that_none_shares_its_keys(
    causal: bool, frequencies: int, d_v: int, dtype: torch.dtype
) -> None:
    """264 of 128 queries, which pass 8 tiles of keys or more: Hopper's ring of three goes round."""
    call = drawn_on_gpu(4, 33, 256, 1000, d_v, frequencies, dtype) | {"is_causal": causal}
    output = ikattn.implicit_kernel_attention(**call)
    assert_close(output, in_float64(reference, call), 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("form", ["plain", "causal", "float mask"])
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=name_of)
def test_many_waves_of_blocks(form: str, dtype: torch.dtype) -> None:
    call = drawn_on_gpu(2, 4, 2048, 2048, 64, 64, dtype) | {"is_causal": form == "causal"}
    names = ["query", "key", "value", "w1", "w2"]
    if form == "float mask":
        call["attn_mask"] = torch.randn(2048, 2048, device="cuda", dtype=dtype)
    wide = converted(call, torch.float64)
    output = ikattn.implicit_kernel_attention(**call)
    assert_close(output, reference(**wide), 2 * torch.finfo(dtype).eps)
    incoming = direction(output)
    got = gradients(ikattn.implicit_kernel_attention, call, names, incoming)
    expected = gradients(reference, wide, names, incoming.double())
    for name in names:
        assert_close(got[name], expected[name], 2 * torch.finfo(dtype).eps, name)


@every_sample
def test_weights_are_those_of_the_cpu(sample: Sample) -> None:
    arguments = sample.arguments()
    arguments.pop("value")
    for average in (False, True):
        got = ikattn.implicit_kernel_weights(
            **on_gpu(arguments, sample.layout), average_heads=average
        )
        expected = ikattn.implicit_kernel_weights(**arguments, average_heads=average)
        assert_close(got.cpu(), expected, 3e-14)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 17, 33), (1, 2, 130, 65)])
def test_dropout_keeps_what_the_cpu_keeps(shape: tuple[int, int, int, int]) -> None:
    seed = torch.tensor([2**61 + 7, 3])
    on_cpu = ikattn.dropout_keep_mask(seed, shape, 0.3)
    assert torch.equal(ikattn.dropout_keep_mask(seed.cuda(), shape, 0.3).cpu(), on_cpu)


@pytest.mark.parametrize("sample", FEW, ids=name_of)
def test_the_same_call_gives_the_same_bits(sample: Sample) -> None:
    arguments = on_gpu(sample.arguments(torch.float32), sample.layout)
    runs = []
    for _ in range(3):
        found = gradients(ikattn.implicit_kernel_attention, arguments)
        runs.append([gradient.cpu() for gradient in found.values()])
    for run in runs[1:]:
        assert_identical(runs[0], run)


def test_a_call_runs_on_the_current_stream_and_in_a_graph() -> None:
    q, k, v = torch.randn(3, 2, 4, 100, 32, device="cuda", dtype=torch.bfloat16).unbind()
    w = 0.1 * torch.randn(4, 32, 16, device="cuda")
    seed = torch.tensor([1, 2], device="cuda")

    def call() -> Tensor:
        return ikattn.implicit_kernel_attention(q, k, v, w, dropout_p=0.2, dropout_seed=seed)

    expected = [call()]
    seed[1] = 3
    expected.append(call())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    for offset, each in zip((2, 3), expected, strict=True):  # the seed is read at every replay
        seed[1] = offset
        graph.replay()
        assert torch.equal(output, each)


def test_many_heads_and_offsets_beyond_32_bits() -> None:
    q = torch.randn(1, 70_000, 2, 8, device="cuda", dtype=torch.float16)
    w = 0.1 * torch.randn(1, 8, 4, device="cuda").expand(70_000, 8, 4)
    many = ikattn.implicit_kernel_attention(q, q, q, w)
    few = ikattn.implicit_kernel_attention(q[:, -3:], q[:, -3:], q[:, -3:], w[-3:])
    assert torch.equal(many[:, -3:], few)
    mask = torch.zeros(46_400, 46_400, device="cuda", dtype=torch.bfloat16)
    mask[-1, :-1] = -torch.inf
    x = torch.randn(1, 1, 46_400, 8, device="cuda")
    output = ikattn.implicit_kernel_attention(x, x, x, w[:1], attn_mask=mask.float())
    assert_close(output[0, 0, -1].cpu(), x[0, 0, -1].cpu(), 1e-5)


@pytest.mark.parametrize("sample", CONTRIBUTION_SAMPLES, ids=lambda sample: sample.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=name_of)
def test_contributions_are_those_of_the_definition(
    sample: ContributionSample, dtype: torch.dtype
) -> None:
    arguments: dict[str, Any] = sample.arguments(dtype)
    call = on_gpu(arguments)
    for name in ("norm", "second_norm"):
        if name in call:
            stats = call[name]
            call[name] = ikattn.NormStats(stats.weight.cuda(), stats.scale.cuda(), stats.centered)
    got = named(ikattn.contributions(**call, per_head=True))
    expected = named(definition(arguments))
    assert got.keys() == expected.keys()
    for name, map_ in got.items():
        assert_close(map_.cpu(), expected[name], 1e-13 if dtype == torch.float64 else 2e-6, name)


def test_tensors_of_two_devices_are_refused() -> None:
    q, w = torch.randn(1, 2, 4, 8), torch.randn(2, 8, 4)
    with pytest.raises(RuntimeError, match="w1 must be on the device of query, cuda:0, got cpu"):
        ikattn.implicit_kernel_attention(q.cuda(), q.cuda(), q.cuda(), w)
