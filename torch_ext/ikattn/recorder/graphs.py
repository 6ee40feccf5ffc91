"""Records the attention of PyTorch Geometric's layers, stock and ours, edge by edge."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ikattn.maps.edges import EdgeMaps
from ikattn.nn.selection import Selection, is_selected, path_to
from ikattn.recorder.calls.hooks import Hook
from ikattn.recorder.calls.modes import as_the_model_runs, in_own_modes
from ikattn.recorder.runs.making import Options

_KINDS = ("GATConv", "GATv2Conv", "TransformerConv")


def graph_layers(model: nn.Module, layers: Selection | None) -> dict[str, nn.Module]:
    """PyG's attention layers in a model that are selected, by their first names."""
    pyg = sys.modules.get("torch_geometric.nn")
    if pyg is None:  # without it there is no such layer
        return {}
    kinds = tuple(getattr(pyg, name) for name in _KINDS)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, kinds) and is_selected([name], module, path_to(model, name), layers)
    }


class GraphLayer:
    """A layer's propagation of messages, in each thread; ``take`` gets its name and maps."""

    def __init__(self, name: str, options: Options, take: Callable[[str, EdgeMaps], None]) -> None:
        self._name, self._options, self._take = name, options, take
        self._thread = threading.local()  # .edge_index, .maps, .holds
        self._lock = threading.RLock()  # of a layer that leaves weights with itself

    def add_hooks(self, layer: Any) -> list[Any]:
        """Hears the layer's messages, until the handles are removed."""
        hooks = (
            (layer.register_propagate_forward_pre_hook, self.begin),
            (layer.register_message_forward_pre_hook, self.before_messages),
            (layer.register_message_forward_hook, self.messages),
            (layer.register_propagate_forward_hook, self.end),
            (partial(layer.register_forward_hook, always_call=True), self.leave),
        )
        return [register(Hook(in_own_modes(hook))) for register, hook in hooks]

    def begin(self, module: Any, arguments: Sequence[Any]) -> None:
        self._thread.edge_index, self._thread.maps = arguments[0], None

    def before_messages(self, module: Any, arguments: Sequence[Any]) -> None:
        """Keeps other threads from a layer's ``_alpha`` until it has done with it."""
        if "alpha" in arguments[0] or getattr(self._thread, "holds", False):
            return
        if not self._lock.acquire(timeout=60):
            raise RuntimeError(
                f"record: {self._name} is called by several threads, one of which was interrupted; "
                "begin a new recording"
            )
        self._thread.holds = True

    def leave(self, module: Any, arguments: Any, output: Any) -> None:
        """The layer's call has ended, well or not."""
        if getattr(self._thread, "holds", False):
            self._thread.holds = False
            self._lock.release()

    def messages(self, module: Any, arguments: Sequence[Any], messages: Tensor) -> None:
        """``messages`` [E, H, C]: what each head moves along each edge."""
        weights = arguments[0].get("alpha")
        if weights is None:
            weights = module._alpha
        self._thread.maps = (weights, messages)

    def end(self, module: Any, arguments: Sequence[Any], output: Tensor) -> None:
        from ikattn.integrations.pyg.edges import ends_of

        maps: tuple[Tensor, Tensor] | None = getattr(self._thread, "maps", None)
        if maps is None:
            raise RuntimeError(
                f"record: {self._name} ({type(module).__name__}) ran, and its messages were not "
                "seen: its propagate must call its method message"
            )
        weights, messages = maps
        source, target, _ = ends_of(self._thread.edge_index, module.flow)
        self._thread.maps = self._thread.edge_index = None
        _check_sum(self._name, module, messages, output, target)
        with as_the_model_runs(gradients=not self._options.detach):
            if module.concat:
                per_head = torch.linalg.vector_norm(messages, dim=-1)
                summed = torch.linalg.vector_norm(per_head, dim=-1)
            else:  # the mean over heads
                per_head = torch.linalg.vector_norm(messages, dim=-1) / messages.shape[1]
                summed = torch.linalg.vector_norm(messages.mean(1), dim=-1)
            # copies of the ends, which the caller may fill again
            source, target = (x.to(torch.int64, copy=True) for x in (source, target))
            tensors = (source, target, weights, per_head, summed)
            source, target, weights, per_head, summed = map(self._kept, tensors)
            nodes = output.shape[0]
            self._take(self._name, EdgeMaps(source, target, nodes, weights, per_head, summed))

    def _kept(self, x: Tensor) -> Tensor:
        x = x.detach() if self._options.detach else x
        return x.cpu() if self._options.to_cpu else x


@torch.no_grad()
def _check_sum(name: str, module: Any, messages: Tensor, output: Tensor, target: Tensor) -> None:
    """Raises RuntimeError unless the messages into each node add up to what it got.

    Sums over heads and channels are compared, which need no second copy of the messages.
    """

    def into_nodes(of_edges: Tensor) -> Tensor:
        return of_edges.new_zeros(len(output)).index_add(0, target, of_edges)

    double: dict[str, Any] = {"dim": (1, 2), "dtype": torch.float64}
    expected = into_nodes(messages.sum(**double))
    scale = into_nodes(torch.linalg.vector_norm(messages, 1, **double))
    error = (expected - output.sum(**double)).abs()
    rounding = torch.finfo(messages.dtype).eps * (8 + len(target) ** 0.5)
    wrong = ~(error <= rounding * scale) & expected.isfinite()
    if wrong.any():
        node = int(wrong.nonzero()[0])
        raise RuntimeError(
            f"record: {name} ({type(module).__name__}, aggr={module.aggr!r}) does not add up: the "
            f"sum of the messages into node {node} and what it got differ by "
            f"{float(error[node] / scale[node]):.2%}. layers=... leaves the layer out"
        )
