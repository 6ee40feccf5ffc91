"""The result of :func:`ikattn.attribute`: numbers, a table, and a page of the coloured text.

Sizes: B sequences, n targets, S tokens.
"""

from __future__ import annotations

import html
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import accumulate
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ikattn._library import version
from ikattn._whole_files import whole_file
from ikattn.maps.importance import RankedToken
from ikattn.maps.page.arrays import as_base64
from ikattn.maps.page.template import frame, write_mode
from ikattn.maps.tokens import is_byte_level, is_special, readable_tokens
from ikattn.maps.words import text_span, texts_of, words_of_text

_LARGEST_FRAME = 2_000_000  # bytes; a notebook keeps one for every cell that shows one


@dataclass
class Attribution:
    """The part that each token of the input has in a number that the model gave.

    ``print`` shows it as a table.

    Attributes:
        scores: ``[B, S]``, or ``[B, n, S]`` for n targets apart. Padding that nothing reads has 0.
        value: ``[B]`` or ``[B, n]``, what was attributed: the sum of the targets' logits.
        bias: ``[B]`` or ``[B, n]``: ``value`` less all scores. With "decompx" the part of biases
            and of vectors that the model puts beside the tokens it was given; with "alti_logit"
            that of feed-forward parts, the token's own vector and biases. NaN where scores are
            shares that add up to 1 ("rollout").
        prefix_scores: ``[B, L]`` or ``[B, n, L]``, scores of the decoder's tokens in an
            encoder-decoder.
        method: The name of the method.
        tokens, prefix_tokens: Names for each sequence, with padding; None: no tokenizer was given.
        target_tokens: The tokens that were attributed, for each sequence.
        byte_level: Whether tokens are those of byte-level BPE, whose "Ġ" is a space.
    """

    scores: Tensor
    value: Tensor
    bias: Tensor
    prefix_scores: Tensor | None = None
    method: str = ""
    tokens: list[list[str]] | None = None
    prefix_tokens: list[list[str]] | None = None
    target_tokens: list[list[str]] | None = None
    byte_level: bool = False

    def label(
        self, tokenizer: Any, ids: Sequence[Tensor | None], targets: Sequence[Sequence[int]]
    ) -> None:
        """Names the tokens, by a tokenizer of transformers, and those that were attributed."""
        if tokenizer is None:
            return
        places = (("tokens", self.scores), ("prefix_tokens", self.prefix_scores))
        for (name, scores), own in zip(places, ids, strict=False):
            if own is None or scores is None:
                continue
            if own.size(-1) == scores.size(-1):  # the first stack may have read an image
                setattr(self, name, [readable_tokens(tokenizer, row) for row in own.tolist()])
        self.byte_level = is_byte_level(tokenizer)
        if any(targets) and self.tokens is not None and len(targets[0]) > 0:
            vocabulary = len(tokenizer)
            if all(i < vocabulary for row in targets for i in row):
                self.target_tokens = [readable_tokens(tokenizer, row) for row in targets]

    def by_words(self, words: Sequence[Sequence[int | None]] | None = None) -> Attribution:
        """Adds up the scores of each word's tokens.

        Args:
            words: Numbers of the tokens' words for each sequence, as ``word_ids()`` of a fast
                tokenizer gives them; tokens without a word (None) are left out. None: a word
                begins where the tokens' text has a space or a new line; special tokens are words.

        Returns:
            Scores ``[B, W]``, W the largest number of words; ``bias`` takes up what is left out.
            ``prefix_scores`` stay those of tokens.

        Raises:
            ValueError: Numbers are not as many as tokens, or the tokens' names are not known.

        Example:
            >>> import torch
            >>> from ikattn.explain import Attribution
            >>> scores = torch.tensor([[0.5, 1.0, 2.0, 0.25]])
            >>> found = Attribution(scores, torch.tensor([4.0]), torch.tensor([0.25]))
            >>> found.by_words([[None, 0, 0, 1]]).scores
            tensor([[3.0000, 0.2500]])
        """
        are_texts = words is None
        if words is None:
            names = self._names("by_words")
            words = [words_of_text(own, byte_level=self.byte_level) for own in names]
        return self._summed(words, are_texts=are_texts)

    def by_lines(self) -> Attribution:
        r"""Adds up the scores of each line's tokens.

        A token that ends a line belongs to it. In code and conversations lines often say more than
        words.

        Returns:
            Scores ``[B, n]``, n the largest number of lines; ``tokens`` are the lines' texts.

        Raises:
            ValueError: The tokens' names are not known.

        Example:
            >>> import torch
            >>> from ikattn.explain import Attribution
            >>> tokens = [["\u0120x", "=1", "\n", "\u0120y", "=2"]]
            >>> scores = torch.tensor([[0.5, 1.0, 0.0, 2.0, 0.25]])
            >>> Attribution(scores, scores.sum(-1), torch.zeros(1), tokens=tokens).by_lines().tokens
            [['x=1\n', 'y=2']]
        """
        lines = []
        for names in self._names("by_lines"):
            texts = texts_of(names, byte_level=self.byte_level)
            before = accumulate((text.count("\n") for text in texts[:-1]), initial=0)
            lines.append(list(before)[: len(names)])
        return self._summed(lines, are_texts=True)

    def _names(self, function: str) -> list[list[str]]:
        if self.tokens is None:
            raise ValueError(
                f"{function}: tokens must have names, got None for found.tokens: pass tokenizer= "
                "to attribute, or set them, a list for each sequence"
            )
        return self.tokens

    def _summed(self, words: Sequence[Sequence[int | None]], *, are_texts: bool) -> Attribution:
        """Adds up scores of tokens with the same number, named by their text or tokens' names."""
        S = self.scores.size(-1)
        if len(words) != self.scores.size(0) or any(len(own) != S for own in words):
            raise ValueError(
                f"by_words: words must hold {S} numbers for each of {self.scores.size(0)} "
                f"sequences, got {[len(own) for own in words]}"
            )
        numbers = [i for own in words for i in own if i is not None]
        if wrong := [i for i in numbers if not (isinstance(i, Integral) and i >= 0)]:
            raise ValueError(f"by_words: words must hold numbers from 0 or None, got {wrong[0]!r}")
        count = max(numbers, default=-1) + 1
        sums = self.scores.new_zeros(*self.scores.shape[:-1], count)
        names: list[list[str]] = [[""] * count for _ in words]
        for b, own in enumerate(words):
            shown = None if self.tokens is None else self.tokens[b]
            if shown is not None and are_texts:
                shown = texts_of(shown, byte_level=self.byte_level)
            for j, word in enumerate(own):
                if word is not None:
                    sums[b, ..., word] += self.scores[b, ..., j]
                    if shown is not None:
                        names[b][word] += shown[j] if are_texts else shown[j].removeprefix("##")
            if are_texts:
                names[b] = [name.strip(" ") for name in names[b]]
        rest = self.bias + self.scores.sum(-1) - sums.sum(-1)
        tokens = None if self.tokens is None else names
        return replace(self, scores=sums, bias=rest, tokens=tokens, byte_level=False)

    def ranked(self, top: int | None = None) -> list[list[RankedToken]]:
        """Sorts tokens of each sequence by the size of their score, the largest first.

        Args:
            top: The number of tokens of each sequence; None: all.

        Raises:
            ValueError: Targets are apart, or no tokenizer named the tokens.
        """
        if self.scores.dim() != 2:
            raise ValueError(
                f"ranked: scores must be [B, S], got {list(self.scores.shape)} of targets apart: "
                "attribute without each=True"
            )
        ranked = []
        for row, names in zip(self.scores, self._names("ranked"), strict=True):
            order = row.abs().argsort(descending=True, stable=True)[:top]
            ranked.append([RankedToken(names[i], float(row[i]), i) for i in order.tolist()])
        return ranked

    def __str__(self) -> str:
        """Returns a table of the scores of each token, with what they and the bias add up to."""
        parts = [("", self.scores, self.tokens)]
        if self.prefix_scores is not None:
            parts.append(("prefix ", self.prefix_scores, self.prefix_tokens))
        lines: list[tuple[str, ...]] = []
        for b in range(self.scores.size(0)):
            titles = ["score"]
            if self.scores.dim() == 3:
                n = self.scores.size(1)
                known = self.target_tokens
                titles = [str(i) for i in range(n)] if known is None else known[b]
                titles = [*titles, *[""] * (n - len(titles))]
            lines.append((f"sequence {b}", *titles))
            for kind, scores, names in parts:
                rows = scores[b] if scores.dim() == 3 else scores[b : b + 1]
                for j, row in enumerate(rows.mT.tolist()):
                    name = f"{j}" if names is None else f"{j} {names[b][j]}"
                    lines.append((kind + name, *(f"{x:.4f}" for x in row)))
            for kind, x in (("bias", self.bias), ("value", self.value)):
                lines.append((kind, *(f"{one:.4f}" for one in x[b].reshape(-1).tolist())))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
            for line in lines
        )

    def to_html(self, path: str | os.PathLike[str], *, title: str | None = None) -> int:
        """Writes one page that shows the text coloured by its scores, and loads nothing.

        Orange tokens are for the answer and blue ones against it. Where targets are apart, the
        page shows the scores of those that its reader chooses. Padding is left out.

        Args:
            path: The file, .html.
            title: The page's title, by default "Attribution".

        Returns:
            The size of the file in bytes.

        Raises:
            ValueError: There is no sequence, or tokens are not as many as scores.
            OSError: The path cannot be written, or the disk is full.

        Example:
            >>> import tempfile, torch
            >>> from ikattn.explain import Attribution
            >>> scores, tokens = torch.tensor([[0.5, -1.0]]), [["\u0120really", "\u0120late"]]
            >>> found = Attribution(scores, torch.tensor([0.0]), torch.tensor([0.5]), tokens=tokens)
            >>> path = tempfile.mkdtemp() + "/scores.html"
            >>> found.to_html(path, title="Why so late?") == len(open(path, "rb").read())
            True
        """
        contents = _contents(self)
        with whole_file(path) as file:
            write_mode(file, "attribution", title or "Attribution", lambda arrays: contents)
            return file.tell()

    def _repr_html_(self) -> str:
        """Returns the page of :meth:`to_html`, small; with targets summed where it is too large."""
        both = (self.scores, self.prefix_scores)
        size = 16 / 3 * sum(x.numel() for x in both if x is not None)  # base64 of float32
        if size < _LARGEST_FRAME:
            contents = _contents(self)
            written = BytesIO()
            write_mode(written, "attribution", "Attribution", lambda arrays: contents, kind="small")
            shown = contents["sequences"]
            longest = max(sum(len(text["texts"]) for text in own["texts"]) for own in shown)
            page = frame(written.getvalue(), "Attribution", min(560, 260 + 2 * longest))
            if len(page) < _LARGEST_FRAME:
                return page
        if self.scores.dim() == 3:
            names = ("scores", "prefix_scores", "value", "bias")
            apart: dict[str, Any] = {name: getattr(self, name) for name in names}
            sums: dict[str, Any] = {n: x if x is None else x.sum(1) for n, x in apart.items()}
            return replace(self, **sums)._repr_html_()
        return (
            f"<p>{html.escape(self.method or 'attribution')}: the page would take more than "
            f"{_LARGEST_FRAME / 1e6:g} MB here; to_html(path) writes it to a file.</p>"
        )


# --- The page


def _contents(found: Attribution) -> dict[str, Any]:
    """Gathers all that the page shows, for JSON.

    Raises:
        ValueError: There is no sequence, or shapes and lists do not fit.
    """
    scores = found.scores
    if scores.dim() not in (2, 3) or scores.size(0) == 0:
        raise ValueError(
            "to_html: scores must be [B, S] or [B, n, S] with B of 1 or more, "
            f"got {list(scores.shape)}"
        )
    shapes = {"value": found.value.shape, "bias": found.bias.shape}
    if found.prefix_scores is not None:
        shapes["prefix_scores"] = found.prefix_scores.shape[:-1]
    for name, shape in shapes.items():
        if shape != scores.shape[:-1]:
            raise ValueError(
                f"to_html: {name} must be of {list(scores.shape[:-1])} targets as scores are, "
                f"got {list(shape)}"
            )
    for name in ("tokens", "prefix_tokens", "target_tokens"):
        lists = getattr(found, name)
        if lists is not None and len(lists) != scores.size(0):
            raise ValueError(
                f"to_html: {name} must hold {scores.size(0)} lists, one a sequence, "
                f"got {len(lists)}"
            )
    return {
        "about": f"{found.method or 'attribution'} · ikattn {version()}",
        "apart": scores.dim() == 3,
        "sequences": [_sequence(found, b) for b in range(scores.size(0))],
    }


def _sequence(found: Attribution, b: int) -> dict[str, Any]:
    names = (found.target_tokens[b] or None) if found.target_tokens else None
    n = found.scores.size(1) if found.scores.dim() == 3 else 1
    if found.scores.dim() == 3 and names is not None:
        if len(names) > n:
            raise ValueError(
                f"to_html: target_tokens[{b}] must be {n} at most, as scores has rows, "
                f"got {len(names)}"
            )
        n = len(names)  # a sequence with fewer targets than others has 0 for the rest
    titles = {"": "Text"} if found.prefix_scores is None else {"": "Encoder", "prefix_": "Decoder"}
    parts = [_text(found, b, n, part, title) for part, title in titles.items()]
    opening = "".join(parts[0]["texts"]).strip()
    return {
        "title": " ".join(opening[:400].split())[:100],
        "targets": None if names is None else texts_of(names, byte_level=found.byte_level),
        "value": _numbers(found.value[b])[:n],
        "bias": _numbers(found.bias[b])[:n],
        "texts": parts,
    }


def _text(found: Attribution, b: int, n: int, part: str, title: str) -> dict[str, Any]:
    """Gathers a text without its padding, and the scores ``[n, S]`` of its tokens.

    part: What the names of its fields begin with, "prefix_" for the decoder's.
    """
    scores, tokens = getattr(found, f"{part}scores"), getattr(found, f"{part}tokens")
    rows = torch.atleast_2d(scores[b].detach().to("cpu", torch.float32))[:n]
    S = rows.size(1)
    names = [str(j) for j in range(S)] if tokens is None else tokens[b]
    if len(names) != S:
        raise ValueError(
            f"to_html: {part}tokens[{b}] must hold the {S} tokens that have scores, got "
            f"{len(names)}"
        )
    has_part = (rows != 0).any(0).tolist()  # NaN, too
    span = text_span(names, has_part)
    shown = rows[:, span].contiguous()
    return {
        "title": title,
        "texts": texts_of(names[span], byte_level=found.byte_level),
        "special": [j for j, name in enumerate(names[span]) if is_special(name)],
        "first": span.start,
        "padding": S - shown.size(1),
        "scores": as_base64(shown),
    }


def _numbers(x: Tensor) -> list[float | None]:
    numbers = x.detach().cpu().double().reshape(-1).tolist()
    return [number if math.isfinite(number) else None for number in numbers]
