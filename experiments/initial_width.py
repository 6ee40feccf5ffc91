"""How wide should a kernel start? Training loss by scale of the first frequencies and head size.

The task needs a selective kernel: tokens belong to clusters, half of them carry their cluster's
random label, and every token is to give the label of its cluster. One attention layer, learned
frequencies ("direct").

    python experiments/initial_width.py --csv initial_width.csv
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

import ikattn
from command_line import check_options, parser_of, run_program
from comparison import Table

CLUSTERS, FEATURES, LENGTH, BATCH = 8, 16, 48, 16


STARTS = ("paper", "unit angle", "half angle", "softmax")


def scale_of(start: str, heads: int, size: int, frequencies: int) -> float:
    """The standard deviation of the first frequencies.

    "paper": that of U(-1/sqrt(HM), 1/sqrt(HM)). "unit angle": the angle 2 pi x.w is as large as the
    root mean square of x, in radians; "half angle": half as large. "softmax": the similarity is, in
    the stationary limit, that of softmax attention.
    """
    if start == "paper":
        return 1 / math.sqrt(3 * heads * frequencies)
    if start == "softmax":
        return 1 / (2 * math.pi * math.sqrt(2) * size**0.25)
    angle = 1.0 if start == "unit angle" else 0.5
    return angle / (2 * math.pi * math.sqrt(size))


class Run(NamedTuple):
    heads: int
    head_dim: int
    start: str
    scale: float | None  # of the first frequencies; of "dot", which has none
    seed: int
    loss: float


class Recall(nn.Module):
    """Tokens [B, N, FEATURES + 2] to labels [B, N]."""

    def __init__(self, heads: int, size: int, frequencies: int, scale: float | None) -> None:
        super().__init__()
        width = heads * size
        self.embedding = nn.Linear(FEATURES + 2, width)
        self.norm = nn.LayerNorm(width)
        kernel = "dot" if scale is None else "implicit"
        self.attention = ikattn.MultiheadAttention(
            width, heads, batch_first=True, kernel=kernel, num_frequencies=frequencies
        )
        if scale is not None:
            bound = math.sqrt(3) * scale
            for w in self.attention.spectral.parameters():
                nn.init.uniform_(w, -bound, bound)
        self.output = nn.Linear(width, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        attended, _ = self.attention(x, x, x, need_weights=False)
        labels: Tensor = self.output(attended).squeeze(-1)
        return labels


def draw(centres: Tensor) -> tuple[Tensor, Tensor]:
    clusters = torch.randint(CLUSTERS, (BATCH, LENGTH))
    labels = torch.randn(BATCH, CLUSTERS).gather(1, clusters)
    shown = (torch.rand(BATCH, LENGTH) < 0.5).float()
    features = centres[clusters] + 0.3 * torch.randn(BATCH, LENGTH, FEATURES)
    return torch.cat([features, (labels * shown).unsqueeze(-1), shown.unsqueeze(-1)], -1), labels


def loss_after(
    heads: int, size: int, frequencies: int, scale: float | None, steps: int, seed: int
) -> float:
    """The mean loss of the last fifth of the steps; 1 is what a constant reaches."""
    torch.manual_seed(seed)
    centres = torch.randn(CLUSTERS, FEATURES)
    model = Recall(heads, size, frequencies, scale)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        tokens, labels = draw(centres)
        loss = (model(tokens) - labels).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return statistics.mean(losses[-steps // 5 :])


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--head-dims", nargs="+", type=int, default=[8, 16, 32, 64, 128], help="d")
    add("--heads", nargs="+", type=int, default=[1, 4])
    add("--frequencies", type=int, default=64, help="M")
    add("--steps", type=int, default=300)
    add("--seeds", type=int, default=2)
    add("--quick", action="store_true", help="one seed of 5 steps")
    add("--csv", type=Path, help="write every run to this file")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.seeds = 5, 1
    check_options(parser, options, ["frequencies", "steps", "seeds"], files=["csv"])
    if min(*options.heads, *options.head_dims) < 1:
        parser.error("--heads and --head-dims must be at least 1")
    torch.set_num_threads(1)
    table = Table[Run](options.csv)
    names = ["dot", *STARTS]
    print(f"{'H':>3}{'d':>5}" + "".join(f"{name:>12}" for name in names))
    for heads in options.heads:
        for size in options.head_dims:
            line = f"{heads:3}{size:5}"
            for name in tqdm(names, desc=f"H = {heads}, d = {size}", leave=False, disable=None):
                scale = None if name == "dot" else scale_of(name, heads, size, options.frequencies)
                found = [
                    loss_after(heads, size, options.frequencies, scale, options.steps, seed)
                    for seed in range(options.seeds)
                ]
                table.add(
                    *(Run(heads, size, name, scale, seed, loss) for seed, loss in enumerate(found))
                )
                line += f"{statistics.mean(found):12.3f}"
            print(line, flush=True)


if __name__ == "__main__":
    run_program(main)
