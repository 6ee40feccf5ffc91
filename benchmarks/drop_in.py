"""The cost of ikattn.MultiheadAttention in nn.MultiheadAttention's place.

export OMP_WAIT_POLICY=passive
python benchmarks/drop_in.py           # one thread: a training step, tiny calls
python benchmarks/drop_in.py --memory  # peak memory of need_weights=True, in fresh processes
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial

import torch
from timing import interleaved, peak_memory, processor, show
from torch import Tensor, nn
from torch.nn import functional as F

import ikattn


def training_step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    return step


def compare_steps(seconds: float) -> None:
    stock = nn.TransformerEncoderLayer(512, 8, batch_first=True)
    ours = ikattn.convert(copy.deepcopy(stock), "dot")
    x = torch.randn(8, 128, 512)
    rivals = {"ikattn": training_step(ours, x), "stock": training_step(stock, x)}
    show("Training step, E = 512, H = 8, 8 x 128 tokens, dot", interleaved(rivals, seconds))


def compare_tiny(seconds: float) -> None:
    x, w = torch.randn(1, 2, 4, 8), torch.randn(2, 8, 4)
    for grad in (False, True):
        x.requires_grad_(grad)
        rivals = {
            "ikattn": many(lambda: ikattn.implicit_kernel_attention(x, x, x, w, w)),
            "sdpa": many(lambda: F.scaled_dot_product_attention(x, x, x)),
        }
        show(f"1000 tiny calls, grad {grad}", interleaved(rivals, seconds))
    x = torch.randn(1, 4, 16)
    stock = nn.MultiheadAttention(16, 2, batch_first=True)
    modules = {
        "ikattn": ikattn.convert(copy.deepcopy(stock)),
        "dot": ikattn.convert(copy.deepcopy(stock), "dot"),
        "stock": stock,
    }
    rivals = {
        name: many(partial(module, x, x, x, need_weights=False)) for name, module in modules.items()
    }
    show("1000 tiny calls of the module", interleaved(rivals, seconds))


def many(call: Callable[[], object]) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(1000):
            call()

    return repeated


SETUP = """
    import copy
    stock = torch.nn.MultiheadAttention(512, 8, {dropout}, batch_first=True)
    ours = ikattn.convert(copy.deepcopy(stock))
    few, x = torch.randn(1, 64, 512), torch.randn(1, {length}, 512)
    def step(module, x):
        output, weights = module(x, x, x)
        (output.sum() + weights.sum()).backward()
"""


def compare_memory(length: int) -> None:
    one = length * length * 4 / 2**20
    print(f"MiB above the inputs, N = {length}, H = 8; weights [N, L, S] are {one:.0f}, of all")
    print(f"heads {8 * one:.0f}")
    for dropout in (0.0, 0.1):
        print(f"dropout {dropout}")
        setup = SETUP.format(length=length, dropout=dropout)
        for name in ("ours", "stock"):
            print(
                f"  {name:10s} {peak_memory(setup, f'step({name}, x)', f'step({name}, few)'):9.1f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", action="store_true", help="peak memory in fresh processes")
    parser.add_argument("--seconds", type=float, default=10.0, help="per comparison")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{processor()}, torch {torch.__version__}, ikattn {ikattn.__version__}, one thread")
    if options.memory:
        compare_memory(2048)
        return
    compare_steps(options.seconds)
    compare_tiny(options.seconds)


if __name__ == "__main__":
    main()
