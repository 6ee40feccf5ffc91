"""One model trained on a task of long sequences, and the time and memory of its steps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from long_tasks import NOT_ASKED, Batch, CopyAndSort, Lists, Texts
from sequence_models import Kernel, SequenceModel

Task = Lists | Texts | CopyAndSort

SIZE, LAYERS = 64, 2
LARGEST_GRADIENT = 1.0
WEIGHT_DECAY = 0.01
WARM_UP = 0.1  # share of the steps in which the learning rate grows; then it falls as a cosine
EVALUATIONS = 8  # on validation, on the way
TEST_SEED, VALIDATION_SEED = 1_000_000, 2_000_000


class Plan(NamedTuple):
    """How a task is trained, the same for every attention.

    lengths: Of the sequences, one after the other, of equal shares of the steps.
    tokens: Of a step: as many sequences as they hold, and at least one.
    test_sequences: Of the last length; validation takes an eighth as many.
    convolved: Whether queries, keys and values pass a convolution over three tokens, and queries
        and keys are turned by their place (rotary).
    """

    lengths: tuple[int, ...]
    tokens: int
    steps: int
    learning_rate: float
    test_sequences: int
    convolved: bool


class Setting(NamedTuple):
    """What may differ between two models of a task."""

    kernel: Kernel
    heads: int = 2
    learning_rate: float = 1.0  # times that of the plan
    frequency_rate: float = 1.0  # of the frequencies, times that of the other parameters


class Progress(NamedTuple):
    """What a model does after so many steps and seconds of training on the process's CPU."""

    part: str  # "validation" or "test"
    step: int
    seconds: float
    length: int
    accuracies: tuple[float, ...]  # one of each measure of the task


class HalfCodes(nn.Module):
    """Embeddings of tokens [B, N] that tell their place in their half by sines and cosines."""

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, size)
        nn.init.normal_(self.tokens.weight, std=0.5)
        self.size = size

    def forward(self, tokens: Tensor) -> Tensor:
        half = tokens.size(1) // 2
        speeds = 10_000.0 ** (-torch.arange(self.size // 2) / (self.size // 2))
        angles = torch.arange(half)[:, None] * speeds
        codes = torch.cat([angles.sin(), angles.cos()], -1).repeat(2, 1)
        embedded: Tensor = self.tokens(tokens) + codes
        return embedded


def build_model(task: Task, setting: Setting, convolved: bool) -> SequenceModel:
    """The model of a task, with fresh parameters of torch's default generator."""
    model = SequenceModel(
        task.vocabulary,
        task.outputs,
        setting.kernel,
        size=SIZE,
        heads=setting.heads,
        layers=LAYERS,
        positions="rotary" if convolved else "none",
        convolution=convolved,
        pooled=task.pooled,
    )
    if isinstance(task, CopyAndSort):
        model.embedding = HalfCodes(task.vocabulary, SIZE)  # type: ignore[assignment]
    return model


def parameter_groups(
    model: nn.Module, rate: float, frequency_rate: float
) -> list[dict[str, object]]:
    """Frequencies with a rate of their own and without weight decay, and all the rest."""
    names = [name for name, _ in model.named_parameters() if "spectral" in name]
    found = dict(model.named_parameters())
    rest = [parameter for name, parameter in found.items() if name not in names]
    groups: list[dict[str, object]] = [{"params": rest, "lr": rate}]
    if names:
        own = [found[name] for name in names]
        groups.append({"params": own, "lr": rate * frequency_rate, "weight_decay": 0.0})
    return groups


def length_at(plan: Plan, step: int) -> int:
    """The length of a step's sequences."""
    return plan.lengths[step * len(plan.lengths) // plan.steps]


def rate_at(step: int, steps: int) -> float:
    """The share of the learning rate that a step has."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


class Training:
    """Steps of AdamW down the loss of a model; the rate grows, then falls as a cosine."""

    def __init__(self, model: nn.Module, plan: Plan, setting: Setting) -> None:
        self.model = model
        rate = plan.learning_rate * setting.learning_rate
        groups = parameter_groups(model, rate, setting.frequency_rate)
        self.optimizer = torch.optim.AdamW(groups, weight_decay=WEIGHT_DECAY)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: rate_at(step, plan.steps)
        )

    def __call__(self, batch: Batch) -> None:
        """One step.

        Raises:
            FloatingPointError: The gradient is not finite; nothing has been changed.
        """
        logits: Tensor = self.model(batch.tokens)
        loss = F.cross_entropy(
            logits.flatten(0, -2), batch.targets.flatten(), ignore_index=NOT_ASKED
        )
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        if not norm.isfinite():
            raise FloatingPointError(f"the loss is {loss.item()}, its gradient's norm {norm}")
        self.optimizer.step()
        self.schedule.step()


@torch.no_grad()
def measure(model: nn.Module, batches: list[Batch], measures: int) -> tuple[float, ...]:
    """The share of right answers, by measure."""
    model.eval()
    right, all_ = np.zeros(measures), np.zeros(measures)
    for batch in batches:
        hits = model(batch.tokens).argmax(-1) == batch.targets
        for number in range(measures):
            asked = batch.asked == number
            right[number] += int(hits[asked].sum())
            all_[number] += int(asked.sum())
    model.train()
    return tuple((right / np.maximum(all_, 1)).tolist())


def draw_batches(task: Task, length: int, sequences: int, seed: int) -> list[Batch]:
    """Sequences to measure on, the same for every model, two in a batch."""
    random = np.random.default_rng(seed)
    return [task.draw(2, length, random) for _ in range(max(1, sequences // 2))]


def train(
    parts: tuple[Task, Task, Task], plan: Plan, setting: Setting, seed: int
) -> Iterator[Progress]:
    """Trains a model, and yields how well it does on the way and in the end.

    Args:
        parts: The task's sequences of training, of validation and of test.
        plan: Its lengths, steps and rates.
        setting: The attention, and what is tuned.
        seed: Of first values and training sequences.

    Yields:
        On validation sequences, EVALUATIONS times, and on test sequences when all steps are done;
        all of the last length of the plan.

    Raises:
        FloatingPointError: The gradient is not finite.
    """
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    length, measures = plan.lengths[-1], len(parts[0].measures)
    held = draw_batches(parts[1], length, plan.test_sequences // 8, VALIDATION_SEED)
    step_of = Training(build_model(parts[0], setting, plan.convolved), plan, setting)
    seconds = 0.0
    for step in range(plan.steps):
        now = length_at(plan, step)
        batch = parts[0].draw(max(1, plan.tokens // now), now, random)
        start = time.process_time()
        step_of(batch)
        seconds += time.process_time() - start
        if (step + 1) * EVALUATIONS // plan.steps > step * EVALUATIONS // plan.steps:
            found = measure(step_of.model, held, measures)
            yield Progress("validation", step + 1, seconds, length, found)
    held = draw_batches(parts[2], length, plan.test_sequences, TEST_SEED)
    yield Progress("test", plan.steps, seconds, length, measure(step_of.model, held, measures))
