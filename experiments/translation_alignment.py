"""How well the cross-attention of a translation model agrees with gold word alignments.

As in Kobayashi et al., "Attention is Not Only a Weight" (EMNLP 2020), section 5: given the right
translation, every target word is linked to the source word that it attends to most, by attention
weights or by the norms of what they weigh.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
from torch import nn

import ikattn
from comparison import describe
from ikattn.explain.alignment import (
    Alignments,
    Links,
    alignment_scores,
    read_alignments,
    word_alignment,
)
from parallel_text import Pair, batches, gather, number_pairs, read_pairs

ORIGIN = "github.com/mt-upc/transformer-contributions-nmt, data/de-en"


class AlignmentRow(NamedTuple):
    attention: str
    p: str
    seed: int
    map: str  # weights, or norms
    setting: str  # AWI, AWO
    layer: int  # of the decoder, from 1
    chosen_on: float  # error rate on the half of the pairs that chose the layer
    error_rate: float  # on the other half


class AlignedPairs(NamedTuple):
    pairs: list[Pair]
    gold: Alignments


def read_aligned_pairs(directory: Path) -> AlignedPairs:
    """Returns sentences and their gold alignments.

    Raises:
        FileNotFoundError, ValueError: A file is missing, or they differ in their lines.
    """
    pairs = read_pairs(directory / "test.de", directory / "test.en", ORIGIN)
    path = directory / "alignment.talp"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: it is part of {ORIGIN}")
    gold = read_alignments(path, first_index=1)
    if len(gold.sure) != len(pairs):
        raise ValueError(f"{path} must have {len(pairs)} lines, as test.de, got {len(gold.sure)}")
    return AlignedPairs(pairs, gold)


@torch.no_grad()
def align(
    model: nn.Module, tokenizer: tokenizers.Tokenizer, pairs: list[Pair]
) -> dict[tuple[str, str, int], list[Links]]:
    """Word alignments of given translations by the cross-attention of every decoder layer.

    Returns:
        For each map ("weights": averaged over heads, "norms": of the vectors that are summed over
        heads), setting (AWI, AWO) and layer from 1, the links of every pair.
    """
    numbers = number_pairs(tokenizer, pairs)
    words = [[words_of(tokenizer, pair[side]) for pair in pairs] for side in (0, 1)]
    found: dict[tuple[str, str, int], list[Links]] = {}
    for batch in batches(numbers, range(len(pairs))):
        own_words = [[side[i] for i in batch] for side in words]
        with ikattn.record(
            model, maps=("weights", "summed"), layers="*.multihead_attn"
        ) as recording:
            model(*gather(numbers, batch))
        for layer, name in enumerate(recording.names, start=1):
            maps = recording[name]
            for kind, map in (("weights", maps.weights.mean(1)), ("norms", maps.summed)):
                for setting in ("AWI", "AWO"):
                    links = word_alignment(map, *own_words, setting=setting)
                    found.setdefault((kind, setting, layer), []).extend(links)
    return found


def words_of(tokenizer: tokenizers.Tokenizer, sentence: str) -> list[int | None]:
    """The word of each subword, and None for END."""
    return [*tokenizer.encode(sentence).word_ids, None]


def measure_alignment(
    found: dict[tuple[str, str, int], list[Links]], gold: Alignments, who: tuple[str, str, int]
) -> list[AlignmentRow]:
    """Error rates on every second pair, of the layer that does best on the pairs between."""

    def error_rate(links: list[Links], first: int) -> float:
        scores = alignment_scores(links[first::2], gold.sure[first::2], gold.possible[first::2])
        return scores.error_rate

    rows = []
    for kind, setting in dict.fromkeys(key[:2] for key in found):
        of_layers = {key[2]: links for key, links in found.items() if key[:2] == (kind, setting)}
        layer = min(of_layers, key=lambda layer: error_rate(of_layers[layer], 0))
        halves = [error_rate(of_layers[layer], first) for first in (0, 1)]
        rows.append(AlignmentRow(*who, kind, setting, layer, *halves))
    return rows


def describe_aligned_pairs(aligned: AlignedPairs, train: list[Pair]) -> str:
    """Says what the error rates must be compared with: known words, and the diagonal's error."""
    known = [{word for pair in train for word in pair[side].split()} for side in (0, 1)]
    shares = []
    for side in (0, 1):
        words = [word for pair in aligned.pairs for word in pair[side].split()]
        shares.append(100 * sum(word in known[side] for word in words) / len(words))
    diagonal = []
    for pair in aligned.pairs:
        S, L = len(pair.source.split()), len(pair.target.split())
        diagonal.append({(int((t + 0.5) * S / L), t) for t in range(L)})
    error = alignment_scores(
        diagonal[1::2], aligned.gold.sure[1::2], aligned.gold.possible[1::2]
    ).error_rate
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
