"""A model as the linear map of its tokens' vectors that it is once some numbers are fixed.

Fixed are the attention weights, the divisors of norms, the slopes ``f(x) / x`` of activations, and
of a product of two vectors that both depend on the tokens each factor in turn. What is left is
linear in the vectors that enter the first block, and in the biases.

Sources: A. Modarressi, M. Fayyaz, E. Aghazadeh, Y. Yaghoobzadeh, M. T. Pilehvar, "DecompX", ACL
2023, for the fixed numbers, its activation "GeLU_ZO" being the slope here; R. Achtibat et al.,
"AttnLRP", ICML 2024, for products, of which each factor gets one half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ikattn._precision import widened
from ikattn.explain.attribution._torch import (
    IN_PLACE,
    NOT_ZERO_AT_ZERO,
    OF_ONE,
    RULES,
    body_of,
    detached,
    hooked,
    is_in_place,
    laid_out,
    name_of,
    operands_in_place,
    out_of_place,
)
from ikattn.recorder.sums.tensors import tensors_in

Activation: TypeAlias = Literal["slope", "tangent"]

# Allowed distances of parts from adding up, over the sum of their sizes: norms of models in float64
# compute in float32.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

_FACTORS = ("mat1", "batch1", "mat2", "batch2")  # names, in a sum with a product


def tolerance_of(x: Tensor) -> float:
    """Returns how far parts of ``x`` may be from adding up in the type the model computes in."""
    device = x.device.type
    under_autocast = torch.is_autocast_enabled(device) and x.dtype == torch.float32
    dtype = torch.get_autocast_dtype(device) if under_autocast else x.dtype
    return TOLERANCES.get(dtype, 5e-2)


class _WithConstant(torch.autograd.Function):
    """``x + c`` for a constant c, whose part of the result the backward appends to a list.

    The host does not wait for it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, constant: Tensor, parts: list[Tensor]) -> Tensor:
        ctx.save_for_backward(constant)
        ctx.shape, ctx.parts = x.shape, parts
        return x + constant

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        (constant,) = ctx.saved_tensors
        whole = gradient.sum_to_size(constant.shape).double()
        part = whole * constant.double()
        ctx.parts.append(part.masked_fill(whole == 0, 0).sum())
        return gradient.sum_to_size(ctx.shape), None, None


class LinearModel(TorchFunctionMode):
    """While it is entered, what is called is linear in the tensors that require gradients.

    Values stay what they are; the gradient is that of the linear map. Parameters must not require
    gradients. ``constants`` gathers, in each backward pass, what biases and other constants add to
    what is differentiated; ``lost`` gathers what comes from fixed numbers that were added, as if
    they were biases, although they depend on the tokens: then the map is not that of the model. The
    activation is "slope", f(x) = (f(x) / x) x, or "tangent", f(x) = f'(x) x + a constant.
    """

    def __init__(self, activation: Activation = "slope") -> None:
        super().__init__()
        if activation not in ("slope", "tangent"):
            raise ValueError(f'activation must be "slope" or "tangent", got {activation!r}')
        self.activation = activation
        self._constants: list[Tensor] = []
        self._lost: list[Tensor] = []
        # Functions by their results: numbers that are fixed, and depend on the tokens.
        self._fixed: Any = WeakTensorKeyDictionary()
        self._functions_added: dict[str, None] = {}

    @property
    def constants(self) -> float:
        """The sum of what constants have added since ``clear``."""
        return _sum_of(self._constants)

    @property
    def lost(self) -> float:
        """The sum of what fixed numbers that are no constants have added since ``clear``."""
        return _sum_of(self._lost)

    @property
    def adds_results_of(self) -> str:
        """The functions whose results are the fixed numbers that were added."""
        return ", ".join(self._functions_added)

    def clear(self) -> None:
        """Forgets what a backward pass has added, before another one."""
        self._constants.clear()
        self._lost.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        args = operands_in_place(args, kwargs)
        name = name_of(func)
        changes_first = is_in_place(func) or name in IN_PLACE
        name = name[1:] if name in IN_PLACE else name
        rule = getattr(self, RULES[name]) if name in RULES else None
        first = args[0] if args else None
        is_empty = isinstance(first, Tensor) and first.numel() == 0
        if name in OF_ONE and not self._depends(first):
            rule = None
        if rule is None or is_empty:
            if name == "multi_head_attention_forward":  # written in Python: its parts can be seen
                with self:
                    return body_of(func)(*args, **kwargs)
            result = func(*args, **kwargs)
            self._follow(name, args, kwargs, result)
            return result
        before = first if changes_first or kwargs.pop("inplace", False) else None
        if before is not None:
            own = rule(out_of_place(name), before.clone(), *args[1:], **kwargs)
            return before.copy_(own)
        result = rule(func, *args, **kwargs)
        self._follow(name, args, kwargs, result)
        calls_it = rule in (self._attention, self._product)  # func itself, or sums of its results
        if calls_it or not self._depends(result):
            return result
        return laid_out(result, func, args, kwargs)

    # --- What is fixed

    def _keep(self, make: Callable[[], Any]) -> Any:
        """Fixes numbers."""
        return make()

    def _fitting(self, fixed: Any, like: Any) -> Any:
        """Returns fixed numbers in the shape of ``like``, whose place they take."""
        return fixed

    def _follow(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Notes results that depend on the tokens, and through which no gradient comes."""
        if name.startswith("new") or name.endswith("like"):  # they take a size and a type
            return
        outputs = [x for x in tensors_in(result) if not x.requires_grad and x.is_floating_point()]
        if not outputs:
            return
        for given in tensors_in((args, kwargs)):
            if given.requires_grad or given in self._fixed:
                self._as_fixed(outputs, self._fixed.get(given, name))
                return

    def _as_fixed(self, x: Any, name: str) -> Any:
        for each in tensors_in(x):
            self._fixed[each] = name
        return x

    def _depends(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.requires_grad

    # --- Rules: func is torch's function, which does not change its arguments

    def _activation(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        x, rest = args[0], args[1:]
        if not self._depends(x):
            return func(*args, **kwargs)
        if self.activation == "tangent":
            return self._tangent(lambda y: func(y, *rest, **kwargs), x)

        def at_point() -> tuple[Tensor, Tensor | None]:
            y = func(x.detach(), *rest, **kwargs)
            is_zero = name_of(func) not in NOT_ZERO_AT_ZERO
            return slope_of(x, y), None if is_zero else torch.where(x.detach() == 0, y, 0)

        slope, at_zero = self._keep(at_point)
        return self.with_constant(x * slope, at_zero)

    def _tangent(self, f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        def at_point() -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                point = x.detach().requires_grad_()
                value = f(point)
                (slope,) = torch.autograd.grad(value.sum(), point)
            return slope, value.detach() - slope * x.detach()

        slope, rest = self._keep(at_point)
        return self.with_constant(x * slope, rest)

    def _fix(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(self._depends(x) for x in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        args, kwargs = detached(args), detached(kwargs)
        return self._as_fixed(self._keep(lambda: func(*args, **kwargs)), name_of(func))

    def _product(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        where = [i for i, x in enumerate(args) if self._depends(x)]
        if len(where) < 2:
            return func(*args, **kwargs)
        i, j = where[-2:]
        left, right = self._keep(lambda: (args[i].detach(), args[j].detach()))
        halves = []
        for at, fixed in ((i, left), (j, right)):
            own = list(args)
            own[at] = self._fitting(fixed, args[at])
            halves.append(func(*own, **kwargs))
        return 0.5 * halves[0] + 0.5 * halves[1]

    def _quotient(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        name = name_of(func)
        divisor = 0 if name.startswith("r") else 1
        own = list(args)
        if len(own) > 1 and self._depends(own[divisor]):
            own[divisor] = self._keep(lambda: args[divisor].detach())
            result = func(*own, **kwargs)
            return result if self._depends(args[1 - divisor]) else self._as_fixed(result, name)
        return func(*args, **kwargs)

    def _sum(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        x: Any
        y: Any
        x, y = args[0], args[1]
        own, other = self._depends(x), self._depends(y)
        if own == other or not isinstance(x, Tensor):
            return func(*args, **kwargs)
        name, alpha = name_of(func), kwargs.get("alpha", 1)
        factors = {"sub": (1, -alpha), "subtract": (1, -alpha), "rsub": (-alpha, 1)}
        a, b = factors.get(name, (1, alpha))
        other_part = y if own else x
        x, y = x if a == 1 else x * a, y if b == 1 else y * b
        moving, constant = (x, y) if own else (y, x)
        is_fixed = isinstance(other_part, Tensor) and other_part in self._fixed
        if is_fixed:
            self._functions_added[self._fixed[other_part]] = None
        return self.with_constant(moving, constant, is_fixed=is_fixed)

    def _join(self, func: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Joins tensors, of which some may be constants."""
        moving = [self._depends(x) for x in tensors]
        if all(moving) or not any(moving):
            return func(tensors, *args, **kwargs)

        def alone(kept: list[bool]) -> Any:
            pairs = zip(tensors, kept, strict=True)
            return func([x if own else torch.zeros_like(x) for x, own in pairs], *args, **kwargs)

        result, pairs = alone(moving), list(zip(tensors, moving, strict=True))
        for is_fixed in (False, True):
            own = [not m and (x in self._fixed) == is_fixed for x, m in pairs]
            if any(own):
                result = self.with_constant(result, alone(own), is_fixed=is_fixed)
        return result

    def _linear(
        self, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return self.with_constant(func(input, weight), bias)

    def _addmm(
        self, func: Any, bias: Any, *factors: Tensor, beta: float = 1, alpha: float = 1, **kw: Any
    ) -> Tensor:
        both = [*factors, *(kw[name] for name in _FACTORS if name in kw)]
        product = self._product(torch.matmul, *both)
        product = product if alpha == 1 else product * alpha
        bias = bias if beta == 1 else bias * beta
        return self._sum(torch.add, product, bias)  # type: ignore[no-any-return]

    def _convolution(
        self, func: Any, input: Tensor, weight: Tensor, bias: Any = None, *rest: Any, **kwargs: Any
    ) -> Tensor:
        made = func(input, weight, None, *rest, **kwargs)
        shape = (-1,) + (1,) * (weight.dim() - 2)
        return self.with_constant(made, None if bias is None else bias.view(shape))

    def _layer_norm(self, func: Any, x: Tensor, shape: Any, *args: Any, **kwargs: Any) -> Tensor:
        weight, bias, eps = _given(args, kwargs, weight=None, bias=None, eps=1e-5)
        axes = list(range(-len(shape), 0))

        def inverse() -> Any:
            return (widened(x.detach()).var(axes, correction=0, keepdim=True) + eps).rsqrt()

        y = (x - x.mean(axes, keepdim=True)) * self._keep(inverse)
        y = y if weight is None else y * weight
        return self.with_constant(y, bias).to(x.dtype)

    def _rms_norm(self, func: Any, x: Tensor, shape: Any, *args: Any, **kwargs: Any) -> Tensor:
        weight, eps = _given(args, kwargs, weight=None, eps=None)
        axes = list(range(-len(shape), 0))

        def inverse() -> Any:
            smallest = torch.finfo(x.dtype).eps if eps is None else eps
            return (widened(x.detach()).square().mean(axes, keepdim=True) + smallest).rsqrt()

        y: Tensor = x * self._keep(inverse)
        return (y if weight is None else y * weight).to(x.dtype)

    def _group_norm(self, func: Any, x: Tensor, groups: int, *args: Any, **kwargs: Any) -> Tensor:
        weight, bias, eps = _given(args, kwargs, weight=None, bias=None, eps=1e-5)
        own = x.unflatten(1, (groups, -1)).flatten(2)
        y = self._layer_norm(F.layer_norm, own, own.shape[2:], eps=eps).reshape(x.shape)
        shape = (-1,) + (1,) * (x.dim() - 2)
        y = y if weight is None else y * weight.view(shape)
        return self.with_constant(y, None if bias is None else bias.view(shape)).to(x.dtype)

    def _batch_norm(self, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        names = ["running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"]
        if func is torch.batch_norm:
            names = [*names[2:4], *names[:2], *names[4:]]
        given = dict(zip(names, args, strict=False)) | kwargs
        mean, variance = given.get("running_mean"), given.get("running_var")
        if given.get("training") or mean is None or variance is None:
            raise ValueError(
                "attribute: batch_norm must run in eval mode, with running_mean and running_var: "
                "its statistics are those of the batch, which mix sequences"
            )
        own: dict[str, Any] = {n: given[n] for n in ("weight", "bias", "eps") if n in given}
        with torch.no_grad():
            zero = F.batch_norm(torch.zeros_like(x[:1]), mean, variance, **own)
        y = F.batch_norm(x, torch.zeros_like(mean), variance, **own | {"bias": None})
        return self.with_constant(y, zero)

    def _normalize(
        self, func: Any, x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, **kw: Any
    ) -> Tensor:
        return x / self._keep(lambda: x.detach().norm(p, dim, keepdim=True).clamp_min(eps))  # type: ignore[no-any-return]

    def _glu(self, func: Any, x: Tensor, dim: int = -1) -> Tensor:
        y, gate = x.chunk(2, dim)
        return y * self._keep(lambda: gate.detach().sigmoid())  # type: ignore[no-any-return]

    def _attention(self, func: Any, query: Any, key: Any, value: Any, *rest: Any, **kw: Any) -> Any:
        """Fixes the weights; the output is linear in ``value``."""
        return func(detached(query), detached(key), value, *detached(rest), **detached(kw))

    def _dropout(
        self, func: Any, x: Tensor, p: float = 0.5, training: bool = True, *rest: Any
    ) -> Tensor:
        if training and p > 0:
            raise ValueError("attribute: the model must be in eval mode, without dropout")
        return x

    def with_constant(self, x: Tensor, constant: Any, *, is_fixed: bool = False) -> Tensor:
        """Returns ``x`` plus a constant, a tensor or a number, which counts as a bias."""
        if constant is None:
            return x
        c = constant.detach() if isinstance(constant, Tensor) else x.new_tensor(constant)
        parts = self._lost if is_fixed else self._constants
        return _WithConstant.apply(x, c, parts)  # type: ignore[no-any-return, no-untyped-call]

    def through_activation(self, x: Tensor, y: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns ``y``, made of ``x`` by a module element by element, as linear in x."""
        if not self._depends(x):
            return y
        with torch._C.DisableTorchFunction():
            if self.activation == "tangent":
                return self._tangent(f, x)
            return x * self._keep(lambda: slope_of(x, y.detach()))  # type: ignore[no-any-return]


@contextmanager
def activations_as_one(model: nn.Module, linear: LinearModel) -> Iterator[None]:
    """Takes transformers' activations, some of which are formulas, as the functions they are."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if len(args) != 1 or not isinstance(output, Tensor) or output.shape != args[0].shape:
            return None
        return linear.through_activation(args[0], output, module.forward)

    def is_activation(module: nn.Module) -> bool:
        kind = type(module)
        return kind.__module__ == "transformers.activations" or "gelu" in kind.__name__.lower()

    with hooked(filter(is_activation, model.modules()), after=hook):
        yield


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], **defaults: Any) -> list[Any]:
    """Returns arguments in the order of their defaults, which stand for those not given."""
    given = dict(zip(defaults, args, strict=False)) | kwargs
    return [given.get(name, default) for name, default in defaults.items()]


def _sum_of(parts: list[Tensor]) -> float:
    by_device: dict[torch.device, list[Tensor]] = {}
    for part in parts:
        by_device.setdefault(part.device, []).append(part)
    return sum(float(torch.stack(own).sum()) for own in by_device.values())


def slope_of(x: Tensor, y: Tensor) -> Tensor:
    """Returns ``y / x``, 0 where x is."""
    x = x.detach()
    return torch.where(x == 0, 0, y / torch.where(x == 0, 1, x))
