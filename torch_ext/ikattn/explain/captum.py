"""Captum: attributions that are called as its methods are, with ids of tokens as inputs.

Sizes: B batch, S tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from ikattn.explain.attribution._attribute import attribute
from ikattn.explain.attribution._linear import Activation
from ikattn.explain.attribution._model import logits_of

__all__ = ["ALTILogit", "DecompX", "Rollout"]

try:
    from captum.attr import Attribution as Method
except ModuleNotFoundError:  # the classes work without it
    Method = object


Inputs = TypeVar("Inputs", Tensor, tuple[Tensor, ...])
Target: TypeAlias = "int | tuple[int, ...] | Sequence[int | tuple[int, ...]] | Tensor | None"


class _OfTokens(Method):  # type: ignore[misc]
    """A method of :func:`ikattn.attribute`; a ``captum.attr.Attribution`` where captum is."""

    def __init__(self, forward_func: nn.Module, method: str, **options: Any) -> None:
        if not isinstance(forward_func, nn.Module):
            raise TypeError(
                f"{self}: forward_func must be a torch.nn.Module, got {type(forward_func).__name__}"
            )
        self.forward_func = forward_func
        self.method = method
        self.options = options

    def attribute(
        self, inputs: Inputs, target: Target = None, additional_forward_args: Any = None
    ) -> Inputs:
        """Scores each token by what it adds to a number that the model gives.

        The model is called as captum calls it, ``forward(*inputs, *additional_forward_args)``.

        Args:
            inputs: Ids of tokens, ``[B, S]``. Of an encoder-decoder those of the encoder; or both
                in a tuple, if they are the first arguments of ``forward``, in any order, and are
                named ``input_ids`` and ``decoder_input_ids``.
            target: A place in the output, as captum has it: of ``[B, V]`` a class, of ``[B, L, V]``
                a tuple of a position, with padding, and a class; or a list of one for each example.
                None: the output is ``[B]`` or ``[B, 1]``. The logit at a position of a decoder is
                that of the next token.
            additional_forward_args: An argument of ``forward`` or a tuple of them, such as the
                attention mask.

        Returns:
            Scores of the shape of each input, float32, or float64 where the model is.

        Raises:
            ValueError: Inputs that are no ids, or a target that the output has not.
            RuntimeError: Errors of :func:`ikattn.attribute`.
        """
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        for ids in given:
            if ids.dim() != 2 or ids.is_floating_point():
                raise ValueError(
                    f"{self}: inputs must be ids of tokens, integers [B, S], got "
                    f"{ids.dtype} {list(ids.shape)}"
                )
        more = additional_forward_args
        more = () if more is None else more if isinstance(more, tuple) else (more,)
        named = inspect.signature(self.forward_func.forward).bind(*given, *more).arguments

        chosen = partial(_chosen, target=target)
        found = attribute(self.forward_func, named, chosen, method=self.method, **self.options)
        names = list(named)[: len(given)]
        own = {names[0]: found.scores}
        if found.prefix_scores is not None:
            own = {"input_ids": found.scores, "decoder_input_ids": found.prefix_scores}
        for name, ids in zip(names, given, strict=True):
            if name not in own or own[name].shape != ids.shape:
                raise ValueError(
                    f"{self}: inputs must be what {' and '.join(own)} hold, the tokens that blocks "
                    f"read, got {name!r} of shape {list(ids.shape)}"
                )
        return tuple(own[name] for name in names) if isinstance(inputs, tuple) else own[names[0]]

    def __repr__(self) -> str:
        return type(self).__name__


class DecompX(_OfTokens):
    """DecompX (Modarressi et al., ACL 2023): the part of the logit that is linear in a token.

    Args:
        forward_func: A module in eval mode, not a function.
        activation: "slope" or "tangent", as in :func:`ikattn.attribute`.

    Example:
        >>> import pytest, torch
        >>> from ikattn.explain.captum import DecompX
        >>> transformers = pytest.importorskip("transformers")
        >>> sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, vocab_size=40)
        >>> config = transformers.BertConfig(**sizes, num_attention_heads=2, num_labels=3)
        >>> model = transformers.BertForSequenceClassification(config).eval()
        >>> ids, mask = torch.tensor([[5, 6, 7, 0]]), torch.tensor([[1, 1, 1, 0]])
        >>> DecompX(model).attribute(ids, target=1, additional_forward_args=mask).shape
        torch.Size([1, 4])
    """

    def __init__(self, forward_func: nn.Module, activation: Activation = "slope") -> None:
        super().__init__(forward_func, "decompx", activation=activation)


class ALTILogit(_OfTokens):
    """ALTI-Logit (Ferrando et al., ACL 2023): what attention writes into the logit.

    Args:
        forward_func: A decoder in eval mode, whose blocks add to a residual stream.
    """

    def __init__(self, forward_func: nn.Module) -> None:
        super().__init__(forward_func, "alti_logit")


class Rollout(_OfTokens):
    """The rollout of a map: shares of the tokens, which add up to 1.

    Args:
        forward_func: A module in eval mode.
        map: "alti", "encoder", "value_zeroing" or another that its blocks have.
    """

    def __init__(self, forward_func: nn.Module, map: str = "alti") -> None:
        super().__init__(forward_func, f"rollout:{map}")


def _chosen(output: Any, target: Target) -> Tensor:
    """Returns the numbers ``[B]`` that captum's target stands for."""
    values: Any = output if isinstance(output, Tensor) else logits_of(output, "attribute")
    values = torch.atleast_1d(values)
    B, *sizes = values.shape
    if target is None and values.numel() == B:
        only: Tensor = values.reshape(B)
        return only
    index: Any = target
    if isinstance(target, Tensor):  # one number is that of all examples
        index = target.item() if target.numel() == 1 else target.tolist()
    indices = index if isinstance(index, list) else [index] * B
    places = [i if isinstance(i, tuple) else (i,) for i in indices]
    inside = all(
        len(place) == len(sizes)
        and all(type(i) is int and -S <= i < S for i, S in zip(place, sizes, strict=True))
        for place in places
    )
    if len(places) != B or not inside:
        raise ValueError(
            f"attribute: target must be a place in the output {list(values.shape)} after B, "
            f"or a list of one for each of the {B} examples, got {target!r}"
        )
    return torch.stack([values[b][place] for b, place in enumerate(places)])
