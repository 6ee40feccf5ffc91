"""The operators as compositions of torch's own, for backends that know no others, such as ONNX.

Not in torch's global table of decompositions: with symbolic sizes torch.compile takes shapes and
strides from there rather than from the fake kernels, and they would be another computation's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_WITH_REFERENCE = (
    "implicit_kernel_attention",
    "implicit_kernel_weights",
    "spectral_features",
    "attention_from_features",
    "key_moments",
    "attention_from_moments",
    "causal_attention_from_moments",
    "edge_attention_from_features",
    "contribution_maps",
    "streamed_contribution_maps",
)
# Compositions themselves, of these operators and torch's.
_COMPOSED = (
    "merge_moments",
    "implicit_kernel_edge_attention",
    "softmax_edge_attention",
    "gat_edge_attention",
)


def decompositions() -> dict[torch._ops.OperatorBase, Callable[..., Any]]:
    """Returns what replaces ikattn's operators in an exported program, for ``run_decompositions``.

    The replacements are the differentiable references: the same numbers to rounding, at the cost of
    holding ``[B, H, L, S]``. Dropout keeps its operator: export in eval mode.

    Returns:
        A table from operators to functions.

    Example:
        >>> import torch, ikattn
        >>> attention = ikattn.MultiheadAttention(16, 4, batch_first=True).eval()
        >>> x = torch.randn(2, 5, 16)
        >>> program = torch.export.export(attention, (x, x, x))
        >>> program = program.run_decompositions(ikattn.ops.decompositions())
        >>> "ikattn" in str(program.graph)
        False
    """
    operators = torch.ops.ikattn
    table: dict[torch._ops.OperatorBase, Callable[..., Any]] = {}
    for name in _WITH_REFERENCE:
        reference = getattr(operators, f"{name}_reference").default
        # the reference is in the table too, or it would be kept as an operator
        for operator in (getattr(operators, name).default, reference):
            table[operator] = partial(_compose, reference)
    for name in _COMPOSED:
        composed = getattr(operators, name).default
        table[composed] = partial(_compose, composed)
    return table


def operator(name: str) -> Any:
    """Returns the operator of that name, or its composition while a model goes to ONNX."""
    is_traced = torch._C._get_tracing_state() is not None or torch.compiler.is_compiling()
    if is_traced and torch.onnx.is_in_onnx_export():  # the question costs a call 1 us
        name = f"{name}_reference"
    return getattr(torch.ops.ikattn, name)


def _compose(reference: torch._ops.OpOverload[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a reference's own kernel: a call of it would be looked up in the table again."""
    return reference._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
