"""A small GPT-2 of words, trained here, then given implicit-kernel attention.

Sizes: B blocks of text, N tokens of a block.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

import ikattn
from parallel_text import read_lines
from sentences import read

LENGTH, BATCH = 64, 16
VOCABULARY = 6000
STEPS = 1000
RATE_AFTER = 3e-5  # of training that goes on
ORIGIN = "github.com/multi30k/dataset, data/task1/tok"
END, UNKNOWN = 0, 1


class Text(NamedTuple):
    """Blocks of words, [B, N + 1], to train on and to test on; and how many words there are."""

    training: Tensor
    test: Tensor
    words: int


def text_of(sentences: Path, captions: Path) -> Text:
    """English captions, sentences of reviews and plots, in an order of no meaning.

    Raises:
        OSError, ValueError: A file cannot be read.
    """
    lines = [line.split() for line in read_lines(captions / "train.lc.norm.tok.en", ORIGIN)]
    for name in ("subj.all", "rt-polarity.all"):
        lines += [list(sentence.words) for sentence in read(sentences, name)]
    counts = Counter(word for line in lines for word in line)
    words = [word for word, _ in counts.most_common(VOCABULARY - 2)]
    numbers = {word: number for number, word in enumerate(words, start=2)}
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0)).tolist()
    tokens = torch.tensor([number for i in order for number in (*_numbers(lines[i], numbers), END)])
    blocks = tokens[: len(tokens) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    tenth = len(blocks) // 10
    return Text(blocks[tenth:], blocks[:tenth], len(words) + 2)


def _numbers(line: list[str], numbers: dict[str, int]) -> list[int]:
    return [numbers.get(word, UNKNOWN) for word in line]


def new_model(words: int, *, frequencies: int | None, seed: int, quick: bool) -> Any:
    """A GPT-2 of 2.9 million parameters; with frequencies, of the implicit kernel."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=words,
        n_positions=LENGTH,
        n_embd=64 if quick else 192,
        n_layer=2 if quick else 4,
        n_head=6 if not quick else 2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=END,
        eos_token_id=END,
    )
    model = transformers.GPT2LMHeadModel(config)
    if frequencies is not None:
        ikattn.convert(model, p=None, num_frequencies=frequencies, seed=seed)
    return model


def train(model: Any, blocks: Tensor, steps: int, seed: int, rate: float = 1e-3) -> None:
    """Adam on blocks drawn anew each epoch; the rate rises for a tenth of the steps, then falls."""
    generator = torch.Generator().manual_seed(1 + seed)
    optimizer = torch.optim.AdamW(ikattn.parameter_groups(model, lr=rate, weight_decay=0.01))
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / steps)),
    )
    model.train()
    numbers: list[int] = []
    for _ in range(steps):
        if len(numbers) < BATCH:
            numbers = torch.randperm(len(blocks), generator=generator).tolist()
        own, numbers = blocks[numbers[:BATCH]], numbers[BATCH:]
        loss = loss_of(model, own)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def loss_of(model: Any, blocks: Tensor) -> Tensor:
    logits = model(input_ids=blocks[:, :-1], use_cache=False).logits
    loss: Tensor = nn.functional.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten())
    return loss


@torch.no_grad()
def perplexity(model: Any, blocks: Tensor) -> float:
    model.eval()
    losses = [loss_of(model, part).item() * len(part) for part in blocks.split(64)]
    return math.exp(sum(losses) / len(blocks))


def steps_of(
    text: Text, frequencies: list[int], seed: int, *, quick: bool, calibrated: bool
) -> Iterator[tuple[str, int, float, float]]:
    """Yields each step's name, M, the perplexity on the test text, and CPU seconds in all.

    Args:
        text: Blocks of words.
        frequencies: M, of each conversion of the trained model; the model that has the implicit
            kernel from the start has the first.
        seed: Of the first weights and frequencies, and of the order of blocks.
        quick: A few steps alone.
        calibrated: The calibrated models alone, no training after it or with the kernel.
    """
    steps, tenth = (4, 2) if quick else (STEPS, STEPS // 10)
    test = text.test[:8] if quick else text.test
    original = new_model(text.words, frequencies=None, seed=seed, quick=quick)
    begin = time.process_time()
    train(original, text.training, steps, seed)
    yield "softmax", 0, perplexity(original, test), time.process_time() - begin
    if not calibrated:
        more = copy.deepcopy(original)
        train(more, text.training, tenth, seed, rate=RATE_AFTER)
        seconds = time.process_time() - begin
        yield "softmax, a tenth of training more", 0, perplexity(more, test), seconds
    blocks = text.training[: 2 if quick else 500]
    batches = [{"input_ids": part[:, :-1]} for part in blocks.split(25)]
    options = {"steps": 3, "output_steps": 3} if quick else {}
    for m in frequencies:
        model = copy.deepcopy(original)
        begin = time.process_time()
        ikattn.convert(model, p=None, num_frequencies=m, seed=seed)
        yield "converted, as drawn", m, perplexity(model, test), 0.0
        ikattn.calibrate(model, batches, train="attention", **options)
        seconds = time.process_time() - begin
        yield "converted, calibrated", m, perplexity(model, test), seconds
        if calibrated:
            continue
        train(model, text.training, tenth, seed, rate=RATE_AFTER)
        seconds = time.process_time() - begin
        yield "the same, a tenth of training", m, perplexity(model, test), seconds
    if calibrated:
        return
    begin = time.process_time()
    model = new_model(text.words, frequencies=frequencies[0], seed=seed, quick=quick)
    train(model, text.training, steps, seed)
    seconds = time.process_time() - begin
    yield "implicit from the start", frequencies[0], perplexity(model, test), seconds
