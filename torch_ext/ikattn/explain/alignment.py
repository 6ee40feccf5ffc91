"""Word alignments: read from maps of cross-attention, read from files, and scored.

A link is a pair (source word, target word), both counted from 0. Symbols: B batch, L queries (rows
of the decoder), S keys (source subwords).
Sources: G. Kobayashi et al., "Attention is Not Only a Weight", EMNLP 2020, section 5, for
alignments from maps; F. J. Och, H. Ney, "A Systematic Comparison of Various Statistical Alignment
Models", Computational Linguistics 2003, for the error rate.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ikattn.maps.summary import check_padding, full_precision
from ikattn.maps.tokens import is_special

__all__ = [
    "AlignmentScores",
    "GoldAlignments",
    "Links",
    "alignment_error_rate",
    "alignment_scores",
    "read_alignments",
    "read_gold_alignments",
    "word_alignment",
    "words_of_subwords",
]

Links: TypeAlias = set[tuple[int, int]]
"""The links of one pair of sentences."""

WordOfToken: TypeAlias = Sequence[int | None]
"""For each token the number of its word, None for a special one: a tokenizer's ``word_ids()``."""

_LINK = re.compile(r"(\d+)([-p])(\d+)")


class GoldAlignments(NamedTuple):
    """What annotators agreed on, for each pair of sentences.

    Attributes:
        sure: Links that must be found.
        possible: Links that may be found; the sure ones are among them.
    """

    sure: list[Links]
    possible: list[Links]


class AlignmentScores(NamedTuple):
    """How well alignments A agree with sure links S and possible links P, over all sentences.

    Attributes:
        error_rate: 1 - (|A and P| + |A and S|) / (|A| + |S|).
        precision: |A and P| / |A|; NaN without a link in A.
        recall: |A and S| / |S|; NaN without a link in S.
        links: |A|.
    """

    error_rate: float
    precision: float
    recall: float
    links: int


def read_alignments(
    path: str | os.PathLike[str], *, first_index: int = 0, target_first: bool = False
) -> list[Links]:
    """Reads alignments in Pharaoh format: a line per sentence, links like ``0-0 1-2``.

    Links marked as possible (``4p5``) are links like any other here.

    Args:
        path: The file.
        first_index: The number of the first word in the file, 0 or 1.
        target_first: Links are target-source in the file.

    Returns:
        The links of each line, as (source, target) counted from 0. An empty line is a pair of
        sentences without links.

    Raises:
        ValueError: A link of another form, or an index below first_index.
        OSError: The file cannot be read.

    Example:
        >>> import pathlib, tempfile
        >>> from ikattn.explain.alignment import read_alignments
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "test.talp"
        >>> _ = path.write_text("0-0 2-1\\n")
        >>> sorted(read_alignments(path)[0])
        [(0, 0), (2, 1)]
    """
    return _read(path, first_index, target_first).possible


def read_gold_alignments(
    path: str | os.PathLike[str], *, first_index: int = 1, target_first: bool = False
) -> GoldAlignments:
    """Reads annotated alignments in talp format: ``9-8`` is a sure link, ``25p22`` a possible one.

    Args:
        path, target_first: As in :func:`read_alignments`.
        first_index: The number of the first word in the file; 1 is usual in this format.

    Returns:
        The links of each line, as (source, target) counted from 0; possible includes sure.

    Raises:
        ValueError, OSError: As :func:`read_alignments`.

    Example:
        >>> import pathlib, tempfile
        >>> from ikattn.explain.alignment import read_gold_alignments
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "alignment.talp"
        >>> _ = path.write_text("1-1 3p2\\n")
        >>> gold = read_gold_alignments(path)
        >>> gold.sure, gold.possible == [{(0, 0), (2, 1)}]
        ([{(0, 0)}], True)
    """
    return _read(path, first_index, target_first)


def _read(path: str | os.PathLike[str], first_index: int, target_first: bool) -> GoldAlignments:
    gold = GoldAlignments([], [])
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        sure: Links = set()
        possible: Links = set()
        for text in line.split():
            match = _LINK.fullmatch(text)
            link = (int(match[1]) - first_index, int(match[3]) - first_index) if match else (-1, -1)
            if match is None or min(link) < 0:
                raise ValueError(
                    f"{os.fspath(path)}, line {number}: links must look like 4-7 (sure) or 4p7 "
                    f"(possible), counted from {first_index}, got {text!r}"
                )
            link = (link[1], link[0]) if target_first else link
            possible.add(link)
            if match[2] == "-":
                sure.add(link)
        gold.sure.append(sure)
        gold.possible.append(possible)
    return gold


def alignment_scores(
    hypotheses: Sequence[Iterable[tuple[int, int]]],
    sure: Sequence[Iterable[tuple[int, int]]],
    possible: Sequence[Iterable[tuple[int, int]]] | None = None,
) -> AlignmentScores:
    """Error rate, precision and recall of alignments; counts are summed over all sentences.

    Args:
        hypotheses: The links of each pair of sentences; a link given twice counts once.
        sure: The sure links.
        possible: The possible links; the sure ones count among them, listed or not. None: all are
            sure.

    Returns:
        The scores.

    Raises:
        ValueError: The numbers of sentences differ, or there is no link in hypotheses and sure.

    Example:
        >>> from ikattn.explain.alignment import alignment_scores
        >>> alignment_scores([{(0, 0), (1, 2)}], [{(0, 0)}], [{(1, 1)}])
        AlignmentScores(error_rate=0.33333333333333337, precision=0.5, recall=1.0, links=2)
    """
    if possible is None:
        possible = [()] * len(sure)
    if not len(hypotheses) == len(sure) == len(possible):
        raise ValueError(
            "alignment_error_rate: hypotheses, sure and possible must hold as many sentences, got "
            f"{len(hypotheses)}, {len(sure)} and {len(possible)}"
        )
    links = in_possible = in_sure = of_sure = 0
    for a, s, p in zip(map(set, hypotheses), map(set, sure), map(set, possible), strict=True):
        links += len(a)
        of_sure += len(s)
        in_sure += len(a & s)
        in_possible += len(a & (p | s))
    if links + of_sure == 0:
        raise ValueError("alignment_error_rate: hypotheses or sure must hold a link, got none")
    return AlignmentScores(
        error_rate=1 - (in_possible + in_sure) / (links + of_sure),
        precision=in_possible / links if links else float("nan"),
        recall=in_sure / of_sure if of_sure else float("nan"),
        links=links,
    )


def alignment_error_rate(
    hypotheses: Sequence[Iterable[tuple[int, int]]],
    sure: Sequence[Iterable[tuple[int, int]]],
    possible: Sequence[Iterable[tuple[int, int]]] | None = None,
) -> float:
    """The alignment error rate, 1 - (|A and P| + |A and S|) / (|A| + |S|), in [0, 1].

    Args and errors: those of :func:`alignment_scores`.

    Example:
        >>> from ikattn.explain.alignment import alignment_error_rate
        >>> alignment_error_rate([{(0, 0), (1, 1)}], sure=[{(0, 0)}], possible=[{(1, 1)}])
        0.0
    """
    return alignment_scores(hypotheses, sure, possible).error_rate


_BEGINNINGS = ("▁", "Ġ")  # sentencepiece; byte-level BPE


def words_of_subwords(
    tokens: Sequence[str], *, begin: str | None = None, special: Iterable[str] = ()
) -> list[int | None]:
    """The number of each token's word, from the marks that subwords bear.

    For tokenizers without ``word_ids()``. Words begin with sentencepiece's "▁" or byte-level BPE's
    "Ġ", or are continued by WordPiece's "##im" and subword-nmt's "im@@". The first token begins a
    word with or without a mark.

    Args:
        tokens: Of one sentence.
        begin: The mark that words begin with. None: whichever of those above the tokens bear.
        special: Tokens that belong to no word, such as a tokenizer's ``all_special_tokens``. Those
            of the usual shapes (``</s>``, ``[CLS]``, ``<|endoftext|>``, ``en_XX``) never do. The
            token of unknown words (``<unk>``, ``[UNK]``) is a word, listed or not.

    Returns:
        A number for each token, None for a special one.

    Raises:
        ValueError: No token bears the mark, or any mark, and there are several.

    Example:
        >>> from ikattn.explain import words_of_subwords
        >>> words_of_subwords(["▁im", "plicit", "▁kernel", "</s>"])
        [0, 0, 1, None]
        >>> words_of_subwords(["[CLS]", "im", "##plicit", "kernel", "[SEP]"])
        [None, 0, 0, 1, None]
    """
    special = set(special)
    is_left_out = [is_special(token, special) for token in tokens]
    own = [token for token, leaves in zip(tokens, is_left_out, strict=True) if not leaves]
    marks = _BEGINNINGS if begin is None else (begin,)
    used = [mark for mark in marks if any(token.startswith(mark) for token in own)]
    continues = any(token.startswith("##") for token in own)
    ends = any(token.endswith("@@") for token in own)
    is_marked = used or (begin is None and (continues or ends))
    if len(own) > 1 and not is_marked:
        expected = "▁, Ġ, ## or @@" if begin is None else repr(begin)
        raise ValueError(
            f"words_of_subwords: no token bears {expected}, got {', '.join(map(repr, own[:6]))}: "
            "pass begin, or use the tokenizer's word_ids()"
        )
    words: list[int | None] = []
    last, before = -1, ""
    for token, leaves in zip(tokens, is_left_out, strict=True):
        if leaves:
            words.append(None)
            continue
        if used:
            begins = token.startswith(tuple(used))
        elif continues:
            begins = not token.startswith("##")
        else:
            begins = not before.endswith("@@")
        if begins or last < 0:
            last += 1
        words.append(last)
        before = token
    return words


def word_alignment(
    map: Tensor,
    source_words: Sequence[WordOfToken],
    target_words: Sequence[WordOfToken],
    *,
    setting: Literal["AWO", "AWI"] = "AWO",
    key_padding: Tensor | None = None,
) -> list[Links]:
    """The source word that each target word draws from most, according to a map.

    The map is summed over the subwords of a source word and averaged over those of a target word.
    Each target word is linked to the source word with the largest number (of equal ones the first),
    and to none if a special token, such as the end of the sentence, has a larger one, or if the
    whole row is 0. Special tokens compete one by one.

    Args:
        map: ``[B, L, S]`` of cross-attention: ``weights`` averaged over heads, ``summed`` or
            ``alti``; or the first result of :func:`ikattn.explain.alti_plus`.
        source_words: For each sentence the word of each source token, None for special ones (a
            tokenizer's ``word_ids()``, :func:`words_of_subwords`). Columns beyond its length do not
            compete.
        target_words: For each sentence the word of each target token y_0, y_1, ..., likewise. These
            are the tokens to be predicted (labels), **without** the one that starts the decoder.
        setting: Whose row belongs to token y_k: "AWO" (alignment with output), row k, where y_k is
            predicted, or "AWI" (alignment with input), row k + 1, where y_k is the decoder's input.
        key_padding: bool ``[B, S]``, True = padding: columns that do not compete. Needed only if
            source_words has entries for them that matter.

    Returns:
        For each sentence its links (source word, target word).

    Raises:
        ValueError: map is not [B, L, S], the word lists do not fit it, or the setting is unknown.

    Source: Kobayashi et al., EMNLP 2020, section 5 and the authors' code.

    Example:
        >>> import torch
        >>> from ikattn.explain.alignment import word_alignment
        >>> map = torch.tensor([[[0.3, 0.3, 0.4, 0.0], [0.1, 0.1, 0.2, 0.6]]])
        >>> word_alignment(map, [[0, 0, 1, None]], [[0, 1]])
        [{(0, 0)}]
    """
    if map.dim() != 3:
        raise ValueError(
            f"word_alignment: map must have shape [B, L, S], got {list(map.shape)}"
            + (": take one head, or head_mean of them" if map.dim() == 4 else "")
        )
    if setting not in ("AWO", "AWI"):
        raise ValueError(f'word_alignment: setting must be "AWO" or "AWI", got {setting!r}')
    B, L, S = map.shape
    shift = 1 if setting == "AWI" else 0
    if map.numel() == 0 or shift == L:
        return [set() for _ in range(B)]
    of_keys = _word_numbers(source_words, "source_words", B, S, "S", map.device)
    of_rows = _word_numbers(target_words, "target_words", B, L - shift, "the rows", map.device)
    if key_padding is not None:
        check_padding(key_padding, "key_padding", (B, S), "word_alignment")
        of_keys = of_keys.masked_fill(key_padding, _PADDING)
    map = full_precision(map.detach())[:, shift:]
    columns, words = _source_columns(map, of_keys)
    columns = _target_sums(columns, of_rows)  # [B, target words, source words + S]
    best, source = columns.max(-1)
    linked = (source < words) & (best > 0)
    links: list[Links] = [set() for _ in range(B)]
    for b, target in linked.nonzero().tolist():
        links[b].add((int(source[b, target]), target))
    return links


# In the tensors of word numbers, beside numbers from 0.
_SPECIAL = -1
_PADDING = -2


def _word_numbers(
    words: Sequence[WordOfToken], name: str, B: int, length: int, axis: str, device: torch.device
) -> Tensor:
    """The word of every token, [B, length], _SPECIAL for None and _PADDING beyond a sentence.

    A target may have one entry more than there are rows, if that is special: AWI has no row of the
    end of the sentence where the decoder is not fed with it.
    """
    if len(words) != B:
        raise ValueError(
            f"word_alignment: {name} must hold a list for each of {B} sentences, got {len(words)}"
        )
    numbers = torch.full((B, length), _PADDING, dtype=torch.int64, device="cpu")
    for b, of_tokens in enumerate(words):
        of_tokens = list(of_tokens)
        while len(of_tokens) > length and of_tokens[-1] is None:
            of_tokens.pop()
        if len(of_tokens) > length or any(x is not None and x < 0 for x in of_tokens):
            raise ValueError(
                f"word_alignment: {name}[{b}] must hold at most {length} ({axis} of map) word "
                f"numbers from 0, or None, got {len(of_tokens)}: {of_tokens}"
            )
        row = [_SPECIAL if x is None else x for x in of_tokens]
        numbers[b, : len(row)] = torch.tensor(row, dtype=torch.int64, device="cpu")
    return numbers.to(device)


def _source_columns(map: Tensor, of_keys: Tensor) -> tuple[Tensor, int]:
    """Sums over the columns of a word: [B, L, words + S], and how many words.

    The last S columns are the special tokens', each at its own place, 0 at all others.
    """
    B, L, S = map.shape
    words = max(int(of_keys.max()) + 1, 0) if of_keys.numel() else 0
    own = torch.arange(words, words + S, device=map.device).expand(B, S)
    index = torch.where(of_keys >= 0, of_keys, own).unsqueeze(1).expand(B, L, S)
    seen = map.masked_fill((of_keys == _PADDING).unsqueeze(1), 0)
    return seen.new_zeros(B, L, words + S).scatter_add(-1, index, seen), words


def _target_sums(columns: Tensor, of_rows: Tensor) -> Tensor:
    """Sums over the rows of a word, [B, words, columns]: largest where the mean is."""
    B, L, width = columns.shape
    words = max(int(of_rows.max()) + 1, 0) if of_rows.numel() else 0
    index = of_rows.masked_fill(of_rows < 0, words)  # a row for all that is no word, dropped below
    index = index.unsqueeze(-1).expand(B, L, width)
    return columns.new_zeros(B, words + 1, width).scatter_add(1, index, columns)[:, :words]
