"""Long documents on a CPU: windows of softmax attention beside whole documents in linear time.

MiniLM embeds documents of 512 to 8192 tokens: by windows of softmax attention whose token vectors
are averaged, or as a whole, with softmax attention or with the implicit kernel. For a whole
document the 512 position vectors are interpolated. The implicit kernel is calibrated on documents
of SUBJ, without labels.

Documents consist of sentences of MR, drawn without repetition, MAJORITY of them of one class. Two
tasks: find the document in which a sentence stands, by the cosine of their embeddings; and tell
documents of the two classes apart, by a linear classifier that was trained on the original model's
embeddings of other sentences.

--data DIR holds rt-polarity.all and subj.all (github.com/harvardnlp/sent-conv-torch, data). A row
of --csv that is there is not computed again.

    pip install 'ikattn[experiments]'
    python experiments/long_documents.py --data DIR --quick
    python experiments/long_documents.py --data DIR --csv documents.csv --plot documents.png
    python experiments/long_documents.py --cost
"""

from __future__ import annotations

import copy
import csv
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ikattn
from command_line import add_options, check_options, parser_of, run_program
from comparison import spread
from pretrained_sentences import MiniLm, linear_classifier
from sentences import read

LENGTHS = (512, 1024, 2048, 4096, 8192)
QUICK = (256, 512)
DOCUMENTS = 24  # of a length
MAJORITY = 0.6  # of a document's sentences are of its class
QUERIES = 16  # sentences of a document that are looked for, or all where it has fewer
PROBE = 1000  # sentences that the classifier is trained on
CALIBRATED = (200, 256)  # documents, and tokens of each


class Arm(NamedTuple):
    """A way to embed a document.

    Attributes:
        name: In tables.
        frequencies: M; 0 is softmax attention.
        window: Tokens that attend to each other; 0 is the whole document.
    """

    name: str
    frequencies: int
    window: int


ARMS = (
    Arm("softmax, windows of 128", 0, 128),
    Arm("softmax, windows of 512", 0, 512),
    Arm("softmax", 0, 0),
    Arm("M = 16", 16, 0),
    Arm("M = 32", 32, 0),
)


class Result(NamedTuple):
    """How well one arm embeds the documents of one length; a row of --csv.

    Attributes:
        seed: Of documents, sentences and frequencies.
        found: Per cent of sentences whose document is the nearest.
        apart: Per cent of pairs of documents of two classes that the classifier ranks rightly.
    """

    arm: str
    length: int
    seed: int
    found: float
    apart: float


class Corpus(NamedTuple):
    """Sentences as numbers of tokens, without special ones.

    Attributes:
        documents: D documents of each length, each a list of sentences.
        labels: Of documents, [D].
        probe, probe_labels: Other sentences.
        unlabelled: Documents to calibrate with.
    """

    documents: dict[int, list[list[list[int]]]]
    labels: Tensor
    probe: list[list[int]]
    probe_labels: Tensor
    unlabelled: list[list[int]]


class InterpolatedPositions(nn.Module):
    """Vectors of positions; those of a longer text lie evenly between the learned ones.

    Args:
        learned: Vectors of P positions.
    """

    def __init__(self, learned: nn.Embedding) -> None:
        super().__init__()
        self.weight = learned.weight

    def forward(self, positions: Tensor) -> Tensor:
        """Returns the vectors of ``positions``, [B, S, D], of [B, S]."""
        last = len(self.weight) - 1
        places = positions * min(1.0, last / max(1, positions.size(-1) - 1))
        below = places.long().clamp(max=last - 1)
        part = (places - below).unsqueeze(-1)
        return torch.lerp(
            F.embedding(below, self.weight), F.embedding(below + 1, self.weight), part
        )


def corpus_of(minilm: MiniLm, data: Path, lengths: Sequence[int], seed: int, quick: bool) -> Corpus:
    """Draws documents of the sentences of MR, and of SUBJ those to calibrate with.

    Raises:
        OSError, ValueError: A file cannot be read.
    """
    numbers = torch.Generator().manual_seed(seed)

    def shuffled(name: str) -> list[tuple[int, list[int]]]:
        sentences = read(data, name)
        order = torch.randperm(len(sentences), generator=numbers).tolist()
        texts = [" ".join(sentences[i].words) for i in order]
        tokens = minilm.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [(sentences[i].label, part) for i, part in zip(order, tokens, strict=True)]

    labelled = shuffled("rt-polarity.all")
    count = 50 if quick else PROBE
    probe, rest = labelled[:count], labelled[count:]
    labels = torch.arange(2 if quick else DOCUMENTS) % 2
    documents = {}
    for length in lengths:
        pools = [[part for label, part in rest if label == wanted] for wanted in (0, 1)]
        documents[length] = [
            _document(pools, int(label), length, numbers) for label in labels.tolist()
        ]
    unlabelled: list[list[int]] = [[]]
    for _, part in shuffled("subj.all"):
        if len(unlabelled[-1]) + len(part) > CALIBRATED[1] - 2:
            unlabelled.append([])
        unlabelled[-1] += part
    return Corpus(
        documents,
        labels,
        [part for _, part in probe],
        torch.tensor([label for label, _ in probe]),
        unlabelled[: 3 if quick else CALIBRATED[0]],
    )


def _document(
    pools: list[list[list[int]]], label: int, length: int, numbers: torch.Generator
) -> list[list[int]]:
    """Takes sentences out of the pools of the two classes, up to ``length`` tokens."""
    found: list[list[int]] = []
    free = length - 2
    while True:
        own = torch.rand((), generator=numbers).item() < MAJORITY
        pool = pools[label if own else 1 - label]
        if not pool:
            raise ValueError(f"there are too few sentences for documents of {length} tokens")
        if len(pool[-1]) > free:
            return found
        found.append(pool.pop())
        free -= len(found[-1])


class Embedder:
    """A model that embeds documents.

    Args:
        minilm: The original, whose positions are interpolated.
        arm: How.
    """

    def __init__(self, minilm: MiniLm, arm: Arm) -> None:
        self.begin, self.end = (
            [minilm.tokenizer.cls_token_id],
            [minilm.tokenizer.sep_token_id],
        )
        self.model: Any = copy.deepcopy(minilm.original)
        embeddings = self.model.embeddings
        embeddings.position_embeddings = InterpolatedPositions(embeddings.position_embeddings)
        self.arm = arm

    def convert(self, seed: int) -> None:
        """Gives the model implicit kernels, as drawn."""
        ikattn.convert(self.model, p=None, num_frequencies=self.arm.frequencies, seed=seed)

    def calibrate(self, documents: Sequence[list[int]], quick: bool) -> None:
        """Fits implicit kernels to softmax, on a document a step."""
        batches = [self._inputs(part) for part in documents]
        steps, output_steps = (3, 3) if quick else (300, 200)
        ikattn.calibrate(self.model, batches, steps=steps, output_steps=0)
        ikattn.calibrate(self.model, batches, steps=0, output_steps=output_steps, train="attention")

    def embed(self, tokens: list[int]) -> Tensor:
        """Returns a unit vector [D] of a text of any length."""
        size = self.arm.window - 2 if self.arm.window else len(tokens)
        total = torch.zeros(self.model.config.hidden_size)
        with torch.no_grad():
            for begin in range(0, len(tokens), size):
                ids = self._inputs(tokens[begin : begin + size])
                total += self.model(**ids).last_hidden_state[0].sum(0)
        return F.normalize(total, dim=-1)

    def _inputs(self, tokens: list[int]) -> dict[str, Tensor]:
        ids = torch.tensor([self.begin + tokens + self.end])
        positions = torch.arange(ids.size(1)).unsqueeze(0)
        return {
            "input_ids": ids,
            "position_ids": positions,
            "token_type_ids": torch.zeros_like(ids),
        }


def results_of(
    minilm: MiniLm,
    arm: Arm,
    corpus: Corpus,
    classifier: Tensor,
    lengths: Sequence[int],
    seed: int,
    quick: bool,
) -> Iterator[Result]:
    """Embeds the documents of each length by one arm."""
    embedder = Embedder(minilm, arm)
    if arm.frequencies:
        embedder.convert(seed)
        embedder.calibrate(corpus.unlabelled, quick)
    for length in lengths:
        documents = corpus.documents[length]
        vectors = torch.stack([embedder.embed(list(chain(*document))) for document in documents])
        right, count = 0, 0
        for i, document in enumerate(documents):
            for sentence in document[:: max(1, len(document) // QUERIES)][:QUERIES]:
                right += int((vectors @ embedder.embed(sentence)).argmax()) == i
                count += 1
        scores = vectors @ classifier
        first, second = (scores[corpus.labels == label] for label in (0, 1))
        apart = (second.unsqueeze(1) > first).double().mean().item()
        yield Result(arm.name, length, seed, 100 * right / count, 100 * apart)


def classifier_of(minilm: MiniLm, corpus: Corpus) -> Tensor:
    """Fits a logistic regression to the original's embeddings of sentences; its weights, [D]."""
    original = Embedder(minilm, ARMS[0])
    vectors = torch.stack([original.embed(sentence) for sentence in corpus.probe])
    return linear_classifier(vectors, corpus.probe_labels)[:-1]


def rows_of(path: Path | None) -> list[Result]:
    """The results that a file holds; none where there is none."""
    if path is None or not path.is_file():
        return []
    with path.open(newline="") as file:
        return [
            Result(
                row["arm"],
                int(row["length"]),
                int(row["seed"]),
                float(row["found"]),
                float(row["apart"]),
            )
            for row in csv.DictReader(file)
        ]


def write(path: Path | None, results: Sequence[Result]) -> None:
    """Writes all results to a file, if one is named."""
    if path is not None:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Result._fields)
            writer.writerows(results)


def print_tables(results: Sequence[Result], lengths: Sequence[int]) -> None:
    """Prints means and deviations over seeds, as Markdown."""
    grouped = defaultdict(list)
    for result in results:
        grouped[result.arm, result.length].append(result)
    titles = {"found": "Sentences whose document is found, %", "apart": "Classes told apart, %"}
    head = "| |" + "|".join(f" {length} " for length in lengths) + "|"
    rule = "|---" * (len(lengths) + 1) + "|"
    for name, title in titles.items():
        print(f"\n{title}:\n\n{head}\n{rule}")
        for arm in ARMS:
            columns = [[getattr(x, name) for x in grouped[arm.name, n]] for n in lengths]
            print(f"| {arm.name} |", " | ".join(spread(c, 1) if c else "" for c in columns), "|")


def print_cost(minilm: MiniLm, lengths: Sequence[int], rounds: int) -> None:
    """Prints CPU seconds for a document, the least of rounds in which all ways take turns."""
    embedders = [Embedder(minilm, arm) for arm in ARMS]
    for embedder in embedders:
        if embedder.arm.frequencies:
            embedder.convert(seed=0)
    best = [[math.inf] * len(lengths) for _ in ARMS]
    for _ in range(rounds):
        for column, length in enumerate(lengths):
            tokens = torch.randint(1000, 2000, (length - 2,)).tolist()
            for row, embedder in zip(best, embedders, strict=True):
                begin = time.process_time()
                embedder.embed(tokens)
                row[column] = min(row[column], time.process_time() - begin)
    print("\nCPU seconds for a document; over softmax's for the whole document:\n")
    print("| |" + "|".join(f" {length} " for length in lengths) + "|")
    print("|---" * (len(lengths) + 1) + "|")
    whole = best[[arm.name for arm in ARMS].index("softmax")]
    for arm, row in zip(ARMS, best, strict=True):
        cells = [f"{own:.2f}; {own / all_:.2f}" for own, all_ in zip(row, whole, strict=True)]
        print(f"| {arm.name} |", " | ".join(cells), "|")


def draw(results: Sequence[Result], path: Path) -> None:
    """Draws what is found and told apart, by length."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for arm in ARMS:
        own = [result for result in results if result.arm == arm.name]
        lengths = sorted({result.length for result in own})
        for axis, name in zip(axes, ("found", "apart"), strict=True):
            means = [
                sum(values) / len(values)
                for values in (
                    [getattr(x, name) for x in own if x.length == length] for length in lengths
                )
            ]
            axis.plot(lengths, means, marker="o", label=arm.name)
    for axis, label in zip(axes, ("sentences found, %", "classes told apart, %"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens of a document")
        axis.set_ylabel(label)
    axes[0].legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, help="folder of the sentences")
    parser.add_argument("--cost", action="store_true", help="measure seconds alone, without data")
    parser.add_argument("--model", type=Path, help="folder of MiniLM; default: its package's")
    parser.add_argument("--seeds", type=int, default=3, help="default: 3")
    parser.add_argument("--quick", action="store_true", help="a few steps, few documents")
    add_options(parser, "tables")
    options = parser.parse_args()
    check_options(parser, options, ("seeds", "threads"))
    torch.set_num_threads(options.threads)
    lengths = QUICK if options.quick else LENGTHS
    if options.data is None and not options.cost:
        parser.error("--data must name the folder of the sentences")
    try:
        minilm = MiniLm(options.model)
        if options.cost:
            print_cost(minilm, lengths, 1 if options.quick else 3)
            return
        results = rows_of(options.csv)
        for seed in range(options.seeds):
            corpus = corpus_of(minilm, options.data, lengths, seed, options.quick)
            classifier = classifier_of(minilm, corpus)
            for arm in ARMS:
                known = {x.length for x in results if (x.arm, x.seed) == (arm.name, seed)}
                missing = [length for length in lengths if length not in known]
                if not missing:
                    continue
                for result in results_of(
                    minilm, arm, corpus, classifier, missing, seed, options.quick
                ):
                    results.append(result)
                    print(*result, sep="  ", flush=True)
                    write(options.csv, results)
    except (OSError, ValueError) as problem:
        parser.error(str(problem))
    print_tables(results, lengths)
    if options.plot is not None:
        draw(results, options.plot)


if __name__ == "__main__":
    run_program(main)
