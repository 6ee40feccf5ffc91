"""How faithful attributions are: SST-2, a small BERT, softmax and implicit-kernel attention.

Two blocks of size 64, word embeddings learned from scratch; in training one word in five is masked,
so that texts with masked words are like those that the model knows. Of test sentences the words of
highest score are masked, or all others: comprehensiveness, higher is better, and sufficiency, lower
is better, averaged over the shares 10, 20, 30 and 50 % of the words, with the 95 % interval of the
first by bootstrap over sentences. The last column is the mean rank correlation with value zeroing.

--data DIR holds stsa.binary.train, stsa.binary.dev and stsa.binary.test.

    pip install --no-build-isolation '.[experiments]' transformers
    python experiments/faithfulness.py --data DIR [--quick]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

import ikattn
from command_line import check_options, parser_of, run_program
from comparison import pad
from ikattn.analysis import faithfulness
from sentences import DATA_SETS, Sentence, read

PAD, UNKNOWN, MASK, CLS, SEP = range(5)
BATCH = 64
METHODS = (
    "decompx",
    "rollout:encoder",
    "rollout:alti",
    "rollout:weights",
    "rollout:value_zeroing",
    "gradient x input",
    "one word out",
    "random",
)


def build(words: int, attention: str) -> Any:
    config = transformers.BertConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        intermediate_size=128,
        vocab_size=words,
        max_position_embeddings=72,
        hidden_dropout_prob=0.3,
        pad_token_id=PAD,
    )
    model = transformers.BertForSequenceClassification(config)
    if attention == "implicit":
        ikattn.use_implicit_attention(model, num_frequencies=32, seed=0)
    return model


def batches(
    sentences: list[Sentence], vocabulary: dict[str, int], order: np.ndarray
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    for start in range(0, len(order), BATCH):
        chosen = [sentences[i] for i in order[start : start + BATCH]]
        ids = pad(
            [[CLS, *(vocabulary.get(word, UNKNOWN) for word in s.words), SEP] for s in chosen]
        )
        inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
        yield inputs, torch.tensor([s.label for s in chosen])


def train(
    model: Any, sentences: list[Sentence], vocabulary: dict[str, int], seed: int, epochs: int
) -> None:
    shuffle = np.random.RandomState(seed)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(epochs):
        for inputs, labels in batches(sentences, vocabulary, shuffle.permutation(len(sentences))):
            ids = inputs["input_ids"]
            hidden = (torch.rand(ids.shape, generator=generator) < 0.2) & (ids > SEP)
            inputs["input_ids"] = ids.masked_fill(hidden, MASK)
            optimizer.zero_grad()
            F.cross_entropy(model(**inputs).logits, labels).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    model.eval()


def gradient_times_input(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    vectors = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    logits = model(inputs_embeds=vectors, attention_mask=inputs["attention_mask"]).logits
    (gradient,) = torch.autograd.grad(logits.amax(-1).sum(), vectors)
    return (gradient * vectors).sum(-1).detach()


@torch.no_grad()
def one_word_out(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    logits = model(**inputs).logits
    classes = logits.argmax(-1, keepdim=True)
    whole, columns = logits.gather(1, classes), []
    for j in range(inputs["input_ids"].size(1)):
        ids = inputs["input_ids"].index_fill(1, torch.tensor(j), MASK)
        without = model(input_ids=ids, attention_mask=inputs["attention_mask"]).logits
        columns.append(whole - without.gather(1, classes))
    return torch.cat(columns, 1)


def scores_of(model: Any, inputs: dict[str, Tensor], method: str, generator: Any) -> Tensor:
    if method == "random":
        return torch.rand(inputs["input_ids"].shape, generator=generator)
    if method == "gradient x input":
        return gradient_times_input(model, inputs)
    if method == "one word out":
        return one_word_out(model, inputs)
    return ikattn.attribute(model, inputs, method=method).scores


def rank_correlation(scores: Tensor, others: Tensor, free: Tensor) -> list[float]:
    """Spearman's, of each sentence."""
    found = []
    for a, b, there in zip(scores, others, free, strict=True):
        if int(there.sum()) > 2:
            ranks = torch.stack([x[there].argsort().argsort().double() for x in (a, b)])
            found.append(float(torch.corrcoef(ranks)[0, 1]))
    return found


def measure(model: Any, sentences: list[Sentence], vocabulary: dict[str, int]) -> None:
    right, total = 0, 0
    found: dict[str, list[Any]] = {method: [] for method in METHODS}
    generator = torch.Generator().manual_seed(0)
    order = np.arange(len(sentences))
    correlations: dict[str, list[float]] = {method: [] for method in METHODS}
    for inputs, labels in batches(sentences, vocabulary, order):
        ids = inputs["input_ids"]
        keep = (ids == CLS) | (ids == SEP)
        free = inputs["attention_mask"].bool() & ~keep
        with torch.no_grad():
            right += int((model(**inputs).logits.argmax(-1) == labels).sum())
        total += len(labels)
        zeroing = scores_of(model, inputs, "rollout:value_zeroing", generator)
        for method in METHODS:
            scores = scores_of(model, inputs, method, generator)
            found[method].append(faithfulness(model, inputs, scores, mask_id=MASK, keep=keep))
            correlations[method] += rank_correlation(scores, zeroing, free)
    print(f"accuracy {100 * right / total:.1f} % of {total} sentences")
    print(f"{'':24}{'comprehensiveness':<26}{'sufficiency':<14}rank correlation")
    for method, parts in found.items():
        whole = type(parts[0])(
            parts[0].shares,
            torch.cat([part.comprehensiveness for part in parts]),
            torch.cat([part.sufficiency for part in parts]),
            torch.cat([part.unchanged for part in parts]),
        )
        low, high = whole.interval()
        print(
            f"{method:24}{f'{whole.aopc:.3f} ({low:.3f} to {high:.3f})':<26}"
            f"{whole.mean_sufficiency:<14.3f}{np.nanmean(correlations[method]):.2f}",
            flush=True,
        )


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of the files named below")
    add("--attention", nargs="+", choices=("softmax", "implicit"), default=("softmax", "implicit"))
    add("--epochs", type=int, default=6)
    add("--sentences", type=int, default=400, help="of the test set; default: 400")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1, help="for torch; default: 1")
    add("--quick", action="store_true", help="320 training and 20 test sentences, one epoch")
    options: argparse.Namespace = parser.parse_args()
    if options.quick:
        options.epochs, options.sentences = 1, 20
    check_options(parser, options, ["epochs", "sentences", "threads"], files=())
    torch.set_num_threads(options.threads)
    try:
        training, _, test = (read(options.data, file) for file in DATA_SETS["sst2"])
    except (OSError, ValueError) as error:
        sys.exit(f"faithfulness.py: {error}")
    training = training[:320] if options.quick else training
    counts = Counter(word for sentence in training for word in sentence.words)
    known = [word for word, count in counts.items() if count > 1]
    vocabulary = {word: number for number, word in enumerate(known, start=SEP + 1)}
    for attention in options.attention:
        torch.manual_seed(options.seed)
        model = build(len(vocabulary) + SEP + 1, attention)
        train(model, training, vocabulary, options.seed, options.epochs)
        print(f"--- {attention} attention")
        measure(model, test[: options.sentences], vocabulary)


if __name__ == "__main__":
    run_program(main, "nothing is kept")
