"""Attention that a module writes out: a softmax of its scores, and a product with values.

What the softmax made is followed through views, copies, dropout and whatever changes it number by
number to the product. Weights and values are thus known, and how the scores came about is not.

Sizes: B batch, H heads, L queries, S keys, d_v head size of value.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from ikattn._precision import widened
from ikattn.recorder.calls.attention_call import AttentionCall
from ikattn.recorder.calls.hearing import methods_of

_PRODUCTS = {"matmul", "bmm", "einsum"}
COPIES = {
    *("contiguous", "clone", "to", "float", "half", "bfloat16", "double", "type", "type_as"),
    *("detach", "alias"),
}
_KEEPS = {"view", "reshape"}
_HEADS = ("num_attention_heads", "num_attn_heads", "num_heads", "n_heads", "n_head", "heads")


def writes_out_attention(module: nn.Module) -> bool:
    """Whether a module that is named for attention has a softmax and a product in its own code."""
    kind: Any = type(module)
    is_named = "Attention" in kind.__name__ or "Attn" in kind.__name__
    return is_named and _writes_out(kind)


@functools.cache
def _writes_out(kind: Any) -> bool:
    codes = [function.__code__ for function in methods_of(kind)]
    names = {name for code in codes for name in code.co_names}
    instructions = (each for code in codes for each in dis.get_instructions(code))
    has_product = bool(names & _PRODUCTS) or any(
        each.opname == "BINARY_MATRIX_MULTIPLY" or each.argrepr == "@" for each in instructions
    )
    return has_product and bool(names & {"softmax", "Softmax"})


class Written(NamedTuple):
    """A product of weights and values.

    Attributes:
        weights: ``[B, H, L, S]`` or ``[B H, L, S]``.
        value: ``[B, H, S, d_v]`` or ``[B H, S, d_v]``, as far as axes are not broadcast.
        made: What the module has made of them, with axes in any order.
        order: The axes of ``made`` that are B, H, L and d_v, or B H, L and d_v.
        drops: Whether weights were dropped in between.
    """

    weights: Tensor
    value: Tensor
    made: Tensor
    order: tuple[int, ...]
    drops: bool

    @property
    def heads(self) -> Tensor:
        """The product, ``[B, H, L, d_v]`` or ``[B H, L, d_v]``."""
        return self.made.permute(self.order)

    def as_made(self, x: Tensor) -> Tensor:
        """Returns ``x [B, H, L, d_v]`` with the axes of what was made."""
        places = [self.order.index(axis) for axis in range(len(self.order))]
        return x.reshape(self.heads.shape).permute(places)


class WrittenOut:
    """Sees a module's operations, and tells of a product with what a softmax has made.

    Values that are themselves a product of what the module computes belong to no token: there the
    softmax is over features, as in attention of linear time, and nothing is told.
    """

    def __init__(self, told: Callable[[Written], None]) -> None:
        self._told = told
        self._weights: dict[int, tuple[Tensor, bool]] = {}  # each with whether some were dropped
        self._products: dict[int, Tensor] = {}

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        if not isinstance(made, Tensor) or not args:
            return
        if name == "softmax":
            axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if axis in (-1, made.dim() - 1) and made.dim() in (3, 4):
                self._weights[id(made)] = made, False
            return
        operands = [x for each in args for x in (each if isinstance(each, list) else [each])]
        tensors = [x for x in operands if isinstance(x, Tensor)]
        first = id(tensors[0]) if tensors else 0
        own = [x for x in tensors if id(x) in self._weights]
        if name in _PRODUCTS and len(tensors) == 2:
            found = None
            if first in self._weights and id(tensors[1]) not in self._products:
                weights, drops = self._weights[first]
                equation = args[0] if name == "einsum" else None
                found = _product(weights, tensors[1], made, equation)
            if found is not None:
                self._told(found._replace(drops=drops))
            elif not any(isinstance(x, nn.Parameter) for x in tensors):
                self._products[id(made)] = made
        elif own and (
            made.shape == own[0].shape or (name in _KEEPS and made.numel() == own[0].numel())
        ):
            drops = self._weights[id(own[0])][1]
            drops = drops or (name == "dropout" and not is_idle_dropout(args, kwargs))
            self._weights[id(made)] = made, drops
        elif first in self._products and made.numel() == tensors[0].numel():
            self._products[id(made)] = made

    def forget(self) -> None:
        """Lets go of all tensors."""
        self._weights.clear()
        self._products.clear()


def is_idle_dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of ``F.dropout`` keeps everything."""
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", args[2] if len(args) > 2 else True)
    return p == 0 or not training


def _product(weights: Tensor, value: Tensor, made: Tensor, equation: str | None) -> Written | None:
    """Returns a product of weights and values; None: it sums over another axis than keys."""
    if equation is None:
        return Written(weights, value, made, tuple(range(made.dim())), False)
    left, _, right = equation.replace(" ", "").partition("->")
    of_weights, _, of_value = left.partition(",")
    *outer, query, key = list(of_weights)
    column = set(of_value) - set(of_weights)
    is_of_heads = len(outer) == 2 and set(outer) <= set(of_value) and len(column) == 1
    if not is_of_heads or key in right or set(right) != {*outer, query, *column}:
        return None
    wanted = [*outer, key, *column], [*outer, query, *column]
    value = value.permute([of_value.index(axis) for axis in wanted[0]])
    return Written(weights, value, made, tuple(right.index(axis) for axis in wanted[1]), False)


def written_call(layer: str, module: nn.Module, written: Written) -> tuple[AttentionCall, Tensor]:
    """Returns the run, taken for self-attention, and its heads ``[B, H, L, d_v]``.

    Raises:
        NotImplementedError: It is not told how many heads there are.
    """
    weights, heads = written.weights, written.heads
    outer: tuple[int, ...] = heads.shape[:-2]
    if len(outer) == 1:
        counts = (getattr(module, name, None) for name in _HEADS)
        H = next((n for n in counts if isinstance(n, int) and n > 0), 0)
        if H == 0 or outer[0] % H:
            raise NotImplementedError(
                f"record: {layer} must compute weights [B, H, L, S], or name its number of heads "
                f"in one of {', '.join(_HEADS)}, got weights {list(weights.shape)}; layers=... "
                "leaves it out"
            )
        outer = outer[0] // H, H
    L, S = weights.shape[-2:]
    value = widened(written.value)
    value = value.expand(*heads.shape[:-2], *value.shape[-2:]).reshape(*outer, S, -1)
    wide = weights.expand(*heads.shape[:-2], L, S).reshape(*outer, L, S).to(value.dtype)
    call = AttentionCall(
        query=wide.new_zeros(*outer, L, 1),
        key=wide.new_zeros(*outer, S, 1),
        value=value,
        kind="self",
        given_weights=wide,
    )
    return call, heads.reshape(*outer, L, -1)
