"""PyG's TransformerConv with a choice of kernel.

Sizes: N nodes, E edges, H heads, C ``out_channels``, M frequencies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import TransformerConv

from ikattn.integrations.pyg.edges import attributes_of, graph_of, with_weights
from ikattn.integrations.pyg.layers import GraphAttention
from ikattn.ops.edges import Edges, implicit_kernel_edge_attention, softmax_edge_attention


class ImplicitKernelTransformerConv(GraphAttention, TransformerConv):  # type: ignore[misc]
    r"""TransformerConv by the implicit kernel, in the paper's form of queries and keys.

    The weight of an edge j -> i is that of ``ikattn.implicit_kernel_edge_attention``. Constructor,
    parameters and checkpoints are those of PyG's TransformerConv; options from ``kernel`` on are
    new. With ``edge_dim`` every edge has a key and a value of its own, as in PyG: then memory is
    O(E H (C + M)).

    Args:
        *args: As for TransformerConv.
        kernel: "implicit", "rbf" or "dot", which is what TransformerConv computes.
        p, num_frequencies, spectral, stationary, seed: As for ``ikattn.MultiheadAttention``; nodes
            are the tokens, frequencies of MIKAN are for the whole graph.

    Raises:
        ValueError: An option is wrong.

    Example:
        >>> import torch
        >>> from ikattn.integrations.pyg import ImplicitKernelTransformerConv
        >>> conv = ImplicitKernelTransformerConv(16, 8, heads=4)
        >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> conv(torch.randn(3, 16), edge_index).shape
        torch.Size([3, 32])
    """

    _size_of_frequencies = 1
    _alpha: Tensor | None

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Any,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Attends over the edges into every node, as TransformerConv.forward.

        Args:
            x, edge_index, edge_attr: As for ``ImplicitKernelGATConv``.
            return_attention_weights: True or False: return ``(edge_index, weights)``, too, weights
                ``[E, H]`` after dropout.

        Returns:
            ``[N, H C]``, without concat ``[N, C]``; with return_attention_weights a tuple.
        """
        shape = (-1, self.heads, self.out_channels)
        from_source, from_target = (x, x) if isinstance(x, Tensor) else x
        query = self.lin_query(from_target).view(shape)
        key = self.lin_key(from_source).view(shape)
        value = self.lin_value(from_source).view(shape)
        graph = graph_of(edge_index, self.flow, query.size(0))
        edges = graph.edges
        if self.lin_edge is not None:
            edge_attr = attributes_of(edge_index, edge_attr)
            if edge_attr is None:
                raise ValueError(
                    f"{type(self).__name__}: edge_attr must have shape [E, {self.edge_dim}], as "
                    "edge_dim is given, got None"
                )
            # Every edge is a source of its own.
            of_edges = self.lin_edge(edge_attr).view(shape)
            key = key.index_select(0, graph.source) + of_edges
            value = value.index_select(0, graph.source) + of_edges
            numbers = torch.arange(graph.source.numel(), device=query.device)
            of_sorted = numbers if edges.order is None else edges.order
            edges = Edges(edges.rowptr, of_sorted, edges.order)
        options: dict[str, Any] = {"dropout_p": self._drop(), "return_weights": True}
        if self.magnitude is not None:
            options["key_bias"] = self.magnitude(key.transpose(0, 1).unsqueeze(0))[0].t()
        if self.kernel == "implicit":
            tensors = (query, key, value, edges, *self._drawn(query, key))
            found = implicit_kernel_edge_attention(*tensors, p=self.p, **options)
        else:
            p = 2.0 if self.kernel == "dot" else self.p
            found = softmax_edge_attention(query, key, value, edges, p=p, **options)
        output, weights = found
        if self._needs_messages():
            self._alpha = weights
            of_edge = value if self.lin_edge is not None else value.index_select(0, graph.source)
            # PyG reads this line: propagate_type: (value: Tensor, alpha: Tensor)
            size = (key.size(0) if self.lin_edge is None else from_source.size(0), query.size(0))
            size = size if self.flow == "source_to_target" else size[::-1]
            output = self.propagate(edge_index, value=of_edge, alpha=weights, size=size)
            self._alpha = None
        output = output.reshape(-1, shape[1] * shape[2]) if self.concat else output.mean(1)
        if self.root_weight:
            root = self.lin_skip(from_target)
            if self.lin_beta is None:
                output = output + root
            else:
                beta = self.lin_beta(torch.cat([output, root, output - root], -1)).sigmoid()
                output = beta * root + (1 - beta) * output
        if not isinstance(return_attention_weights, bool):
            return output
        return with_weights(output, edge_index, weights)

    def message(self, value: Tensor, alpha: Tensor) -> Tensor:
        """Returns the weighted values of edges [E, H, C], for those who look at messages."""
        return value * alpha.unsqueeze(-1)
