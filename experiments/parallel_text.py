"""Pairs of sentences in two languages, their subwords, and batches of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers
from torch import Tensor

from comparison import pad

SUBWORDS = 4000
BATCH_TOKENS = 2000  # of source or target, padding included

BEGIN, END, UNKNOWN = 1, 2, 3
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]  # in the order of their numbers, after PADDING = 0

ENDING = ".lc.norm.tok"
ORIGIN = "github.com/multi30k/dataset, data/task1/tok"
TEST_SETS = ("test_2016_flickr", "test_2017_flickr", "test_2017_mscoco")


class Pair(NamedTuple):
    source: str
    target: str


class Corpus(NamedTuple):
    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]
    tokenizer: tokenizers.Tokenizer  # of both languages, from the training set


def read_lines(path: Path, origin: str) -> list[str]:
    """Returns the sentences of a file.

    Raises:
        FileNotFoundError, ValueError: It is missing, is not UTF-8, or one of its lines is empty.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: it is part of {origin}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    lines = [" ".join(line.split()) for line in text.removesuffix("\n").split("\n")]
    if not all(lines):
        raise ValueError(f"{path}, line {1 + lines.index('')}: expected a sentence, got none")
    return lines


def read_pairs(source: Path, target: Path, origin: str) -> list[Pair]:
    """Returns the sentences of two files, line by line.

    Raises:
        FileNotFoundError, ValueError: As read_lines, or the files differ in their lines.
    """
    lines = [read_lines(path, origin) for path in (source, target)]
    if len(lines[0]) != len(lines[1]):
        raise ValueError(
            f"{source} and {target} must have as many lines, got {len(lines[0])} and "
            f"{len(lines[1])}"
        )
    return [Pair(*pair) for pair in zip(*lines, strict=True)]


def read_corpus(directory: Path, test_set: str, *, quick: bool = False) -> Corpus:
    """Reads the data and learns subwords from its training set."""
    parts = [
        read_pairs(directory / f"{name}{ENDING}.de", directory / f"{name}{ENDING}.en", ORIGIN)
        for name in ("train", "val", test_set)
    ]
    if quick:
        parts = [part[:size] for part, size in zip(parts, (256, 32, 16), strict=True)]
    return Corpus(*parts, learn_subwords(line for pair in parts[0] for line in pair))


def learn_subwords(lines: Iterable[str]) -> tokenizers.Tokenizer:
    """A byte-pair encoding within words, which begin with a mark.

    A mark at their ends would be a matter of chance: tokenizers numbers the subwords that begin or
    end a word in the order of a hash table, and breaks ties of the training by these numbers.
    """
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=SPECIAL[UNKNOWN]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=SUBWORDS, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


class Numbers(NamedTuple):
    """A pair of sentences as numbers of subwords."""

    source: list[int]  # ends with END
    target: list[int]  # begins with BEGIN, ends with END


def number_pairs(tokenizer: tokenizers.Tokenizer, pairs: list[Pair]) -> list[Numbers]:
    sources = tokenizer.encode_batch([pair.source for pair in pairs])
    targets = tokenizer.encode_batch([pair.target for pair in pairs])
    return [
        Numbers([*source.ids, END], [BEGIN, *target.ids, END])
        for source, target in zip(sources, targets, strict=True)
    ]


def batches(pairs: list[Numbers], order: Sequence[int]) -> Iterator[list[int]]:
    """Yields indices in this order, as many at once as BATCH_TOKENS holds when padded."""
    batch: list[int] = []
    longest = 0
    for i in order:
        length = max(len(pairs[i].source), len(pairs[i].target))
        if batch and max(longest, length) * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch, longest = [], 0
        batch.append(i)
        longest = max(longest, length)
    if batch:
        yield batch


def by_length(pairs: list[Numbers], order: Iterable[int]) -> list[int]:
    """Sorts indices so that batches need little padding; equally long pairs stay in their order."""
    return sorted(order, key=lambda i: max(len(pairs[i].source), len(pairs[i].target)))


def gather(pairs: list[Numbers], batch: list[int]) -> tuple[Tensor, Tensor]:
    """Source [B, S] and target [B, L + 1] of a batch."""
    return pad([pairs[i].source for i in batch]), pad([pairs[i].target for i in batch])
