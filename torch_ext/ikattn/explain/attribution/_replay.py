"""The linear map of a model applied to vectors of single tokens, with biases out or shared.

Sizes: K vectors that go through together, L tokens.
Source: A. Modarressi et al., "DecompX", ACL 2023, and the authors' code for where biases are
shared: those of norms and feed-forward parts at once, those of values and of the out-projection
when the attention's output has been added to the residual.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from ikattn.explain.attribution._linear import Activation, LinearModel
from ikattn.explain.attribution._torch import SUMS, detached, name_of
from ikattn.recorder.calls.sdpa import sdpa_call

# Functions that take a tensor without its waiting bias.
_UNASKING = SUMS | {"iadd", "isub", "dropout", "get", "set", "size", "dim", "requires_grad"}
# Functions whose result is their first tensor in another form.
_FORMS = "to type type_as float view reshape flatten contiguous clone squeeze"
_SAME = (_UNASKING - SUMS) | set(_FORMS.split())


class Replay(LinearModel):
    """A linear map applied to other vectors: one call fixes numbers, others use them.

    The calls are with batches of one sequence first, and then of as many as there are sources whose
    vectors go through together. Biases stay out ("none"), but for those before tokens are mixed,
    which belong to their token; or each is shared among the vectors that go through, by how large
    the product of the bias and each is (DecompX's "absdot").
    """

    enters_every_block = False  # or the first that runs alone

    def __init__(
        self, activation: Activation, biases: Literal["none", "absdot"], caller: str
    ) -> None:
        super().__init__(activation)
        self.caller = caller
        self.shares_biases = biases == "absdot"  # among the vectors
        self._kept: list[Any] = []
        self._next: int | None = None  # None: numbers are being fixed
        self._vectors_own: Tensor | None = None  # which token each vector belongs to
        self._own: Tensor | None = None  # likewise, until tokens are mixed
        self._is_whole, self._count = False, 1
        # Events of the first call, and how far a later one has come.
        self._events: list[str] = []
        self._event = 0
        # Biases of out-projections, which wait for the sum of their output and the residual.
        self._waiting: Any = WeakTensorKeyDictionary()

    def enter_block(self, x: Tensor) -> None:
        """Notes that a block is called with ``x``."""

    def part(self, output: Tensor) -> Tensor | None:
        """Returns what is wanted of a block that just ran; None: it has no such part."""
        return output

    def begin(self, own: Tensor | None) -> None:
        """Has the next call use what the first one fixed.

        ``own``, bool ``[K, L]``, says which token each of the vectors that go through belongs to.
        With "absdot" the last belongs to none: it takes biases that are still to be shared. None:
        vectors are whole, and every bias is as it is.
        """
        self._next, self._event = 0, 0
        self._own = self._vectors_own = own
        self._is_whole, self._count = own is None, 1 if own is None else own.size(0)

    @property
    def is_fixing(self) -> bool:
        """Whether the call is the first."""
        return self._next is None

    def _note(self, event: str) -> None:
        if self.is_fixing:
            self._events.append(event)
        self._event += 1

    def _keep(self, make: Callable[[], Any]) -> Any:
        if self.is_fixing:
            self._kept.append(make())
            return self._kept[-1]
        assert self._next is not None
        if self._next >= len(self._kept):
            raise RuntimeError(
                f"{self.caller}: the model's first call fixed {len(self._kept)} numbers, and a "
                "later one with the same inputs asks for more: it computes something else in each "
                "call"
            )
        self._next += 1
        return self._kept[self._next - 1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._waiting and name_of(func) not in _UNASKING:
            args, kwargs = tree_map_only(Tensor, self._whole, (args, kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _whole(self, x: Tensor) -> Tensor:
        """Returns a tensor with the bias that waits for it, if one does."""
        return self._shared(x, self._waiting[x]) if x in self._waiting else x

    def _linear(
        self, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        if not self._depends(input):
            return super()._linear(func, input, weight, bias)
        before = self._events[self._event - 1 : self._event]  # the last one, if any
        self._note("linear")
        is_shared = self._next is not None and self.shares_biases and not self._is_whole
        if not is_shared or bias is None or self._own is not None:
            return super()._linear(func, input, weight, bias)
        made: Tensor = func(input, weight)
        rest = (event for event in self._events[self._event :] if event != "linear")
        if next(rest, "") == "attention":  # weights add up to 1: it comes through as it is
            last = torch.arange(made.size(0), device=made.device) == made.size(0) - 1
            return made + bias * last.view(-1, *(1,) * (made.dim() - 1))
        if before != ["attention"]:  # of no out-projection
            return self._shared(made, bias)
        self._waiting[made] = bias.detach()
        return made

    def _layer_norm(self, *args: Any, **kwargs: Any) -> Tensor:
        self._note("norm")
        return super()._layer_norm(*args, **kwargs)

    def _activation(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if args and self._depends(args[0]):
            self._note("activation")
        return super()._activation(func, *args, **kwargs)

    def _sum(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        waiting = [self._waiting[x] for x in args if isinstance(x, Tensor) and x in self._waiting]
        if not waiting:
            return super()._sum(func, *args, **kwargs)
        if not all(self._depends(x) for x in args) or kwargs or "sub" in name_of(func):
            return super()._sum(func, *tree_map_only(Tensor, self._whole, args), **kwargs)
        result = func(*args)
        for constant in waiting:
            result = self._shared(result, constant)
        return result

    def _fix(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if "softmax" in name_of(func) and any(self._depends(x) for x in args):
            self._own = None
            self._note("attention")
        fixed = super()._fix(func, *args, **kwargs)
        return self._fitting(fixed, args[0]) if args else fixed

    def _fitting(self, fixed: Any, like: Any) -> Any:
        is_of_heads = isinstance(fixed, Tensor) and fixed.dim() == 3 and fixed.size(0) > 1
        if is_of_heads and like.dim() == 3 and like.size(0) == self._count * fixed.size(0):
            return fixed.repeat(self._count, 1, 1)  # [H, ..] of one sequence, for [K H, ..]
        return fixed

    def _attention(self, func: Any, query: Any, key: Any, value: Any, *rest: Any, **kw: Any) -> Any:
        self._own = None  # vectors are mixed from here on
        self._note("attention")
        if name_of(func) != "scaled_dot_product_attention":
            raise NotImplementedError(
                f"{self.caller}: the model calls {name_of(func)}, which gives no weights to fix: "
                "load the model with attention by scaled_dot_product_attention or a softmax "
                '(attn_implementation="sdpa" or "eager")'
            )

        def weights() -> Tensor:
            call, _ = sdpa_call("the model", detached((query, key, value, *rest)), detached(kw))
            return call.weights.to(value.dtype)

        kept = self._keep(weights)
        groups = kept.size(1) // value.size(1)
        return kept @ value.repeat_interleave(groups, 1)

    def with_constant(self, x: Tensor, constant: Any, *, is_fixed: bool = False) -> Tensor:
        if self.is_fixing:
            return super().with_constant(x, constant, is_fixed=is_fixed)
        if constant is None:
            return x
        if is_fixed:
            raise NotImplementedError(
                f"{self.caller}: the model adds what {self.adds_results_of or 'a function'} made "
                "of the tokens as biases are added, of which there is no linear map"
            )
        c = constant if isinstance(constant, Tensor) else x.new_tensor(constant)
        if self._is_whole:
            return x + c
        x = x.expand(torch.broadcast_shapes(x.shape, c.shape))
        if x.dim() == 2 and x.size(0) % self._count == 0:
            # tokens of all vectors in a row, [K L, D]
            made = self.with_constant(x.unflatten(0, (self._count, -1)), c)
            return made.flatten(0, 1)
        if self._own is not None:  # before tokens are mixed a bias belongs to its token
            return x + c * self._own_of(x)
        if not self.shares_biases:
            return x
        # one that is given for each of a batch is the same for all that go through
        return self._shared(x, c[:1] if c.dim() == x.dim() else c)

    def _own_of(self, x: Tensor) -> Tensor:
        """Returns which token each of the vectors belongs to, with as many axes as ``x``.

        ``x`` is ``[K, L, ..]``, ``[L, K, ..]`` or, of heads, ``[K, H, L, ..]``.
        """
        assert self._own is not None
        own = self._own
        K, L = own.shape
        if x.dim() >= 3 and x.shape[:2] == (K, L):
            return own.view(K, L, *(1,) * (x.dim() - 2))
        if x.dim() >= 3 and x.shape[:2] == (L, K):
            return own.mT.reshape(L, K, *(1,) * (x.dim() - 2))
        if x.dim() == 4 and x.shape[::2] == (K, L):
            return own.view(K, 1, L, 1)
        raise NotImplementedError(
            f"{self.caller}: a bias is added to {list(x.shape)}, where [{K}, {L}, ..] is expected"
        )

    def _shared(self, x: Tensor, c: Tensor) -> Tensor:
        """Shares a bias, and what the last of ``x``, ``[K, .., D]``, holds, among the others."""
        own, total = x[:-1], x[-1:] + c
        share = (own * total).sum(-1, keepdim=True).abs()
        size = share.sum(0, keepdim=True)
        share = torch.where(size == 0, 1 / own.size(0), share / torch.where(size == 0, 1, size))
        return torch.cat([own + total * share, torch.zeros_like(x[-1:])])


class BlockReplay(Replay):
    """The linear maps of blocks, each applied to vectors of its own.

    It finds, in every block, the last sum, and what that adds to the stream: to the block's input
    and sums with it. In a post-norm block, whose stream ends at a norm, that is the operand made
    later. What a parallel block adds in several sums is taken together.
    """

    enters_every_block = True

    def __init__(self, activation: Activation, caller: str, scope: str) -> None:
        super().__init__(activation, "none", caller)
        self._scope = scope
        self._ages: Any = WeakTensorKeyDictionary()  # when tensors were made
        self._age = 0
        # Tensors of the stream, and what was added last: the operands of one sum, or of several.
        self._stream: Any = WeakTensorKeyDictionary()
        self._first: Any = None
        self._added: list[Tensor] | None = None
        self._last: list[Tensor] = []

    def enter_block(self, x: Tensor) -> None:
        self._own = self._vectors_own
        self._last = []
        self._stream[x] = []

    def part(self, output: Tensor) -> Tensor | None:
        if self._scope == "block":
            return output
        return torch.stack(self._last).sum(0) if self._last else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._first = args[0] if args else None  # a rule gets a copy of what is changed in place
        self._added = None
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, Tensor):
            self._age += 1
            first = args[0] if args and isinstance(args[0], Tensor) else None
            is_same = first is not None and name_of(func) in _SAME
            self._ages[result] = self._age_of(first) if is_same else self._age
            added = self._stream.get(first) if is_same else self._added
            if added is not None:
                self._stream[result] = added
        return result

    def _age_of(self, x: Any) -> int:
        return int(self._ages.get(x, 0)) if isinstance(x, Tensor) else 0

    def _note(self, event: str) -> None:
        super()._note(event)
        self._last = self._last if event == "norm" else []

    def _sum(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        both = args[:2]
        depend = len(both) == 2 and all(self._depends(x) for x in both)
        if depend and both[0].shape == both[1].shape:
            self._last = self._adds(both, self._first)
        return super()._sum(func, *args, **kwargs)

    def _adds(self, both: tuple[Tensor, ...], left: Any) -> list[Tensor]:
        """Returns what a sum of both adds to the stream; ``left`` is the first as it was given."""
        pair = (left, both[1])
        known = [self._stream.get(x) if isinstance(x, Tensor) else None for x in pair]
        ages = [self._age_of(x) for x in pair]
        if (known[0] is None) == (known[1] is None):
            return [both[ages[1] > ages[0]].detach()]
        at = 0 if known[0] is None else 1
        added = [both[at].detach()]
        before = known[1 - at]
        if before and ages[at] < ages[1 - at]:  # made beside what the sum before it added
            added += before
        self._added = added
        return added
