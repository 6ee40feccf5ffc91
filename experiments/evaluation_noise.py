"""The noise that a trained generator should evaluate with, by the recall task of initial_width.py.

Loss on fresh sequences, after training with fresh noise in every step: no noise (the mean), fresh
noise, and fixed points, quasi-random (scrambled Sobol) and pseudo-random, of four seeds each.

    python experiments/evaluation_noise.py
"""

from __future__ import annotations

import statistics

import torch
from tqdm import tqdm

import ikattn
from command_line import check_options, parser_of, run_program
from initial_width import CLUSTERS, FEATURES, Recall, draw

NOISES = ("mean", "random", "quasi-random points", "pseudo-random points")
POINT_SETS = 4


def train(source: str, frequencies: int, steps: int, seed: int) -> tuple[Recall, torch.Tensor]:
    torch.manual_seed(seed)
    centres = torch.randn(CLUSTERS, FEATURES)
    model = Recall(2, 16, frequencies, scale=None)
    model.attention.set_kernel("implicit", spectral=source, num_frequencies=frequencies)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        tokens, labels = draw(centres)
        loss = (model(tokens) - labels).square().mean()
        loss = loss + ikattn.regularization_loss(model) / 100_000
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), centres


@torch.no_grad()
def loss_with(noise: str, model: Recall, centres: torch.Tensor, seed: int) -> float:
    """The mean loss of 25 batches for each set of points, the same ones for every noise."""
    source = model.attention.spectral
    source.evaluation = "points" if "points" in noise else noise
    losses = []
    for points_seed in range(POINT_SETS):
        if "points" in noise:
            draw_points = sobol_points if "quasi" in noise else normal_points
            source.points.copy_(draw_points(source.points.shape, POINT_SETS * seed + points_seed))
        for batch in range(25):
            torch.manual_seed(10_000 + 25 * points_seed + batch)
            tokens, labels = draw(centres)
            losses.append((model(tokens) - labels).square().mean().item())
    return statistics.mean(losses)


def normal_points(shape: torch.Size, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sobol_points(shape: torch.Size, seed: int) -> torch.Tensor:
    """M points in H * d dimensions, made normal: [H, d, M]."""
    heads, size, count = shape
    engine = torch.quasirandom.SobolEngine(heads * size, scramble=True, seed=seed)
    uniform = engine.draw(count).clamp(1e-6, 1 - 1e-6)
    return torch.special.ndtri(uniform).T.reshape(shape)


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--frequencies", nargs="+", type=int, default=[8, 64], help="M")
    add("--steps", type=int, default=600)
    add("--seeds", type=int, default=3)
    add("--quick", action="store_true", help="one seed of 5 steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.seeds = 5, 1
    check_options(parser, options, ["steps", "seeds"], files=[])
    if any(number < 2 or number % 2 for number in options.frequencies):
        parser.error("--frequencies must be even and at least 2")
    torch.set_num_threads(1)
    print(f"{'':14}" + "".join(f"{noise:>22}" for noise in NOISES))
    for source in ("ikan", "mikan"):
        for frequencies in options.frequencies:
            found: dict[str, list[float]] = {noise: [] for noise in NOISES}
            label = f"{source}, M = {frequencies}"
            for seed in tqdm(range(options.seeds), desc=label, leave=False, disable=None):
                model, centres = train(source, frequencies, options.steps, seed)
                for noise in NOISES:
                    found[noise].append(loss_with(noise, model, centres, seed))
            means = "".join(f"{statistics.mean(found[noise]):22.4f}" for noise in NOISES)
            print(f"{label:14}{means}", flush=True)


if __name__ == "__main__":
    run_program(main)
