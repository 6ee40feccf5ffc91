"""Translation (Multi30k, German to English), by attention and order of the norm.

nn.Transformer with two encoder and two decoder layers whose attention is converted; subwords of a
joint byte-pair encoding; one matrix embeds the source, the target and the output. The epoch is
selected by the loss on the validation set, never on a test set; BLEU is sacrebleu's, of greedy
translations and of lower-cased words as the data separates them.

MIKAN averages over whole sequences, so it cannot stand everywhere in a decoder that must not look
ahead: the decoder's self-attention has IKAN's frequencies in its place, and its cross-attention
averages the keys, which are the source sentence, alone.

--data DIR holds train, val and test_2016_flickr, test_2017_flickr or test_2017_mscoco, each as
NAME.lc.norm.tok.de and NAME.lc.norm.tok.en: one sentence a line.
--align DIR holds test.de, test.en and alignment.talp: sentences and their gold word alignment.

    pip install 'ikattn[experiments]'
    python experiments/translation.py --data DIR --quick
    python experiments/translation.py --data DIR --csv translation.csv --plot translation.png
    python experiments/translation.py --data DIR --attention softmax direct --seeds 1 --align DIR
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import ikattn
from comparison import (
    ATTENTIONS,
    PADDING,
    add_options,
    check_options,
    choose_orders,
    describe,
    draw_plot,
    pad,
    parse_order,
    spread,
    train_step,
    write_csv,
)
from ikattn.analysis.alignment import (
    GoldAlignments,
    Links,
    alignment_error_rate,
    read_gold_alignments,
    word_alignment,
)

try:
    import sacrebleu
    import tokenizers
except ModuleNotFoundError as missing:
    sys.exit(f"translation.py needs {missing.name}: pip install 'ikattn[experiments]'")

SIZE, HEADS, LAYERS, FEED_FORWARD, FREQUENCIES = 128, 4, 2, 256, 32
SUBWORDS = 4000
DROPOUT = 0.1
SMOOTHING = 0.1
LEARNING_RATE, WARM_UP = 2e-3, 0.1  # the largest, and after which part of all steps it is reached
LARGEST_GRADIENT = 1.0
BATCH_TOKENS = 2000  # of source or target, padding included

BEGIN, END, UNKNOWN = 1, 2, 3
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]  # in the order of their numbers, after PADDING = 0

ENDING = ".lc.norm.tok"
ORIGIN = "github.com/multi30k/dataset, data/task1/tok"
ALIGNMENT_ORIGIN = "github.com/mt-upc/transformer-contributions-nmt, data/de-en"
TEST_SETS = ("test_2016_flickr", "test_2017_flickr", "test_2017_mscoco")


class Pair(NamedTuple):
    source: str
    target: str


class Corpus(NamedTuple):
    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]
    tokenizer: tokenizers.Tokenizer  # of both languages, from the training set


class Run(NamedTuple):
    test_set: str
    attention: str
    p: str  # a number, "none", "learned"; "-" for softmax
    seed: int
    epochs: int
    selected_epoch: int
    validation_perplexity: float  # of a subword
    validation_bleu: float
    test_bleu: float
    parameters: int
    seconds_per_epoch: float  # training and the loss on the validation set


class AlignmentRow(NamedTuple):
    attention: str
    p: str
    seed: int
    map: str  # weights, or norms
    setting: str  # AWI, AWO
    layer: int  # of the decoder, from 1
    chosen_on: float  # error rate on the half of the pairs that chose the layer
    error_rate: float  # on the other half


class Translator(nn.Module):
    """Source [B, S] and target so far [B, T] to a hidden state for the token that follows each."""

    def __init__(self, subwords: int, attention: str, p: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(subwords, SIZE, padding_idx=PADDING)
        self.dropout = nn.Dropout(DROPOUT)
        sizes: dict[str, Any] = {
            "d_model": SIZE,
            "nhead": HEADS,
            "dim_feedforward": FEED_FORWARD,
            "dropout": DROPOUT,
            "batch_first": True,
            "norm_first": True,
        }
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**sizes),
            LAYERS,
            nn.LayerNorm(SIZE),
            enable_nested_tensor=False,
        )
        self.transformer = nn.Transformer(
            **sizes, num_decoder_layers=LAYERS, custom_encoder=encoder
        )
        nn.init.normal_(self.embedding.weight, std=SIZE**-0.5)
        convert_attention(self.transformer, attention, p)

    def encode(self, source: Tensor) -> Tensor:
        """Source [B, S] to memory [B, S, SIZE]; PADDING follows a sentence."""
        memory: Tensor = self.transformer.encoder(
            self.embed(source), src_key_padding_mask=source == PADDING
        )
        return memory

    def decode(self, target: Tensor, memory: Tensor, source: Tensor) -> Tensor:
        """Hidden states [B, T, SIZE]; position t sees the target up to t."""
        later = torch.ones(target.size(1), target.size(1), dtype=torch.bool).triu(1)
        hidden: Tensor = self.transformer.decoder(
            self.embed(target),
            memory,
            tgt_mask=later,
            tgt_is_causal=True,
            memory_key_padding_mask=source == PADDING,
        )
        return hidden

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decode(target, self.encode(source), source)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every subword [..., subwords]."""
        return hidden @ self.embedding.weight.T

    def embed(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens) * math.sqrt(SIZE) + positions(tokens.size(1))
        dropped: Tensor = self.dropout(embedded)
        return dropped


def positions(length: int) -> Tensor:
    """Sines and cosines [length, SIZE], which sentences longer than those of training have too."""
    angles = torch.arange(length).unsqueeze(1) * 10000 ** (-torch.arange(0, SIZE, 2) / SIZE)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def convert_attention(transformer: nn.Transformer, attention: str, p: str) -> None:
    """Converts all attention; none of it lets the decoder see what it is to predict."""
    order = parse_order(p)
    options: dict[str, Any] = {"p": order, "num_frequencies": FREQUENCIES}
    if attention == "mikan":
        for layer in transformer.decoder.layers:
            source = ikattn.spectral.Mikan(HEADS, SIZE // HEADS, FREQUENCIES, pool="key")
            ikattn.convert(layer.multihead_attn, spectral=source, **options)
        ikattn.convert(transformer, select="decoder.*.self_attn", spectral="ikan", **options)
        ikattn.convert(transformer.encoder, spectral="mikan", **options)
    else:
        ikattn.convert(transformer, **ATTENTIONS[attention], **options)


def read_lines(path: Path, origin: str) -> list[str]:
    """Returns the sentences of a file.

    Raises:
        FileNotFoundError, ValueError: It is missing or empty, or one of its lines is.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: it is part of {origin}")
    lines = [" ".join(line.split()) for line in path.read_text(encoding="utf-8").splitlines()]
    if not all(lines) or not lines:
        number = 1 if not lines else 1 + lines.index("")
        raise ValueError(f"{path}, line {number}: expected a sentence, got none")
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
    """Source [B, S] and target [B, T + 1] of a batch."""
    return pad([pairs[i].source for i in batch]), pad([pairs[i].target for i in batch])


def prediction_loss(
    model: Translator, source: Tensor, target: Tensor, *, smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy in nats of every subword [subwords] of the target [B, T + 1], no padding."""
    labels = target[:, 1:]
    known = labels != PADDING
    logits = model.logits(model(source, target[:, :-1])[known])
    return F.cross_entropy(logits, labels[known], reduction="none", label_smoothing=smoothing)


class Fitted(NamedTuple):
    model: Translator  # of the selected epoch, in eval mode
    selected_epoch: int
    validation_perplexity: float
    seconds_per_epoch: float


def fit(corpus: Corpus, attention: str, p: str, seed: int, epochs: int) -> Fitted:
    """Trains one model and keeps the epoch with the smallest loss on the validation set."""
    torch.manual_seed(seed)
    generator = np.random.RandomState(seed)
    train = number_pairs(corpus.tokenizer, corpus.train)
    validation = number_pairs(corpus.tokenizer, corpus.validation)
    model = Translator(corpus.tokenizer.get_vocab_size(), attention, p)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    steps = epochs * sum(1 for _ in batches(train, by_length(train, range(len(train)))))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step / steps))
    losses: list[float] = []
    best: dict[str, Tensor] = {}
    label = f"{describe(attention, p)}, seed {seed}"
    start = time.perf_counter()
    with tqdm(total=steps, desc=label, unit="batch", leave=False, disable=None) as progress:
        for epoch in range(epochs):
            model.train()
            filled = list(batches(train, by_length(train, generator.permutation(len(train)))))
            for number in generator.permutation(len(filled)):
                source, target = gather(train, filled[number])
                loss = prediction_loss(model, source, target, smoothing=SMOOTHING).mean()
                train_step(
                    model,
                    optimizer,
                    loss,
                    examples=len(train),
                    largest_gradient=LARGEST_GRADIENT,
                )
                schedule.step()
                progress.update()
            losses.append(validation_loss(model, validation))
            if losses[-1] == min(losses):
                best = copy.deepcopy(model.state_dict())
            tqdm.write(
                f"{label}, epoch {epoch + 1}: validation perplexity {math.exp(losses[-1]):.2f}, "
                f"{(time.perf_counter() - start) / (epoch + 1):.0f} s per epoch",
                file=sys.stderr,
            )
    seconds = (time.perf_counter() - start) / epochs
    model.load_state_dict(best)
    selected = int(np.argmin(losses))
    return Fitted(model.eval(), selected + 1, math.exp(losses[selected]), seconds)


def rate(progress: float) -> float:
    """The learning rate, as a part of the largest: up, then down to 0 at the end of training."""
    return min(progress / WARM_UP, max(1 - progress, 0) / (1 - WARM_UP))


@torch.no_grad()
def validation_loss(model: Translator, pairs: list[Numbers]) -> float:
    """Mean over all subwords, in nats."""
    model.eval()
    losses = [
        prediction_loss(model, *gather(pairs, batch))
        for batch in batches(pairs, by_length(pairs, range(len(pairs))))
    ]
    return float(torch.cat(losses).mean())


@torch.no_grad()
def translate(model: Translator, source: Tensor) -> list[list[int]]:
    """Greedy translations of a batch [B, S], without BEGIN and END; at most twice as long."""
    model.eval()
    memory = model.encode(source)
    target = torch.full((source.size(0), 1), BEGIN)
    ended = torch.zeros(source.size(0), dtype=torch.bool)
    for _ in range(2 * source.size(1) + 5):
        following = model.logits(model.decode(target, memory, source)[:, -1]).argmax(-1)
        target = torch.cat([target, following.masked_fill(ended, PADDING).unsqueeze(1)], dim=1)
        ended |= following == END
        if ended.all():
            break
    return [
        [token for token in row if token not in (PADDING, BEGIN, END)] for row in target.tolist()
    ]


def bleu(model: Translator, tokenizer: tokenizers.Tokenizer, pairs: list[Pair]) -> float:
    """BLEU, 0 to 100, of greedy translations; words are those of the data."""
    numbers = number_pairs(tokenizer, pairs)
    translations = [""] * len(pairs)
    for batch in batches(numbers, sorted(range(len(pairs)), key=lambda i: len(numbers[i].source))):
        found = translate(model, gather(numbers, batch)[0])
        for i, text in zip(batch, tokenizer.decode_batch(found), strict=True):
            translations[i] = text
    references = [pair.target for pair in pairs]
    score = sacrebleu.corpus_bleu(translations, [references], tokenize="none", force=True)
    return float(score.score)


def measure(
    fitted: Fitted, corpus: Corpus, options: argparse.Namespace, key: tuple[str, str, int]
) -> Run:
    scores = [
        bleu(fitted.model, corpus.tokenizer, part) for part in (corpus.validation, corpus.test)
    ]
    return Run(
        options.test,
        *key,
        epochs=options.epochs,
        selected_epoch=fitted.selected_epoch,
        validation_perplexity=fitted.validation_perplexity,
        validation_bleu=scores[0],
        test_bleu=scores[1],
        parameters=sum(parameter.numel() for parameter in fitted.model.parameters()),
        seconds_per_epoch=fitted.seconds_per_epoch,
    )


def print_row(runs: list[Run]) -> None:
    """Prints the runs of one setting, which differ in their seed."""
    test, validation, perplexity, seconds = (
        [getattr(run, name) for run in runs]
        for name in ("test_bleu", "validation_bleu", "validation_perplexity", "seconds_per_epoch")
    )
    print(
        f"{describe(runs[0].attention, runs[0].p):<22}{spread(test, 1):<15}"
        f"{spread(validation, 1):<18}{spread(perplexity, 2):<14}{np.mean(seconds):.0f} s",
        flush=True,
    )


class AlignedPairs(NamedTuple):
    pairs: list[Pair]
    gold: GoldAlignments


def read_aligned_pairs(directory: Path) -> AlignedPairs:
    """Returns sentences and their gold alignments.

    Raises:
        FileNotFoundError, ValueError: A file is missing, or they differ in their lines.
    """
    pairs = read_pairs(directory / "test.de", directory / "test.en", ALIGNMENT_ORIGIN)
    path = directory / "alignment.talp"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: it is part of {ALIGNMENT_ORIGIN}")
    gold = read_gold_alignments(path)
    if len(gold.sure) != len(pairs):
        raise ValueError(f"{path} must have {len(pairs)} lines, as test.de, got {len(gold.sure)}")
    return AlignedPairs(pairs, gold)


@torch.no_grad()
def align(
    model: Translator, tokenizer: tokenizers.Tokenizer, pairs: list[Pair], batch_size: int = 16
) -> dict[tuple[str, str, int], list[Links]]:
    """Word alignments of given translations by the cross-attention of every decoder layer.

    Returns:
        For each map ("weights": averaged over heads, "norms": of the vectors that are summed over
        heads), setting (AWI, AWO) and layer from 1, the links of every pair.
    """
    found: dict[tuple[str, str, int], list[Links]] = {}
    for start in range(0, len(pairs), batch_size):
        sources = tokenizer.encode_batch([x.source for x in pairs[start : start + batch_size]])
        targets = tokenizer.encode_batch([x.target for x in pairs[start : start + batch_size]])
        words = [[x.word_ids for x in encoded] for encoded in (sources, targets)]
        words = [[[*ids, None] for ids in side] for side in words]  # None: END
        with ikattn.record(
            model, maps=("weights", "summed"), layers="*.multihead_attn"
        ) as recording:
            model(
                pad([[*x.ids, END] for x in sources]),
                pad([[BEGIN, *x.ids, END] for x in targets]),
            )
        for layer, name in enumerate(recording.names, start=1):
            maps = recording[name]
            for kind, map in (("weights", maps.weights.mean(1)), ("norms", maps.summed)):
                for setting in ("AWI", "AWO"):
                    links = word_alignment(map, *words, setting=setting)
                    found.setdefault((kind, setting, layer), []).extend(links)
    return found


def measure_alignment(
    found: dict[tuple[str, str, int], list[Links]], gold: GoldAlignments, who: tuple[str, str, int]
) -> list[AlignmentRow]:
    """Error rates on every second pair, of the layer that does best on the pairs between."""

    def error_rate(links: list[Links], first: int) -> float:
        return alignment_error_rate(links[first::2], gold.sure[first::2], gold.possible[first::2])

    rows = []
    for kind, setting in dict.fromkeys(key[:2] for key in found):
        of_layers = {key[2]: links for key, links in found.items() if key[:2] == (kind, setting)}
        layer = min(of_layers, key=lambda layer: error_rate(of_layers[layer], 0))
        halves = [error_rate(of_layers[layer], first) for first in (0, 1)]
        rows.append(AlignmentRow(*who, kind, setting, layer, *halves))
    return rows


def describe_aligned_pairs(aligned: AlignedPairs, corpus: Corpus) -> str:
    """Says what the error rates must be compared with: known words, and the diagonal's error."""
    known = [{word for pair in corpus.train for word in pair[side].split()} for side in (0, 1)]
    shares = []
    for side in (0, 1):
        words = [word for pair in aligned.pairs for word in pair[side].split()]
        shares.append(100 * sum(word in known[side] for word in words) / len(words))
    diagonal = []
    for pair in aligned.pairs:
        S, T = len(pair.source.split()), len(pair.target.split())
        diagonal.append({(int((t + 0.5) * S / T), t) for t in range(T)})
    error = alignment_error_rate(
        diagonal[1::2], aligned.gold.sure[1::2], aligned.gold.possible[1::2]
    )
    return (
        f"{len(aligned.pairs)} aligned pairs: of their words the training set has {shares[0]:.0f} "
        f"% (source) and {shares[1]:.0f} % (target); linking along the diagonal has the error rate "
        f"{100 * error:.1f} %"
    )


def print_alignments(rows: list[AlignmentRow], conditions: str) -> None:
    print(f"\n{conditions}.")
    print(f"{'':22}{'map':<10}{'setting':<10}{'layer':<8}alignment error rate (other half)")
    for row in rows:
        print(
            f"{describe(row.attention, row.p):<22}{row.map:<10}{row.setting:<10}{row.layer:<8}"
            f"{100 * row.error_rate:.1f} % ({100 * row.chosen_on:.1f} % where it was chosen)"
        )


class ModelFolder:
    """Keeps trained models, so that a later run can measure them again without training.

    Args:
        path: The folder; made if it does not exist.
        corpus, epochs: What models of this run are trained with. A model kept there that was
            trained with others is an error.
    """

    def __init__(self, path: Path, corpus: Corpus, epochs: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.subwords = corpus.tokenizer.get_vocab_size()
        self.trained_with = {"epochs": epochs, "tokenizer": corpus.tokenizer.to_str()}

    def file(self, attention: str, p: str, seed: int) -> Path:
        return self.path / f"{attention}.{p}.{seed}.pt"

    def load(self, attention: str, p: str, seed: int) -> Fitted | None:
        """Returns the model that is kept, None if there is none.

        Raises:
            ValueError: It was trained with other subwords or for another number of epochs.
        """
        file = self.file(attention, p, seed)
        if not file.is_file():
            return None
        kept = torch.load(file, weights_only=True)
        for name, value in self.trained_with.items():
            if kept[name] != value:
                raise ValueError(f"{file} was trained with other {name}: take another --models")
        model = Translator(self.subwords, attention, p)
        model.load_state_dict(kept["model"])
        return Fitted(model.eval(), *kept["fitted"])

    def save(self, fitted: Fitted, attention: str, p: str, seed: int) -> None:
        file = self.file(attention, p, seed)
        unfinished = file.with_suffix(".unfinished")
        state = {"model": fitted.model.state_dict(), "fitted": fitted[1:], **self.trained_with}
        torch.save(state, unfinished)
        unfinished.replace(file)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of the files named above")
    add("--test", choices=TEST_SETS, default=TEST_SETS[0], help=f"default: {TEST_SETS[0]}")
    add("--attention", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    add("--p", nargs="+", default=["2"], help="orders: numbers, 'none', 'learned'; default: 2")
    add("--seeds", type=int, default=3)
    add("--epochs", type=int, default=15)
    add("--quick", action="store_true", help="256 training pairs, one seed, one epoch")
    add("--models", type=Path, help="keep models in this folder; do not train those kept there")
    add("--align", type=Path, help="folder of aligned pairs: measure alignments of seed 0")
    add("--align-csv", type=Path, help="write their error rates to this file")
    add_options(parser, plotted="BLEU")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.epochs = 1, 1
    check_options(parser, options, ["seeds", "epochs", "threads"])
    return options


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    settings = [(a, p) for a in options.attention for p in choose_orders(a, options.p)]
    kept: dict[tuple[str, str, int], Fitted | None] = {}
    try:
        corpus = read_corpus(options.data, options.test, quick=options.quick)
        aligned = None if options.align is None else read_aligned_pairs(options.align)
        folder = options.models and ModelFolder(options.models, corpus, options.epochs)
        if folder:
            runs_of = [(a, p, seed) for a, p in settings for seed in range(options.seeds)]
            kept = {key: folder.load(*key) for key in runs_of}
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"translation.py: {error}")
    runs: list[Run] = []
    alignments: list[AlignmentRow] = []
    print(f"{options.test:<22}{'BLEU':<15}{'validation BLEU':<18}{'perplexity':<14}time per epoch")
    for attention, p in settings:
        rows = []
        for seed in range(options.seeds):
            key = (attention, p, seed)
            fitted = kept.get(key)
            if fitted is None:
                fitted = fit(corpus, *key, options.epochs)
                if folder:
                    folder.save(fitted, *key)
            rows.append(measure(fitted, corpus, options, key))
            if aligned is not None and seed == 0:
                found = align(fitted.model, corpus.tokenizer, aligned.pairs)
                alignments += measure_alignment(found, aligned.gold, key)
        runs += rows
        print_row(rows)
        if options.csv is not None:
            write_csv(options.csv, runs)
        if options.align_csv is not None and alignments:
            write_csv(options.align_csv, alignments)
    if options.plot is not None:
        draw_plot(options.plot, runs, "test_set", lambda run: run.test_bleu, "BLEU")
    if aligned is not None:
        print_alignments(alignments, describe_aligned_pairs(aligned, corpus))


if __name__ == "__main__":
    main()
