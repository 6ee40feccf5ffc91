"""Inseq: attributions as methods of its registry, so that its outputs, views and files hold them.

Sizes: B batch, S tokens of the source, L of the target, n target tokens that are attributed.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ikattn._optional import optional
from ikattn.explain.attribution._attribute import attribute

__all__ = ["register"]

_ROLLED = ("alti", "encoder", "with_norm", "with_residual", "summed", "weights", "value_zeroing")
METHODS = ("decompx", "alti_logit", *(f"rollout:{map}" for map in _ROLLED))


@functools.cache
def register() -> tuple[str, ...]:
    """Makes the methods of :func:`ikattn.attribute` known to inseq, "ikattn_decompx" and so on.

    A score is a token's part in the logit of a target token. Each sequence is attributed without
    its padding. "decompx" takes one forward pass of it and one backward pass for each target token;
    the others begin anew for each target token. Encoder-decoders have "decompx" alone.

    Returns:
        The names.

    Raises:
        ModuleNotFoundError: inseq is missing.

    Example:
        >>> import pytest
        >>> inseq = pytest.importorskip("inseq")
        >>> from ikattn.explain.inseq import register
        >>> "ikattn_decompx" in register()
        True
        >>> "ikattn_decompx" in inseq.list_feature_attribution_methods()
        True
    """
    optional("inseq", "ikattn.explain.inseq", "inseq")
    names = tuple(f"ikattn_{method}" for method in METHODS)
    base = _base()
    for name in names:
        # inseq finds the subclasses of its own class, and does not keep them alive
        _REGISTERED.append(type(name, (base,), {"method_name": name}))
    return names


_REGISTERED: list[type] = []


class PaddedIds(NamedTuple):
    """The tokens of a batch, and which of them are no padding, both ``[B, S]``."""

    ids: Tensor
    mask: Tensor

    def of(self, b: int, end: int | None = None) -> tuple[Tensor, Tensor]:
        """Returns the ids of a sequence without padding, ``[1, S_b]``, and their places."""
        at = self.mask[b, :end].nonzero()[:, 0]
        return self.ids[b, at][None], at


class StepScores(NamedTuple):
    """Scores of target tokens on the CPU; NaN where nothing predicts one, 0 at padding."""

    source: Tensor | None  # [B, n, S], of an encoder's tokens; None where there is no encoder
    target: Tensor  # [B, n, L], of the tokens before the target


def step_scores(
    model: nn.Module,
    method: str,
    source: PaddedIds | None,
    target: PaddedIds,
    first: int,
    last: int,
    **options: Any,
) -> StepScores:
    """Scores target tokens from ``first`` to before ``last``, counted with padding.

    The source has the tokens of an encoder, None: there is none; the target those that the decoder
    reads. Method and options are those of :func:`ikattn.attribute`. ValueError tells of scores of
    tokens that come after their target.
    """
    B, L = target.ids.shape
    sizes = [None if source is None else source.ids.size(1), L]
    made = [None if S is None else torch.full((B, last - first, S), torch.nan) for S in sizes]
    for b in range(B):
        ids, at = target.of(b, last)
        steps = at[1:] - first  # nothing predicts the first token
        steps = steps[steps >= 0].cpu()
        if not len(steps):
            continue
        inputs, places = {"input_ids": ids}, [at, at]
        if source is not None:
            source_ids, places[0] = source.of(b)
            inputs = {"input_ids": source_ids, "decoder_input_ids": ids}
        rows = _rows(model, method, inputs, len(steps), options)
        for whole, own, where in zip(made, rows, places, strict=True):
            if whole is not None and own is not None:
                padded = torch.zeros(len(steps), whole.size(-1))
                padded[:, where.cpu()] = own.detach().to("cpu", torch.float32)
                whole[b, steps] = padded
    assert made[1] is not None
    return StepScores(made[0], made[1])


def _rows(
    model: nn.Module, method: str, inputs: dict[str, Tensor], n: int, options: dict[str, Any]
) -> StepScores:
    """Scores the last n tokens of one sequence: ``[n, S]`` and ``[n, L]``."""
    L = inputs.get("decoder_input_ids", inputs["input_ids"]).size(1)
    if method == "decompx":
        found = attribute(model, inputs, slice(L - n, L), each=True, **options)
        rows = StepScores(None, found.scores[0])
        if found.prefix_scores is not None:
            rows = StepScores(found.scores[0], found.prefix_scores[0])
    else:
        rows = StepScores(None, torch.zeros(n, L))
        for row, t in enumerate(range(L - n, L)):
            before = {**inputs, "input_ids": inputs["input_ids"][:, : t + 1]}
            found = attribute(model, before, slice(t, t + 1), method=method, **options)
            rows.target[row, : t + 1] = found.scores[0]
    later = rows.target.triu(L - n)
    if bool(later.any()):
        raise ValueError(
            f"ikattn.explain.inseq: {type(model).__name__} reads tokens after the one that it "
            f"predicts, whose scores are up to {float(later.abs().max()):.3g}; inseq attributes "
            "those before"
        )
    return rows


def _base() -> type:
    """Makes a class of inseq's registry without a name, the parent of all methods."""
    from inseq.attr.feat import FeatureAttribution
    from inseq.attr.feat.attribution_utils import check_attribute_positions
    from inseq.attr.step_functions import get_step_function
    from inseq.data import CoarseFeatureAttributionStepOutput
    from inseq.utils import Registry

    class Propagation(FeatureAttribution, Registry):  # type: ignore[misc]
        """Attribution of all steps at once; inseq goes through them and takes one at a time."""

        method_name: str

        def prepare_and_attribute(
            self, *args: Any, attributed_fn: Any = None, **kwargs: Any
        ) -> Any:
            known = [get_step_function(name) for name in ("logit", "probability")]
            if attributed_fn not in (None, "logit", *known):
                raise ValueError(
                    f'{self.method_name}: attributed_fn must be "logit" or left out, '
                    f"got {attributed_fn!r}"
                )
            return super().prepare_and_attribute(*args, attributed_fn=known[0], **kwargs)

        def get_attribution_args(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            own = {name: x for name, x in kwargs.items() if name == "activation"}
            return own, {name: x for name, x in kwargs.items() if name not in own}

        def attribute(
            self,
            batch: Any,
            attributed_fn: Any,
            attr_pos_start: Any,
            attr_pos_end: Any,
            **kwargs: Any,
        ) -> Any:
            is_seq2seq = self.attribution_model.is_encoder_decoder
            size = batch.max_generation_length
            first, last = check_attribute_positions(size, attr_pos_start, attr_pos_end)
            self._first = first
            self._has_prefix = not is_seq2seq or kwargs["attribute_target"]
            self._scores = step_scores(
                self.attribution_model.model,
                self.method_name.removeprefix("ikattn_"),
                PaddedIds(batch.source_ids, batch.source_mask) if is_seq2seq else None,
                PaddedIds(batch.target_ids, batch.target_mask),
                first,
                min(last + 1, size) if is_seq2seq else last,  # inseq goes as far
                **kwargs["attribution_args"],
            )
            try:
                return super().attribute(batch, attributed_fn, first, last, **kwargs)
            finally:
                del self._scores

        def filtered_attribute_step(
            self,
            batch: Any,
            target_ids: Any,
            attributed_fn: Any,
            target_attention_mask: Any,
            **kwargs: Any,
        ) -> Any:
            self._step = batch.target_ids.size(1)
            self._is_active = target_attention_mask.flatten().bool().cpu()
            return super().filtered_attribute_step(
                batch, target_ids, attributed_fn, target_attention_mask, **kwargs
            )

        def attribute_step(self, main_args: Any, attribution_args: Any) -> Any:
            step = self._step - self._first
            source, target = self._scores
            return CoarseFeatureAttributionStepOutput(
                source_attributions=None if source is None else source[self._is_active, step],
                target_attributions=(
                    target[self._is_active, step, : self._step] if self._has_prefix else None
                ),
                step_scores={},
            )

    return Propagation
