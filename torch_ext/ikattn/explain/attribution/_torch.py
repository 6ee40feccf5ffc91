"""Torch's functions by their names, and hooks of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from ikattn.recorder.calls.hooks import Hook
from ikattn.recorder.sums.tensors import tensors_in


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ATTENTION = _names(
    """
    scaled_dot_product_attention implicit_kernel_attention attention_from_features
    softmax_mean_weights
    """
)
SUMS = _names("add radd sub subtract rsub")
IN_PLACE = _names("iadd isub imul idiv itruediv ipow imatmul")
NOT_ZERO_AT_ZERO = _names("pow float_power clamp clamp_min clamp_max hardtanh")
OF_ONE = _names("linear conv1d conv2d layer_norm rms_norm group_norm batch_norm normalize glu")
"""Functions whose first operand alone depends on tokens."""

# Methods of LinearModel by the functions that they stand for.
RULES = {name: f"_{name}" for name in (*OF_ONE, "dropout")}
for rule, names in {
    "_activation": """
        gelu silu relu relu6 tanh hardtanh hardswish leaky_relu elu selu celu mish prelu rrelu pow
        square float_power clamp clamp_min clamp_max abs sin tan atan sinh expm1 log1p erf
    """,
    "_fix": """
        softmax log_softmax sigmoid softplus hardsigmoid sqrt rsqrt reciprocal exp exp2 log norm
        vector_norm linalg_vector_norm linalg_norm var std var_mean std_mean logsumexp cos rpow
        softmin gumbel_softmax logsigmoid
    """,
    "_product": "mul multiply rmul matmul rmatmul mm bmm einsum dot mv outer inner",
    "_quotient": "div divide true_divide truediv rtruediv rdiv",
    "_sum": " ".join(SUMS),
    "_join": "cat concat concatenate stack hstack vstack",
    "_attention": " ".join(ATTENTION),
    "_addmm": "addmm baddbmm",
    "_convolution": "conv1d conv2d",
}.items():
    RULES |= dict.fromkeys(names.split(), rule)

# Names of a function's second operand, and of the factors of a sum with a product.
_SECOND = ("other", "exponent", "mat2", "vec", "vec2", "tensor", "normalized_shape", "num_groups")


def name_of(func: Any) -> str:
    """Returns the name that torch gives to a function, of tensors and of modules alike."""
    name: str = getattr(func, "__name__", "")
    return name.split(".")[0].strip("_")


def is_in_place(func: Any) -> bool:
    name: str = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def out_of_place(name: str) -> Any:
    """Returns the function of that name that changes no operand."""
    return getattr(torch, name, None) or getattr(Tensor, name, None) or getattr(F, name)


def operands_in_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the arguments by place, with operands that were given by name, taken from kwargs."""
    for name in ("input", "tensors"):
        if not args and name in kwargs:
            args = (kwargs.pop(name),)
    if len(args) == 1 and "mat1" not in kwargs:
        args += tuple(kwargs.pop(name) for name in _SECOND if name in kwargs)
    return args


def laid_out(x: Tensor, func: Any, args: Any, kwargs: Any) -> Tensor:
    """Returns ``x``, which stands for what func gives, in the order in memory of torch's own."""
    if x.is_contiguous() and all(y.is_contiguous() for y in tensors_in((args, kwargs))):
        return x
    with torch._C.DisableTorchFunction(), torch.no_grad():
        like = func(*args, **kwargs)
    return x if like.stride() == x.stride() else torch.empty_like(like).copy_(x)


def body_of(func: FunctionType) -> FunctionType:
    """Returns a Python function of torch's that asks no modes before it runs."""
    names = dict(func.__globals__)
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        if name in names:
            names[name] = lambda *_: False
    body = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def detached(x: Any) -> Any:
    """Returns tuples, lists and dictionaries with tensors that have no gradient."""
    return tree_map_only(Tensor, Tensor.detach, x)


@contextmanager
def hooked(
    modules: Iterable[nn.Module],
    *,
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """Has modules call hooks while it is entered.

    ``before`` is called first of all, with the module, args and kwargs, and may give others;
    ``after`` with the module, args and what it made, and may give something else.
    """
    with ExitStack() as opened:
        for module in modules:
            if before is not None:
                options = {"with_kwargs": True, "prepend": True}
                opened.callback(module.register_forward_pre_hook(Hook(before), **options).remove)
            if after is not None:
                opened.callback(module.register_forward_hook(Hook(after)).remove)
        yield


def called_with(
    args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor, y: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    changed = tuple(y if each is x else each for each in args)
    return changed, {name: y if each is x else each for name, each in kwargs.items()}


def first_output(output: Any) -> Any:
    """Returns what a block makes of its tokens, without what it gives beside it."""
    return output[0] if isinstance(output, (tuple, list)) else output
