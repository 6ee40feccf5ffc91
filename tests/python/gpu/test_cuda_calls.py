"""Calls on a GPU: streams, graphs, devices, memory, and sizes beyond 32 bits."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from agreement import assert_close, assert_identical
from gpu import (
    DEVICE,
    IN_THE_INTERPRETER,
    drawn_on_gpu,
    is_on,
    large,
    memory_limited_to,
    needs_a_gpu,
)
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
def test_hoppers_own_kernels_are_in_use_where_they_can_be() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("this GPU is no Hopper")
    state = "on" if is_on("hopper") else "off (IKATTN_KERNELS)"
    assert f"those for Hopper alone: {state}\n" in ikattn.info(), ikattn.info()


def dropping() -> tuple[Arguments, Tensor]:
    seed = torch.tensor([1, 2], device=DEVICE)
    call = drawn_on_gpu(2, 4, 200, 200, 64, 16, torch.bfloat16)
    return call | {"dropout_p": 0.2, "dropout_seed": seed}, seed


@dataclass
class Work:
    """A call, and its arguments whose gradients are made, too."""

    function: Callable[..., Tensor]
    arguments: Arguments
    leaves: list[str] = field(default_factory=lambda: list(GRADIENTS))

    def __post_init__(self) -> None:
        for name in self.leaves:
            self.arguments[name].requires_grad_()

    def __call__(self, **others: Tensor) -> list[Tensor]:
        """Output and gradients, on the current stream."""
        call = self.arguments | others
        output = self.function(**call)
        if not self.leaves:
            return [output]
        leaves = [call[name] for name in self.leaves]
        return [output.detach(), *torch.autograd.grad(output, leaves, torch.ones_like(output))]


def attending(*sizes: Any, **options: Any) -> Work:
    return Work(attention, drawn_on_gpu(*sizes) | options)


def masked(*shape: int) -> Work:
    """The gradients of mask and bias count, too."""
    call = drawn_on_gpu(2, 4, 200, 200, 64, 16, torch.bfloat16)
    call["attn_mask"] = torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)
    call["key_bias"] = torch.randn(4, 200, device=DEVICE, dtype=torch.bfloat16)
    return Work(attention, call, [*GRADIENTS, "attn_mask", "key_bias"])


def weighing(**options: Any) -> Work:
    call = drawn_on_gpu(2, 4, 200, 200, 64, 16, torch.bfloat16) | options
    del call["value"]
    return Work(ikattn.implicit_kernel_weights, call, ["query", "key", "w1", "w2"])


def all_maps(maps: Callable[..., ikattn.Contributions], names: list[str], heads: int) -> Work:
    torch.manual_seed(0)
    sizes = {
        "attn_weights": (1, heads, 70, 70),
        "query": (1, heads, 70, 16),
        "key": (1, heads, 70, 16),
        "value": (1, heads, 70, 8),
        "out_proj_weight": (32, heads * 8),
        "residual": (1, 70, 32),
    }
    names = [*names, "value", "out_proj_weight", "residual"]
    call: Arguments = {name: torch.rand(sizes[name], device=DEVICE) for name in names}
    ones = torch.ones(32, device=DEVICE), torch.ones(1, 70, device=DEVICE)
    norm = ikattn.maps.NormStats(*ones)

    def joined(**arguments: Tensor) -> Tensor:
        found = maps(**arguments, norm=norm, second_norm=norm)
        every = [found.value_norms, found.summed, found.with_residual, found.with_norm]
        every += [found.encoder, *found.mixing_ratio.values()]
        return torch.cat([x.flatten() for x in every if x is not None])

    return Work(joined, call, names)


def features() -> Work:
    call = drawn_on_gpu(2, 4, 200, 200, 64, 16, torch.bfloat16)
    tokens = {"x": call["query"], "w1": call["w1"], "w2": call["w2"]}
    return Work(ikattn.ops.spectral_features, tokens, list(tokens))


def kept(seed: Tensor) -> Tensor:
    return ikattn.ops.dropout_keep_mask(seed, (2, 4, 200, 200), 0.2)


HALF = torch.bfloat16
# A call for every kind of kernels; Hopper's own take two of them where they are on.
KINDS: dict[str, Callable[[], Work]] = {
    "folded": lambda: attending(8, 33, 200, 300, 64, 64, HALF),
    "causal": lambda: attending(8, 33, 200, 200, 64, 64, torch.float16, is_causal=True),
    "shared keys": lambda: attending(1, 2, 3, 3000, 64, 100, HALF),
    "general": lambda: attending(2, 4, 200, 200, 64, 16, HALF, is_causal=True, magnitude_scale=3.0),
    "float mask": lambda: masked(200, 200),
    "mask of keys": lambda: masked(200),
    "mask of rows": lambda: masked(2, 1, 200, 1),
    "dropout": lambda: Work(attention, dropping()[0]),
    "wide": lambda: attending(2, 4, 200, 300, 160, 100, torch.float16),
    "wide and dropout": lambda: attending(
        2, 4, 200, 200, 160, 16, HALF, dropout_p=0.2, dropout_seed=dropping()[1], is_causal=True
    ),
    "in linear time": lambda: attending(1, 4, 2000, 2000, 64, 16, HALF),
    "causal in linear time": lambda: attending(1, 2, 16000, 16000, 64, 16, HALF, is_causal=True),
    "float32": lambda: attending(2, 4, 200, 200, 64, 16, torch.float32),
    "float64": lambda: attending(1, 2, 70, 130, 64, 16, torch.float64),
    "weights": lambda: weighing(dropout_p=0.2, dropout_seed=dropping()[1]),
    "average weights": lambda: weighing(average_heads=True),
    "features": features,
    "keep mask": lambda: Work(kept, {"seed": dropping()[1]}, []),
    "maps": lambda: all_maps(ikattn.contributions, ["attn_weights"], 4),
    "maps of many heads": lambda: all_maps(ikattn.contributions, ["attn_weights"], 70),
    "streamed maps": lambda: all_maps(ikattn.streamed_contributions, ["query", "key"], 12),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def results(call: Arguments) -> list[Tensor]:
    return Work(attention, call, [name for name in GRADIENTS if call[name].requires_grad])()


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


@large
@every_kind
def test_the_same_call_gives_the_same_bits(kind: str) -> None:
    work = KINDS[kind]()
    first = [x.cpu() for x in work()]
    for _ in range(5):
        assert_identical([x.cpu() for x in work()], first)


@needs_a_gpu
@every_kind
def test_a_call_runs_on_the_current_stream(kind: str) -> None:
    work = KINDS[kind]()
    expected = work()
    name, tensor = next(iter(work.arguments.items()))
    stream = torch.cuda.Stream()
    late = torch.zeros_like(tensor).requires_grad_(False)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # what another stream would not wait for
        late.copy_(tensor.detach())
        found = work(**{name: late.requires_grad_(name in work.leaves)})
    stream.synchronize()
    for got, right in zip(found, expected, strict=True):
        assert torch.equal(got, right)


@needs_a_gpu
@every_kind
def test_a_call_can_be_captured(kind: str) -> None:
    """A capture fails where a call waits for the host."""
    work = KINDS[kind]()
    expected = [x.clone() for x in work()]
    graph, written = captured(work)
    for _ in range(2):
        for each in written:
            each.zero_()
        graph.replay()
        for got, right in zip(written, expected, strict=True):
            assert torch.equal(got, right)


@needs_a_gpu
@pytest.mark.parametrize("backward", [False, True])
def test_every_replay_of_a_graph_reads_the_seed(backward: bool) -> None:
    call, seed = dropping()
    for name in GRADIENTS:
        call[name].requires_grad_(backward)

    def run() -> list[Tensor]:
        return results(call)

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
    """More than a grid has along its other axes, on CUDA cores and on tensor cores."""
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
    """The last of 2^31 elements of query, output and gradients are those of a small call."""
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
    with (
        memory_limited_to(100 << 20),
        pytest.raises(
            torch.OutOfMemoryError,
            match=r"attention: no memory for \d+ bytes beyond \d+ of its working memory",
        ),
    ):
        attention(**call)
    attention(**call)


def attended(call: Arguments) -> list[Tensor]:
    return [attention(**call)]


def weighed(call: Arguments) -> list[Tensor]:
    weights = ikattn.implicit_kernel_weights(call["query"], call["key"], call["w1"])
    return [weights, *torch.autograd.grad(weights.sum(), [call["query"], call["w1"]])]


@functools.cache
def projection() -> Tensor:
    return torch.eye(80, device=DEVICE, dtype=torch.bfloat16)


def mapped(call: Arguments) -> list[Tensor]:
    tokens = [call[name].detach() for name in GRADIENTS[:3]]
    return [ikattn.streamed_contributions(*tokens, projection(), maps=["summed"]).summed]


NAMED = r"(implicit_kernel|(streamed_)?contribution)\w+: no memory for "


@pytest.mark.skipif(not IN_THE_INTERPRETER, reason="a GPU's memory comes in large pieces")
@pytest.mark.parametrize("work", [attended, results, weighed, mapped])
@pytest.mark.parametrize("causal", [False, True])
def test_memory_may_be_missing_anywhere(work, causal):
    """Whatever a call cannot have, it says so, leaves nothing behind, and the next one runs."""
    call = drawn_on_gpu(1, 2, 70, 70, 40, 16, torch.bfloat16) | {"is_causal": causal}
    for name in GRADIENTS:
        call[name].requires_grad_()
    expected = [x.cpu() for x in work(call)]
    refusals, found = [], None
    for free in itertools.count(0, 1 << 14):
        with memory_limited_to(free):
            try:
                found = work(call)
                break
            except torch.OutOfMemoryError as error:
                refusals.append(str(error))
    assert len(refusals) > 3
    assert [text for text in refusals if not re.match(NAMED, text)] == []
    assert_identical([x.cpu() for x in found], expected)


def test_the_backward_reads_results_as_they_lie() -> None:
    call = drawn_on_gpu(2, 4, 30, 40, 64, 16, torch.float32)
    tensors = [call[name] for name in GRADIENTS]
    output, log_normalizer = torch.ops.ikattn.implicit_kernel_attention(*tensors)

    def backward(output: Tensor, log_normalizer: Tensor) -> list[Tensor]:
        wanted = [True] * 5 + [False] * 2
        found = torch.ops.ikattn.implicit_kernel_attention_backward(
            torch.ones_like(output), *tensors, output, log_normalizer, wanted=wanted
        )
        return [x.cpu() for x in found]

    turned = [x.mT.contiguous().mT for x in (output, log_normalizer)]
    assert_identical(backward(*turned), backward(output, log_normalizer))


def test_tensors_of_two_devices_are_refused() -> None:
    q, w = torch.randn(1, 2, 4, 8), torch.randn(2, 8, 4)
    with pytest.raises(
        RuntimeError, match=f"w1 must be on the device of query, {DEVICE}:0, got cpu"
    ):
        attention(q.to(DEVICE), q.to(DEVICE), q.to(DEVICE), w)
