"""How faithful attributions are: of sentences' classes, and of the words of translations.

    sst2           SST-2, two blocks of size 64 from scratch, softmax attention
    sst2-implicit  the same with implicit-kernel attention
    minilm         SST-2, a linear classifier of a pretrained encoder's mean vectors (--encoder)
    translation    Multi30k, two blocks a side from scratch: the word in a translation's middle

What is trained from scratch has one word in five masked, so that texts with masked words are like
those that the model knows. Of test sentences the words of highest score are masked, or all others:
comprehensiveness, higher is better, and sufficiency, lower is better, averaged over the shares 10,
20, 30 and 50 % of the words; and for how many of the texts the class stays where 20 % are masked.
Numbers are means over seeds with their standard deviation, and of a single seed with the 95 %
interval of a bootstrap over sentences. The last columns are mean rank correlations with leaving
words out one by one, and with value zeroing.

--data DIR holds stsa.binary.train, stsa.binary.dev and stsa.binary.test, --translations DIR the
tokenised files of Multi30k's task 1.

    pip install --no-build-isolation '.[experiments]' transformers
    python experiments/faithfulness.py --data DIR --translations DIR [--quick]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import ikattn
from command_line import check_options, parser_of, run_program
from faithfulness_models import Question, Task, pretrained, sentiment, translation
from ikattn.explain import Faithfulness, faithfulness

TASKS = ("sst2", "sst2-implicit", "minilm", "translation")
MAPS = ("encoder", "alti", "weights", "value_zeroing")
OTHERS = ("gradient x input", "one word out", "random")
REFERENCES = ("one word out", "rollout:value_zeroing")
METHODS = {
    "translation": ("decompx", "rollout:alti", "cross-attention", *OTHERS),
    "": ("decompx", *(f"rollout:{name}" for name in MAPS), *OTHERS),
}


def gradient_times_input(model: Any, question: Question) -> Tensor:
    inputs = dict(question.inputs)
    vectors = model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
    logits = question.output(model(inputs_embeds=vectors, **inputs))
    (gradient,) = torch.autograd.grad(logits.amax(-1).sum(), vectors)
    return (gradient * vectors).sum(-1).detach()


@torch.no_grad()
def one_word_out(model: Any, question: Question, mask_id: int) -> Tensor:
    inputs = question.inputs
    logits = question.output(model(**inputs))
    classes = logits.argmax(-1, keepdim=True)
    whole, columns = logits.gather(1, classes), []
    for j in range(inputs["input_ids"].size(1)):
        ids = inputs["input_ids"].index_fill(1, torch.tensor(j), mask_id)
        without = question.output(model(**{**inputs, "input_ids": ids}))
        columns.append(whole - without.gather(1, classes))
    return torch.cat(columns, 1)


@torch.no_grad()
def cross_attention(model: Any, question: Question) -> Tensor:
    """The weights of the decoder's last vector, the mean over layers and heads."""
    with ikattn.record(model, maps=("weights",)) as recording:
        model(**question.inputs)
    maps = [recording[name].weights for name in recording.names if "encoder_attn" in name]
    mean = torch.stack(maps).mean((0, 2))  # [B, L, S]
    there = question.inputs["decoder_input_ids"] != 0
    return mean[torch.arange(len(mean)), there.sum(1) - 1]


def scores_of(task: Task, question: Question, method: str, generator: torch.Generator) -> Tensor:
    """[B, S]: of the class, or word, that the model gives the whole text."""
    model, inputs = task.model, question.inputs
    if method == "random":
        return torch.rand(inputs["input_ids"].shape, generator=generator)
    if method == "gradient x input":
        return gradient_times_input(model, question)
    if method == "one word out":
        return one_word_out(model, question, task.mask_id)
    if method == "cross-attention":
        return cross_attention(model, question)
    with torch.no_grad():
        classes = question.output(model(**inputs)).argmax(-1, keepdim=True)

    def chosen(output: Any) -> Tensor:
        return question.output(output).gather(1, classes)[:, 0]

    return ikattn.attribute(model, inputs, chosen, method=method).scores


def rank_correlation(scores: Tensor, others: Tensor, free: Tensor) -> list[float]:
    """Spearman's, of each sentence."""
    found = []
    for a, b, there in zip(scores, others, free, strict=True):
        if int(there.sum()) > 2:
            ranks = torch.stack([x[there].argsort().argsort().double() for x in (a, b)])
            found.append(float(torch.corrcoef(ranks)[0, 1]))
    return found


class Measured(NamedTuple):
    """The worth of a method's scores."""

    faithfulness: Faithfulness
    ranks: dict[str, float]  # mean rank correlation with the scores of other methods


def measure(task: Task, methods: tuple[str, ...]) -> dict[str, Measured]:
    parts: dict[str, list[Faithfulness]] = {method: [] for method in methods}
    references = [name for name in REFERENCES if name in methods]
    ranks = {method: {name: [] for name in references} for method in methods}
    generator = torch.Generator().manual_seed(0)
    for question in task.questions:
        inputs, keep = question.inputs, question.keep
        free = inputs["attention_mask"].bool() & ~keep
        options = {"mask_id": task.mask_id, "keep": keep, "output": question.output}
        scores = {method: scores_of(task, question, method, generator) for method in methods}
        for method, own in scores.items():
            parts[method].append(faithfulness(task.model, inputs, own, **options))
            for name in references:
                ranks[method][name] += rank_correlation(own, scores[name], free)
    return {
        method: Measured(
            _joined(own), {name: float(np.nanmean(x)) for name, x in ranks[method].items()}
        )
        for method, own in parts.items()
    }


def _joined(parts: list[Faithfulness]) -> Faithfulness:
    names = ("comprehensiveness", "sufficiency", "unchanged")
    return Faithfulness(
        parts[0].shares, *(torch.cat([getattr(part, name) for part in parts]) for name in names)
    )


def show(runs: list[dict[str, Measured]]) -> None:
    """A table of the means over seeds."""

    def spread(numbers: list[float], digits: int = 3) -> str:
        mean = f"{np.mean(numbers):.{digits}f}"
        return mean if len(numbers) == 1 else f"{mean} +- {np.std(numbers, ddof=1):.{digits}f}"

    rows = [("", "comprehensiveness", "sufficiency", "class kept, 20 %", *REFERENCES)]
    for method in runs[0]:
        found = [run[method] for run in runs]
        first = spread([own.faithfulness.aopc for own in found])
        if len(runs) == 1:
            low, high = found[0].faithfulness.interval()
            first += f" ({low:.3f} to {high:.3f})"
        sufficiency = spread([own.faithfulness.mean_sufficiency for own in found])
        kept = spread([float(own.faithfulness.accuracy[1]) for own in found], 2)
        ranks = [spread([own.ranks[name] for own in found], 2) for name in found[0].ranks]
        rows.append((method, first, sufficiency, kept, *ranks))
    for name, *cells in rows:
        print(f"{name:22}" + "".join(f"{cell:<26}" for cell in cells).rstrip(), flush=True)


def build(options: argparse.Namespace, name: str, seed: int) -> Task:
    count = options.sentences
    if name == "translation":
        return translation(options.translations, seed, options.quick, count)
    if name == "minilm":
        return pretrained(options.data, options.encoder, seed, options.quick, count)
    attention = "implicit" if name == "sst2-implicit" else "softmax"
    return sentiment(options.data, attention, seed, options.quick, count)


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", choices=TASKS, help="default: all whose data is given")
    add("--data", type=Path, help="folder of SST-2")
    add("--translations", type=Path, help="folder of Multi30k")
    add("--encoder", type=Path, help="folder of a pretrained encoder of transformers")
    add("--seeds", type=int, default=3)
    add("--sentences", type=int, default=400, help="of the test set; default: 400")
    add("--threads", type=int, default=1, help="for torch; default: 1")
    add("--quick", action="store_true", help="a few sentences, one epoch, one seed")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.sentences = 1, 20
    check_options(parser, options, ["seeds", "sentences", "threads"], files=())
    given = {
        "sst2": options.data,
        "sst2-implicit": options.data,
        "minilm": options.data and options.encoder,
        "translation": options.translations,
    }
    tasks = options.tasks or [name for name in TASKS if given[name]]
    missing = [name for name in tasks if not given[name]]
    if missing or not tasks:
        parser.error(
            f"{', '.join(missing) or 'every task'} needs --data, --encoder or --translations"
        )
    torch.set_num_threads(options.threads)
    for name in tasks:
        methods = METHODS.get(name, METHODS[""])
        seeds = range(1 if name == "minilm" else options.seeds)
        runs = []
        for seed in seeds:
            try:
                task = build(options, name, seed)
            except (OSError, ValueError) as error:
                sys.exit(f"faithfulness.py: {error}")
            print(f"--- {name}, seed {seed}: {task.said}", flush=True)
            runs.append(measure(task, methods))
        show(runs)


if __name__ == "__main__":
    run_program(main, "nothing is kept")
