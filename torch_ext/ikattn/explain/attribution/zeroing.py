"""Value zeroing: how much a block's output changes where one token's value is missing.

Sizes: B batch, N blocks, K tokens whose values are zeroed together, L = S tokens, D model size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ikattn._memory import takes_memory_for
from ikattn._precision import widened
from ikattn.explain.attribution._model import Stack, alone, sequences_of, takes, the_stack_of
from ikattn.explain.attribution._torch import ATTENTION, body_of, first_output, hooked, name_of
from ikattn.maps.summary import row_shares
from ikattn.recorder.sums.tensors import first_tensor

_CALLER = "value_zeroing"
_KEEPING = ("dropout", "to", "type", "float", "type_as", "view", "reshape", "nan_to_num", "getitem")


@torch.no_grad()
@takes_memory_for("the outputs without a token's value")
def value_zeroing(model: nn.Module, inputs: Mapping[str, Tensor], *, together: int = 32) -> Tensor:
    r"""Measures how far a token's output turns where another token's value is zero.

    .. math:: c_{ij} = \frac{1 - \cos(y_i, y_i^{\neg j})}{\sum_k 1 - \cos(y_i, y_i^{\neg k})}

    y is what a block makes, :math:`y^{\neg j}` what it makes of the same input where the values of
    token j are zero in every head, while the attention weights stay. The whole block counts: norms,
    residual and the feed-forward part as it is. Time S forward passes.

    Source: H. Mohebbi, W. Zuidema, G. Chrupała, A. Alishahi, "Quantifying Context Mixing in
    Transformers", EACL 2023, equation 1.

    Args:
        model: A model in eval mode, one stack of blocks.
        inputs: Tensors of one batch, by name; ``mask`` and ``src_mask`` of two axes are of pairs.
        together: How many tokens go together.

    Returns:
        ``[N, B, L, S]``, rows add up to 1; :func:`ikattn.rollout` multiplies them. Rows and columns
        of padding (``attention_mask``, ``src_key_padding_mask``) are 0.

    Raises:
        ValueError: Several stacks of blocks, a model in training.
        NotImplementedError: A block's attention was not seen.

    Example:
        >>> import torch
        >>> from ikattn.explain import value_zeroing
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> maps = value_zeroing(model, {"src": torch.randn(1, 5, 16)})
        >>> torch.allclose(maps.sum(-1), torch.ones(2, 1, 5))
        True
    """
    stack = the_stack_of(model, inputs, _CALLER)
    if together < 1:
        raise ValueError(f"{_CALLER}: together must be 1 or more, got {together}")
    found = []
    with alone(model, _CALLER):
        for item in sequences_of(inputs):
            maps = torch.stack([each.maps(together) for each in _runs(model, item, stack)])
            away = _padding_of(item)
            if away is not None:
                maps = maps.masked_fill(away | away[:, None], 0)
            found.append(row_shares(maps))
    return torch.stack(found, 1)


def _padding_of(inputs: Mapping[str, Any]) -> Tensor | None:
    """Returns which tokens are padding, bool ``[S]``, by transformers' mask or torch's."""
    for name, mask in inputs.items():
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            continue
        if name == "attention_mask":
            return mask[0] == 0
        if name.endswith("padding_mask"):
            return mask[0] == -torch.inf if mask.is_floating_point() else mask[0].bool()
    return None


class _Run(NamedTuple):
    """A block's call of one sequence."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def maps(self, together: int) -> Tensor:
        """Returns cosine distances, ``[L, S]``."""
        x = first_tensor(self.args, self.kwargs)
        if x is None or x.dim() != 3:
            got = "no tensor" if x is None else list(x.shape)
            raise NotImplementedError(
                f"{_CALLER}: blocks must be called with [B, L, D], and {type(self.block).__name__}"
                f" was with {got}"
            )
        plain = self._output(self.args, self.kwargs)
        others = [each for each in (*self.args, *self.kwargs.values()) if each is not x]
        if any(  # must be of the size of the batch
            isinstance(each, Tensor) and each.dim() > 2 and each.size(0) not in (1, x.size(1))
            for each in others
        ):
            together = 1
        columns = []
        for first in range(0, x.size(1), together):
            keys = torch.arange(first, min(first + together, x.size(1)), device=x.device)
            args, kwargs = self._many(len(keys))
            with _Zeroed(keys) as zeroed:
                output = self._output(args, kwargs).detach()
            if not zeroed.has_seen:
                raise NotImplementedError(
                    f"{_CALLER}: {type(self.block).__name__} called no attention whose weights "
                    "are told from its values: neither scaled_dot_product_attention nor a product "
                    "with what softmax gave"
                )
            columns.append(1 - F.cosine_similarity(output, plain, dim=-1))
        distances = torch.cat(columns).mT
        # pairs that a mask hides differ by rounding alone
        return distances.masked_fill(distances < 16 * torch.finfo(distances.dtype).eps, 0)

    def _many(self, count: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Repeats the arguments of one sequence, such as its vectors and its padding."""

        def many(each: Any) -> Any:
            is_of_one = isinstance(each, Tensor) and each.dim() > 1 and each.size(0) == 1
            return each.expand(count, *each.shape[1:]) if is_of_one else each

        kwargs = {name: many(each) for name, each in self.kwargs.items()}
        return tuple(map(many, self.args)), kwargs

    def _output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return widened(first_output(self.block(*args, **kwargs)))


def _runs(model: nn.Module, inputs: dict[str, Any], stack: Stack) -> list[_Run]:
    runs: list[_Run] = []

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        runs.append(_Run(module, args, dict(kwargs)))

    options = {"use_cache": False} if takes(model, "use_cache") else {}
    with hooked(stack.blocks, before=hook):
        model(**{**options, **inputs})
    return runs


class _Zeroed(TorchFunctionMode):
    """While entered, values of ``keys``, one a sequence, are 0 in the first attention."""

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self.has_seen = False
        self._keys = keys
        self._weights: Any = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name == "multi_head_attention_forward":
            with self:
                return body_of(func)(*args, **kwargs)
        if self.has_seen:
            return func(*args, **kwargs)
        if name in ATTENTION and len(args) >= 3:
            return func(*args[:2], self._without(args[2]), *args[3:], **kwargs)
        is_mixing = name in ("matmul", "bmm") and len(args) == 2 and args[0] in self._weights
        if is_mixing:
            return func(args[0], self._without(args[1]))
        result = func(*args, **kwargs)
        is_kept = name in _KEEPING and isinstance(args[0], Tensor) and args[0] in self._weights
        is_weights = name == "softmax" or is_kept
        if is_weights and isinstance(result, Tensor):
            self._weights[result] = True
        return result

    def _without(self, value: Tensor) -> Tensor:
        """Returns ``[K, .., S, d_v]`` with zeros where the key of a sequence is."""
        self.has_seen = True
        K, S = len(self._keys), value.size(-2)
        away = torch.arange(S, device=value.device) == self._keys[:, None]  # [K, S]
        by_sequence = value.reshape(K, -1, S, value.size(-1))  # where heads are part of the batch
        return by_sequence.masked_fill(away[:, None, :, None], 0).view(value.shape)
