"""PyG's attention layers with a choice of kernel: what they share, and those of the GAT form.

Each is PyG's own, with its constructor, parameters and checkpoints; what differs is the attention.
Sizes: N nodes, E edges, H heads, C ``out_channels``, M frequencies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing
from torch_geometric.typing import SparseTensor
from typing_extensions import Unpack

from ikattn._optional import optional
from ikattn.integrations.pyg.edges import (
    Graph,
    attributes_of,
    graph_of,
    num_targets_of,
    with_self_loops,
    with_weights,
)
from ikattn.nn.kernels import Kernel
from ikattn.nn.with_kernel import ModuleOptions, WithKernel
from ikattn.ops.edges import gat_edge_attention, softmax_edge_attention

Nodes: TypeAlias = "Tensor | tuple[Tensor, Tensor | None]"
Pair: TypeAlias = "tuple[Tensor, Tensor | None]"

_STEPS = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
_HOOKS = [f"_{step}_forward{when}_hooks" for step in _STEPS for when in ("_pre", "")]


class Mapped(NamedTuple):
    """The arguments of attention in the GAT form."""

    target: Tensor  # [N, H, C]
    source: Tensor  # [N, H, C]
    graph: Graph
    of_edges: Tensor | None  # [E, H, C]


class GraphAttention(WithKernel):
    """A base of PyG's layers with a choice of kernel."""

    heads: int
    out_channels: int
    dropout: float
    _size_of_frequencies: int  # in out_channels
    default_frequencies = 16

    # PyG takes what a class inherits for the general form, which is its parent's own here.
    propagate = MessagePassing.propagate
    edge_updater = MessagePassing.edge_updater

    def __init__(self, *args: Any, kernel: Kernel = "implicit", **kwargs: Any) -> None:
        names = [name for name in ModuleOptions.__annotations__ if name in kwargs]
        options: Any = {name: kwargs.pop(name) for name in names}
        super().__init__(*args, **kwargs)
        self.set_kernel(kernel, **options)

    if TYPE_CHECKING:  # attributes of PyG's layers have no types

        def __getattr__(self, name: str) -> Any: ...

    def set_kernel(self, kernel: Kernel, **options: Unpack[ModuleOptions]) -> None:
        """Changes the kernel in place, with new frequencies for "implicit"; all else stays.

        Args:
            kernel, options: As for the constructor.

        Raises:
            ValueError: An option is wrong; nothing has changed then.
        """
        with torch.inference_mode(False):  # frequencies are there to be trained
            self._choose_kernel(
                kernel,
                num_heads=self.heads,
                head_dim=self._size_of_frequencies * self.out_channels,
                like=next(x for x in self.parameters() if not nn.parameter.is_lazy(x)),
                **options,
            )

    def reset_parameters(self) -> None:
        """Draws every parameter anew."""
        super().reset_parameters()  # type: ignore[misc]
        self._reset_kernel()

    def _needs_messages(self) -> bool:
        """Whether somebody looks at the messages of edges, or sums them up otherwise."""
        return (
            bool(self.explain)
            or self.decomposed_layers > 1
            or self.aggr not in ("add", "sum")
            or any(vars(self).get(name) for name in _HOOKS)
        )

    def _drop(self) -> float:
        return self.dropout if self.training else 0.0

    def _drawn(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns frequencies [H, .., M] for queries and keys [nodes, H, ..]."""
        pools = getattr(self.spectral, "pools", False)
        tokens = [x.transpose(0, 1).unsqueeze(0) for x in (query, key)]
        if not pools:  # nothing but sizes is asked of them
            tokens = [x[:, :, :1] for x in tokens]
        w1, w2 = self._frequencies(tokens[0], tokens[1], None, None)
        return tuple(  # type: ignore[return-value]
            w if w is None or w.dim() == 3 else w.squeeze(0) for w in (w1, w2)
        )

    def __prepare_scriptable__(self) -> NoReturn:
        raise RuntimeError(
            f"TorchScript cannot compile {type(self).__name__}; use torch.compile or "
            "torch.export.export instead"
        )


class _GATForm(GraphAttention):
    """The paper's form for GAT: a learned vector and the concatenated ends of an edge.

    A layer has ``_map_nodes``, which returns the mapped sources and targets, [N, H C] each, of
    which the latter may be None, and ``_attend_as_stock``, which computes what PyG's does.
    """

    _size_of_frequencies = 2
    # Names of the learned vector's halves, first that for targets, and of that for edges.
    _halves: tuple[str, str]
    _of_edges: str

    def _forward(
        self,
        x: Nodes,
        edge_index: Any,
        edge_attr: Tensor | None,
        size: tuple[int, int] | None,
        return_attention_weights: bool | None,
    ) -> Any:
        """Computes what ``forward`` of both layers returns, where PyG's own does not serve."""
        of_source, of_target = (x, x) if isinstance(x, Tensor) else x
        if of_source.dim() != 2:
            raise ValueError(
                f"{type(self).__name__}: x must have shape [N, channels], got "
                f"{list(of_source.shape)}"
            )
        has_residual = self.res is not None and of_target is not None
        residual = self.res(of_target) if has_residual else None
        source, target = (
            None if x is None else x.view(-1, self.heads, self.out_channels)
            for x in self._map_nodes(of_source, of_target)
        )
        assert source is not None
        num_nodes = source.size(0) if target is None else min(source.size(0), target.size(0))
        num_nodes = min(size) if size is not None else num_nodes
        edge_index, edge_attr = self._with_loops(edge_index, edge_attr, num_nodes)
        nodes = (source if target is None else target).size(0)
        num_targets = num_targets_of(self.flow, edge_index, nodes, size)
        ends = source.new_zeros((num_targets, *source.shape[1:])) if target is None else target
        graph = graph_of(edge_index, self.flow, num_targets)
        needs_messages = self._needs_messages()
        options: dict[str, Any] = {
            "dropout_p": self._drop(),
            "return_weights": needs_messages or bool(return_attention_weights),
        }
        attend: Any = self._attend_as_stock if self.kernel == "dot" else self._attend_by_kernel
        edge_attr = None if self.lin_edge is None else attributes_of(edge_index, edge_attr)
        of_edges = None
        if edge_attr is not None:
            of_edges = self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels)
        attended = attend(Mapped(ends, source, graph, of_edges), options)
        output, weights = attended if isinstance(attended, tuple) else (attended, None)
        if needs_messages:
            output = self.propagate(edge_index, x=(source, target), alpha=weights, size=size)
        output = output.flatten(1) if self.concat else output.mean(1)
        if residual is not None:
            output = output + residual
        if self.bias is not None:
            output = output + self.bias
        if not return_attention_weights or weights is None:
            return output
        return with_weights(output, edge_index, weights)

    @property
    def _vector(self) -> Tensor:
        """The learned vector, [H, 2 C]."""
        return torch.cat([getattr(self, name) for name in self._halves], -1).squeeze(0)

    def _attend_by_kernel(self, mapped: Mapped, options: dict[str, Any]) -> Any:
        vector, (target, source, graph, of_edges) = self._vector, mapped
        w1 = w2 = None
        if self.kernel == "implicit":
            query = ends = vector.unsqueeze(0)
            if getattr(self.spectral, "pools", False):  # it takes means
                means = (x.sum(0, keepdim=True) / max(x.size(0), 1) for x in (target, source))
                ends = torch.cat([*means], -1)
            w1, w2 = self._drawn(query, ends)
        edge_bias = self._bias_of(of_edges)
        if self.magnitude is not None:
            learned = self.magnitude.of_edges(target, source, graph.target, graph.source)
            edge_bias = learned if edge_bias is None else edge_bias + learned
        tensors = vector, target, source, source, graph.edges, w1, w2
        return gat_edge_attention(*tensors, p=self.p, edge_bias=edge_bias, **options)

    def _bias_of(self, of_edges: Tensor | None) -> Tensor | None:
        """Returns what features of edges [E, H, C] add to their logits, [E, H]."""
        return None if of_edges is None else (of_edges * getattr(self, self._of_edges)).sum(-1)

    def _with_loops(
        self, edge_index: Any, edge_attr: Tensor | None, num_nodes: int
    ) -> tuple[Any, Tensor | None]:
        if not self.add_self_loops:
            return edge_index, edge_attr
        if isinstance(edge_index, SparseTensor):
            if self.edge_dim is not None:
                raise NotImplementedError(
                    f"{type(self).__name__}: edge_attr and add_self_loops together need "
                    "edge_index as a tensor [2, E], got a SparseTensor"
                )
            torch_sparse = optional("torch_sparse", "a SparseTensor", "torch_sparse")
            return torch_sparse.set_diag(edge_index), edge_attr
        return with_self_loops(edge_index, edge_attr, self.fill_value, num_nodes)


class ImplicitKernelGATConv(_GATForm, GATConv):  # type: ignore[misc]
    r"""GATConv by the implicit kernel, in the form that the paper gives for GAT.

    The weight of an edge is that of :func:`ikattn.ops.gat_edge_attention`, with ``att_dst`` and
    ``att_src`` as the vector and mapped nodes as its ends. Constructor and ``forward``, parameters,
    initial values and checkpoints are those of PyG's GATConv; options from ``kernel`` on are new.
    docs/guide/graphs.md has more.

    Args:
        *args: As for GATConv: ``in_channels``, ``out_channels``, ``heads`` and so on.
            ``negative_slope`` has a meaning with "dot" alone.
        kernel: "implicit": learned through its spectral density. "rbf": the RBF kernel. "dot":
            ``exp(LeakyReLU(a . x))``, what GATConv computes.
        p: Order of the norm in the magnitude, a real number >= 1; None: no magnitude; "learned":
            one for each head. "dot" has none.
        num_frequencies: M, per head; this and the options below are for "implicit".
        spectral, stationary, seed: As for ``ikattn.MultiheadAttention``. What MIKAN averages are
            the vector and the concatenation of all targets' and all sources' means.

    Raises:
        ValueError: An option is wrong.

    Source: K. Song et al., "Implicit Kernel Attention", AAAI 2021 (arXiv 2006.06147), on GAT.

    Example:
        >>> import torch
        >>> from ikattn.integrations.pyg import ImplicitKernelGATConv
        >>> conv = ImplicitKernelGATConv(16, 8, heads=4)
        >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> conv(torch.randn(3, 16), edge_index).shape
        torch.Size([3, 32])
    """

    _halves, _of_edges = ("att_dst", "att_src"), "att_edge"

    def forward(
        self,
        x: Nodes,
        edge_index: Any,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Attends over the edges into every node, as GATConv.forward.

        Args:
            x: ``[N, channels]``, or of sources and targets; targets may be None.
            edge_index: ``[2, E]``, an EdgeIndex, a SparseTensor or a sparse tensor of torch.
            edge_attr, size: As for GATConv.forward.
            return_attention_weights: True: return ``(edge_index, weights)``, too, with the self
                loops, weights ``[E, H]`` after dropout; of a SparseTensor one with these values.

        Returns:
            ``[N, H C]``, without concat ``[N, C]``; with return_attention_weights a tuple.
        """
        if self.kernel == "dot" and self._needs_messages():
            return GATConv.forward(self, x, edge_index, edge_attr, size, return_attention_weights)
        return self._forward(x, edge_index, edge_attr, size, return_attention_weights)

    def _map_nodes(self, of_source: Tensor, of_target: Tensor | None) -> Pair:
        if self.lin is None:
            return self.lin_src(of_source), None if of_target is None else self.lin_dst(of_target)
        source = self.lin(of_source)
        if of_target is of_source:
            return source, source
        return source, None if of_target is None else self.lin(of_target)

    def _attend_as_stock(self, mapped: Mapped, options: dict[str, Any]) -> Any:
        vector, (target, source, graph, of_edges) = self._vector, mapped
        vector = vector * vector.size(-1) ** 0.5  # the operator divides by it
        options |= {"edge_bias": self._bias_of(of_edges), "negative_slope": self.negative_slope}
        return gat_edge_attention(vector, target, source, source, graph.edges, **options)


class ImplicitKernelGATv2Conv(_GATForm, GATv2Conv):  # type: ignore[misc]
    r"""GATv2Conv by the implicit kernel: as ``ImplicitKernelGATConv``, with GATv2's maps.

    Targets have a map of their own (``lin_r``) unless ``share_weights``, and the vector a is
    ``[att || att]``: its product with ``[z_i || z_j]`` is that of GATv2 without the LeakyReLU. Only
    "dot" has it, and is what GATv2Conv computes; logits are then those of edges, which takes memory
    of O(E H C).

    Args:
        *args: As for GATv2Conv.
        kernel, p, num_frequencies, spectral, stationary, seed: As for ``ImplicitKernelGATConv``.

    Raises:
        ValueError: An option is wrong.

    Example:
        >>> import torch
        >>> from ikattn.integrations.pyg import ImplicitKernelGATv2Conv
        >>> conv = ImplicitKernelGATv2Conv(16, 8, heads=4, p="learned")
        >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> conv(torch.randn(3, 16), edge_index).shape
        torch.Size([3, 32])
    """

    _halves, _of_edges = ("att", "att"), "att"

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Any,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Attends over the edges into every node; arguments and result as ImplicitKernelGATConv."""
        if self.kernel == "dot" and self._needs_messages():
            return GATv2Conv.forward(self, x, edge_index, edge_attr, return_attention_weights)
        return self._forward(x, edge_index, edge_attr, None, return_attention_weights)

    def _map_nodes(self, of_source: Tensor, of_target: Tensor | None) -> Pair:
        source = self.lin_l(of_source)
        if self.share_weights and of_target is of_source:
            return source, source
        return source, None if of_target is None else self.lin_r(of_target)

    def _attend_as_stock(self, mapped: Mapped, options: dict[str, Any]) -> Any:
        target, source, graph, of_edges = mapped
        ends = source.index_select(0, graph.source) + target.index_select(0, graph.target)
        if of_edges is not None:
            ends = ends + of_edges
        slope = self.negative_slope
        logits = (nn.functional.leaky_relu(ends, slope, inplace=slope >= 0) * self.att).sum(-1)
        none, nothing = target[..., :0], source[..., :0]  # all that counts is in the logits
        return softmax_edge_attention(
            none, nothing, source, graph.edges, edge_bias=logits, **options
        )
