"""Norm-aware contributions beside the formulation that builds every vector.

export OMP_WAIT_POLICY=passive
python benchmarks/contributions.py --length 512  # one thread: N summed, all maps, rivals
python benchmarks/contributions.py --pairs     # what a pair takes, from memory and from cache
python benchmarks/contributions.py --memory    # peak memory in fresh processes
python benchmarks/contributions.py --model     # against the forward pass of BERT-base
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from timing import interleaved, peak_memory, processor, show
from torch import Tensor, nn

import ikattn


def five_dimensional(weights: Tensor, value: Tensor, projection: Tensor) -> Tensor:
    """N as the papers' code computes it: [B, H, L, S, D] in memory."""
    heads = weights.shape[1]
    transformed = torch.einsum("bhsv,dhv->bhsd", value, projection.unflatten(1, (heads, -1)))
    return torch.linalg.vector_norm(
        (weights.unsqueeze(-1) * transformed.unsqueeze(2)).sum(1), dim=-1
    )


def factor_form(weights: Tensor, value: Tensor, projection: Tensor) -> Tensor:
    """N by Gram matrices of the transformed vectors: fast, but not accurate where heads cancel."""
    heads = weights.shape[1]
    transformed = torch.einsum("bhsv,dhv->bshd", value, projection.unflatten(1, (heads, -1)))
    rows = weights.permute(0, 3, 2, 1)  # [B, S, L, H]
    squares = ((rows @ (transformed @ transformed.mT)) * rows).sum(-1)
    return squares.clamp_min(0).sqrt().mT


def inputs(length: int, heads: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    weights = torch.randn(1, heads, length, length).softmax(-1)
    value = torch.randn(1, heads, length, size // heads)
    return weights, value, torch.randn(size, size) / size**0.5


def compare_summed(length: int, heads: int, size: int, seconds: float) -> None:
    weights, value, projection = inputs(length, heads, size)
    residual = torch.randn(1, length, size)
    query, key = torch.randn(2, 1, heads, length, size // heads).unbind()
    norm = ikattn.maps.NormStats(torch.ones(size), torch.ones(1, length))
    rivals = {
        "a product [L, D] x [D, D]": lambda: residual[0] @ projection,
        "from query and key": lambda: ikattn.streamed_contributions(
            query, key, value, projection, maps=["summed"]
        ),
        "ikattn": lambda: ikattn.contributions(weights, value, projection, maps=["summed"]),
        "of these, vectors and factors": lambda: ikattn.contributions(
            weights[:, :, :1], value, projection, maps=["summed"]
        ),
        "value norms": lambda: ikattn.contributions(
            weights, value, projection, maps=["value_norms"]
        ),
        "all maps": lambda: ikattn.contributions(
            weights, value, projection, residual=residual, norm=norm, second_norm=norm
        ),
        "factors": lambda: factor_form(weights, value, projection),
    }
    if length <= 512:  # the size of its tensor is 10 GB there
        rivals["5-D"] = lambda: five_dimensional(weights, value, projection)
    title = f"H = {heads}, D = {size}, L = S = {length}"
    with torch.no_grad():
        show(title, interleaved(rivals, seconds))

    leaves = [x.requires_grad_() for x in (weights, value, projection)]
    incoming = torch.rand(1, length, length)
    functions: dict[str, Callable[..., Any]] = {
        "ikattn": lambda *call: ikattn.contributions(*call, maps=["summed"]).summed,
        "factors": factor_form,
    }
    if length <= 128:
        functions["5-D"] = five_dimensional
    rivals = {
        name: lambda f=function: torch.autograd.grad(f(*leaves), leaves, incoming)
        for name, function in functions.items()
    }
    show(f"{title}, forward + backward", interleaved(rivals, seconds))


def measure_pairs(length: int, heads: int, size: int, seconds: float) -> None:
    """Nanoseconds of a pair of N summed: what more queries take, the keys being the same."""
    few = 64
    _, value, projection = inputs(length, heads, size)
    sources = {
        "memory": torch.rand(1, heads, length, length),
        "cache": torch.rand(1, heads, 1, length).expand(-1, -1, length, -1),  # one row for all
    }
    calls: dict[str, Callable[[], object]] = {}
    for name, weights in sources.items():
        for rows in (few, length):
            part = weights[:, :, :rows]
            calls[f"{name}, {rows}"] = lambda part=part: ikattn.contributions(
                part, value, projection, maps=["summed"]
            )
    calls["sum"] = sources["memory"].sum
    best = {name: min(times) for name, times in interleaved(calls, seconds).items()}
    pairs = (length - few) * length
    print(f"H = {heads}, D = {size}, L = S = {length}")
    for name in sources:
        taken = 1e9 * (best[f"{name}, {length}"] - best[f"{name}, {few}"]) / pairs
        print(f"  weights from {name:8s} {taken:5.2f} ns a pair, {4 * heads / taken:5.1f} GB/s")
    read = sources["memory"].nbytes / best["sum"] / 1e9
    print(f"  a sum over the same weights reads {read:.1f} GB/s")


SETUP = """
    torch.manual_seed(0)
    H, L, D = {heads}, {length}, {size}
    weights = torch.rand(1, H, L, L)
    weights /= weights.sum(-1, keepdim=True)
    value, projection = torch.randn(1, H, L, D // H), torch.randn(D, D)
    residual = torch.randn(1, L, D)
    norm = ikattn.maps.NormStats(torch.ones(D), torch.ones(1, L))
    few = (weights[:, :, :8, :8], value[:, :, :8], projection)
"""
STREAMED_SETUP = """
    torch.manual_seed(0)
    H, L, D = {heads}, {length}, {size}
    query, key, value = torch.randn(3, 1, H, L, D // H).unbind()
    projection = torch.randn(D, D)
    residual = torch.randn(1, L, D)
    norm = ikattn.maps.NormStats(torch.ones(D), torch.ones(1, L))
"""
FIVE_DIMENSIONAL = """
    vectors = torch.einsum("bhsv,dhv->bhsd", value, projection.unflatten(1, (H, -1)))
    summed = (weights.unsqueeze(-1) * vectors.unsqueeze(2)).sum(1).norm(dim=-1)
"""


def compare_memory(heads: int, size: int) -> None:
    sizes = {"heads": heads, "length": 512, "size": size}
    warm = "ikattn.contributions(*few)"
    ours = "ikattn.contributions(weights, value, projection, maps=['summed'])"
    all_maps = (
        "ikattn.contributions(weights, value, projection, residual=residual, norm=norm, "
        "second_norm=norm)"
    )
    streamed = (
        "ikattn.streamed_contributions(query, key, value, projection, residual=residual, "
        "norm=norm, second_norm=norm)"
    )
    backward = (
        "leaves = [x.requires_grad_() for x in (weights, value, projection)]; "
        "torch.autograd.grad(ikattn.contributions(*leaves, maps=['summed']).summed.sum(), leaves)"
    )
    print("MiB above the inputs")
    for name, call, length in (
        ("N summed", ours, 512),
        ("its gradients, too", backward, 512),
        ("5-D", FIVE_DIMENSIONAL, 512),
        ("all maps", all_maps, 512),
        ("N summed", ours, 4096),
        ("all maps", all_maps, 4096),
    ):
        setup = SETUP.format(**(sizes | {"length": length}))
        print(f"  L = S = {length:5d}  {name:20s} {peak_memory(setup, call, warm):9.1f}")
    setup = STREAMED_SETUP.format(**(sizes | {"length": 4096}))
    warm = streamed.replace("query, key, value", "query[:, :, :8], key[:, :, :8], value[:, :, :8]")
    warm = warm.replace("residual=residual, norm=norm, second_norm=norm", "")
    print(f"  L = S =  4096  {'all maps, streamed':20s} {peak_memory(setup, streamed, warm):9.1f}")


def compare_model(length: int, seconds: float) -> None:
    """All maps of all layers of BERT-base, from its weights, beside its forward pass."""
    layers, heads, size = 12, 12, 768
    layer = nn.TransformerEncoderLayer(size, heads, 4 * size, activation="gelu", batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()
    x = torch.randn(1, length, size)
    weights, value, projection = inputs(length, heads, size)
    norm = ikattn.maps.NormStats(torch.ones(size), torch.ones(1, length))

    def maps() -> None:
        for _ in range(layers):
            ikattn.contributions(
                weights, value, projection, residual=x, norm=norm, second_norm=norm
            )

    with torch.no_grad():
        rivals = {"ikattn": maps, "forward": lambda: model(x)}
        show(f"BERT-base, {length} tokens, all maps", interleaved(rivals, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", action="store_true", help="peak memory in fresh processes")
    parser.add_argument("--pairs", action="store_true", help="what a pair takes")
    parser.add_argument("--model", action="store_true", help="beside a forward pass of BERT-base")
    parser.add_argument("--length", type=int, default=512, help="L = S")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0, help="per comparison")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{processor()}, torch {torch.__version__}, {options.threads} thread(s)")
    if options.memory:
        compare_memory(12, 768)
    elif options.pairs:
        measure_pairs(options.length, 12, 768, options.seconds)
    elif options.model:
        compare_model(options.length, options.seconds)
    else:
        compare_summed(options.length, 12, 768, options.seconds)


if __name__ == "__main__":
    main()
