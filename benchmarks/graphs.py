"""Attention over edges against the attention of torch_geometric's GATConv on the same graph.

What GATConv does after its linear maps: a score for every edge, softmax over the edges into a node,
the weighted sum; forward and backward. Ours is the same from query, key and value, or, with
--kernel dot, GATConv's own numbers from its nodes.

export OMP_WAIT_POLICY=passive
python benchmarks/graphs.py                                  # 100,000 nodes, 1,000,000 edges
python benchmarks/graphs.py --nodes 2708 --edges 10556 --head-dim 32
"""

from __future__ import annotations

import argparse
import resource
import statistics
from collections.abc import Callable

import torch
from timing import interleaved, processor
from torch import Tensor
from torch_geometric.nn import GATConv

import ikattn


def wait(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize()


def ours(edge_index: Tensor, options: argparse.Namespace) -> Callable[[], None]:
    shape = (options.nodes, options.heads, options.head_dim)
    query, key, value = (
        torch.randn(shape, device=options.device, requires_grad=True) for _ in range(3)
    )
    frequencies = options.heads, options.head_dim, options.frequencies
    w1, w2 = (
        (0.1 * torch.randn(frequencies, device=options.device)).requires_grad_() for _ in range(2)
    )
    edges = ikattn.ops.Edges.from_coo(*edge_index, options.nodes)

    def step() -> None:
        output = ikattn.implicit_kernel_edge_attention(query, key, value, edges, w1, w2)
        torch.autograd.grad(output.sum(), (query, key, value, w1, w2))
        wait(options)

    return step


def dot(edge_index: Tensor, options: argparse.Namespace) -> Callable[[], None]:
    shape = (options.nodes, options.heads, options.head_dim)
    x = torch.randn(shape, device=options.device, requires_grad=True)
    vector = torch.randn(options.heads, 2 * options.head_dim, device=options.device)
    vector.requires_grad_()
    edges = ikattn.ops.Edges.from_coo(*edge_index, options.nodes)

    def step() -> None:
        output = ikattn.ops.gat_edge_attention(vector, x, x, x, edges, negative_slope=0.2)
        torch.autograd.grad(output.sum(), (x, vector))
        wait(options)

    return step


def gat(edge_index: Tensor, options: argparse.Namespace) -> Callable[[], None]:
    conv = GATConv(1, options.head_dim, options.heads, add_self_loops=False).to(options.device)
    shape = (options.nodes, options.heads, options.head_dim)
    x = torch.randn(shape, device=options.device, requires_grad=True)

    def step() -> None:
        alpha = (x * conv.att_src).sum(-1), (x * conv.att_dst).sum(-1)
        weights = conv.edge_updater(edge_index, alpha=alpha, edge_attr=None, size=None)
        output = conv.propagate(edge_index, x=(x, x), alpha=weights, size=None)
        torch.autograd.grad(output.sum(), (x, conv.att_src, conv.att_dst))
        wait(options)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--nodes", type=int, default=100_000)
    add("--edges", type=int, default=1_000_000)
    add("--heads", type=int, default=8)
    add("--head-dim", type=int, default=8, help="d = d_v")
    add("--frequencies", type=int, default=16, help="M")
    add("--threads", type=int, default=1)
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--seconds", type=float, default=40.0)
    add("--kernel", choices=("implicit", "dot"), default="implicit", help="of ours")
    add("--only", choices=("gat", "ours"), help="one of them, for its peak memory")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    edge_index = torch.randint(options.nodes, (2, options.edges)).to(options.device)
    print(f"{processor()}, torch {torch.__version__}, {options.threads} thread(s)")
    own = dot if options.kernel == "dot" else ours
    if options.only:
        step = (gat if options.only == "gat" else own)(edge_index, options)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        step()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"{options.only}: peak {(peak - before) / 1024:.0f} MB above inputs")
        return
    steps = {"gat": gat(edge_index, options), "ours": own(edge_index, options)}
    times = interleaved(steps, options.seconds)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    print(
        f"GATConv {1e3 * medians['gat']:.0f} ms, ours {medians['ours'] / medians['gat']:.2f} of it"
    )


if __name__ == "__main__":
    main()
