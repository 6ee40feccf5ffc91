"""Attention over the edges of a graph.

Symbols, in every docstring: N_q targets, N_k sources, E edges, H heads, d head size of query and
key, d_v head size of value, M frequencies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypeAlias, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from ikattn.ops.options import EdgeOptions, changed

_Parameters = ParamSpec("_Parameters")
_Attended: TypeAlias = "Tensor | tuple[Tensor, Tensor]"


class Edges(NamedTuple):
    """The edges of a graph, sorted by target (compressed sparse rows).

    Attributes:
        rowptr: int64 or int32 ``[N_q + 1]``: the edges into target i are those from ``rowptr[i]``
            up to ``rowptr[i + 1]``.
        col: ``[E]``, the source of each edge.
        order: int64 ``[E]``: which of the edges that were given each of these is; None: that of the
            same number.

    Example:
        >>> import torch, ikattn
        >>> source, target = torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1])
        >>> ikattn.ops.Edges.from_coo(source, target, num_targets=2).rowptr
        tensor([0, 1, 3])
    """

    rowptr: Tensor
    col: Tensor
    order: Tensor | None = None

    @classmethod
    def from_coo(
        cls, source: Tensor, target: Tensor, num_targets: int, *, is_sorted: bool = False
    ) -> Edges:
        """Returns the edges ``source[e] -> target[e]``, such as those of an ``edge_index``.

        Sort a graph once and use it in all layers: this may cost as much as an attention call.

        Args:
            source: int64 or int32 ``[E]``, numbers of sources.
            target: As source, numbers of targets.
            num_targets: N_q.
            is_sorted: The targets ascend already. Edges into one target keep their order, if not.

        Raises:
            TypeError: source or target are not integers.
            ValueError: They differ in shape, or a target is not in ``[0, num_targets)``, or they do
                not ascend though is_sorted says so.

        Example:
            >>> import torch, ikattn
            >>> edge_index = torch.tensor([[0, 2, 1], [1, 0, 1]])  # source, target
            >>> edges = ikattn.ops.Edges.from_coo(*edge_index, num_targets=3)
            >>> edges.rowptr.tolist(), edges.col.tolist(), edges.order.tolist()
            ([0, 1, 3, 3], [2, 0, 1], [1, 0, 2])
        """
        for name, index in (("source", source), ("target", target)):
            if index.dtype not in (torch.int64, torch.int32):
                raise TypeError(f"Edges.from_coo: {name} must be int64 or int32, got {index.dtype}")
        if source.dim() != 1 or source.shape != target.shape:
            raise ValueError(
                "Edges.from_coo: source and target must have one shape, [E], got "
                f"{list(source.shape)} and {list(target.shape)}"
            )
        source, target, order = source.long(), target.long(), None
        is_traced = torch.compiler.is_compiling() or target.is_meta  # numbers are not at hand
        if not is_sorted:
            target, order = torch.sort(target, stable=True)
            source = source[order]
        elif not is_traced and bool((target.diff() < 0).any()):
            raise ValueError("Edges.from_coo: target must ascend where is_sorted=True")
        least, most = (0, -1) if is_traced or not target.numel() else map(int, target[[0, -1]])
        if least < 0 or most >= num_targets:
            worst = least if least < 0 else most
            raise ValueError(
                f"Edges.from_coo: target must be in [0, num_targets) = [0, {num_targets}), "
                f"got {worst}"
            )
        nodes = torch.arange(num_targets + 1, device=target.device)
        return cls(torch.searchsorted(target.contiguous(), nodes), source, order)


class _Attention(Protocol[_Parameters]):
    """A function whose result holds the weights, too, where ``return_weights`` asks for them.

    Other arguments are checked where it is left out.
    """

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, *tensors: Any, return_weights: Literal[True], **options: Any
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def __call__(self, *tensors: Any, return_weights: bool, **options: Any) -> Any: ...

    @overload
    def __call__(self, *tensors: _Parameters.args, **options: _Parameters.kwargs) -> Tensor: ...


def _with_weights_on_request(function: Callable[_Parameters, _Attended]) -> _Attention[_Parameters]:
    """Tells type checkers what a function returns; it stays what it is."""
    return function  # type: ignore[return-value]


@_with_weights_on_request
def implicit_kernel_edge_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edges: Edges,
    w1: Tensor,
    w2: Tensor | None = None,
    *,
    eps: float = 1e-5,
    return_weights: bool = False,
    **options: Unpack[EdgeOptions],
) -> _Attended:
    r"""Attends from every node to those that have an edge into it.

    .. math::
        o_i = \sum_{e: j \to i} \frac{(s_{ij}^2 + \epsilon)\,
              \exp(g_j + \mathrm{key\_bias}_j + \mathrm{edge\_bias}_e)}{Z_i} v_j

    with s and g as in :func:`ikattn.implicit_kernel_attention`, and Z_i the sum over the edges into
    i: the paper's attention, where the pairs that count are edges. An edge that occurs twice counts
    twice.

    Memory is O((N_q + N_k) H (M + d_v) + E H), and results have the same bits in every run. Second
    derivatives and ``torch.func`` are a composition of torch's own functions, which holds
    ``[E, H, 2M]`` and ``[E, H, d_v]``.

    Args:
        query: ``[N_q, H, d]``; float64, float32, bfloat16 or float16.
        key: ``[N_k, H, d]``.
        value: ``[N_k, H, d_v]``.
        edges: Of the graph, such as ``Edges.from_coo(*edge_index, num_targets)``. That sources are
            in ``[0, N_k)``, and that rowptr ascends, is checked on the CPU. On a GPU torch stops
            the program where a source is out of range, and rowptr is taken as it is.
        w1: Frequencies ``[H, d, M]``, in cycles per unit of query; in the dtype of query or
            float32.
        w2: The second frequencies, shaped as w1. None: the stationary kernel, w2 = w1.
        key_bias: Added to the logits of all edges of a source, ``[N_k]`` or ``[N_k, H]``. ``-inf``
            hides the source.
        edge_bias: Added to the logit of an edge, ``[E]`` or ``[E, H]``, in the order in which the
            edges were given. ``-inf`` hides the edge.
        p, dropout_p, magnitude_scale: As in :func:`ikattn.implicit_kernel_attention`.
        eps: Added to the squared covariance; at least 1e-30, for float64 nodes 1e-290.
        dropout_seed: int64 ``[2]``, seed and offset of the dropout mask of the sorted edges. None:
            drawn from torch's default generator.
        return_weights: Return the weights, too.

    Returns:
        ``[N_q, H, d_v]`` in the dtype of query, zero for a node without edges. With
        return_weights also the weights after dropout, ``[E, H]``, in the order in which the edges
        were given. Differentiable in all floating-point arguments, any number of times.

    Raises:
        RuntimeError, TypeError, ValueError, IndexError: An argument has a wrong shape or value.

    Example:
        >>> import torch, ikattn
        >>> edges = ikattn.ops.Edges.from_coo(*torch.tensor([[0, 2, 1], [1, 0, 1]]), num_targets=3)
        >>> q, k, v = (torch.randn(3, 4, 8) for _ in range(3))
        >>> w1, w2 = (0.1 * torch.randn(4, 8, 16) for _ in range(2))
        >>> output, weights = ikattn.implicit_kernel_edge_attention(
        ...     q, k, v, edges, w1, w2, return_weights=True
        ... )
        >>> output.shape, weights.shape, bool((output[2] == 0).all())
        (torch.Size([3, 4, 8]), torch.Size([3, 4]), True)
    """
    return _attend(
        "implicit_kernel_edge_attention",
        (query, key, value, edges.rowptr, edges.col, w1, w2),
        edges,
        return_weights,
        options,
        eps=eps,
    )


@_with_weights_on_request
def softmax_edge_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edges: Edges,
    *,
    negative_slope: float = 1.0,
    return_weights: bool = False,
    **options: Unpack[EdgeOptions],
) -> _Attended:
    r"""Attends over edges by the RBF kernel times the magnitude; by default by softmax.

    .. math::
        o_i = \sum_{e: j \to i} \frac{\exp(-|q_i - k_j|_2^2 / (2 \sqrt{d}) + g_j
              + \mathrm{key\_bias}_j + \mathrm{edge\_bias}_e)}{Z_i} v_j

    with the magnitude g of :func:`ikattn.implicit_kernel_attention`. For p = 2 it is
    ``exp(q_i . k_j / sqrt(d))``, ordinary softmax attention. The same kernels compute it as
    :func:`implicit_kernel_edge_attention`, so that kernels can be compared on a graph.

    Args:
        query, key, value, edges, return_weights, options: As in
            :func:`implicit_kernel_edge_attention`.
        negative_slope: Slope, for negative numbers, of a LeakyReLU that takes the logit with its
            biases. 1: none. Others need p = 2 and no magnitude_scale.

    Returns:
        As :func:`implicit_kernel_edge_attention`.

    Raises:
        RuntimeError, TypeError, ValueError, IndexError: As there.

    Example:
        >>> import torch, ikattn
        >>> edges = ikattn.ops.Edges.from_coo(*torch.tensor([[0, 2, 1], [1, 0, 1]]), num_targets=3)
        >>> q, k, v = (torch.randn(3, 4, 8) for _ in range(3))
        >>> ikattn.ops.softmax_edge_attention(q, k, v, edges).shape
        torch.Size([3, 4, 8])
    """
    return _attend(
        "softmax_edge_attention",
        (query, key, value, edges.rowptr, edges.col),
        edges,
        return_weights,
        options,
        negative_slope=negative_slope,
    )


@_with_weights_on_request
def gat_edge_attention(
    vector: Tensor,
    target: Tensor,
    source: Tensor,
    value: Tensor,
    edges: Edges,
    w1: Tensor | None = None,
    w2: Tensor | None = None,
    *,
    eps: float = 1e-5,
    negative_slope: float = 1.0,
    return_weights: bool = False,
    **options: Unpack[EdgeOptions],
) -> _Attended:
    r"""Attends by the paper's form for GAT: a learned vector, and the two ends of every edge.

    .. math::
        o_i = \sum_{e: j \to i} \frac{(s(a, x_e)^2 + \epsilon)\,
              \exp(|x_e|_p^2 / (2 \sqrt{2 d}) + \mathrm{key\_bias}_j + \mathrm{edge\_bias}_e)}
              {Z_i} v_j, \qquad x_e = [z_i \,\|\, y_j]

    with a the vector, z_i the target, y_j the source, and s the similarity of
    :func:`ikattn.implicit_kernel_attention`. Nothing of size ``[E, 2 d]`` is made: features of
    nodes suffice. For p = 2 the target's part of the norm cancels; for others ``[E, H]`` norms are
    held.

    Args:
        vector: a, ``[H, 2 d]``, first the part for targets; in the dtype of target or float32.
        target: z, ``[N_q, H, d]``; float64, float32, bfloat16 or float16.
        source: y, ``[N_k, H, d]``.
        value: ``[N_k, H, d_v]``.
        edges: As in :func:`implicit_kernel_edge_attention`.
        w1: Frequencies ``[H, 2 d, M]``. None: the RBF kernel, of which p = 2 makes
            ``exp(a . x / sqrt(2 d))``.
        w2: The second frequencies, shaped as w1. None: the stationary kernel, w2 = w1.
        p, key_bias, edge_bias, dropout_p, eps, dropout_seed, return_weights: As there.
        magnitude_scale: Factor of ``|x|_p^2``. None: ``1 / (2 sqrt(2 d))``.
        negative_slope: Without frequencies and with p = 2, as in :func:`softmax_edge_attention`:
            GAT's attention, ``exp(LeakyReLU(a . x / sqrt(2 d) + edge_bias_e))``.

    Returns:
        As :func:`implicit_kernel_edge_attention`.

    Raises:
        RuntimeError, TypeError, ValueError, IndexError: As there.

    Source: K. Song et al., "Implicit Kernel Attention", AAAI 2021 (arXiv 2006.06147), on GAT.

    Example:
        >>> import torch, ikattn
        >>> edges = ikattn.ops.Edges.from_coo(*torch.tensor([[0, 2, 1], [1, 0, 1]]), num_targets=3)
        >>> z = torch.randn(3, 4, 8)
        >>> a, w1, w2 = torch.randn(4, 16), torch.randn(4, 16, 5), torch.randn(4, 16, 5)
        >>> ikattn.ops.gat_edge_attention(a, z, z, z, edges, w1, w2).shape
        torch.Size([3, 4, 8])
    """
    return _attend(
        "gat_edge_attention",
        (vector, target, source, value, edges.rowptr, edges.col, w1, w2),
        edges,
        return_weights,
        options,
        eps=eps,
        negative_slope=negative_slope,
    )


def _attend(
    name: str,
    tensors: tuple[Tensor | None, ...],
    edges: Edges,
    return_weights: bool,
    options: EdgeOptions,
    **others: Any,
) -> _Attended:
    """Calls the operator of that name; what is of edges comes and goes in their given order."""
    named = changed(name, options, edges.col, of_edges=True)
    order, edge_bias = edges.order, named.get("edge_bias")
    if edge_bias is not None and order is not None:
        if edge_bias.dim() > 0 and edge_bias.shape[0] == 1:
            edge_bias = edge_bias.expand(order.shape[0], *edge_bias.shape[1:])
        if edge_bias.dim() == 0 or edge_bias.shape[0] != order.shape[0]:
            raise ValueError(
                f"{name}: edge_bias must have shape [E] or [E, H] with E = {order.shape[0]}, got "
                f"{list(edge_bias.shape)}"
            )
        named["edge_bias"] = edge_bias.index_select(0, order)
    operator: Any = getattr(torch.ops.ikattn, name)
    result: tuple[Tensor, Tensor] = operator(*tensors, **named, **others)
    output, weights = result
    if not return_weights:
        return output
    if order is not None:
        weights = weights.new_zeros(weights.shape).index_copy(0, order, weights)
    return output, weights
