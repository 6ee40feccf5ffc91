"""Implicit-kernel attention on the CPU beside its eager composition and softmax attention.

Every sample of one rival is followed at once by a sample of the next, in one process, so that a
machine whose speed changes under it treats them alike; compare the ratios, not the milliseconds.
`probe` is a matrix product of the pair loop's shape timed in the same rounds: where its spread is
wide, measure again.

    export OMP_WAIT_POLICY=passive
    python benchmarks/attention.py             # one thread, the table of the README
    python benchmarks/attention.py --weights   # averaged over heads, forward + backward
    python benchmarks/attention.py --memory    # peak memory in fresh processes
    python benchmarks/attention.py --module    # a training step of a small model
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import interleaved, processor, show
from torch import Tensor, nn

import ikattn


def forward_and_backward(call: Callable[[list[Tensor]], Tensor], inputs: list[Tensor]) -> None:
    output = call(inputs)
    torch.autograd.grad(output, inputs, torch.ones_like(output))


def compare_operators(
    length: int, size: tuple[int, int, int], causal: bool, seconds: float
) -> None:
    """Forward, and forward + backward, B = 1, float32."""
    heads, d, frequencies = size
    torch.manual_seed(0)
    bound = 1 / (heads * frequencies) ** 0.5
    inputs = [torch.randn(1, heads, length, d) for _ in range(3)]
    inputs += [torch.empty(heads, d, frequencies).uniform_(-bound, bound) for _ in range(2)]
    leaves = [t.clone().requires_grad_() for t in inputs]
    probe_left, probe_right = torch.randn(192, 128), torch.randn(128, 192)

    def ours(t: list[Tensor]) -> Tensor:
        return ikattn.implicit_kernel_attention(*t, is_causal=causal)

    def eager(t: list[Tensor]) -> Tensor:
        return ikattn.reference.implicit_kernel_attention(*t, is_causal=causal)

    def softmax(t: list[Tensor]) -> Tensor:
        return F.scaled_dot_product_attention(*t, is_causal=causal)

    name = f"N = {length}{', causal' if causal else ''}"
    with torch.no_grad():
        forward = {
            "probe": lambda: probe_left @ probe_right,
            "ikattn": lambda: ours(inputs),
            "eager": lambda: eager(inputs),
            "softmax": lambda: softmax(inputs[:3]),
        }
        show(f"{name}, forward", interleaved(forward, seconds))
    both = {
        "ikattn": lambda: forward_and_backward(ours, leaves),
        "eager": lambda: forward_and_backward(eager, leaves),
        "softmax": lambda: forward_and_backward(softmax, leaves[:3]),
    }
    show(f"{name}, forward + backward", interleaved(both, seconds))


def compare_weights(length: int, size: tuple[int, int, int], seconds: float) -> None:
    """Weights averaged over heads, forward + backward, B = 1, float32."""
    heads, d, frequencies = size
    torch.manual_seed(0)
    leaves = [torch.randn(1, heads, length, d).requires_grad_() for _ in range(2)]
    leaves += [(0.05 * torch.randn(heads, d, frequencies)).requires_grad_() for _ in range(2)]

    def ours(t: list[Tensor]) -> Tensor:
        return ikattn.implicit_kernel_weights(*t, average_heads=True)

    def eager(t: list[Tensor]) -> Tensor:
        return ikattn.reference.implicit_kernel_weights(*t, average_heads=True)

    rivals = {
        "ikattn": lambda: forward_and_backward(ours, leaves),
        "eager": lambda: forward_and_backward(eager, leaves),
    }
    show(f"N = {length}, averaged weights, forward + backward", interleaved(rivals, seconds))


def module_step(seconds: float) -> None:
    """One training step of a small encoder, 8 x 32 tokens, stock and converted."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    stock = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    converted = ikattn.convert(copy.deepcopy(stock))
    tokens = torch.randn(8, 32, 128)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()

    rivals: dict[str, Callable[[], object]] = {}
    for name, model in (("ikattn", converted), ("stock", stock)):
        optimizer = torch.optim.Adam(model.parameters())
        rivals[name] = lambda model=model, optimizer=optimizer: step(model, optimizer)
    show(
        "training step, 8 x 32 tokens, embedding 128, 4 heads, M 64, 2 layers",
        interleaved(rivals, seconds),
    )


def peak_resident_kib() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def measure_memory(name: str, length: int, heads: int, d: int, frequencies: int) -> None:
    """Peak resident memory of one forward call above inputs and output; in a fresh process."""
    call = (
        ikattn.implicit_kernel_attention
        if name == "ikattn"
        else ikattn.reference.implicit_kernel_attention
    )
    w1, w2 = (0.1 * torch.randn(heads, d, frequencies) for _ in range(2))
    small = torch.randn(1, heads, 64, d)
    with torch.no_grad():
        call(small, small, small, w1, w2)
        inputs = [torch.randn(1, heads, length, d) for _ in range(3)]
        Path("/proc/self/clear_refs").write_text(
            "5"
        )  # the peak starts again at what is resident now
        before = peak_resident_kib()
        output = call(*inputs, w1, w2)
    extra = (peak_resident_kib() - before) * 1024 - output.numel() * output.element_size()
    print(f"{name:8s} N = {length}: {extra / 1e6:8.1f} MB above inputs and output")


def memory_in_fresh_processes(arguments: argparse.Namespace) -> None:
    for name, length in (("ikattn", 8192), ("ikattn", 2048), ("eager", 2048)):
        command = [sys.executable, __file__, "--memory-of", name, "--lengths", str(length)]
        command += ["--threads", str(arguments.threads)]
        subprocess.run(command, check=True)


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--frequencies", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0, help="per comparison")
    parser.add_argument("--memory", action="store_true", help="peak memory instead of time")
    parser.add_argument("--weights", action="store_true", help="the weights in place of output")
    parser.add_argument("--module", action="store_true", help="a small model's training step")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    size = (arguments.heads, arguments.head_size, arguments.frequencies)
    if arguments.memory_of:
        measure_memory(arguments.memory_of, arguments.lengths[0], *size)
        return
    print(
        f"{processor()}, {arguments.threads} thread(s), torch {torch.__version__}, "
        f"ikattn {ikattn.__version__} with {torch.ops.ikattn.instruction_set()}"
    )
    print(f"B = 1, H = {size[0]}, d = d_v = {size[1]}, M = {size[2]}, float32")
    if arguments.memory:
        memory_in_fresh_processes(arguments)
    elif arguments.module:
        module_step(arguments.seconds)
    elif arguments.weights:
        for length in arguments.lengths:
            compare_weights(length, size, arguments.seconds)
    else:
        for length in arguments.lengths:
            for causal in (False, True):
                compare_operators(length, size, causal, arguments.seconds)


if __name__ == "__main__":
    main()
