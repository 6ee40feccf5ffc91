"""Laws the operators obey; NaN and dropout; threads and instruction sets change nothing."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import ikattn
from operator_samples import SAMPLES, Options, Sample, differentiable, error, options

attention = ikattn.implicit_kernel_attention
weights_of = ikattn.implicit_kernel_weights


@pytest.fixture
def tensors() -> list[Tensor]:
    return Sample("laws", L=40, S=70).make()[0]


def test_a_permutation_of_keys_changes_nothing(tensors: list[Tensor]) -> None:
    query, key, value, w1, w2 = tensors
    order = torch.randperm(70)
    shuffled = attention(query, key[:, :, order], value[:, :, order], w1, w2)
    assert error(shuffled, attention(*tensors)) < 1e-13


def test_a_batch_is_a_loop_over_its_items(tensors: list[Tensor]) -> None:
    query, key, value, w1, w2 = tensors
    items = [attention(query[i : i + 1], key[i : i + 1], value[i : i + 1], w1, w2) for i in (0, 1)]
    assert torch.equal(torch.cat(items), attention(*tensors))


def test_bool_float_and_causal_masks_agree(tensors: list[Tensor]) -> None:
    visible = torch.ones(40, 70, dtype=torch.bool).tril()
    hidden = torch.zeros(40, 70, dtype=torch.float64).masked_fill(~visible, -math.inf)
    causal = attention(*tensors, is_causal=True)
    assert error(attention(*tensors, attn_mask=visible), causal) < 1e-13
    assert error(attention(*tensors, attn_mask=hidden), causal) < 1e-13
    assert error(attention(*tensors, attn_mask=visible, is_causal=True), causal) < 1e-13


def test_a_key_bias_is_a_float_mask_with_one_row(tensors: list[Tensor]) -> None:
    row = torch.randn(70, dtype=torch.float64)
    assert error(attention(*tensors, key_bias=row), attention(*tensors, attn_mask=row)) < 1e-13


def test_rows_of_weights_sum_to_one_and_times_value_give_the_output(tensors: list[Tensor]) -> None:
    query, key, value, w1, w2 = tensors
    weights = weights_of(query, key, w1, w2)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 40, dtype=torch.float64))
    assert error(weights @ value, attention(*tensors)) < 1e-13
    assert error(weights_of(query, key, w1, w2, average_heads=True), weights.mean(1)) < 1e-13


def test_stationary_is_both_frequencies_equal(tensors: list[Tensor]) -> None:
    query, key, value, w1, _ = tensors
    assert error(attention(query, key, value, w1), attention(query, key, value, w1, w1)) < 1e-13
    shift = torch.randn(16, dtype=torch.float64)
    moved = weights_of(query + shift, key + shift, w1, p=None)
    assert error(moved, weights_of(query, key, w1, p=None)) < 1e-12


def test_grouped_heads_are_repeated_heads() -> None:
    (query, key, value, w1, w2), _ = Sample("groups", G=2, frequency_heads=2, L=20, S=30).make()
    repeated = [x.repeat_interleave(2, 1) for x in (key, value)]
    wide = [w.repeat_interleave(2, 0) for w in (w1, w2)]
    grouped = attention(query, key, value, w1, w2, enable_gqa=True)
    assert error(grouped, attention(query, *repeated, *wide)) < 1e-13


@pytest.mark.parametrize("kernel", ["dot", "rbf", "implicit"])
def test_similarity_times_magnitude_is_the_weight(tensors: list[Tensor], kernel: str) -> None:
    query, key, _, w1, w2 = tensors
    spectrum = {"w1": w1, "w2": w2} if kernel == "implicit" else {}
    p = 2.0 if kernel == "dot" else 3.0
    similarity, magnitude = ikattn.decompose(query, key, kernel=kernel, p=p, **spectrum)
    weights = similarity * magnitude.unsqueeze(-2)
    weights = weights / weights.sum(-1, keepdim=True)
    if kernel == "implicit":
        expected = weights_of(query, key, w1, w2, p=p)
    else:
        scores = query @ key.mT / 4
        if kernel == "rbf":
            norms = [torch.linalg.vector_norm(key, order, dim=-1).square() for order in (3, 2)]
            scores = scores + (norms[0] - norms[1]).unsqueeze(-2) / 8
        expected = scores.softmax(-1)
    assert error(weights, expected) < 1e-12


def test_decompose_refuses_what_it_does_not_know(tensors: list[Tensor]) -> None:
    with pytest.raises(ValueError, match='kernel must be "dot", "rbf" or "implicit", got \'x\''):
        ikattn.decompose(*tensors[:2], kernel="x")
    with pytest.raises(ValueError, match="w1 must be given"):
        ikattn.decompose(*tensors[:2], kernel="implicit")


# --- NaN and Inf ---


def hide_from_six(form: str) -> Options:
    shown = torch.arange(9) < 6
    bias = torch.zeros(9, dtype=torch.float64).masked_fill(~shown, -math.inf)
    return {
        "bool": {"attn_mask": shown},
        "float": {"attn_mask": bias},
        "bias": {"key_bias": bias},
        "bool and causal": {"attn_mask": shown, "is_causal": True},
    }[form]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("form", ["bool", "float", "bias", "bool and causal"])
def test_nan_behind_a_mask_never_leaks(form: str, bad: float) -> None:
    clean, _ = Sample("nan", L=9, S=9).make()
    opts = hide_from_six(form)
    dirty = [tensor.detach().clone() for tensor in clean]
    dirty[1][:, :, 6:8] = bad
    dirty[2][:, :, 7:] = bad
    dirty = [tensor.requires_grad_() for tensor in dirty]
    outputs = [attention(*inputs, **opts) for inputs in (clean, dirty)]
    assert error(outputs[1], outputs[0]) < 1e-13
    gradients = [
        torch.autograd.grad(o.sum(), i) for o, i in zip(outputs, (clean, dirty), strict=True)
    ]
    for expected, got in zip(*gradients, strict=True):
        assert error(got, expected) < 1e-12
    averaged = weights_of(dirty[0], dirty[1], *dirty[3:], **opts, average_heads=True)
    assert torch.isfinite(averaged).all()


def test_nan_in_a_key_reaches_exactly_the_rows_that_see_it() -> None:
    tensors, _ = Sample("nan", L=9, S=9).make()
    with torch.no_grad():
        tensors[1][:, :, 6] = math.nan
    output = attention(*tensors, is_causal=True)
    assert torch.isfinite(output[:, :, :6]).all()
    assert output[:, :, 6:].isnan().all()


def test_nan_in_a_query_reaches_its_row_only() -> None:
    tensors, _ = Sample("nan", L=9, S=9).make()
    with torch.no_grad():
        tensors[0][:, :, 4] = math.nan
    output = attention(*tensors)
    assert output[:, :, 4].isnan().all()
    assert torch.isfinite(output[:, :, [0, 1, 2, 3, 5, 6, 7, 8]]).all()


def test_a_row_that_sees_nothing_is_zero_even_if_it_is_nan() -> None:
    tensors, _ = Sample("nan", L=9, S=9).make()
    with torch.no_grad():
        tensors[0][:, :, 4] = math.nan
    shown = torch.ones(9, 9, dtype=torch.bool)
    shown[4] = False
    output = attention(*tensors, attn_mask=shown)
    assert not output[:, :, 4].any()
    for gradient in torch.autograd.grad(output.sum(), tensors):
        assert torch.isfinite(gradient).all()
    _, log_normalizer = torch.ops.ikattn.implicit_kernel_attention(*tensors, attn_mask=shown)
    assert (log_normalizer[:, :, 4] == -math.inf).all()


# --- Dropout ---


def philox(counter: np.ndarray, seed: int) -> np.ndarray:
    """Philox4x32-7 in numpy; counter [..., 4] of uint64 holding 32-bit numbers."""
    low = np.uint64(0xFFFFFFFF)
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    c = [counter[..., i].copy() for i in range(4)]
    for _ in range(7):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        shift = np.uint64(32)
        c = [(b >> shift) ^ c[1] ^ key[0], b & low, (a >> shift) ^ c[3] ^ key[1], a & low]
        key = [(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(c, -1)


def test_dropout_mask_is_the_documented_function_of_its_seed() -> None:
    seed, offset, shape, p = 2**40 + 17, 5, (2, 3, 37, 50), 0.3
    keep = ikattn.dropout_keep_mask(torch.tensor([seed, offset]), shape, p)
    b, h, i, j = np.meshgrid(*[np.arange(n) for n in shape], indexing="ij")
    member = [
        (x % 16 % 2) + 2 * (x % 16 // 8) for x in (i, j)
    ]  # position in {2a, 2a+1, 2a+8, 2a+9}
    group = [x // 16 * 4 + x % 8 // 2 for x in (i, j)]
    counter = np.stack([*group, b * shape[1] + h, np.full_like(b, offset)], -1).astype(np.uint64)
    word = np.take_along_axis(philox(counter, seed), member[0][..., None], -1)[..., 0]
    byte = (word >> (8 * member[1].astype(np.uint64))) & np.uint64(0xFF)
    assert np.array_equal(keep.numpy(), byte >= round(256 * p))


def test_output_and_weights_drop_what_the_mask_says(tensors: list[Tensor]) -> None:
    query, key, value, w1, w2 = tensors
    opts = {"dropout_p": 0.3, "dropout_seed": torch.tensor([7, 1])}
    keep = ikattn.dropout_keep_mask(opts["dropout_seed"], (2, 4, 40, 70), 0.3)  # type: ignore[arg-type]
    dropped = weights_of(query, key, w1, w2) * keep * (256 / (256 - round(0.3 * 256)))
    assert error(weights_of(query, key, w1, w2, **opts), dropped) < 1e-13
    assert error(attention(*tensors, **opts), dropped @ value) < 1e-13


def test_dropout_follows_torchs_generator(tensors: list[Tensor]) -> None:
    torch.manual_seed(3)
    first, second = attention(*tensors, dropout_p=0.5), attention(*tensors, dropout_p=0.5)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(first, attention(*tensors, dropout_p=0.5))


# --- Threads, instruction sets, memory ---


def everything(sample: Sample) -> list[Tensor]:
    tensors, opts = sample.make(torch.float32)
    output = attention(*tensors, **opts)
    return [output, *torch.autograd.grad(output.square().sum(), differentiable(tensors, opts))]


LONG = [
    Sample("one long head", B=1, H=1, G=1, L=1000, S=900, d=32, d_v=32),
    Sample("one long head, causal", B=1, H=1, G=1, L=900, S=900, options=options(is_causal=True)),
    *[s for s in SAMPLES if "group" in s.name or "float mask" in s.name],
]


@pytest.mark.parametrize("sample", LONG, ids=lambda sample: sample.name)
def test_the_number_of_threads_changes_no_bit(sample: Sample) -> None:
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 7, 2):
            torch.set_num_threads(threads)
            results.append(everything(sample))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def test_several_python_threads_may_call_at_once() -> None:
    sample = LONG[1]
    expected = everything(sample)
    results: list[list[Tensor]] = []
    # random numbers are drawn from one generator: inputs are made before
    tensors, opts = sample.make(torch.float32)

    def call() -> None:
        output = attention(*tensors, **opts)
        results.append([output, *torch.autograd.grad(output.square().sum(), tensors)])

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        for a, b in zip(result, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("capability", "name"), [("default", "baseline"), ("avx2", "avx2")])
def test_every_instruction_set_gives_the_same_numbers(capability: str, name: str) -> None:
    if name not in ("baseline", torch.ops.ikattn.instruction_set()) and "avx" not in (
        torch.ops.ikattn.instruction_set()
    ):
        pytest.skip(f"the processor has no {name}")
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, ikattn
from operator_samples import SAMPLES, differentiable, error
assert torch.ops.ikattn.instruction_set() == {name!r}
for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 2e-4)):
    for sample in SAMPLES:
        tensors, opts = sample.make(dtype)
        inputs = differentiable(tensors, opts)
        for f in (ikattn.implicit_kernel_attention,):
            output = f(*tensors, **opts)
            plain = ikattn.reference.implicit_kernel_attention(*tensors, **opts)
            assert error(output, plain.double()) < bound, sample.name
            direction = torch.randn_like(output)
            pairs = zip(torch.autograd.grad(output, inputs, direction),
                        torch.autograd.grad(plain, inputs, direction))
            for ours, expected in pairs:
                assert error(ours, expected.double()) < bound, sample.name
print("all samples agree")
"""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "all samples agree", done.stderr


def test_a_long_forward_needs_little_memory() -> None:
    benchmark = Path(__file__).resolve().parents[2] / "benchmarks" / "attention.py"
    command = [sys.executable, str(benchmark), "--memory-of", "ikattn", "--lengths", "8192"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    megabytes = float(done.stdout.split(":")[1].split()[0])
    assert 0 < megabytes < 60
