"""Fills a recording from hooks, while the model runs."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.activation import MultiheadAttention as StockMultiheadAttention
from torch.utils.hooks import RemovableHandle

from ikattn._memory import memory_for
from ikattn._precision import without_autocast
from ikattn.analysis._recorder.attention_call import (
    AttentionCall,
    Surroundings,
    awaited_norms,
    convert_tensors,
    make_maps,
)
from ikattn.analysis._recorder.plan import Plan
from ikattn.analysis._recorder.torch_attention import torch_call
from ikattn.analysis._recorder.transformers_attention import interface_call
from ikattn.analysis.contributions import Contributions
from ikattn.analysis.maps import Batch, Layer
from ikattn.analysis.recording import Recording
from ikattn.integrations.transformers._interface import Given

__all__ = ["OnLayer", "Recorder"]

OnLayer: TypeAlias = Callable[[int, Layer, Contributions], None]


@dataclass
class _Run:
    """A layer's attention that has run, while norms after it are awaited."""

    name: str
    attention: AttentionCall
    wanted: tuple[str, ...]
    around: Surroundings
    awaited: set[str]


@dataclass
class _Call:
    """A call of the model, or of a part of it, in the thread that made it."""

    index: int
    running: list[nn.Module] = field(default_factory=list)  # outermost first
    inputs: dict[nn.Module, Tensor] = field(default_factory=dict)  # first inputs: residuals
    frequencies: dict[nn.Module, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    times_run: dict[nn.Module, int] = field(default_factory=dict)
    pending: dict[nn.Module, _Run] = field(default_factory=dict)
    query_padding: dict[str, Tensor | None] = field(default_factory=dict)  # by side
    padded_length: int | None = None  # of what nn.TransformerEncoder has nested
    layers: dict[str, Layer] = field(default_factory=dict)
    batch: Batch = field(default_factory=Batch)


class Recorder:
    """Fills a recording from hooks."""

    def __init__(
        self, recording: Recording, *, to_cpu: bool, detach: bool, on_layer: OnLayer | None
    ) -> None:
        self._recording = recording
        self._to_cpu = to_cpu
        self._detach = detach
        self._on_layer = on_layer
        self._handles: list[RemovableHandle] = []
        self._lock = threading.Lock()
        self._calls_begun = 0
        self._thread = threading.local()

    # --- Hooks

    def add_hooks(self, model: nn.Module, plans: Sequence[Plan]) -> None:
        """Those of calls embrace the others: before them on the way in, after them on the way out.

        Every module around a layer is watched, so that a part of the model may be called alone.
        """
        around = {module: None for plan in plans for module in (plan.module, *plan.ancestors)}
        watched = list({model: None} | around)
        for module in watched:
            self._handles.append(module.register_forward_pre_hook(self._enter))
            if isinstance(module, nn.TransformerEncoder):
                self._before(module, self._note_padded_length)
        for plan in plans:
            self._add_layer_hooks(plan)
        for module in watched:
            self._handles.append(module.register_forward_hook(self._complete))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _add_layer_hooks(self, plan: Plan) -> None:
        module, parts = plan.module, plan.parts
        self._before(parts.pre_norm or module, self._note_residual)
        for name, norm in (("norm_input", parts.norm), ("second_norm_input", parts.second_norm)):
            if norm is not None:
                self._before(norm, self._norm_hook(plan, name))
        if not isinstance(module, StockMultiheadAttention):
            return
        spectral = getattr(module, "spectral", None)
        if isinstance(spectral, nn.Module):
            self._handles.append(spectral.register_forward_hook(self._note_frequencies(module)))
        hook = self._torch_hook(plan)
        self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def _before(self, module: nn.Module, note: Callable[[nn.Module, Tensor], None]) -> None:
        """Hands ``note`` the first input of each forward of ``module``."""
        first = next(iter(inspect.signature(module.forward).parameters))

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            note(module, args[0] if args else kwargs[first])

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    # --- Calls

    @property
    def _call(self) -> _Call | None:
        return getattr(self._thread, "call", None)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if _is_in_backward():
            return  # a checkpointed layer, run again
        if self._call is None:
            with self._lock:
                self._thread.call = _Call(self._calls_begun)
                self._calls_begun += 1
        self._thread.call.running.append(module)

    def _complete(self, module: nn.Module, args: Any, output: Any) -> None:
        """Keeps the batch, if the call that opened it has come to its end without an error."""
        call = self._call
        if call is None or call.running != [module]:
            return
        for run in call.pending.values():
            raise RuntimeError(
                f"record: a norm that should follow {run.name} did not run in this call; its "
                "resolver must be wrong"
            )
        with self._lock:
            for name, layer in call.layers.items():
                self._recording.layers.setdefault(name, layer)
            if self._on_layer is None:
                self._recording.batches.append(call.batch)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._call
        if call is None or not call.running or call.running[-1] is not module:
            return
        call.running.pop()
        if not call.running:
            self._thread.call = None

    # --- What a layer needs

    def _note_residual(self, module: nn.Module, x: Tensor) -> None:
        if self._call is not None:
            self._call.inputs[module] = x

    def _note_padded_length(self, module: nn.Module, x: Tensor) -> None:
        if self._call is not None and not x.is_nested and x.dim() == 3:
            self._call.padded_length = x.size(1)

    def _note_frequencies(self, attention: nn.Module) -> Callable[..., None]:
        def hook(spectral: nn.Module, args: Any, output: tuple[Any, ...]) -> None:
            if self._call is not None:  # a regulariser may follow w1 and w2
                self._call.frequencies[attention] = (output[0], output[1])

        return hook

    def _norm_hook(self, plan: Plan, name: str) -> Callable[[nn.Module, Tensor], None]:
        def note(module: nn.Module, x: Tensor) -> None:
            call = self._call
            run = None if call is None else call.pending.get(plan.module)
            if call is None or run is None or name not in run.awaited:
                return
            setattr(run.around, name, _as_batch(x, plan, run.attention, call.padded_length))
            run.awaited.remove(name)
            if not run.awaited:
                del call.pending[plan.module]
                self._make_maps(call, plan, run)

        return note

    def _torch_hook(self, plan: Plan) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            call = self._call
            if call is not None:
                with self._grad_mode():
                    attention = torch_call(
                        module,
                        args,
                        kwargs,
                        plan.parts.kind,
                        call.frequencies.pop(module, None),
                        call.padded_length,
                    )
                self._attention_ran(call, plan, attention)

        return hook

    def interface_called(self, plan: Plan, given: Given) -> None:
        """Takes up what a module passed to its attention function."""
        call = self._call
        if call is not None:
            with self._grad_mode():
                attention = interface_call(plan.module, given, plan.parts.kind)
            self._attention_ran(call, plan, attention)

    # --- Maps

    def _attention_ran(self, call: _Call, plan: Plan, attention: AttentionCall) -> None:
        module, parts = plan.module, plan.parts
        times = call.times_run[module] = call.times_run.get(module, 0) + 1
        name = plan.name if times == 1 else f"{plan.name}#{times}"
        if module in call.pending:
            raise RuntimeError(
                f"record: {plan.name} ran again before the norm after it; its resolver must be "
                "wrong"
            )
        if attention.kind == "self":
            call.query_padding[parts.side] = attention.query_padding
        elif parts.kind == "cross":
            padding = call.query_padding.get(parts.side)
            if padding is not None and padding.shape == attention.sizes[::2]:
                attention.query_padding = padding
        residual = call.inputs.pop(parts.pre_norm or module, None)
        around = Surroundings()
        if residual is not None and parts.block != "none":
            around.residual = _as_batch(residual, plan, attention, call.padded_length)
        wanted = plan.maps(attention.kind)
        run = _Run(name, attention, wanted, around, set(awaited_norms(parts, wanted)))
        if run.awaited:
            call.pending[module] = run
        else:
            self._make_maps(call, plan, run)

    def _make_maps(self, call: _Call, plan: Plan, run: _Run) -> None:
        parts, attention = plan.parts, run.attention
        with memory_for("record", f"the maps of layer {run.name}"):
            with self._grad_mode(), without_autocast(attention.query.device):
                maps = make_maps(attention, parts, run.around, run.wanted)
            maps = convert_tensors(maps, detach=self._detach, to_cpu=self._to_cpu)
        layer = Layer(
            run.name,
            attention.kind,
            parts.side,
            attention.query.size(1),
            parts.block,
            parts.family,
        )
        call.layers[run.name] = layer
        if self._on_layer is None:
            call.batch.layers[run.name] = maps
        else:
            self._on_layer(call.index, layer, maps)

    def _grad_mode(self) -> torch.set_grad_enabled:
        return torch.set_grad_enabled(torch.is_grad_enabled() and not self._detach)


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _as_batch(x: Tensor, plan: Plan, attention: AttentionCall, padded: int | None) -> Tensor:
    """What a layer's block passes on, as ``[B, T, D]``.

    Raises:
        RuntimeError: It has other sizes than the attention's queries.
    """
    B, _, T, _ = attention.sizes
    if x.is_nested:
        sizes = None if padded is None else (B, padded, x.size(2))
        x = torch.nested.to_padded_tensor(x, 0.0, sizes)
    elif isinstance(plan.module, StockMultiheadAttention):
        if x.dim() == 2:
            x = x.unsqueeze(0)
        elif not plan.module.batch_first:
            x = x.transpose(0, 1)
    elif x.dim() == 2 and x.size(0) == B * T:
        x = x.unflatten(0, (B, T))
    if x.shape[:-1] != (B, T):
        raise RuntimeError(
            f"record: {plan.name}: the residual and the inputs of the norms must have shape "
            f"[B, T, D] = [{B}, {T}, D], got {list(x.shape)}; chunked feed-forward layers "
            "(chunk_size_feed_forward) cannot be recorded with their norms"
        )
    return x
