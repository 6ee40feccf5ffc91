"""The options of the operators, each written once: functions take them as ``**options``.

Symbols as in ``ikattn.ops``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from torch import Tensor

from ikattn.ops.dropout import draw_dropout_seed


class _Options(TypedDict, total=False):
    p: float | None  # order of the norm in a key's magnitude; 2.0
    key_bias: Tensor | None  # added to logits of keys
    dropout_p: float  # probability on normalised weights; 0.0
    magnitude_scale: float | None  # factor of |k|_p^2; None: 1 / (2 sqrt(d))
    dropout_seed: Tensor | None  # seed and offset of the dropout mask; None: drawn


class AttentionOptions(_Options, total=False):
    """The nine options of :func:`ikattn.implicit_kernel_attention`, which documents them."""

    attn_mask: Tensor | None  # bool, or added to logits of pairs
    is_causal: bool  # False
    enable_gqa: bool  # whether key and value may have fewer heads; False
    eps: float  # added to the squared covariance; 1e-5


class EdgeOptions(_Options, total=False):
    """The options of :func:`ikattn.implicit_kernel_edge_attention`, which documents them."""

    edge_bias: Tensor | None  # added to logits of edges


# The schemas' defaults, but for those of tensors, which are None.
DEFAULTS: dict[str, Any] = {
    "p": 2.0,
    "dropout_p": 0.0,
    "is_causal": False,
    "enable_gqa": False,
    "eps": 1e-5,
    "magnitude_scale": None,
}
_ATTENTION = dict.fromkeys(AttentionOptions.__annotations__) | DEFAULTS
_EDGES = {name: DEFAULTS.get(name) for name in EdgeOptions.__annotations__}


def changed(
    function: str, options: Mapping[str, Any], like: Tensor, *, of_edges: bool = False
) -> dict[str, Any]:
    """Returns the options that are not the schema's defaults: each named one costs a call 0.4 us.

    Dropout without a seed gets a fresh one, on the device of ``like``.
    """
    if not options:
        return {}
    known = _EDGES if of_edges else _ATTENTION
    named: dict[str, Any] = {}
    try:
        for name, x in options.items():
            default = known[name]
            if x is not default and not (type(x) is type(default) and x == default):
                named[name] = x
    except KeyError as unknown:
        raise TypeError(
            f"{function}() got an unexpected keyword argument {unknown}; its options are "
            f"{', '.join(sorted(known))}"
        ) from None
    if "dropout_p" in named and named["dropout_p"] > 0 and "dropout_seed" not in named:
        named["dropout_seed"] = draw_dropout_seed(like.device)
    return named
