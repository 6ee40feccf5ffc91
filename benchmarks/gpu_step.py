"""A training step of encoder layers on a GPU, converted beside stock, and a call of few tokens.

    python benchmarks/gpu_step.py

Four layers, E = 1024, H = 16, autocast to bfloat16; models take turns, and the medians of three
rounds of eight steps are told, in ms of the wall clock. The call has 16 tokens, so that its time is
the host's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ikattn

SHAPES = ((32, 512), (8, 2048), (2, 8192))  # batch, tokens


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        1024, 16, 4096, dropout=0.0, batch_first=True, norm_first=True, device="cuda"
    )
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def seconds(call: Callable[[], object], times: int) -> float:
    """Returns the time of one call, among so many after the first three."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def training_step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main() -> None:
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    models = {"stock": encoder(), "converted": ikattn.convert(encoder())}
    for batch, tokens in SHAPES:
        x = torch.randn(batch, tokens, 1024, device="cuda")
        times: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(3):
            for name, model in models.items():
                times[name].append(1e3 * seconds(training_step(model, x), 8))
        stock, converted = (statistics.median(times[name]) for name in models)
        ratio = f"ratio {converted / stock:.2f}"
        print(f"{batch} x {tokens}: stock {stock:.2f}, converted {converted:.2f}, {ratio}")
    q = torch.randn(1, 4, 16, 64, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(4, 64, 16, device="cuda")
    with torch.no_grad():
        ours = seconds(lambda: ikattn.implicit_kernel_attention(q, q, q, w, w), 500)
        sdpa = seconds(lambda: F.scaled_dot_product_attention(q, q, q), 500)
    print(f"16 tokens: ikattn {1e6 * ours:.0f} us, SDPA {1e6 * sdpa:.0f} us")


if __name__ == "__main__":
    main()
