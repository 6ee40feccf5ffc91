"""Train a small vision transformer with softmax and with implicit-kernel attention.

The data are scikit-learn's own handwritten digits. Both models start from the same weights and see
the same images in the same order; all that differs is one line,

    ikattn.convert(model)

Prints a table of both, and draws where they look. About a minute on one core:

    pip install 'ikattn[demo]'
    python examples/digits.py
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import ikattn

PIXELS = 8  # a digit is 8 x 8
PATCH = 3  # a token is a patch of 3 x 3
GRID = PIXELS - PATCH + 1  # patches overlap: 6 x 6 of them, one around each inner pixel
BATCH = 64
LEARNING_RATE = 2e-3
REQUIRED_ACCURACY = 0.95


class Digits(NamedTuple):
    images: Tensor  # [N, 1, 8, 8], mean about 0, variance about 1
    labels: Tensor  # [N]


class Trained(NamedTuple):
    name: str
    model: VisionTransformer
    seconds: float
    validation: float
    test: float


class VisionTransformer(nn.Module):
    """Patches of an image -> nn.TransformerEncoder -> mean over tokens -> ten classes."""

    def __init__(self, size: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, size, kernel_size=PATCH)
        self.positions = nn.Parameter(0.5 * torch.randn(GRID * GRID, size))
        layer = nn.TransformerEncoderLayer(
            size, heads, 2 * size, activation="gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(size)
        self.encoder = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
        self.classes = nn.Linear(size, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images [N, 1, 8, 8] to logits [N, 10]."""
        tokens = self.patches(images).flatten(2).mT + self.positions  # [N, 36, size]
        logits: Tensor = self.classes(self.encoder(tokens).mean(dim=1))
        return logits


def load_splits() -> tuple[Digits, ...]:
    """Returns digits to train on (70 %), to validate (10 %) and to test (20 %), always the same."""
    digits = load_digits()
    images = (torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.3) / 0.37
    labels = torch.tensor(digits.target)

    def split(index: np.ndarray, fraction: float) -> list[np.ndarray]:
        options = {"test_size": fraction, "stratify": labels[index], "random_state": 0}
        return list(train_test_split(index, **options))

    rest, test = split(np.arange(len(labels)), 0.2)
    train, validation = split(rest, 0.125)
    return tuple(Digits(images[index], labels[index]) for index in (train, validation, test))


def jitter(images: Tensor, generator: torch.Generator) -> Tensor:
    """Turns every image by up to 0.2 radians and shifts it by up to 0.3 pixels."""
    angle, dx, dy = 2 * torch.rand(3, len(images), generator=generator) - 1
    angle, dx, dy = 0.2 * angle, 0.075 * dx, 0.075 * dy  # an image is 2 wide
    cos, sin = angle.cos(), angle.sin()
    maps = torch.stack([cos, -sin, dx, sin, cos, dy], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def train(
    model: nn.Module, digits: Digits, validation: Digits, *, epochs: int, seed: int, name: str
) -> None:
    """Trains with AdamW; a progress bar goes to stderr where that is a terminal."""
    torch.manual_seed(seed)  # for dropout
    generator = torch.Generator().manual_seed(seed)  # for the order of images, and their jitter
    steps = len(digits.labels) // BATCH  # in an epoch
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=epochs * steps
    )
    progress = tqdm(range(epochs), desc=f"{name:<15}", unit="epoch", disable=None)
    for _ in progress:
        model.train()
        order = torch.randperm(len(digits.labels), generator=generator)
        for batch in order[: steps * BATCH].split(BATCH):
            logits = model(jitter(digits.images[batch], generator))
            loss = F.cross_entropy(logits, digits.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        progress.set_postfix_str(f"loss {loss:.3f}, validation {accuracy(model, validation):.1%}")


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """Returns the fraction of digits that the model names rightly."""
    model.eval()
    return float((model(digits.images).argmax(dim=1) == digits.labels).float().mean())


@torch.no_grad()
def received_attention(model: VisionTransformer, images: Tensor) -> Tensor:
    """Returns the attention each patch receives in each layer, [layers, N, 6, 6].

    It is the mean over heads and over all patches that attend, in units of what a patch receives on
    average.
    """
    model.eval()
    calls: list[tuple[nn.Module, tuple[Tensor, Tensor, Tensor]]] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda *call: calls.append(call))
        for layer in model.encoder.layers
    ]
    model(images)
    for hook in hooks:
        hook.remove()
    weights = [attention(*tokens, need_weights=True)[1] for attention, tokens in calls]
    received = torch.stack(weights).mean(dim=2) * GRID * GRID  # of [layers, N, 36, 36]
    return received.view(len(calls), len(images), GRID, GRID)


def draw(trained: list[Trained], digits: Digits, path: Path) -> None:
    """Draws the attention that the patches of one digit of every class receive."""
    images = digits.images[[int((digits.labels == label).nonzero()[0]) for label in range(10)]]
    maps = [received_attention(entry.model, images) for entry in trained]
    layers = len(trained[0].model.encoder.layers)
    colours = Normalize(0, max(float(received.quantile(0.995)) for received in maps))

    figure = Figure(figsize=(13.2, 7.1), layout="constrained")
    figure.suptitle("Where two vision transformers look: the attention each patch receives")
    axes = figure.subplots(1 + 2 * layers, 10)
    for column, image in enumerate(images[:, 0]):
        draw_digit(axes[0, column], image, ink=1.0)
        axes[0, column].set_title(column)
        for layer in range(layers):
            for row, received in enumerate(maps, start=1 + 2 * layer):
                draw_digit(axes[row, column], image, ink=0.28)
                dots = draw_attention(axes[row, column], received[layer, column], colours)
    titles = [f"{entry.name}\nlayer {layer + 1}" for layer in range(layers) for entry in trained]
    for axis, title in zip(axes[:, 0], ["test digit", *titles], strict=True):
        axis.set_ylabel(title)
    bar = figure.colorbar(dots, ax=axes, extend="max", shrink=0.8, aspect=35, pad=0.015)
    bar.set_label("attention received, mean over heads and queries\n(1 = the average patch)")
    bar.outline.set_visible(False)
    figure.savefig(path, dpi=150)


def draw_digit(axis: Axes, image: Tensor, ink: float) -> None:
    axis.imshow(-image, cmap="gray", alpha=ink, extent=(0, PIXELS, PIXELS, 0))
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_color("0.75")


def draw_attention(axis: Axes, received: Tensor, colours: Normalize) -> PathCollection:
    """Puts a dot on the centre of each patch, its area and colour the attention received."""
    y, x = np.indices((GRID, GRID)) + PATCH / 2
    area = 26 * received.clamp(max=colours.vmax)
    return axis.scatter(x, y, s=area, c=received, cmap="YlOrRd", norm=colours, linewidths=0)


def print_table(trained: list[Trained]) -> None:
    print(f"{'attention':<17}{'test accuracy':>14}{'validation':>12}{'parameters':>12}{'time':>9}")
    for entry in trained:
        parameters = sum(parameter.numel() for parameter in entry.model.parameters())
        print(
            f"{entry.name:<17}{entry.test:>14.1%}{entry.validation:>12.1%}"
            f"{parameters:>12,}{entry.seconds:>7.1f} s"
        )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20, help="for each model; default: 20")
    parser.add_argument("--seed", type=int, default=0, help="of weights and training; default: 0")
    picture = Path("build", "digits_attention.png")
    parser.add_argument("--output", type=Path, default=picture, help="the picture")
    # More of them gain little on tensors this small, and lose much while others use the machine.
    parser.add_argument("--threads", type=int, default=1, help="for torch; default: 1")
    parser.add_argument("--quick", action="store_true", help="1 epoch, and any accuracy will do")
    options = parser.parse_args()
    if options.epochs < 1 or options.threads < 1:
        parser.error("--epochs and --threads must be at least 1")
    return options


def main() -> None:
    options = parse_options()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    epochs = 1 if options.quick else options.epochs
    digits, validation, test = load_splits()
    print(f"Training on {len(digits.labels)} digits, {epochs} epoch(s) each:", flush=True)

    trained = []
    for name in ("softmax", "implicit kernel"):
        torch.manual_seed(options.seed)
        model = VisionTransformer()
        if name == "implicit kernel":
            ikattn.convert(model, seed=options.seed)
        start = time.perf_counter()
        train(model, digits, validation, epochs=epochs, seed=options.seed, name=name)
        seconds = time.perf_counter() - start
        scores = accuracy(model, validation), accuracy(model, test)
        trained.append(Trained(name, model, seconds, *scores))

    print_table(trained)
    draw(trained, test, options.output)
    print(f"Where they look on ten test digits: {options.output}")
    if not options.quick and any(entry.test < REQUIRED_ACCURACY for entry in trained):
        sys.exit(f"Test accuracy is below {REQUIRED_ACCURACY:.0%}")


if __name__ == "__main__":
    main()
