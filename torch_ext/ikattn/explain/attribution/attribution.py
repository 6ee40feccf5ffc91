"""What :func:`ikattn.attribute` found."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor

from ikattn.explain.attribution.page import frame, write_page
from ikattn.maps.importance import RankedToken
from ikattn.maps.tokens import is_byte_level, readable_tokens
from ikattn.maps.words import texts_of, words_of_text

__all__ = ["Attribution"]


@dataclass
class Attribution:
    """The part that each token of the input has in a number that the model gave.

    ``print`` shows it as a table.

    Attributes:
        scores: ``[B, S]``, or ``[B, n, S]`` for n targets apart. Padding has 0, unless
            the target reads it.
        value: ``[B]`` or ``[B, n]``, what was attributed: the sum of the targets' logits.
        bias: ``[B]`` or ``[B, n]``: ``value`` less all scores. With "decompx" what biases add, and
            vectors that the model puts beside the tokens it was given; with
            "alti_logit" what feed-forward parts, the token's own vector and biases add. NaN where
            scores are shares that add up to 1 ("rollout").
        prefix_scores: Of an encoder-decoder those of the decoder's tokens, ``[B, L]``.
        method: As it was asked for.
        tokens, prefix_tokens: For each sequence, with padding; None: no tokenizer was given.
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
        """The same with scores of words: sums over their tokens.

        Args:
            words: For each sequence the number of each token's word, as ``word_ids()`` of a fast
                tokenizer gives them; tokens without a word (None) are left out. None: a word
                begins where the tokens' text has a space or a new line; special tokens are words.

        Returns:
            Scores ``[B, W]``, W the largest number of words; ``bias`` takes up what is left out.
            ``prefix_scores`` stay those of tokens.

        Raises:
            ValueError: As many numbers as tokens are needed, or the tokens' names.

        Example:
            >>> import torch
            >>> from ikattn.explain import Attribution
            >>> scores = torch.tensor([[0.5, 1.0, 2.0, 0.25]])
            >>> found = Attribution(scores, torch.tensor([4.0]), torch.tensor([0.25]))
            >>> found.by_words([[None, 0, 0, 1]]).scores
            tensor([[3.0000, 0.2500]])
        """
        if words is None:
            names = self._names("by_words")
            words = [words_of_text(own, byte_level=self.byte_level) for own in names]
            return self._summed(words, are_texts=True)
        return self._summed(words, are_texts=False)

    def by_lines(self) -> Attribution:
        r"""The same with scores of the text's lines: sums over their tokens.

        A token that ends a line belongs to it. Of code, or of a conversation, lines often say more
        than words.

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
        """Sums over tokens with the same number.

        Args:
            words: For each sequence, the numbers.
            are_texts: Whether they are named by their text; otherwise by their tokens' names.
        """
        S = self.scores.size(-1)
        if len(words) != self.scores.size(0) or any(len(own) != S for own in words):
            raise ValueError(
                f"by_words: words must hold {S} numbers for each of {self.scores.size(0)} sequences"
            )
        count = max((i + 1 for own in words for i in own if i is not None), default=0)
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
        return Attribution(
            sums,
            self.value,
            rest,
            self.prefix_scores,
            self.method,
            tokens,
            self.prefix_tokens,
            self.target_tokens,
        )

    def ranked(self, top: int | None = None) -> list[list[RankedToken]]:
        """Tokens of each sequence by the size of their score, the largest first.

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
        """A table of the scores of each token, with what they and the bias add up to."""
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
            path: Of the file, .html.
            title: Of the page, by default "Attribution".

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
        return write_page(self, path, title)

    def _repr_html_(self) -> str:
        """The page of :meth:`to_html`, small; the coloured text alone where it is too large."""
        return frame(self)
