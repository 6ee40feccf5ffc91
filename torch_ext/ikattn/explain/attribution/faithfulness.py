"""How faithful scores of tokens are: what the model says without the tokens they name.

Sizes: B batch, S tokens.
Sources: J. DeYoung et al., "ERASER", ACL 2020, for comprehensiveness, sufficiency and AOPC.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ikattn.explain.attribution._model import logits_of

_CALLER = "faithfulness"
Replacement = Literal["mask", "zero", "drop"]


@dataclass(frozen=True)
class Faithfulness:
    """Changes of a class when the tokens of highest score go, or stay alone.

    Probabilities are those of the class that the model gives the whole text.

    Attributes:
        shares: The shares of tokens taken.
        comprehensiveness: ``[N, K]``, of each text and share: how much less likely the class is
            without these tokens. Higher is better.
        sufficiency: ``[N, K]``, how much less likely it is with these alone. Lower is better.
        unchanged: ``[N, K]``, bool: without these tokens the model still gives the same class.
    """

    shares: tuple[float, ...]
    comprehensiveness: Tensor
    sufficiency: Tensor
    unchanged: Tensor

    @property
    def aopc(self) -> float:
        """Comprehensiveness, averaged over shares and texts."""
        return float(self.comprehensiveness.mean())

    @property
    def mean_sufficiency(self) -> float:
        """Sufficiency, averaged over shares and texts."""
        return float(self.sufficiency.mean())

    @property
    def accuracy(self) -> Tensor:
        """For each share the part of the texts whose class stays, ``[K]``."""
        return self.unchanged.double().mean(0)

    def __str__(self) -> str:
        low, high = self.interval()
        scores = f"AOPC {self.aopc:.3f} ({low:.3f} to {high:.3f})"
        return f"{scores}, sufficiency {self.mean_sufficiency:.3f}, {len(self.unchanged)} texts"

    def interval(
        self, draws: int = 1000, level: float = 0.95, seed: int = 0
    ) -> tuple[float, float]:
        """Returns an interval of ``aopc``, by bootstrap over texts."""
        each = self.comprehensiveness.double().mean(1)
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(len(each), (draws, len(each)), generator=generator)
        means = each[chosen].mean(1)
        low, high = (1 - level) / 2, (1 + level) / 2
        ends = torch.quantile(means, torch.tensor([low, high], dtype=means.dtype))
        return float(ends[0]), float(ends[1])


@torch.no_grad()
def faithfulness(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    scores: Tensor,
    *,
    shares: Sequence[float] = (0.1, 0.2, 0.3, 0.5),
    replace: Replacement = "mask",
    mask_id: int | None = None,
    keep: Tensor | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Faithfulness:
    """Takes the tokens of highest score away, and all others, and looks at what the model says.

    Args:
        model: Gives logits ``[B, V]`` of classes; in eval mode. Of other models see ``output``.
        inputs: ``input_ids`` ``[B, S]``, ``attention_mask`` where there is padding, and others.
        scores: ``[B, S]``, for example those of :func:`ikattn.attribute`.
        shares: Shares of the tokens that may go, rounded up; the same number for every method, so
            that methods can be compared.
        replace: "mask": the token becomes ``mask_id``; "zero": its word embedding becomes 0;
            "drop": it is left out, and those after it move up.
        mask_id: The mask token's id, for "mask".
        keep: bool ``[B, S]``, True = never goes, such as special tokens; padding never counts.
        output: Makes logits ``[B, V]`` of the model's output: for a model of text, for example,
            ``lambda out: out.logits[:, -1]``, those of the next token.

    Returns:
        Numbers for each text and share.

    Raises:
        ValueError: Shapes that do not fit, an unknown name, shares outside (0, 1].

    Example:
        >>> import pytest, torch
        >>> transformers = pytest.importorskip("transformers")
        >>> sizes = dict(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
        >>> config = transformers.BertConfig(**sizes, intermediate_size=32, vocab_size=9)
        >>> model = transformers.BertForSequenceClassification(config).eval()
        >>> ids = torch.tensor([[1, 2, 3, 4, 5]])
        >>> from ikattn.explain import faithfulness
        >>> found = faithfulness(model, {"input_ids": ids}, torch.rand(1, 5), mask_id=8)
        >>> found.comprehensiveness.shape
        torch.Size([1, 4])
    """
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if not isinstance(scores, Tensor):
        raise ValueError(f"{_CALLER}: scores must be a tensor, got {type(scores).__name__}")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or scores.shape != ids.shape:
        raise ValueError(
            f"{_CALLER}: scores must be [B, S] as inputs['input_ids'] is, got {list(scores.shape)}"
            f" and {list(ids.shape) if isinstance(ids, Tensor) else type(inputs).__name__}"
        )
    if model.training:
        raise ValueError(
            f"{_CALLER}: model must be in eval mode, got {type(model).__name__} in training: call "
            "model.eval()"
        )
    if ids.numel() == 0:
        raise ValueError(f"{_CALLER}: inputs['input_ids'] must hold a token, got {list(ids.shape)}")
    if replace not in ("mask", "zero", "drop"):
        raise ValueError(f'{_CALLER}: replace must be "mask", "zero" or "drop", got {replace!r}')
    if replace == "mask" and mask_id is None:
        raise ValueError(
            f'{_CALLER}: replace="mask" needs mask_id, the id of the mask token, got None: '
            'give it, or take replace="zero" or "drop"'
        )
    if not shares or not all(0 < share <= 1 for share in shares):
        raise ValueError(f"{_CALLER}: shares must be in (0, 1], got {list(shares)}")
    mask = inputs.get("attention_mask")
    there = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    if keep is not None and (keep.dtype != torch.bool or keep.shape != ids.shape):
        raise ValueError(
            f"{_CALLER}: keep must be bool {list(ids.shape)}, got {keep.dtype} {list(keep.shape)}"
        )
    free = there if keep is None else there & ~keep
    if not bool(free.any(1).all()):
        texts = (~free.any(1)).nonzero()[:, 0].tolist()
        raise ValueError(
            f"{_CALLER}: keep must leave a token that may go in every text, got none in {texts}"
        )
    asked = _Asked(model, inputs, there, replace, mask_id, output)
    if not bool(scores[free].isfinite().all()):
        raise ValueError(f"{_CALLER}: scores must be finite, got {scores[~scores.isfinite()][0]}")
    before, classes = asked.without(None)
    order = scores.masked_fill(~free, -math.inf).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1)  # 0 for the highest
    count = free.sum(1, keepdim=True)
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    for share in shares:
        number = (count * share).ceil().long()
        best = free & (rank < number)
        without, now = asked.without(best, classes)
        alone, _ = asked.without(free & ~best, classes)
        rows.append((before - without, before - alone, now == classes))
    found = [torch.stack(each, 1) for each in zip(*rows, strict=True)]
    return Faithfulness(tuple(shares), *found)


@dataclass(frozen=True)
class _Asked:
    """A model and its inputs, of which tokens are taken away as ``replace`` says."""

    model: nn.Module
    inputs: Mapping[str, Tensor]
    there: Tensor  # bool [B, S], no padding
    replace: Replacement
    mask_id: int | None
    output: Callable[[Any], Tensor] | None

    def without(self, gone: Tensor | None, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns probabilities ``[B]`` of classes (None: the likeliest), and the likeliest."""
        logits = self._logits(gone)
        if logits.dim() != 2:
            raise ValueError(
                f"{_CALLER}: model, or output, must give logits of classes, [B, V], got "
                f"{list(logits.shape)}"
            )
        probabilities = logits.double().softmax(-1)
        likeliest = probabilities.argmax(-1)
        chosen = likeliest if classes is None else classes
        return probabilities.gather(1, chosen[:, None])[:, 0], likeliest

    def _logits(self, gone: Tensor | None) -> Tensor:
        """Returns logits without tokens; None: of the texts as they are, made in the same way."""
        ids, is_whole = self.inputs["input_ids"], gone is None
        gone = torch.zeros_like(self.there) if gone is None else gone
        if self.replace == "mask":
            assert self.mask_id is not None
            return self._call({**self.inputs, "input_ids": ids.masked_fill(gone, self.mask_id)})
        if self.replace == "drop":
            return torch.cat([self._dropped(gone, b) for b in range(len(ids))])
        vectors = self.model.get_input_embeddings()(ids)  # type: ignore[operator]
        changed = {**self.inputs, "inputs_embeds": vectors.masked_fill(gone.unsqueeze(-1), 0)}
        del changed["input_ids"]
        found = self._call(changed)
        if is_whole:
            self._check_vectors(found)
        return found

    def _check_vectors(self, found: Tensor) -> None:
        logits = self._call(self.inputs)
        size = logits.abs().max().clamp_min(1e-30)
        if found.shape != logits.shape or float((found - logits).abs().max() / size) > 1e-2:
            raise ValueError(
                f"{_CALLER}: {type(self.model).__name__} gives other logits for the vectors of "
                "its input embeddings, as inputs_embeds, than for input_ids: take "
                'replace="mask" or "drop"'
            )

    def _call(self, inputs: Mapping[str, Tensor]) -> Tensor:
        made = self.model(**inputs)
        return logits_of(made, _CALLER) if self.output is None else self.output(made)

    def _dropped(self, gone: Tensor, b: int) -> Tensor:
        kept = self.there[b] & ~gone[b]
        if not bool(kept.any()):
            raise ValueError(f'{_CALLER}: replace="drop" leaves nothing of text {b}: give keep')
        width = self.inputs["input_ids"].shape[1:]
        own = {name: x[b : b + 1] for name, x in self.inputs.items()}
        of_source = {
            n for n, x in own.items() if not n.startswith("decoder_") and x.shape[1:] == width
        }
        return self._call({n: x[:, kept] if n in of_source else x for n, x in own.items()})
