"""The operators on a GPU, against the CPU's float64 reference, over the samples all tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import formula
import ikattn
from agreement import (
    FLOAT64_OUTPUT,
    OUTPUT_FACTOR,
    OUTPUT_ULPS,
    assert_close,
    assert_gradients_accurate,
    assert_identical,
    direction,
    error,
    gradient_scales,
    gradients,
    in_float64,
)
from gpu import DEVICE, assert_on_tensor_cores, drawn_on_gpu, large, needs_a_gpu, on_gpu
from samples import BY_NAME, DTYPES, FEW, SAMPLES, Arguments, Sample, converted, name_of
from tiers import each_call

reference = ikattn.reference.implicit_kernel_attention
every_sample = pytest.mark.parametrize(
    "sample",
    [
        pytest.param(sample, marks=large) if sample.B * sample.H > 64 else sample
        for sample in SAMPLES
    ],
    ids=name_of,
)

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)


def at_that_precision(dtype: torch.dtype) -> Callable[..., Tensor]:
    """The reference whose own error is the measure."""
    return formula.attention_in_its_type if dtype.itemsize == 2 else reference


@every_dtype
@every_sample
def test_output_is_as_accurate_as_the_reference(sample: Sample, dtype: torch.dtype) -> None:
    arguments = sample.arguments(dtype)
    output = ikattn.implicit_kernel_attention(**on_gpu(arguments, sample.layout))
    assert output.device.type == DEVICE
    assert output.dtype == dtype
    truth = in_float64(reference, arguments)
    allowed = FLOAT64_OUTPUT
    if dtype != torch.float64:
        own = error(at_that_precision(dtype)(**arguments), truth)
        allowed = OUTPUT_FACTOR * own + OUTPUT_ULPS * torch.finfo(torch.float32).eps
    if dtype.itemsize == 2:
        allowed += torch.finfo(dtype).eps / 2  # its own rounding
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
        grad_output=incoming.to(DEVICE),
    )
    assert_gradients_accurate(
        {name: gradient.cpu() for name, gradient in got.items()},
        gradients(at_that_precision(dtype), arguments, grad_output=incoming),
        gradients(reference, converted(arguments, torch.float64), grad_output=incoming.double()),
        gradient_scales(arguments, incoming),
        dtype,
    )


OF_TOKENS = ["query", "key", "value", "w1", "w2"]


def roundings_of(call: Arguments) -> float:
    """Two of the type; five where a causal row sees few keys by scores in int8, which err more."""
    names = (*OF_TOKENS, "is_causal", "enable_gqa", "attn_mask", "eps")
    told = {name: call[name] for name in names if name in call}
    is_int8 = ikattn.which_kernels(**told).forward.scores == "int8"
    return (5 if is_int8 and call.get("is_causal") else 2) * torch.finfo(call["query"].dtype).eps


def assert_output_and_gradients(call: Arguments, scales: dict[str, float] | None = None) -> None:
    """Within roundings_of() of those of the float64 reference there; scales: of agreement.py."""
    tolerance = roundings_of(call)
    wide = converted(call, torch.float64)
    output = ikattn.implicit_kernel_attention(**call)
    assert_close(output, reference(**wide), tolerance)
    incoming = direction(output)
    got = gradients(ikattn.implicit_kernel_attention, call, OF_TOKENS, incoming)
    expected = gradients(reference, wide, OF_TOKENS, incoming.double())
    for name in OF_TOKENS:
        scale = 0.0 if scales is None else scales[name]
        assert_close(got[name], expected[name], tolerance, name, scale)


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
    assert_on_tensor_cores(call)
    incoming = torch.randn(shape)
    output = ikattn.implicit_kernel_attention(**call)
    assert_close(output.cpu(), in_float64(reference, arguments), 2**-9)
    got = gradients(ikattn.implicit_kernel_attention, call, grad_output=incoming.to(DEVICE))
    wide = converted(arguments, torch.float64)
    expected = gradients(reference, wide, grad_output=incoming.double())
    for name, gradient in got.items():
        assert_close(gradient.cpu(), expected[name], 2**-7, name)


@large
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("frequencies", [32, 64, 96])
@pytest.mark.parametrize("d_v", [64, 128, 192])
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=name_of)
def test_blocks_enough_that_none_shares_its_keys(causal, frequencies, d_v, dtype):
    """264 of 128 queries, which pass 8 tiles of keys or more: Hopper's ring of three goes round."""
    call = drawn_on_gpu(4, 33, 256, 1000, d_v, frequencies, dtype) | {"is_causal": causal}
    output = ikattn.implicit_kernel_attention(**call)
    assert_close(output, in_float64(reference, call), roundings_of(call))


def causal_gradient_scales(call: Arguments, incoming: Tensor) -> dict[str, float]:
    """Returns agreement.gradient_scales(), which would hold 150 GB of [B, H, L, S, M] here."""
    leaves = {name: call[name].detach().double().requires_grad_() for name in OF_TOKENS}
    q, k, v, w1, w2 = leaves.values()
    phi_q, phi_k = (ikattn.reference.spectral_features(x, w1, w2) for x in (q, k))
    s = phi_q @ phi_k.mT / (4 * w1.shape[-1])
    logits = k.square().sum(-1) / (2 * k.shape[-1] ** 0.5)
    weights = ((s.square() + 1e-5) * logits.unsqueeze(-2).exp()).tril()
    output = weights / weights.sum(-1, keepdim=True).detach() @ v
    found = torch.autograd.grad(output, list(leaves.values()), incoming.double())
    return {name: x.abs().max().item() for name, x in zip(OF_TOKENS, found, strict=True)}


@large
@pytest.mark.parametrize("form", ["plain", "causal", "float mask"])
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=name_of)
def test_many_waves_of_blocks(form: str, dtype: torch.dtype) -> None:
    """288 of 128 queries: enough that no block shares its keys, causal or not."""
    call = drawn_on_gpu(2, 9, 2048, 2048, 64, 64, dtype) | {"is_causal": form == "causal"}
    if form == "float mask":
        call["attn_mask"] = torch.randn(2048, 2048, device=DEVICE, dtype=dtype)
    # Where a causal row sees few keys its gradients are what the rounded output leaves of larger
    # terms: they err relative to these, as agreement.py says.
    scales = None
    if form == "causal":
        scales = causal_gradient_scales(call, direction(call["query"]))
    assert_output_and_gradients(call, scales)


@large
@pytest.mark.parametrize("frequencies", ["of keys", "of queries"])
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=name_of)
def test_many_blocks_of_grouped_heads_inside_the_tokens(frequencies, dtype):
    """264 of 128 queries, heads of a token side by side, two heads of queries for each of keys."""
    call = drawn_on_gpu(2, 66, 256, 1000, 64, 64, dtype) | {"enable_gqa": True}
    for name in OF_TOKENS[1:3] if frequencies == "of queries" else OF_TOKENS[1:]:
        call[name] = call[name][..., ::2, :, :]
    for name in OF_TOKENS[:3]:
        call[name] = call[name].transpose(1, 2).contiguous().transpose(1, 2)
    assert_output_and_gradients(call)


@large
@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=name_of)
def test_many_blocks_pass_by_hidden_keys_that_hold_anything(dtype, rubbish):
    call = drawn_on_gpu(4, 33, 256, 1000, 64, 64, dtype)
    hidden = torch.arange(1000, device=DEVICE) % 7 == 3
    call["key_bias"] = torch.zeros(1000, device=DEVICE, dtype=dtype).masked_fill(hidden, -torch.inf)

    def results(held: float) -> list[Tensor]:
        spoilt = {name: call[name].clone() for name in ("key", "value")}
        for tokens in spoilt.values():
            tokens[..., hidden, :] = held
        output = ikattn.implicit_kernel_attention(**call | spoilt)
        found = gradients(
            ikattn.implicit_kernel_attention, call | spoilt, OF_TOKENS, direction(output)
        )
        return [output, *found.values()]

    spoilt, clean = ([x.cpu() for x in results(held)] for held in (rubbish, 0.0))
    if torch.ops.ikattn.linear_time() != "always":
        return assert_identical(spoilt, clean)
    # A head whose hidden keys are not finite takes quadratic time, whose bits are others.
    for got, expected in zip(spoilt, clean, strict=True):
        assert_close(got, expected, 4 * torch.finfo(dtype).eps)
    return None


@pytest.mark.parametrize(
    "call",
    [
        {"attn_mask": torch.finfo(torch.float32).min, "key_bias": torch.finfo(torch.float32).min},
        {"attn_mask": torch.finfo(torch.float32).min, "key_bias": -299.1, "p": None},
        {"attn_mask": torch.finfo(torch.float32).min, "magnitude_scale": -1 / 16},
        {"attn_mask": torch.finfo(torch.float32).min, "key_bias": -168.4, "eps": 0.5},
        {"attn_mask": torch.finfo(torch.float32).min, "key_bias": -36.9, "p": None, "eps": 0.9},
        {"attn_mask": -1048000.0, "key_bias": -1048000.0, "eps": 0.9},
    ],
    ids=str,
)
def test_lowest_numbers_leave_weights_of_float16_in_its_range(call: Arguments, matmul: Any) -> None:
    """Where scores are 1, and what the largest logit has beside 2^33 is rounded."""
    matmul.fp32_precision = "tf32"
    torch.manual_seed(0)
    query = torch.randn(1, 1, 64, 64)
    query *= 298.9**0.5 * 4 / query.norm(dim=-1, keepdim=True)  # |k|^2 / 16 = 298.9
    value, w1 = torch.randn(1, 1, 64, 8), 1e-5 * torch.randn(1, 64, 16)
    shapes = {"attn_mask": (64, 64), "key_bias": (64,)}
    call = {name: torch.full(shapes[name], x) if name in shapes else x for name, x in call.items()}
    arguments: Arguments = {"query": query, "key": query, "value": value, "w1": w1} | call
    output = ikattn.implicit_kernel_attention(**on_gpu(arguments)).cpu()
    near = arguments | {"attn_mask": torch.zeros(64, 64)}
    near |= {"key_bias": torch.zeros(64)} if "key_bias" in call else {}
    assert_close(output, in_float64(reference, near), 2**-9)


@pytest.mark.parametrize("form", ["plain", "causal", "bias", "float mask", "grouped"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_each_gradient_alone_is_what_it_is_among_all(form, dtype):
    call = drawn_on_gpu(2, 4, 70, 140, 40, 32, dtype)
    if form == "causal":
        call["is_causal"] = True
    if form == "bias":
        call["key_bias"] = torch.linspace(-1, 1, 140, device=DEVICE, dtype=dtype)
    if form == "float mask":
        call["attn_mask"] = torch.linspace(-1, 1, 140, device=DEVICE, dtype=dtype).cos()
    if form == "grouped":
        call |= {"enable_gqa": True, "key": call["key"][:, :2], "value": call["value"][:, :2]}
    everything = gradients(ikattn.implicit_kernel_attention, call)
    for name, gradient in everything.items():
        alone = gradients(ikattn.implicit_kernel_attention, call, [name])[name]
        assert_identical([alone.cpu()], [gradient.cpu()])


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=name_of)
def test_causal_chunks(grouped: bool, dtype: torch.dtype) -> None:
    """Where all calls take linear time, two chunks; each gradient alone, too."""
    call = drawn_on_gpu(1, 2, 300, 300, 64, 8, dtype) | {"is_causal": True}
    shared = {name: call[name][..., :1, :, :] for name in OF_TOKENS[1:] if grouped}
    call |= {name: x.expand_as(call[name]) for name, x in shared.items()}
    scales = causal_gradient_scales(call, direction(call["query"]))
    call |= shared | {"enable_gqa": grouped}
    assert_output_and_gradients(call, scales)
    everything = gradients(ikattn.implicit_kernel_attention, call, OF_TOKENS[:3])
    for name, gradient in everything.items():
        alone = gradients(ikattn.implicit_kernel_attention, call, [name])[name]
        assert_identical([alone.cpu()], [gradient.cpu()])


@pytest.mark.parametrize("way", ["mask", "bias", "mask and bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rows_of_the_lowest_number(way: str, dtype: torch.dtype) -> None:
    """Hugging Face's masks hide padding so; such rows are like rows without the mask."""
    call = drawn_on_gpu(1, 2, 140, 600, 40, 32, dtype)
    call["key"] *= 3  # logits of 36, which 2^33 in one float32 would lose
    lowest: Arguments = {}
    if "mask" in way:
        mask = torch.zeros(140, 600, device=DEVICE, dtype=dtype)
        mask[[5, 77]] = torch.finfo(dtype).min
        lowest["attn_mask"] = mask
    if "bias" in way:
        lowest["key_bias"] = torch.full((600,), torch.finfo(dtype).min, device=DEVICE, dtype=dtype)
    incoming = torch.zeros(1, 2, 140, 40, device=DEVICE, dtype=dtype)
    incoming[:, :, [5, 77]] = direction(incoming)[:, :, [5, 77]]
    got, alike = (
        gradients(ikattn.implicit_kernel_attention, arguments, OF_TOKENS, incoming)
        for arguments in (call | lowest, call)
    )
    wide = converted({name: x.cpu() for name, x in call.items()}, torch.float64)
    expected = gradients(reference, wide, OF_TOKENS, incoming.cpu().double())
    rounding = max(1e-4, torch.finfo(dtype).eps)  # of float32: 2^33 in 48 bits
    for name in OF_TOKENS:
        tolerance = 2 * error(alike[name].cpu(), expected[name]) + rounding
        assert_close(got[name].cpu(), expected[name], tolerance, name)
    outputs = (ikattn.implicit_kernel_attention(**call | added) for added in (lowest, {}))
    rows, rows_alike = (output[:, :, [5, 77]].cpu() for output in outputs)
    assert_close(rows, rows_alike, 2 * rounding)


@pytest.mark.parametrize("way", ["one key", "causal", "key bias", "bool mask", "float mask"])
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=name_of)
def test_the_row_of_a_lone_key_is_its_value(way: str, dtype: torch.dtype) -> None:
    """The bits are equal: its weight is 1, and gradients follow from the rest of the difference."""
    call = drawn_on_gpu(2, 3, 70, 1 if way == "one key" else 70, 40, 32, dtype)
    alone = torch.eye(70, device=DEVICE) == 1
    rows, keys = slice(None), slice(None)  # which rows, and whose values they are
    if way == "one key":
        keys = slice(0, 1)
    elif way == "causal":
        call["is_causal"] = True
        rows = keys = slice(0, 1)
    elif way == "key bias":
        keys = slice(5, 6)
        call["key_bias"] = torch.zeros(70, device=DEVICE).masked_fill(~alone[5], -torch.inf)
    elif way == "bool mask":
        call["attn_mask"] = alone
    else:
        mask = torch.zeros(70, 70, device=DEVICE, dtype=dtype)
        call["attn_mask"] = mask.masked_fill(~alone, -torch.inf)
    output = ikattn.implicit_kernel_attention(**call)[..., rows, :]
    expected = call["value"][..., keys, :].expand_as(output)
    assert_identical([output.cpu()], [expected.cpu()])


@pytest.mark.parametrize(("frequencies", "d_v"), [(128, 64), (64, 256), (160, 200)])
@pytest.mark.parametrize("form", ["plain", "bool mask", "float mask"])
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=name_of)
def test_wide_rows(frequencies: int, d_v: int, form: str, dtype: torch.dtype) -> None:
    """More than 128 features, or columns of the value, go by slices of 128."""
    call = drawn_on_gpu(2, 3, 300, 500, d_v, frequencies, dtype)
    if form == "bool mask":
        call["attn_mask"] = torch.rand(300, 500, device=DEVICE) < 0.7
    elif form == "float mask":
        call["attn_mask"] = torch.randn(300, 500, device=DEVICE, dtype=dtype)
    assert_on_tensor_cores(call)
    assert_output_and_gradients(call)


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
    on_cpu = ikattn.ops.dropout_keep_mask(seed, shape, 0.3)
    assert torch.equal(ikattn.ops.dropout_keep_mask(seed.to(DEVICE), shape, 0.3).cpu(), on_cpu)


@each_call(FEW)
def test_the_same_call_gives_the_same_bits(sample: Sample) -> None:
    arguments = on_gpu(sample.arguments(torch.float32), sample.layout)
    runs = []
    for _ in range(3):
        found = gradients(ikattn.implicit_kernel_attention, arguments)
        runs.append([gradient.cpu() for gradient in found.values()])
    for run in runs[1:]:
        assert_identical(runs[0], run)


@each_call(FEW)
def test_gradients_of_weights_are_those_of_the_cpu(sample: Sample) -> None:
    arguments = sample.arguments()
    arguments.pop("value")
    weights = ikattn.implicit_kernel_weights
    incoming = direction(weights(**arguments))
    got = gradients(weights, on_gpu(arguments, sample.layout), grad_output=incoming.to(DEVICE))
    expected = gradients(weights, arguments, grad_output=incoming)
    for name, gradient in got.items():
        # of a lone key, or of a mask of whole rows, they vanish but for rounding
        assert_close(gradient.cpu(), expected[name], 1e-12, name, scale=1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("stationary", [False, True])
def test_features_and_their_gradients_are_those_of_the_cpu(dtype, stationary):
    torch.manual_seed(0)
    arguments: Arguments = {"x": torch.randn(2, 3, 70, 20), "w1": torch.randn(3, 20, 11) / 5}
    arguments["w2"] = None if stationary else torch.randn(3, 20, 11) / 5
    names = ["x", "w1"] if stationary else ["x", "w1", "w2"]
    arguments |= {name: arguments[name].to(dtype) for name in names}
    wide = arguments | {name: arguments[name].double() for name in names}
    found = ikattn.ops.spectral_features(**on_gpu(arguments))
    assert_close(found.cpu(), ikattn.ops.spectral_features(**wide), 64 * torch.finfo(dtype).eps)
    incoming = direction(ikattn.ops.spectral_features(**arguments))
    got = gradients(ikattn.ops.spectral_features, on_gpu(arguments), names, incoming.to(DEVICE))
    expected = gradients(ikattn.ops.spectral_features, wide, names, incoming.double())
    for name, gradient in got.items():
        assert_close(gradient.cpu(), expected[name], 64 * torch.finfo(dtype).eps, name)


@pytest.mark.parametrize("kernel", ["implicit", "dot", "rbf"])
def test_the_module_gives_what_it_gives_on_the_cpu(kernel: str) -> None:
    torch.manual_seed(0)
    module = ikattn.MultiheadAttention(24, 3, kernel=kernel, batch_first=True).double()
    x = torch.randn(2, 40, 24, dtype=torch.float64)
    padding = torch.zeros(2, 40, dtype=torch.bool)
    padding[1, 30:] = True

    def run(device: str) -> list[Tensor]:
        there, tokens = module.to(device), x.to(device)
        output, weights = there(tokens, tokens, tokens, key_padding_mask=padding.to(device))
        found = torch.autograd.grad(output.square().sum(), list(there.parameters()))
        return [each.cpu() for each in (output, weights, *found)]

    for got, expected in zip(run(DEVICE), run("cpu"), strict=True):
        assert_close(got, expected, 1e-11)


@needs_a_gpu
def test_autocast_takes_the_module_to_the_tensor_cores() -> None:
    torch.manual_seed(0)
    module = ikattn.MultiheadAttention(128, 4, kernel="implicit", batch_first=True)
    x = torch.randn(2, 100, 128)
    expected = module(x, x, x, need_weights=False)[0]
    with torch.autocast("cuda", torch.bfloat16):
        there = x.to(DEVICE)
        output = module.to(DEVICE)(there, there, there, need_weights=False)[0]
    assert output.dtype == torch.bfloat16
    assert_close(output.cpu(), expected, 2**-6)


def test_second_derivatives_are_those_of_the_cpu() -> None:
    sample = BY_NAME["15 queries, 17 keys"]  # of a lone key they would vanish

    def second(arguments: Arguments) -> list[Tensor]:
        names = ["query", "key", "value", "w1"]
        leaves = {name: arguments[name].detach().requires_grad_() for name in names}
        output = ikattn.implicit_kernel_attention(**arguments | leaves)
        first = torch.autograd.grad(output.square().sum(), list(leaves.values()), create_graph=True)
        total = sum((x * x).sum() for x in first)
        return [x.cpu() for x in torch.autograd.grad(total, list(leaves.values()))]

    arguments = sample.arguments()
    for got, expected in zip(second(on_gpu(arguments)), second(arguments), strict=True):
        assert_close(got, expected, 1e-10)
