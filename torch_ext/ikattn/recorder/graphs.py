"""Records the attention of PyTorch Geometric's layers, stock and ours, edge by edge."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ikattn.maps.edges import EdgeMaps
from ikattn.maps.recording import Recording
from ikattn.nn.selection import Selection, is_selected, path_to
from ikattn.recorder.calls.hooks import Hook
from ikattn.recorder.calls.modes import as_the_model_runs, in_own_modes
from ikattn.recorder.runs.call import is_running

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


class _ModelCall:
    """A call of the model that has begun, in this thread."""

    def __init__(self, frame: Any) -> None:
        self.frame = frame  # of the call: what Ctrl-C ended is no more on the stack
        self.maps: dict[str, EdgeMaps] = {}


class GraphRecorder:
    """Fills ``Recording.graphs``: one entry for each forward call of the model."""

    def __init__(self, recording: Recording, *, to_cpu: bool, detach: bool) -> None:
        self._recording = recording
        self._to_cpu = to_cpu
        self.detach = detach
        self._handles: list[Any] = []
        self._thread = threading.local()

    def add_hooks(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        """Hears the model and each layer's messages."""
        add = self._handles.append
        add(model.register_forward_pre_hook(Hook(in_own_modes(self._begin))))
        add(model.register_forward_hook(Hook(in_own_modes(self._end))))
        add(model.register_forward_hook(Hook(in_own_modes(self._leave)), always_call=True))
        for name, layer in layers.items():
            call = _LayerCall(name, self)
            module: Any = layer
            add(module.register_propagate_forward_pre_hook(Hook(in_own_modes(call.begin))))
            add(module.register_message_forward_pre_hook(Hook(in_own_modes(call.before_messages))))
            add(module.register_message_forward_hook(Hook(in_own_modes(call.messages))))
            add(module.register_propagate_forward_hook(Hook(in_own_modes(call.end))))
            add(module.register_forward_hook(Hook(in_own_modes(call.leave)), always_call=True))

    def remove_hooks(self) -> None:
        """Ends the recording."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def add(self, name: str, maps: EdgeMaps) -> None:
        """Takes the maps of one run of a layer; a further run in the same call is ``name#2``."""
        calls = self._calls
        while calls and not is_running(calls[-1].frame):
            calls.pop()
        if not calls:  # a layer was called by itself
            self._recording.graphs.append({name: maps})
            return
        run, single, of_call = 1, name, calls[-1].maps
        while single in of_call:
            run += 1
            single = f"{name}#{run}"
        of_call[single] = maps

    def kept(self, tensor: Tensor) -> Tensor:
        """A map as the recording holds it."""
        tensor = tensor.detach() if self.detach else tensor
        return tensor.cpu() if self._to_cpu else tensor

    @property
    def _calls(self) -> list[_ModelCall]:
        calls: list[_ModelCall] | None = getattr(self._thread, "calls", None)
        if calls is None:
            calls = self._thread.calls = []
        return calls

    def _begin(self, module: nn.Module, arguments: Any) -> None:
        self._calls.append(_ModelCall(sys._getframe(3)))  # beyond the hook and its modes

    def _end(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._calls[-1].maps:
            self._recording.graphs.append(self._calls[-1].maps)

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._calls.pop()


class _LayerCall:
    """One layer's propagation of messages, in each thread."""

    def __init__(self, name: str, recorder: GraphRecorder) -> None:
        self._name = name
        self._recorder = recorder
        self._thread = threading.local()  # .edge_index, .maps, .holds
        self._lock = threading.RLock()  # of a layer that leaves weights with itself

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
        with as_the_model_runs(gradients=not self._recorder.detach):
            if module.concat:
                per_head = torch.linalg.vector_norm(messages, dim=-1)
                summed = torch.linalg.vector_norm(per_head, dim=-1)
            else:  # the mean over heads
                per_head = torch.linalg.vector_norm(messages, dim=-1) / messages.shape[1]
                summed = torch.linalg.vector_norm(messages.mean(1), dim=-1)
            keep = self._recorder.kept
            self._recorder.add(
                self._name,
                EdgeMaps(
                    keep(source.to(torch.int64, copy=True)),  # the caller may fill them again
                    keep(target.to(torch.int64, copy=True)),
                    output.shape[0],
                    keep(weights),
                    keep(per_head),
                    keep(summed),
                ),
            )


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
