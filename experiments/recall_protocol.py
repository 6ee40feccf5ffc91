"""Multi-query associative recall (Arora et al. 2023): the task, a model's training, its test.

A sequence begins with pairs of a key and a value. Keys then come again at random places, sooner
more often than later, and the model is to name each one's value there. All other places hold random
tokens: values, and keys that no pair has. There are no data but these.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ikattn
from comparison import train_step
from sequence_models import Kernel, SequenceModel, state_size

KEYS = VALUES = 256
HEAD_DIM = 64
GAP_POWER = -0.99  # of the distance, in twos, by which the places of queries are drawn
LARGEST_GRADIENT = 1.0
WEIGHT_DECAY = 0.1
AVERAGED_STEPS = 50  # the time constant of the mean of weights that is tested
WARM_UP = 50  # steps
TEST_SEED = 1 << 20
VALIDATION_SEED = TEST_SEED + 1

LENGTHS = (64, 128, 256, 512, 1024)
PAIRS = (4, 8, 16, 32, 64)


class Examples(NamedTuple):
    """Tokens [B, N], the places of queries [B, P] and the number of the value of each [B, P]."""

    tokens: Tensor
    places: Tensor
    answers: Tensor


Task = tuple[int, int]  # length and number of pairs


class Stage(NamedTuple):
    """A part of training: lengths, of which each step draws one, tokens of a batch, and steps."""

    lengths: tuple[int, ...]
    tokens: int
    steps: int


class Setting(NamedTuple):
    """A training run. Rates are Adam's; that of kernels is a multiple of the other."""

    name: str
    kernel: Kernel
    size: int
    rate: float
    kernel_rate: float
    seed: int


class Run(NamedTuple):
    """The accuracy of one model, at one moment of its training, on one task."""

    attention: str
    size: int
    width: float
    rate: float
    kernel_rate: float
    seed: int
    moment: str  # "validation", after the first stage; "equal steps" or "equal time"
    steps: int
    seconds_per_step: float
    length: int
    pairs: int
    state: int  # numbers that a layer keeps, of this length
    accuracy: float


class Moment(NamedTuple):
    """When a model is tested, in steps of its training, and on what."""

    name: str
    step: int
    tasks: list[Task]


def fitting(pairs: Sequence[int], length: int) -> list[int]:
    """The numbers of pairs for which a sequence has room, with a query for each."""
    return [count for count in pairs if 4 * count <= length]


def draw(batch: int, length: int, pairs: int, generator: torch.Generator) -> Examples:
    """Draws sequences.

    Raises:
        ValueError: The pairs and a query for each do not fit, or there are too few keys.
    """
    if pairs < 1 or 4 * pairs > length or pairs > KEYS:
        raise ValueError(
            f"pairs must be from 1 to {min(KEYS, length // 4)} at length {length}, got {pairs}"
        )
    order = torch.rand(batch, KEYS, generator=generator).argsort(1)
    keys, others = order[:, :pairs], order[:, pairs:]
    values = torch.randint(VALUES, (batch, pairs), generator=generator)
    fillers = torch.cat([others, torch.arange(KEYS, KEYS + VALUES).expand(batch, -1)], 1)
    chosen = torch.randint(fillers.size(1), (batch, length), generator=generator)
    tokens = fillers.gather(1, chosen)
    tokens[:, 0 : 2 * pairs : 2] = keys
    tokens[:, 1 : 2 * pairs : 2] = KEYS + values
    weights = torch.arange(1, (length - 2 * pairs) // 2 + 1).double() ** GAP_POWER
    # the largest of log(uniform) / weight are a draw without replacement, by weight
    drawn = torch.rand(batch, len(weights), generator=generator, dtype=torch.double)
    places = 2 * pairs + 2 * (drawn.log() / weights).topk(pairs, 1).indices
    tokens.scatter_(1, places, keys)
    return Examples(tokens, places, values)


def make_model(setting: Setting) -> SequenceModel:
    torch.manual_seed(setting.seed)
    return SequenceModel(
        KEYS + VALUES,
        VALUES,
        setting.kernel,
        size=setting.size,
        heads=setting.size // HEAD_DIM,
        causal=True,
        convolution=True,
    )


def draw_batch(stage: Stage, generator: torch.Generator) -> Examples:
    """A batch of one length and number of pairs, both drawn."""

    def one_of(choices: Sequence[int]) -> int:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    length = one_of(stage.lengths)
    pairs = one_of(fitting(PAIRS, length))
    return draw(max(1, stage.tokens // length), length, pairs, generator)


class Training:
    """A model that learns, and the mean of its last weights, which is tested."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.model = make_model(setting)
        groups = ikattn.parameter_groups(
            self.model,
            lr=setting.rate,
            frequency_lr=setting.rate * setting.kernel_rate,
            weight_decay=WEIGHT_DECAY,
        )
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
        self.warm_up = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / WARM_UP)
        )
        decay = 1 - 1 / AVERAGED_STEPS
        self.mean = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.generator = torch.Generator().manual_seed(setting.seed)
        self.steps = 0
        self.runs: list[Run] = []

    def step(self, examples: Examples) -> float:
        """Learns of a batch; returns its loss.

        Raises:
            FloatingPointError: The gradient is not finite.
        """
        logits = self.model(examples.tokens, places=examples.places)
        loss = F.cross_entropy(logits.flatten(0, 1), examples.answers.flatten())
        train_step(self.model, self.optimizer, loss, examples=1, largest_gradient=LARGEST_GRADIENT)
        self.warm_up.step()
        self.mean.update_parameters(self.model)
        self.steps += 1
        return loss.item()

    def train(self, stage: Stage, until: int, moments: Sequence[Moment], per_step: float) -> None:
        """Learns on a stage's lengths until so many steps are done; tests at moments."""
        while self.steps < until:
            self.step(draw_batch(stage, self.generator))
            for moment in moments:
                for task in moment.tasks if moment.step == self.steps else ():
                    self.test(moment.name, task, per_step, TEST_SEED)

    def test(self, moment: str, task: Task, per_step: float, seed: int) -> float:
        """Notes the accuracy on a task, and returns it."""
        setting = self.setting
        heads = setting.size // HEAD_DIM
        run = Run(
            setting.name,
            setting.size,
            setting.kernel.width,
            setting.rate,
            setting.kernel_rate,
            setting.seed,
            moment,
            self.steps,
            per_step,
            *task,
            heads * state_size(setting.kernel, HEAD_DIM, task[0]),
            accuracy_of(self.mean, task, seed),
        )
        self.runs.append(run)
        return run.accuracy


@torch.no_grad()
def accuracy_of(model: nn.Module, task: Task, seed: int) -> float:
    """The share of queries that are answered; a seed's sequences are the same for every model."""
    generator = torch.Generator().manual_seed(seed)
    right = asked = 0
    for _ in range(2 if task[1] >= 32 else 4):
        examples = draw(16, *task, generator)
        found = model(examples.tokens, places=examples.places).argmax(-1)
        right += int((found == examples.answers).sum())
        asked += found.numel()
    return right / asked


@torch.no_grad()
def random_recall(frequencies: int, tokens: int, width: float, repeats: int = 4) -> float:
    """Returns the recall of an untrained kernel: the share of values that are read right.

    Random keys, each asked for once, hold random values of VALUES, which are random vectors; the
    answer is the vector most like the output.

    Args:
        frequencies: M, drawn from a normal distribution.
        tokens: How many keys.
        width: Standard deviation of the frequencies, in units of 1 / (2 pi sqrt(d)).
        repeats: Draws of all of it.
    """
    generator = torch.Generator().manual_seed(TEST_SEED)
    right = 0
    for _ in range(repeats):
        keys = torch.randn(1, 1, tokens, HEAD_DIM, generator=generator)
        w1, w2 = torch.randn(2, 1, HEAD_DIM, frequencies, generator=generator) * (
            width / (2 * math.pi * math.sqrt(HEAD_DIM))
        )
        vectors = torch.randn(VALUES, HEAD_DIM, generator=generator)
        vectors -= vectors.mean(0)
        values = torch.randint(VALUES, (tokens,), generator=generator)
        read = ikattn.implicit_kernel_attention(
            keys, keys, vectors[values].expand(1, 1, -1, -1), w1, w2, p=None
        )
        right += int(((read[0, 0] @ vectors.T).argmax(-1) == values).sum())
    return right / (repeats * tokens)


def seconds_per_step(settings: Sequence[Setting], stage: Stage, rounds: int) -> list[float]:
    """The processor's seconds that a step takes each setting: the least of rounds, by length.

    The settings take turns, so that what else the machine does slows all of them alike.
    """
    generator = torch.Generator().manual_seed(0)
    trainings = [Training(setting) for setting in settings]
    best = [[math.inf] * len(stage.lengths) for _ in settings]
    for _ in range(rounds):
        for column, length in enumerate(stage.lengths):
            pairs = fitting(PAIRS, length)[-1]
            examples = draw(max(1, stage.tokens // length), length, pairs, generator)
            for row, training in zip(best, trainings, strict=True):
                start = time.process_time()
                training.step(examples)
                row[column] = min(row[column], time.process_time() - start)
    return [sum(row) / len(row) for row in best]


def fit(
    candidates: Sequence[Setting],
    stages: Sequence[Stage],
    moments: Sequence[Moment],
    per_step: float,
    validated: Task,
) -> list[Run]:
    """Trains candidates through the first stage, and the best of them through the others.

    The best is chosen on a task whose sequences are not those of the tests. The last stage goes on
    until the last moment.

    Returns:
        One run of moment "validation" for each candidate; all else is of the best one.

    Raises:
        FloatingPointError: The gradient of every candidate, or of the best one, is not finite.
    """
    trained: list[tuple[float, Training]] = []
    problem: FloatingPointError | None = None
    for setting in candidates:
        training = Training(setting)
        try:
            training.train(stages[0], stages[0].steps, moments, per_step)
        except FloatingPointError as error:
            problem = error
            continue
        trained.append(
            (training.test("validation", validated, per_step, VALIDATION_SEED), training)
        )
    if problem is not None and not trained:
        raise problem
    best = max(trained, key=lambda pair: pair[0])[1]
    end = best.steps
    for stage in stages[1:]:
        end += stage.steps
        best.train(stage, end, moments, per_step)
    best.train(stages[-1], max(moment.step for moment in moments), moments, per_step)
    validations = [run for _, t in trained for run in t.runs if run.moment == "validation"]
    return validations + [run for run in best.runs if run.moment != "validation"]
