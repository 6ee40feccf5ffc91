"""Tasks of long sequences: nested lists, texts read byte by byte, numbers copied and sorted.

A task draws batches of one length, so that no token is padding. Sizes: B batch, N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sentences import ORIGIN

NOT_ASKED = -100  # the target of a place that is not asked, as cross_entropy ignores it

# Tokens of ListOps: digits 0 to 9 are themselves.
OPERATORS = ("MIN", "MAX", "MED", "SM")
CLOSE = 10 + len(OPERATORS)
SYMBOLS = CLOSE + 1
MOST_ARGUMENTS = 10
SHORTEST_LIST = 4  # tokens: an operator, two arguments, the bracket that closes
DEEPEST = 4  # levels of lists

NUMBERS = 16  # that are copied and sorted; the tokens after them say what is to be done
COPY, SORT = NUMBERS, NUMBERS + 1


class Batch(NamedTuple):
    """Tokens [B, N], and targets: [B, N], or [B] of a task about whole sequences.

    ``asked`` [B, N] or [B] numbers the measure that a target counts for; it is -1 elsewhere.
    """

    tokens: Tensor
    targets: Tensor
    asked: Tensor


def capacity(depth: int) -> int:
    """The most tokens of a list of so many levels; of 0, a digit's."""
    return 1 if depth == 0 else 2 + MOST_ARGUMENTS * capacity(depth - 1)


def evaluate(operator: str, values: Sequence[int]) -> int:
    """The value of a list: its least, greatest or middle number, or the last digit of its sum.

    Of an even number of values the middle is that of the two in the middle, rounded down.
    """
    if operator == "MED":
        return int(np.median(values))
    return {"MIN": min, "MAX": max, "SM": sum}[operator](values) % 10


def split_tokens(tokens: int, depth: int, random: np.random.Generator) -> list[int]:
    """Sizes of a list's arguments: at most ten that add up, each 1 or that of a list."""
    largest = capacity(depth - 1)
    fewest = max(2, -(-tokens // largest))
    while True:
        sizes = np.ones(random.integers(fewest, min(MOST_ARGUMENTS, tokens) + 1), dtype=int)
        while (left := tokens - int(sizes.sum())) > 0:
            grown = [i for i, size in enumerate(sizes) if SHORTEST_LIST <= size < largest]
            new = np.flatnonzero(sizes == 1) if left >= SHORTEST_LIST - 1 < largest else []
            places = [*grown, *new]
            if not places:
                break
            place = random.choice(places)
            least = SHORTEST_LIST - 1 if sizes[place] == 1 else 1
            sizes[place] += random.integers(least, min(left, largest - sizes[place]) + 1)
        if left == 0:
            return [int(size) for size in sizes]


class Lists:
    """ListOps (Nangia & Bowman 2018): a value is asked at every bracket that closes a list.

    A token's number tells its level, too: symbol + level * SYMBOLS, the outermost list's being 0.
    """

    vocabulary = SYMBOLS * (DEEPEST + 1)
    outputs = 10
    places_are_told = False
    pooled = False
    measures = ("inner lists", "outermost list")

    def draw(self, count: int, length: int, random: np.random.Generator) -> Batch:
        """Draws a batch of trees of exactly ``length`` tokens."""
        tokens, targets = (np.empty((count, length), dtype=np.int64) for _ in range(2))
        for row in range(count):
            written: list[tuple[int, int]] = []
            self._write(length, 0, random, written)
            tokens[row], targets[row] = np.transpose(written)
        asked = np.where(targets == NOT_ASKED, -1, 0)
        asked[:, -1] = 1
        return Batch(*map(torch.from_numpy, (tokens, targets, asked)))

    def _write(
        self, size: int, level: int, random: np.random.Generator, out: list[tuple[int, int]]
    ) -> int:
        """Appends a digit or a list of ``size`` tokens, with targets, and returns its value."""
        if size == 1:
            digit = int(random.integers(10))
            out.append((digit + SYMBOLS * level, NOT_ASKED))
            return digit
        operator = int(random.integers(len(OPERATORS)))
        out.append((10 + operator + SYMBOLS * level, NOT_ASKED))
        sizes = split_tokens(size - 2, DEEPEST - level, random)
        values = [self._write(part, level + 1, random, out) for part in sizes]
        value = evaluate(OPERATORS[operator], values)
        out.append((CLOSE + SYMBOLS * level, value))
        return value


class CopyAndSort:
    """Half of a sequence are numbers, the other half asks for them, as they came or sorted.

    Every sequence draws its numbers from shares of its own, so that the sorted ones are not the
    same each time. The tokens that ask say what they ask for, COPY or SORT; half of a batch's
    sequences ask for each.
    """

    vocabulary = NUMBERS + 2
    outputs = NUMBERS
    places_are_told = True  # those in a half, by codes
    pooled = False
    measures = ("copied", "sorted")

    def draw(self, count: int, length: int, random: np.random.Generator) -> Batch:
        """Draws a batch; ``length`` is even."""
        half = length // 2
        tokens, targets, asked = (
            np.full((count, length), fill, dtype=np.int64) for fill in (0, NOT_ASKED, -1)
        )
        for row in range(count):
            shares = random.dirichlet(np.ones(NUMBERS))
            numbers = random.choice(NUMBERS, half, p=shares)
            is_sort = int(random.integers(2)) if count == 1 else row % 2
            tokens[row, :half], tokens[row, half:] = numbers, SORT if is_sort else COPY
            targets[row, half:] = np.sort(numbers) if is_sort else numbers
            asked[row, half:] = is_sort
        return Batch(*map(torch.from_numpy, (tokens, targets, asked)))


class Texts:
    """Sentences of one class, joined to a text of so many bytes, whose class is asked.

    Args:
        sentences: Of each class, in bytes.
    """

    vocabulary = 256
    outputs = 2
    places_are_told = False
    pooled = True
    measures = ("texts",)

    def __init__(self, sentences: Sequence[Sequence[bytes]]) -> None:
        self.sentences = sentences

    def draw(self, count: int, length: int, random: np.random.Generator) -> Batch:
        """Draws a batch; no sentence is twice in a text before all have been."""
        labels = np.arange(count) % len(self.sentences)
        if count == 1:
            labels = random.integers(len(self.sentences), size=1)
        texts = []
        for label in labels:
            text = b""
            while len(text) < length:
                for number in random.permutation(len(self.sentences[label])):
                    text += self.sentences[label][number] + b"\n"
                    if len(text) >= length:
                        break
            texts.append(np.frombuffer(text[:length], dtype=np.uint8).astype(np.int64))
        return Batch(
            torch.from_numpy(np.stack(texts)),
            torch.from_numpy(labels.astype(np.int64)),
            torch.zeros(count, dtype=torch.int64),
        )


def read_sentences(folder: Path, file: str, fewest: int = 30) -> list[list[bytes]]:
    """The sentences of a file, by label, each label at the head of its line.

    Raises:
        OSError, ValueError: It cannot be read, a label is neither 0 nor 1, or there are too few.
    """
    path = folder / file
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: it is part of {ORIGIN}")
    found: list[list[bytes]] = [[], []]
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        label, _, sentence = line.partition(b" ")
        if not line.strip():
            continue
        if label not in (b"0", b"1") or not sentence.strip():
            raise ValueError(
                f"{path}, line {number}: expected 0 or 1 and a sentence, got {line[:20]!r}"
            )
        found[int(label)].append(sentence.strip())
    if min(map(len, found)) < fewest:
        counts = " and ".join(str(len(part)) for part in found)
        raise ValueError(f"{path}: expected {fewest} sentences of each label, got {counts}")
    return found


def split_texts(sentences: list[list[bytes]], seed: int) -> list[Texts]:
    """Texts of training, of validation and of test, in shares of 8, 1 and 1 of the sentences."""
    random = np.random.default_rng(seed)
    parts: list[list[list[bytes]]] = [[], [], []]
    for own in sentences:
        order = [own[i] for i in random.permutation(len(own))]
        tenth = len(order) // 10
        for part, chosen in zip(
            parts, (order[2 * tenth :], order[:tenth], order[tenth : 2 * tenth]), strict=True
        ):
            part.append(chosen)
    return [Texts(part) for part in parts]
