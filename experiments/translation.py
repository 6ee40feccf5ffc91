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
import tempfile
import time
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

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
    parse_order,
    spread,
    train_step,
)

try:
    import sacrebleu
    import tokenizers
except ModuleNotFoundError as missing:
    sys.exit(f"translation.py needs {missing.name}: pip install 'ikattn[experiments]'")

from parallel_text import (
    BEGIN,
    END,
    TEST_SETS,
    Corpus,
    Numbers,
    Pair,
    batches,
    by_length,
    gather,
    number_pairs,
    read_corpus,
)
from translation_alignment import (
    AlignmentRow,
    align,
    describe_aligned_pairs,
    measure_alignment,
    print_alignments,
    read_aligned_pairs,
)

SIZE, HEADS, LAYERS, FEED_FORWARD, FREQUENCIES = 128, 4, 2, 256, 32
DROPOUT = 0.1
SMOOTHING = 0.1
LEARNING_RATE, WARM_UP = 2e-3, 0.1  # the largest, and after which part of all steps it is reached
LARGEST_GRADIENT = 1.0


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


class Translator(nn.Module):
    """Source [B, S] and target so far [B, L] to a hidden state for the token that follows each."""

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
        """Hidden states [B, L, SIZE]; position t sees the target up to t."""
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
    options = {"p": parse_order(p), "num_frequencies": FREQUENCIES} | ATTENTIONS[attention]
    if attention == "mikan":

        def from_keys(module: nn.MultiheadAttention) -> nn.Module:
            return ikattn.spectral.Mikan(module.num_heads, module.head_dim, FREQUENCIES, pool="key")

        of_keys, of_none = options | {"spectral": from_keys}, options | {"spectral": "ikan"}
        ikattn.convert(transformer, select="*.multihead_attn", **of_keys)
        ikattn.convert(transformer, select="decoder.*.self_attn", **of_none)
        ikattn.convert(transformer.encoder, **options)
    else:
        ikattn.convert(transformer, **options)


def prediction_loss(
    model: Translator, source: Tensor, target: Tensor, *, smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy in nats of every subword [subwords] of the target [B, L + 1], no padding."""
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
    """Trains one model and keeps the epoch with the smallest loss on the validation set.

    Raises:
        FloatingPointError: A loss or its gradient is not finite.
    """
    torch.manual_seed(seed)
    generator = np.random.RandomState(seed)
    train = number_pairs(corpus.tokenizer, corpus.train)
    validation = number_pairs(corpus.tokenizer, corpus.validation)
    model = Translator(corpus.tokenizer.get_vocab_size(), attention, p)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    steps = epochs * len(draw_batches(train, np.random.RandomState(0)))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step / steps))
    losses: list[float] = []
    best: dict[str, Tensor] = {}
    label = label_of(attention, p, seed)
    start = time.process_time()
    with tqdm(total=steps, desc=label, unit="batch", leave=False, disable=None) as progress:
        for epoch in range(1, epochs + 1):
            train_epoch(model, optimizer, schedule, train, generator, progress)
            losses.append(validation_loss(model, validation))
            seconds = (time.process_time() - start) / epoch
            if not math.isfinite(losses[-1]):
                raise FloatingPointError(f"the validation loss is {losses[-1]}")
            if losses[-1] == min(losses):
                best = copy.deepcopy(model.state_dict())
            tqdm.write(
                f"{label}, epoch {epoch}: validation perplexity {math.exp(losses[-1]):.2f}, "
                f"{seconds:.0f} s per epoch",
                file=sys.stderr,
            )
    model.load_state_dict(best)
    selected = int(np.argmin(losses))
    return Fitted(model.eval(), selected + 1, math.exp(losses[selected]), seconds)


def label_of(attention: str, p: str, seed: int) -> str:
    return f"{describe(attention, p)}, seed {seed}"


def train_epoch(
    model: Translator,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    pairs: list[Numbers],
    generator: np.random.RandomState,
    progress: tqdm[None],
) -> None:
    model.train()
    for batch in draw_batches(pairs, generator):
        loss = prediction_loss(model, *gather(pairs, batch), smoothing=SMOOTHING).mean()
        train_step(model, optimizer, loss, examples=len(pairs), largest_gradient=LARGEST_GRADIENT)
        schedule.step()
        progress.update()


def draw_batches(pairs: list[Numbers], generator: np.random.RandomState) -> list[list[int]]:
    """Batches of about equally long pairs, in random order."""
    filled = list(batches(pairs, by_length(pairs, generator.permutation(len(pairs)))))
    return [filled[number] for number in generator.permutation(len(filled))]


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
        f"{spread(validation, 1):<18}{spread(perplexity, 2):<18}{np.mean(seconds):.0f} s",
        flush=True,
    )


class ModelFolder:
    """Keeps trained models, so that a later run can measure them again without training.

    Args:
        path: The folder; made if it does not exist. ValueError if nothing can be written there.
        corpus, epochs: What models of this run are trained with. A model kept there that was
            trained with others is an error.
    """

    def __init__(self, path: Path, corpus: Corpus, epochs: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        try:
            tempfile.TemporaryFile(dir=path).close()
        except OSError as error:
            raise ValueError(f"no model can be kept in {path}: {error}") from None
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
        try:
            kept = torch.load(file, weights_only=True)
        except (RuntimeError, UnpicklingError, EOFError) as error:
            raise ValueError(f"{file} is no model that was kept: {error}") from None
        if not isinstance(kept, dict) or not {"model", "fitted"} <= kept.keys():
            raise ValueError(f"{file} is no model that was kept here")
        for name, value in self.trained_with.items():
            if kept.get(name) != value:
                raise ValueError(f"{file} was trained with other {name}: take another --models")
        model = Translator(self.subwords, attention, p)
        try:
            model.load_state_dict(kept["model"])
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"{file} holds another model: {error}") from None
        return Fitted(model.eval(), *kept["fitted"])

    def save(self, fitted: Fitted, attention: str, p: str, seed: int) -> None:
        file = self.file(attention, p, seed)
        unfinished = file.with_suffix(".unfinished")
        state = {"model": fitted.model.state_dict(), "fitted": fitted[1:], **self.trained_with}
        torch.save(state, unfinished)
        unfinished.replace(file)


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of the files named below")
    add("--test", choices=TEST_SETS, default=TEST_SETS[0], help=f"default: {TEST_SETS[0]}")
    add("--attention", nargs="+", choices=ATTENTIONS, default=COMPARED)
    add("--p", nargs="+", default=["2"], help="orders: numbers, 'none', 'learned'; default: 2")
    add("--seeds", type=int, default=1)
    add("--epochs", type=int, default=8)
    add("--quick", action="store_true", help="256 training pairs, one seed, one epoch")
    add("--models", type=Path, help="keep models in this folder; do not train those kept there")
    add("--align", type=Path, help="folder of aligned pairs: measure alignments of seed 0")
    add("--align-csv", type=Path, help="write their error rates to this file")
    add_options(parser, plotted="BLEU")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.epochs = 1, 1
    if options.align_csv and not options.align:
        parser.error("--align-csv needs --align")
    check_options(
        parser, options, ["seeds", "epochs", "threads"], files=["csv", "plot", "align_csv"]
    )
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
    except (OSError, ValueError) as error:
        sys.exit(f"translation.py: {error}")
    table = Table[Run](options.csv)
    alignments = Table[AlignmentRow](options.align_csv)
    print(f"{options.test:<22}{'BLEU':<15}{'validation BLEU':<18}{'perplexity':<18}time per epoch")
    divergences = Divergences()
    for attention, p in settings:
        rows = []
        for seed in range(options.seeds):
            key = (attention, p, seed)
            fitted = kept.get(key)
            if fitted is None:
                label = label_of(*key)
                fitted = divergences.fit(label, partial(fit, corpus, *key, options.epochs))
                if fitted is None:
                    continue
                if folder:
                    folder.save(fitted, *key)
            rows.append(measure(fitted, corpus, options, key))
            table.add(rows[-1])
            if aligned is not None and seed == 0:
                found = align(fitted.model, corpus.tokenizer, aligned.pairs)
                alignments.add(*measure_alignment(found, aligned.gold, key))
        if rows:
            print_row(rows)
    if options.plot is not None and table.runs:
        draw_plot(options.plot, table.runs, "test_set", lambda run: run.test_bleu, "BLEU")
    if aligned is not None and alignments.runs:
        print_alignments(alignments.runs, describe_aligned_pairs(aligned, corpus.train))
    divergences.end()


if __name__ == "__main__":
    run_program(main)
