"""What :func:`ikattn.attribute` found."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ikattn.analysis.attribution.page import frame, write_page
from ikattn.analysis.through_layers import RankedToken
from ikattn.analysis.tokens import readable_tokens

__all__ = ["Attribution"]


@dataclass
class Attribution:
    """The part that each token of the input has in a number that the model gave.

    Attributes:
        scores: ``[B, S]``, or ``[B, n, S]`` for n targets apart. Padding has 0, unless
            the target reads it.
        value: ``[B]`` or ``[B, n]``, what was attributed: the sum of the targets' logits.
        bias: ``[B]`` or ``[B, n]``: ``value`` less all scores. With "decompx" what biases add; with
            "alti_logit" what feed-forward parts, the token's own vector and biases add. NaN where
            scores are shares that add up to 1 ("rollout").
        prefix_scores: Of an encoder-decoder those of the decoder's tokens, ``[B, T]``.
        method: As it was asked for.
        tokens, prefix_tokens: For each sequence, with padding; None: no tokenizer was given.
        target_tokens: The tokens that were attributed, for each sequence.
    """

    scores: Tensor
    value: Tensor
    bias: Tensor
    prefix_scores: Tensor | None = None
    method: str = ""
    tokens: list[list[str]] | None = None
    prefix_tokens: list[list[str]] | None = None
    target_tokens: list[list[str]] | None = None

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
        if any(targets) and self.tokens is not None and len(targets[0]) > 0:
            vocabulary = len(tokenizer)
            if all(i < vocabulary for row in targets for i in row):
                self.target_tokens = [readable_tokens(tokenizer, row) for row in targets]

    def by_words(self, words: Sequence[Sequence[int | None]]) -> Attribution:
        """The same with scores of words: sums over their tokens.

        Args:
            words: For each sequence the number of each token's word, as ``word_ids()`` of a fast
                tokenizer gives them; tokens without a word (None) are left out.

        Returns:
            Scores ``[B, W]``, W the largest number of words; ``bias`` takes up what is left out.

        Raises:
            ValueError: As many numbers as tokens are needed.

        Example:
            >>> import torch
            >>> from ikattn.analysis import Attribution
            >>> scores = torch.tensor([[0.5, 1.0, 2.0, 0.25]])
            >>> found = Attribution(scores, torch.tensor([4.0]), torch.tensor([0.25]))
            >>> found.by_words([[None, 0, 0, 1]]).scores
            tensor([[3.0000, 0.2500]])
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
            for j, word in enumerate(own):
                if word is not None:
                    sums[b, ..., word] += self.scores[b, ..., j]
                    if self.tokens is not None:
                        names[b][word] += self.tokens[b][j].removeprefix("##")
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
        if self.scores.dim() != 2 or self.tokens is None:
            raise ValueError("ranked: scores must be [B, S], and their tokens known")
        ranked = []
        for row, names in zip(self.scores, self.tokens, strict=True):
            order = row.abs().argsort(descending=True, stable=True)[:top]
            ranked.append([RankedToken(names[i], float(row[i]), i) for i in order.tolist()])
        return ranked

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
            >>> from ikattn.analysis import Attribution
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
