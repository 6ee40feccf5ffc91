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
from numbers import Integral
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ikattn._precision import widened
from ikattn.maps.summary import check_padding
from ikattn.maps.tokens import is_special

Links: TypeAlias = set[tuple[int, int]]
"""Links of one pair of sentences."""

WordOfToken: TypeAlias = Sequence[int | None]
"""Numbers of each token's word, None for a special one: a tokenizer's ``word_ids()``."""

_LINK = re.compile(r"(\d+)([-p])(\d+)")


class Alignments(NamedTuple):
    """Word alignments of pairs of sentences.

    Attributes:
        sure: The links that must be found, for each pair.
        possible: The links that may be found, for each pair; the sure ones are among them.
    """

    sure: list[Links]
    possible: list[Links]


class AlignmentScores(NamedTuple):
    """How well alignments A agree with sure links S and possible links P, over all sentences.

    Attributes:
        error_rate: ``1 - (|A and P| + |A and S|) / (|A| + |S|)``, in [0, 1].
        precision: ``|A and P| / |A|``; NaN without a link in A.
        recall: ``|A and S| / |S|``; NaN without a link in S.
        links: ``|A|``.
    """

    error_rate: float
    precision: float
    recall: float
    links: int


def read_alignments(
    path: str | os.PathLike[str], *, first_index: int, target_first: bool = False
) -> Alignments:
    """Reads alignments in Pharaoh or talp format: a line for each pair of sentences.

    ``9-8`` is a sure link and ``25p22`` a possible one.

    Args:
        path: The file.
        first_index: The number of a sentence's first word in the file: 0 is usual in Pharaoh files,
            1 in talp files.
        target_first: Whether links are target-source in the file.

    Returns:
        The links of each line, as (source, target) counted from 0. An empty line is a pair of
        sentences without links.

    Raises:
        ValueError: A link of another form, or an index below first_index.
        OSError: The file cannot be read.

    Example:
        >>> import pathlib, tempfile
        >>> from ikattn.explain import read_alignments
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "alignment.talp"
        >>> _ = path.write_text("1-1 3p2\\n")
        >>> read_alignments(path, first_index=1) == ([{(0, 0)}], [{(0, 0), (2, 1)}])
        True
    """
    found = Alignments([], [])
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        sure: Links = set()
        possible: Links = set()
        for text in line.split():
            match = _LINK.fullmatch(text)
            link = (int(match[1]) - first_index, int(match[3]) - first_index) if match else (-1, -1)
            if match is None or min(link) < 0:
                raise ValueError(
                    f"read_alignments: {os.fspath(path)}, line {number}: links must look like 4-7 "
                    f"(sure) or 4p7 (possible), counted from first_index={first_index}, got "
                    f"{text!r}"
                )
            link = (link[1], link[0]) if target_first else link
            possible.add(link)
            if match[2] == "-":
                sure.add(link)
        found.sure.append(sure)
        found.possible.append(possible)
    return found


def alignment_scores(
    hypotheses: Sequence[Iterable[tuple[int, int]]],
    sure: Sequence[Iterable[tuple[int, int]]],
    possible: Sequence[Iterable[tuple[int, int]]] | None = None,
) -> AlignmentScores:
    """Scores alignments by error rate, precision and recall; counts are over all sentences.

    Args:
        hypotheses: The links of each pair of sentences; a link given twice counts once.
        sure: The sure links.
        possible: The possible links; the sure ones count among them, listed or not. None: all are
            sure.

    Returns:
        ``error_rate``, ``precision``, ``recall`` and the number of ``links`` in hypotheses.

    Raises:
        ValueError: The numbers of sentences differ, or there is no link in hypotheses and sure.

    Source: Och and Ney 2003.

    Example:
        >>> from ikattn.explain import alignment_scores
        >>> alignment_scores([{(0, 0), (1, 2)}], [{(0, 0)}], [{(1, 1)}])
        AlignmentScores(error_rate=0.33333333333333337, precision=0.5, recall=1.0, links=2)
    """
    if possible is None:
        possible = [()] * len(sure)
    if not len(hypotheses) == len(sure) == len(possible):
        raise ValueError(
            "alignment_scores: hypotheses, sure and possible must hold as many sentences, got "
            f"{len(hypotheses)}, {len(sure)} and {len(possible)}"
        )
    links = in_possible = in_sure = of_sure = 0
    for a, s, p in zip(map(set, hypotheses), map(set, sure), map(set, possible), strict=True):
        links += len(a)
        of_sure += len(s)
        in_sure += len(a & s)
        in_possible += len(a & (p | s))
    if links + of_sure == 0:
        raise ValueError(
            f"alignment_scores: hypotheses or sure must hold a link, got none in {len(sure)} "
            "pairs of sentences"
        )
    return AlignmentScores(
        error_rate=1 - (in_possible + in_sure) / (links + of_sure),
        precision=in_possible / links if links else float("nan"),
        recall=in_sure / of_sure if of_sure else float("nan"),
        links=links,
    )


_BEGINNINGS = ("▁", "Ġ")  # sentencepiece; byte-level BPE


def words_of_subwords(
    tokens: Sequence[str], *, begin: str | None = None, special: Iterable[str] = ()
) -> list[int | None]:
    """Returns the number of each token's word, by the marks that subwords bear.

    It serves tokenizers without ``word_ids()``. Words begin with sentencepiece's "▁" or byte-level
    BPE's "Ġ", or are continued by WordPiece's "##im" and subword-nmt's "im@@". The first token
    begins a word with or without a mark.

    Args:
        tokens: The tokens of one sentence.
        begin: The mark that words begin with. None: whichever of those above the tokens bear.
        special: Tokens that belong to no word, such as a tokenizer's ``all_special_tokens``; tokens
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
    """Links each target word to the source word that it draws from most, according to a map.

    The map is summed over the subwords of a source word and averaged over those of a target word.
    Each target word is linked to the source word with the largest number (of equal ones the first),
    and to none if a special token, such as the end of the sentence, has a larger one, or if the
    whole row is 0. Special tokens compete one by one.

    Args:
        map: ``[B, L, S]`` of cross-attention: ``weights`` averaged over heads, ``summed`` or
            ``alti``; or the first result of :func:`ikattn.explain.alti_plus`.
        source_words: Words of the source tokens, a list for each sentence, None for special tokens
            (a tokenizer's ``word_ids()``, :func:`words_of_subwords`). Columns beyond its length do
            not compete.
        target_words: Words of the target tokens y_0, y_1, ..., likewise. The tokens are those to be
            predicted (labels), **without** the one that starts the decoder.
        setting: The row of token y_k: "AWO" (alignment with output), row k, where y_k is
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
        >>> from ikattn.explain import word_alignment
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
    map = widened(map.detach())[:, shift:]
    words = max(int(of_keys.max()) + 1, 0) if of_keys.numel() else 0
    targets = max(int(of_rows.max()) + 1, 0) if of_rows.numel() else 0
    # special tokens have the last S columns, each its own place; rows that are no word's go
    places = torch.where(of_keys >= 0, of_keys, torch.arange(words, words + S, device=map.device))
    map = map.masked_fill((of_keys == _PADDING).unsqueeze(1), 0)
    columns = _sums(map, places.unsqueeze(1), -1, words + S)
    rows = of_rows.masked_fill(of_rows < 0, targets).unsqueeze(-1)
    sums = _sums(columns, rows, 1, targets + 1)[:, :targets]  # largest where the mean is
    best, source = sums.max(-1)
    linked = (source < words) & (best > 0)
    links: list[Links] = [set() for _ in range(B)]
    for b, target in linked.nonzero().tolist():
        links[b].add((int(source[b, target]), target))
    return links


_SPECIAL, _PADDING = -1, -2  # in tensors of word numbers, beside numbers from 0


def _word_numbers(
    words: Sequence[WordOfToken], name: str, B: int, length: int, axis: str, device: torch.device
) -> Tensor:
    """Returns the word of every token, [B, length], or _SPECIAL, or _PADDING beyond a sentence.

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
        known = [x for x in of_tokens if x is not None]
        are_words = all(isinstance(x, Integral) and x >= 0 for x in known)
        if len(of_tokens) > length or not are_words:
            raise ValueError(
                f"word_alignment: {name}[{b}] must hold at most {length} ({axis} of map) word "
                f"numbers from 0, or None, got {len(of_tokens)}: {of_tokens}"
            )
        row = [_SPECIAL if x is None else x for x in of_tokens]
        numbers[b, : len(row)] = torch.tensor(row, dtype=torch.int64, device="cpu")
    return numbers.to(device)


def _sums(x: Tensor, places: Tensor, axis: int, size: int) -> Tensor:
    """Adds up what goes to the same of ``size`` places on an axis."""
    shape = list(x.shape)
    shape[axis] = size
    return x.new_zeros(shape).scatter_add(axis, places.expand_as(x), x)
