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

import ikattn
from comparison import parse_order
from ikattn.ops.magnitude import log_magnitude
from ikattn.spectral import Direct
from long_tasks import NOT_ASKED, Batch, CopyAndSort, Lists, Texts
from sequence_models import Attention, Kernel, SequenceModel

Task = Lists | Texts | CopyAndSort

SIZE, LAYERS = 64, 2
LARGEST_GRADIENT = 1.0
WEIGHT_DECAY = 0.01
SLOWEST = 10_000.0  # tokens in a radian of the slowest code of places
WARM_UP = 0.1  # share of the steps in which the learning rate grows; then it falls as a cosine
EVALUATIONS = 8  # on validation, on the way
TEST_SEED, VALIDATION_SEED = 1_000_000, 2_000_000


class Plan(NamedTuple):
    """How a task is trained, the same for every attention.

    lengths: Of the sequences, one after the other, of equal shares of the steps.
    tokens: Of a step: as many sequences as they hold, and at least one.
    test_sequences: Of the last length; validation takes an eighth as many.
    """

    lengths: tuple[int, ...]
    tokens: int
    steps: int
    learning_rate: float
    test_sequences: int


class Setting(NamedTuple):
    """Settings that may differ between two models of a task."""

    kernel: Kernel
    heads: int = 2
    learning_rate: float = 1.0  # times that of the plan
    frequency_rate: float = 0.1  # of the kernels, times that of the other parameters
    gradient_scale: float = 1.0  # of the kernels' gradients, before all are clipped together
    reach: float = 8.0  # of places in the implicit kernel, see PlacedAttention; 0: rotary places


class Progress(NamedTuple):
    """A model's state after so many steps and seconds of training on the process's CPU."""

    part: str  # "validation" or "test"
    step: int
    seconds: float
    length: int
    accuracies: tuple[float, ...]  # one of each measure of the task


class PlaceCodes(nn.Module):
    """Embeddings of tokens [B, N] that tell their place in their half by sines and cosines."""

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, size)
        nn.init.normal_(self.tokens.weight, std=0.5)
        half = size // 2
        self.register_buffer("speeds", SLOWEST ** (-torch.arange(half) / half), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        angles = torch.arange(tokens.size(1) // 2)[:, None] * self.speeds
        codes = torch.cat([angles.sin(), angles.cos()], -1).repeat(2, 1)
        embedded: Tensor = self.tokens(tokens) + codes
        return embedded


class PlacedAttention(Attention):
    """Implicit kernel whose tokens have their place as one more coordinate of query and key.

    The kernel then depends on the distance of two places: w1 and w2 share the row of this
    coordinate. At first the similarity of the first head reaches ``reach`` tokens far, by its
    standard deviation, that of the last one four times as many, and others in between. Rotary
    places would not do: with frequencies for queries and keys that are turned, the similarity is no
    function of the distance.
    """

    def __init__(self, size: int, heads: int, kernel: Kernel, reach: float) -> None:
        super().__init__(size, heads, kernel, causal=False, convolution=True)
        dim = size // heads + 1
        self.spectral = Direct(heads, dim, kernel.frequencies, initial="unit angle")
        with torch.no_grad():
            for w in self.spectral.frequencies():
                assert w is not None
                w[:, :-1].mul_(kernel.width)
        reaches = reach * 4.0 ** (torch.arange(heads) / max(1, heads - 1))
        self.register_buffer("token", math.sqrt(dim) / reaches[:, None, None], persistent=False)

    def _implicit(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hidden: Tensor | None,
        log_decay: Tensor | None = None,
    ) -> Tensor:
        assert self.spectral is not None
        assert log_decay is None
        bias = None
        if self.magnitude is not None:
            bias = self.magnitude(k, hidden)
        elif (p := parse_order(self.kernel.p)) is not None:
            bias = log_magnitude(k, p)
        places = self.token * torch.arange(q.size(-2), device=q.device)[:, None]
        q, k = (torch.cat([x, places.expand(len(x), -1, -1, -1)], -1) for x in (q, k))
        w1, w2 = self.spectral.frequencies()
        assert w2 is not None
        w2 = torch.cat([w2[:, :-1], w1[:, -1:]], 1)
        return ikattn.implicit_kernel_attention(q, k, v, w1, w2, p=None, key_bias=bias)


def build_model(task: Task, setting: Setting) -> SequenceModel:
    """The model of a task, with fresh parameters of torch's default generator."""
    kernel, heads = setting.kernel, setting.heads
    model = SequenceModel(
        task.vocabulary,
        task.outputs,
        kernel,
        size=SIZE,
        heads=heads,
        layers=LAYERS,
        positions="none" if task.places_are_told else "rotary",
        convolution=True,
        pooled=task.pooled,
    )
    if task.places_are_told:
        model.embedding = PlaceCodes(task.vocabulary, SIZE)  # type: ignore[assignment]
    elif kernel.kind == "implicit" and setting.reach:
        for block in model.blocks:
            block.attention = PlacedAttention(SIZE, heads, kernel, setting.reach)
    return model


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
        groups = ikattn.parameter_groups(
            model, lr=rate, frequency_lr=rate * setting.frequency_rate, weight_decay=WEIGHT_DECAY
        )
        self.gradient_scale = setting.gradient_scale
        kernels = (group["params"] for group in groups if group["name"] == "kernels")
        self.kernels: list[nn.Parameter] = next(kernels, [])  # softmax attention has none
        self.optimizer = torch.optim.AdamW(groups)
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
        for parameter in self.kernels:
            if parameter.grad is not None:
                parameter.grad.mul_(self.gradient_scale)
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
    step_of = Training(build_model(parts[0], setting), plan, setting)
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
