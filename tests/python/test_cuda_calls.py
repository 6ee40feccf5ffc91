"""Calls on a GPU: streams, graphs, devices, memory, and sizes beyond 32 bits."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ikattn
from agreement import assert_close
from gpu import DEVICE, IN_THE_INTERPRETER, drawn_on_gpu, large, needs_a_gpu
from samples import DTYPES, Arguments, name_of

attention = ikattn.implicit_kernel_attention
GRADIENTS = ["query", "key", "value", "w1", "w2"]
LARGE = 60 << 30  # bytes of memory that the largest calls need

needs_much_memory = pytest.mark.skipif(
    IN_THE_INTERPRETER or torch.cuda.get_device_properties(0).total_memory < LARGE,
    reason=f"this is no GPU of {LARGE >> 30} GiB",
)


@pytest.fixture(autouse=True)
def emptied() -> None:
    torch.cuda.empty_cache()


@needs_a_gpu
def test_the_kernels_asked_for_are_those_in_use() -> None:
    if os.environ.get("IKATTN_WARPGROUPS") != "1":
        pytest.skip("IKATTN_WARPGROUPS=1 would ask for Hopper's own kernels")
    assert "those for Hopper alone: on\n" in ikattn.info(), ikattn.info()


def dropping() -> tuple[Arguments, Tensor]:
    seed = torch.tensor([1, 2], device=DEVICE)
    call = drawn_on_gpu(2, 4, 200, 200, 64, 16, torch.bfloat16)
    return call | {"dropout_p": 0.2, "dropout_seed": seed}, seed


def results(call: Arguments, names: list[str] = GRADIENTS) -> list[Tensor]:
    """Output and gradients, on the current stream."""
    leaves = [call[name] for name in names]
    output = attention(**call)
    return [output.detach(), *torch.autograd.grad(output, leaves, torch.ones_like(output))]


def captured(call: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of a call, and where it writes; run before on a stream of its own, as torch asks."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        written = call()
    return graph, written


@needs_a_gpu
def test_a_call_runs_on_the_current_stream() -> None:
    call, _ = dropping()
    for name in GRADIENTS:
        call[name].requires_grad_()
    expected = results(call)
    stream = torch.cuda.Stream()
    late = call["query"].detach().clone().zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # what another stream would not wait for
        late.copy_(call["query"])
        found = results(call | {"query": late.requires_grad_()})
    stream.synchronize()
    for got, right in zip(found, expected, strict=True):
        assert torch.equal(got, right)


@needs_a_gpu
@pytest.mark.parametrize("backward", [False, True])
def test_every_replay_of_a_graph_reads_the_seed(backward: bool) -> None:
    call, seed = dropping()
    for name in GRADIENTS:
        call[name].requires_grad_(backward)

    def run() -> list[Tensor]:
        return results(call) if backward else [attention(**call)]

    expected = []
    for offset in (2, 3):
        seed[1] = offset
        expected.append([x.clone() for x in run()])
    assert not torch.equal(expected[0][0], expected[1][0])
    graph, written = captured(run)
    for offset, right in zip((2, 3), expected, strict=True):
        seed[1] = offset
        graph.replay()
        for got, each in zip(written, right, strict=True):
            assert torch.equal(got, each)


@needs_a_gpu
def test_gradients_of_maps_can_be_captured() -> None:
    torch.manual_seed(0)
    weights = torch.rand(1, 4, 40, 40, device=DEVICE, requires_grad=True)
    value = torch.randn(1, 4, 40, 8, device=DEVICE, requires_grad=True)
    projection = torch.randn(32, 32, device=DEVICE, requires_grad=True)
    leaves = (weights, value, projection)

    def run() -> list[Tensor]:
        norms = ikattn.contributions(*leaves, maps=["summed"]).summed
        assert norms is not None
        return [norms.detach(), *torch.autograd.grad(norms.sum(), leaves)]

    expected = run()
    graph, written = captured(run)
    graph.replay()
    for got, right in zip(written, expected, strict=True):
        assert torch.equal(got, right)


@needs_a_gpu
def test_a_call_runs_on_the_device_of_its_tensors() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    call, _ = dropping()
    there = {
        name: each.to("cuda:1") if isinstance(each, Tensor) else each for name, each in call.items()
    }
    with torch.cuda.device(0):
        output = attention(**there)
    assert output.device == torch.device("cuda:1")
    assert torch.equal(output.to("cuda:0"), attention(**call))


@large
@pytest.mark.parametrize("dtype", DTYPES[1:3], ids=name_of)
def test_many_heads(dtype: torch.dtype) -> None:
    """More than a grid has along its other axes, on the ordinary units and on tensor cores."""
    call = drawn_on_gpu(1, 70_000, 3, 2, 8, 4, dtype)
    for name in GRADIENTS:
        call[name].requires_grad_()
    few = {name: call[name].detach()[..., -3:, :, :].requires_grad_() for name in GRADIENTS}
    for got, right in zip(results(call), results(few), strict=True):
        assert torch.equal(got[..., -3:, :, :], right)


@needs_much_memory
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_a_mask_with_offsets_beyond_32_bits(dtype: torch.dtype) -> None:
    """Its last rows, forward and backward, are those of a call of these rows alone."""
    N, rows = 46_400, 200
    torch.manual_seed(0)
    mask = torch.randn(N, N, device=DEVICE, dtype=torch.bfloat16).to(dtype)
    mask[-1, :-1] = -torch.inf
    q, k, v = torch.randn(3, 1, 1, N, 64, device=DEVICE, dtype=dtype).unbind()
    w1, w2 = torch.randn(2, 1, 64, 8, device=DEVICE) * 0.3 / 8
    incoming = torch.randn(1, 1, N, 64, device=DEVICE, dtype=dtype)
    incoming[..., :-rows, :] = 0  # so that keys, too, hear of the last rows alone
    found = []
    for part in (slice(0, N), slice(N - rows, N)):
        leaves = [x.detach().requires_grad_() for x in (q[..., part, :], k, v)]
        output = attention(*leaves, w1, w2, attn_mask=mask[part])
        gradients = torch.autograd.grad(output, leaves, incoming[..., part, :])
        found.append([output.detach(), *gradients])
    assert_close(found[0][0][0, 0, -1], v[0, 0, -1], torch.finfo(dtype).eps)
    tolerance = 4 * torch.finfo(dtype).eps
    for whole, alone in zip(*found, strict=True):
        assert_close(whole[..., -rows:, :], alone[..., -rows:, :], tolerance)
    for whole, alone in zip(found[0][2:], found[1][2:], strict=True):
        assert_close(whole, alone, tolerance)


@needs_much_memory
def test_tokens_with_offsets_beyond_32_bits() -> None:
    """Of 2^31 elements of query, output and their gradients the last are those of a small call."""
    L, rows = 2**31 // 64 + 1000, 300
    torch.manual_seed(0)
    q = torch.randn(1, 1, L, 64, device=DEVICE, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 1, 40, 64, device=DEVICE, dtype=torch.bfloat16).unbind()
    w1, w2 = torch.randn(2, 1, 64, 4, device=DEVICE) * 0.3 / 8
    found = []
    for query in (q, q[..., -rows:, :]):
        leaf = query.detach().requires_grad_()
        output = attention(leaf, k, v, w1, w2)
        (gradient,) = torch.autograd.grad(output, leaf, torch.ones_like(output))
        found.append([x[..., -rows:, :].clone() for x in (output.detach(), gradient)])
    for whole, alone in zip(*found, strict=True):
        assert_close(whole, alone, 2 * torch.finfo(q.dtype).eps)


@needs_a_gpu
def test_memory_that_is_not_there_is_named() -> None:
    call = drawn_on_gpu(1, 1, 1 << 20, 64, 8, 64, torch.bfloat16)
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction(
            (torch.cuda.memory_reserved() + (100 << 20)) / total
        )
        with pytest.raises(
            torch.OutOfMemoryError,
            match=r"implicit_kernel_attention: of its working memory, .* bytes so far, the next",
        ):
            attention(**call)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    attention(**call)


def test_tensors_of_two_devices_are_refused() -> None:
    q, w = torch.randn(1, 2, 4, 8), torch.randn(2, 8, 4)
    with pytest.raises(
        RuntimeError, match=f"w1 must be on the device of query, {DEVICE}:0, got cpu"
    ):
        attention(q.to(DEVICE), q.to(DEVICE), q.to(DEVICE), w)
