"""Does training bear features of 8 bits? Translation and regression, exact and rounded.

Hopper's kernels round features, which lie in [-2, 2], to multiples of 2 / 127 where query, key and
value are bfloat16 (docs/internals/int8_scores.md). Here the same happens on any device: attention
is composed of torch's operators, forward and backward see the same rounded features, and gradients
pass through the rounding. Nothing else differs between the two runs of a seed.

    pip install 'ikattn[experiments]'
    python experiments/rounded_features.py --translation DIR --regression DIR --csv rounded.csv
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import ikattn
import regression_protocol
import translation
from command_line import check_options, parser_of, run_program
from comparison import Divergences, Table, spread

LARGEST = 127  # stands for 2
ATTENTION, ORDER = "direct", "2"


def features(x: Tensor, w1: Tensor, w2: Tensor | None, *, rounds: bool) -> Tensor:
    phi = ikattn.ops.spectral_features(x, w1, w2)
    if not rounds:
        return phi
    return phi + ((phi * LARGEST / 2).round() * 2 / LARGEST - phi).detach()


def composed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w1: Tensor,
    w2: Tensor | None = None,
    *,
    rounds: bool,
    p: float | None = 2.0,
    key_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    eps: float = 1e-5,
    **_: Any,
) -> Tensor:
    phi_q, phi_k = (features(x, w1, w2, rounds=rounds) for x in (query, key))
    score = phi_q @ phi_k.mT / (4 * w1.shape[-1])
    logits = torch.zeros((), device=key.device)
    if p is not None:
        logits = key.abs().pow(p).sum(-1).pow(2 / p).unsqueeze(-2) / (2 * math.sqrt(key.shape[-1]))
    if key_bias is not None:
        logits = logits + key_bias.unsqueeze(-2)
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        logits = logits + (torch.where(attn_mask, 0.0, -math.inf) if is_bool else attn_mask)
    if is_causal:
        ahead = torch.ones(score.shape[-2:], dtype=torch.bool, device=score.device).triu(1)
        logits = logits.masked_fill(ahead, -math.inf)
    weights = ((score.square() + eps).log() + logits).softmax(-1)
    return F.dropout(weights, dropout_p) @ value


@contextlib.contextmanager
def attention_composed(*, rounds: bool) -> Iterator[None]:
    """ikattn's modules compose their attention."""
    module = ikattn.nn.functional
    kept = module.implicit_kernel_attention  # type: ignore[attr-defined]
    module.implicit_kernel_attention = partial(composed_attention, rounds=rounds)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.implicit_kernel_attention = kept  # type: ignore[attr-defined]


class Row(NamedTuple):
    task: str
    features: str
    seed: int
    loss: float  # perplexity of a subword, or last test RMSE
    score: float  # BLEU, or best test RMSE


def translate(folder: Path, epochs: int, *, seed: int, quick: bool) -> tuple[float, float]:
    corpus = translation.read_corpus(folder, translation.TEST_SETS[0], quick=quick)
    fitted = translation.fit(corpus, ATTENTION, ORDER, seed, epochs)
    bleu = translation.bleu(fitted.model, corpus.tokenizer, corpus.test)
    return fitted.validation_perplexity, bleu


def regress(folder: Path, name: str, epochs: int, *, seed: int) -> tuple[float, float]:
    setting = regression_protocol.Setting(name, ATTENTION, ORDER)
    series = regression_protocol.load(folder, name)
    repeats = regression_protocol.fit_repeats(setting, series, 1, epochs, seed, Divergences())
    (run,) = repeats
    return run.last_rmse, run.best_rmse


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--translation", type=Path, help="folder of translation.py's files; its epochs: --epochs")
    add("--regression", type=Path, help="folder of regression.py's data sets: airline and co2")
    add("--seeds", type=int, default=3)
    add("--epochs", type=int, default=3, help="of translation; airline has 100 for each, co2 30")
    add("--threads", type=int, default=1)
    add("--csv", type=Path)
    add("--quick", action="store_true", help="one seed, one epoch, 256 pairs")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.epochs = 1, 1
    check_options(parser, options, ["seeds", "epochs", "threads"], files=["csv"])
    torch.set_num_threads(options.threads)
    each = 1 if options.quick else options.epochs
    tasks: dict[str, Any] = {}
    if options.regression:
        for name, factor in (("airline", 100), ("co2", 30)):
            tasks[name] = partial(regress, options.regression, name, factor * each)
    if options.translation:
        tasks["translation"] = partial(
            translate, options.translation, options.epochs, quick=options.quick
        )
    table = Table[Row](options.csv)
    for task, fit in tasks.items():
        for kind in ("exact", "rounded"):
            rows = []
            for seed in range(options.seeds):
                with attention_composed(rounds=kind == "rounded"):
                    rows.append(Row(task, kind, seed, *fit(seed=seed)))
                table.add(rows[-1])
            losses, scores = ([getattr(row, name) for row in rows] for name in ("loss", "score"))
            print(f"{task:<12}{kind:<9}{spread(losses, 4):<20}{spread(scores, 4)}", flush=True)
            print(" " * 21 + np.array2string(np.array(losses), precision=4), flush=True)


if __name__ == "__main__":
    run_program(main)
