"""Follows heads from the attention to the out-projection, operation by operation.

Between both a model may rearrange heads, multiply them with a gate, divide them by a norm, or add
pairs of them. Each of these is linear in the heads once the gate, or the divisor, is known.

Sizes: B batch, H query heads, L queries, d_v head size of value, D model size; R = B L rows of
merged heads, ``[R, H d_v]``; X columns of what the out-projection is called with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from ikattn._precision import widened
from ikattn.recorder.calls.hearing import Told
from ikattn.recorder.calls.products import COPIES, WrittenOut, is_idle_dropout
from ikattn.recorder.sums.tensors import tensors_in

_MOVES = {
    *("reshape", "view", "transpose", "permute", "flatten", "unflatten", "squeeze", "unsqueeze"),
    *("chunk", "split", "unbind", "getitem", "narrow", "swapaxes", "movedim", "view_as", "select"),
    *("swapdims", "moveaxis", "tensor_split", "reshape_as"),
}
_PRODUCTS = {"mul", "multiply", "rmul", "imul"}
_QUOTIENTS = {"div", "divide", "truediv", "itruediv", "true_divide"}
_SUMS = {"add": 1, "iadd": 1, "radd": 1, "sub": -1, "isub": -1, "subtract": -1}


class Gate(NamedTuple):
    """A multiple of heads, with which an out-projection is called.

    Attributes:
        columns: ``[H d_v]``, the column of the input that each number of the heads is in; those
            that are in none have a factor of 0.
        factors: ``[R, H d_v]``, what each number of the heads is multiplied with.
    """

    columns: Tensor
    factors: Tensor

    def of_one_call(self, calls: int, H: int) -> Gate:
        """Returns the gate of one call whose values are those of several calls side by side."""

        def by_head(x: Tensor) -> Tensor:
            own: Tensor = x.unflatten(-1, (calls, H, -1))
            return own.transpose(-3, -2).flatten(-3)

        return Gate(by_head(self.columns), by_head(self.factors))


class Product(NamedTuple):
    """A linear map that no module has applied: ``x W^T + b``."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    made: Tensor


class _Term(NamedTuple):
    """A part of a tensor that is made of heads.

    Attributes:
        places: The place among the merged heads of each number.
        factor: What it is multiplied with; None: 1.
    """

    places: Tensor
    factor: Tensor | None = None

    def moved(self, move: Callable[[Tensor], Any]) -> _Term:
        index, factor = self.places.contiguous(), self.factor
        return _Term(move(index), None if factor is None else move(factor.contiguous()))

    def part(self, number: int) -> _Term:
        """One of several tensors that a move has made."""
        factor = None if self.factor is None else self.factor[number]
        return _Term(self.places[number], factor)

    def times(self, factor: Tensor, shape: torch.Size) -> _Term:
        whole = factor if self.factor is None else self.factor * factor
        return _Term(self.places.expand(shape), whole.expand(shape))


_Terms: TypeAlias = Callable[[], list[_Term]]  # which are made when somebody asks


class FollowedHeads(TorchFunctionMode):
    """Follows the heads that a module has computed, while it is running."""

    def __init__(self, written_out: WrittenOut | None = None) -> None:
        super().__init__()
        self._written_out = written_out
        self._known: dict[int, tuple[Tensor, _Terms]] = {}
        self._keep: Callable[[], None] | None = None
        self.stop = ""  # the name of the last operation that heads cannot be followed through
        self.product: Product | None = None  # of what is made of heads

    def begin(self, heads: Tensor, place: Callable[[], Tensor], keep: Callable[[], None]) -> None:
        """Follows ``heads``, beside those of calls before it in the same module.

        ``place`` gives the place of each number among the merged heads of all calls, int64;
        ``keep`` is called before something is written into ``heads``.
        """
        self._known[id(heads)] = heads, lambda: [_Term(place())]
        self._keep = keep
        self.stop = ""

    def enter(self) -> None:
        _push_mode(self)

    def leave(self) -> None:
        """Lets go of all tensors, and of the mode, which others may have been entered above."""
        self._known.clear()
        self.product = None
        if self._written_out is not None:
            self._written_out.forget()
        above = []
        while self in _get_current_function_mode_stack():
            mode = _pop_mode()
            if mode is not self:
                above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = [x for x in tensors_in((args, kwargs)) if id(x) in self._known]
        name = getattr(func, "__name__", "")
        plain = name.strip("_")
        if not own:
            made = func(*args, **kwargs)
            if self._written_out is not None:
                self._written_out.note(plain, args, kwargs, made)
            return made
        writes = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        writes = writes or kwargs.get("out") is not None
        if writes and self._keep is not None:
            self._keep()
            self._keep = None
        terms = [self._known[id(x)][1] for x in own]
        made = func(*args, **kwargs)
        self._note(func, Told(plain, args, kwargs, made), own, terms)
        return made

    def _note(self, func: Any, told: Told, own: list[Tensor], terms: list[_Terms]) -> None:
        """Notes what an operation has made of tensors that are followed."""
        name, args, kwargs, made = told
        first, is_one = bool(args) and args[0] is own[0], len(own) == 1
        is_plain = len(args) == 2 and set(kwargs) <= {"out"}
        if is_one and name in _MOVES and first:

            def moved() -> list[_Term]:
                return [term.moved(lambda x: func(x, *args[1:], **kwargs)) for term in terms[0]()]

            several = functools.cache(moved)
            for number, each in enumerate([made] if isinstance(made, Tensor) else made):
                found = several if made is each else functools.partial(_parts, several, number)
                self._known[id(each)] = each, functools.cache(found)
            return
        if not isinstance(made, Tensor):
            return
        rule: _Terms | None = None
        keeps = first and name in COPIES  # in the type of the second, for "type_as"
        if keeps or (is_one and name == "dropout" and is_idle_dropout(args, kwargs)):
            rule = terms[0]
        elif is_one and is_plain and (name in _PRODUCTS or (name in _QUOTIENTS and first)):
            other = args[1] if first else args[0]
            rule = functools.partial(_times, terms[0], other, made, inverse=name in _QUOTIENTS)
        elif is_one and name == "neg":
            rule = functools.partial(_times, terms[0], -1.0, made)
        elif len(own) == 2 and name in _SUMS and is_plain and own[0].shape == own[1].shape:
            sign = float(_SUMS[name])
            rule = functools.partial(lambda a, b: a() + _times(b, sign, made), *terms)
        elif is_one and name == "rms_norm" and first:
            rule = functools.partial(_normed, terms[0], made, *args, **kwargs)
        elif name == "cat" and all(id(x) in self._known for x in args[0]):
            axis = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            rule = functools.partial(_joined, terms, axis)
        if rule is not None:
            self._known[id(made)] = made, functools.cache(rule)
        elif is_one and first and name == "linear":
            self.product = _linear(made, *args, **kwargs)
        elif is_one and first and name == "matmul" and args[1].dim() == 2:
            self.product = Product(args[0], args[1].mT, None, made)
        elif made.is_floating_point() and made.numel() >= own[0].numel():
            self.stop = name

    def is_of_heads(self, x: Tensor) -> bool:
        """Whether a tensor is heads, or a multiple of them."""
        return id(x) in self._known

    def gate(self, x: Tensor, sizes: tuple[int, int, int]) -> Gate | str | None:
        """Returns the multiple of the heads that ``x [.., X]`` is, or why it is none.

        ``sizes`` are the number of calls of the attention, R, and H d_v, of each call. None where x
        does not have R rows that are made of heads; a reason where it has, and they are not the
        heads of their own token, each number multiplied with one number.
        """
        if id(x) not in self._known or x.numel() == 0 or x.numel() != sizes[1] * x.size(-1):
            return None
        calls, rows, width = sizes
        terms = self._known[id(x)][1]()
        if not terms:
            return None
        columns = torch.zeros(calls * width, dtype=torch.int64, device=x.device)
        taken = torch.zeros_like(columns)
        factors = widened(x.new_zeros(rows, calls * width))
        own_row = torch.arange(rows, device=x.device).unsqueeze(1)
        for term in terms:
            index = term.places.reshape(rows, -1)
            call, rest = index // (rows * width), index % (rows * width)
            places = call * width + rest % width
            if not torch.equal(rest // width, own_row.expand_as(index)):
                return "its tokens are in another order than those of its heads"
            if not torch.equal(places, places[:1].expand_as(places)):
                return "each token has its heads in an order of its own"
            taken.index_add_(0, places[0], torch.ones_like(places[0]))
            columns[places[0]] = torch.arange(x.size(-1), device=x.device)
            own = 1.0 if term.factor is None else term.factor.reshape(rows, -1).to(factors.dtype)
            factors[:, places[0]] = own
        if bool((taken > 1).any()):
            return "a head is in several of its columns"
        return Gate(columns, factors)


def _parts(several: _Terms, number: int) -> list[_Term]:
    return [term.part(number) for term in several()]


def _times(terms: _Terms, other: Any, made: Tensor, *, inverse: bool = False) -> list[_Term]:
    dtype = torch.float64 if made.dtype == torch.float64 else torch.float32
    factor = torch.as_tensor(other, dtype=dtype, device=made.device).detach()
    factor = 1 / factor if inverse else factor
    return [term.times(factor, made.shape) for term in terms()]


def _normed(
    terms: _Terms,
    made: Tensor,
    x: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> list[_Term]:
    """Divides by the root mean square, which is taken for a number."""
    rows = widened(x.detach())
    square = rows.square().mean(tuple(range(-len(shape), 0)), keepdim=True)
    factor = (square + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    if weight is not None:
        factor = factor * widened(weight.detach())
    return [term.times(factor.expand(made.shape), made.shape) for term in terms()]


def _joined(terms: list[_Terms], axis: int) -> list[_Term]:
    """Sets tensors side by side of which each is one part of heads; else there is no part."""
    found = [each() for each in terms]
    if any(len(each) != 1 for each in found):
        return []
    one = torch.ones((), device=found[0][0].places.device)
    parts = [each[0].times(one, each[0].places.shape) for each in found]
    factors = [part.factor for part in parts if part.factor is not None]
    return [_Term(torch.cat([part.places for part in parts], axis), torch.cat(factors, axis))]


def _linear(made: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Product:
    return Product(input, weight, bias, made)
