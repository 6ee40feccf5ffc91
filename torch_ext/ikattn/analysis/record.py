"""``ikattn.record``: the maps of a model's attention, taken from ordinary forward calls.

A call's way: a hook on the outermost module that runs opens a batch -> hooks note the residual ->
the attention runs, and tells what it was given (a hook on ``nn.MultiheadAttention``, or the
attention function of a transformers model) -> hooks on the norms after it note their inputs -> with
the last of these the maps of that layer are made, and all that they were made of is let go.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.activation import MultiheadAttention as StockMultiheadAttention
from torch.utils.hooks import RemovableHandle

from ikattn._memory import memory_for
from ikattn._selection import Selection, is_selected
from ikattn.analysis._attention_call import (
    ALL_MAPS,
    LEDGER,
    USUAL_MAPS,
    AttentionCall,
    Surroundings,
    awaited_norms,
    convert_tensors,
    defined_maps,
    make_maps,
    why_undefined,
    without_autocast,
)
from ikattn.analysis._resolvers import AttentionParts, find_attention, out_proj_weight
from ikattn.analysis._torch_attention import torch_call
from ikattn.analysis.recording import Batch, Layer, Recording
from ikattn.contributions import Contributions
from ikattn.integrations.transformers._interface import Given
from ikattn.integrations.transformers._recording import interface_call, listening

__all__ = ["record"]

OnLayer: TypeAlias = Callable[[int, Layer, Contributions], None]

_GROUPS = {"ledger": (*LEDGER, "value_norms", "per_head")}


@contextlib.contextmanager
def record(
    model: nn.Module,
    maps: Iterable[str] | None = ("summed",),
    *,
    layers: Selection | None = None,
    to_cpu: bool = True,
    detach: bool = True,
    on_layer: OnLayer | None = None,
) -> Iterator[Recording]:
    """Records what every token contributes, in every layer of attention, while the model runs.

    Records ``nn.MultiheadAttention``, stock and ours, and the models of Hugging Face transformers
    that a resolver knows (``ikattn.analysis.register_resolver`` adds more). Inside the block the
    model is called as ever: arguments, return values and gradients stay what they are, but torch's
    fused kernel of a whole ``nn.TransformerEncoderLayer``, which hides the attention, is replaced
    by the same layer's ordinary code, and what torch.compile made runs as written. After the block
    the model is as it was before it.

    Each call of the model gives one batch; so does each direct call of a part of it, such as the
    encoder pass of ``generate``, each of whose steps is a call of its own. A call that raises gives
    none. Several threads may call the model; batches are in the order in which calls ended.
    Recordings of one model may be nested, and each gets every call.

    Weights are computed once more, in float32 at least, from the queries and keys that the model
    projected; large ones are never held, unless a map for every head is asked for. In training they
    are the weights before dropout, while what went into a norm is what it really got. A layer that
    is run several times in one call is ``name``, ``name#2`` and so on. Learned and zero keys
    (``add_bias_kv``, ``add_zero_attn``) are the last columns of a map.

    Args:
        model: Any module that holds attention.
        maps: Names of maps: "value_norms", "per_head", "summed" (N), "with_residual" (N_Res),
            "with_norm" (N_ResLN), "encoder" (N_Enc), "mixing_ratio" (of each map from "summed" on
            that the layer has), "weights", "similarity", "magnitude"; "ledger" stands for the last
            three with "value_norms" and "per_head", and "all" for all of these that a layer has.
            None: what a layer has, except those for every head and those of the ledger. In
            cross-attention "with_norm" and "encoder" hold
            what comes from the keys alone: the residual has no column.
        layers: Which layers, as in ``ikattn.convert``: a predicate of name and module; a pattern of
            names as in a shell ("encoder.*"); a type, of the layer or of what holds it; a list of
            patterns and types; None: all.
        to_cpu: Move maps to the CPU as they are made.
        detach: Maps have no gradient. False: they are differentiable where grad mode is on.
        on_layer: Called with the number of the forward call, the layer and its maps as soon as they
            are made, in the thread that runs the model; the recording then keeps no maps. A call
            that raises later may have handed over some layers.

    Yields:
        The recording, filled as calls end. Shapes are those of ``Contributions``; unbatched input
        is a batch of one.

    Raises:
        TypeError: model is no module, or an out-projection is no plain linear map.
        ValueError: A map does not exist, or a layer does not have it (the message says why); layers
            selects none; the model holds no attention; its attention implementation is neither
            "eager" nor "sdpa".
        NotImplementedError: The model's attention cannot be recorded, or no resolver knows it.
        RuntimeError: In a forward call: a norm that should follow the attention did not run.

    Sources: those of ``ikattn.contributions``.

    Example:
        >>> import torch, ikattn
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2).eval()
        >>> with ikattn.record(model, maps=("summed", "with_norm")) as recording:
        ...     output = model(torch.randn(3, 5, 16))
        >>> recording.names
        ['layers.0.self_attn', 'layers.1.self_attn']
        >>> recording["layers.0.self_attn"].with_norm.shape
        torch.Size([3, 5, 5])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"record: model must be a torch.nn.Module, got {type(model).__name__}")
    plans = _plan(model, _asked(maps), layers)
    defined = {name for plan in plans for name in plan.maps(plan.parts.kind)}
    recording = Recording(_describe(model), tuple(name for name in ALL_MAPS if name in defined))
    recorder = _Recorder(recording, to_cpu=to_cpu, detach=detach, on_layer=on_layer)
    with contextlib.ExitStack() as stack:
        if any(_is_compiled(module) for module in model.modules()):
            # a graph compiled before the block would run without its hooks
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        on_interface = {
            plan.module: plan
            for plan in plans
            if not isinstance(plan.module, StockMultiheadAttention)
        }
        if on_interface:

            def listener(module: nn.Module, given: Given) -> None:
                recorder.interface_called(on_interface[module], given)

            stack.enter_context(listening(model, on_interface, listener))
        stack.callback(recorder.remove_hooks)
        recorder.add_hooks(model, plans)
        yield recording


# --- Before anything runs


@dataclass(frozen=True, eq=False)
class _Asked:
    """Names of maps: those that a layer must have, and those to take where it has them."""

    required: tuple[str, ...]
    where_defined: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class _Plan:
    """What to record of one layer of attention."""

    name: str
    module: nn.Module
    ancestors: tuple[nn.Module, ...]
    parts: AttentionParts
    asked: _Asked

    def maps(self, kind: str | None) -> tuple[str, ...]:
        """The names of the maps to make of a run of this kind, None where it is not known yet.

        Raises:
            ValueError: A map was asked for that the layer does not have.
        """
        for name in self.asked.required:
            reason = why_undefined(name, self.parts, kind)
            if reason is not None:
                raise ValueError(
                    f"record: {self.name} has no map {name!r}: {reason}. It has "
                    f"{', '.join(defined_maps(ALL_MAPS, self.parts, kind))}; maps='all' takes of "
                    "each layer what it has, layers=... leaves layers out"
                )
        found = (*self.asked.required, *defined_maps(self.asked.where_defined, self.parts, kind))
        return tuple(dict.fromkeys(found))


def _plan(model: nn.Module, asked: _Asked, layers: Selection | None) -> list[_Plan]:
    """What to record of each selected layer.

    Raises:
        ValueError: There is none, none is selected, or one has not the maps that were asked for.
        NotImplementedError: One of them cannot be recorded.
        TypeError: Its out-projection is no plain linear map.
    """
    sites = find_attention(model)
    if not sites:
        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            "record: model must hold attention that can be recorded, nn.MultiheadAttention or what "
            f"calls transformers' AttentionInterface; there is none in {', '.join(kinds)}"
        )
    plans = []
    for site in sites:
        if not is_selected([site.name], site.module, (*site.ancestors, site.module), layers):
            continue
        if isinstance(site.parts, str):
            raise NotImplementedError(f"record: {site.name} cannot be recorded: {site.parts}")
        plan = _Plan(site.name, site.module, site.ancestors, site.parts, asked)
        plan.maps(site.parts.kind)
        out_proj_weight(site.parts.out_proj)
        plans.append(plan)
    if not plans:
        names = ", ".join(site.name for site in sites)
        raise ValueError(f"record: layers={layers!r} selects none of {names}")
    return plans


def _asked(maps: Iterable[str] | None) -> _Asked:
    """What ``maps`` stands for.

    Raises:
        ValueError: It names no map, or one that does not exist.
    """
    if maps is None:
        return _Asked((), USUAL_MAPS)
    names = [maps] if isinstance(maps, str) else list(maps)
    for name in names:
        if name not in (*ALL_MAPS, *_GROUPS, "all"):
            raise ValueError(
                f"record: maps must be names out of {', '.join((*ALL_MAPS, *_GROUPS, 'all'))}, "
                f"got {name!r}"
            )
    if not names:
        raise ValueError("record: maps must name at least one map, got none")
    named = (single for name in names if name != "all" for single in _GROUPS.get(name, (name,)))
    return _Asked(tuple(named), ALL_MAPS if "all" in names else ())


def _describe(model: nn.Module) -> str:
    source = getattr(getattr(model, "config", None), "name_or_path", "")
    return f"{type(model).__name__} {source}".strip()


# --- While the model runs


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


class _Recorder:
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

    def add_hooks(self, model: nn.Module, plans: Sequence[_Plan]) -> None:
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

    def _add_layer_hooks(self, plan: _Plan) -> None:
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

    def _norm_hook(self, plan: _Plan, name: str) -> Callable[[nn.Module, Tensor], None]:
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

    def _torch_hook(self, plan: _Plan) -> Callable[..., None]:
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

    def interface_called(self, plan: _Plan, given: Given) -> None:
        """Takes up what a module passed to its attention function."""
        call = self._call
        if call is not None:
            with self._grad_mode():
                attention = interface_call(plan.module, given, plan.parts.kind)
            self._attention_ran(call, plan, attention)

    # --- Maps

    def _attention_ran(self, call: _Call, plan: _Plan, attention: AttentionCall) -> None:
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

    def _make_maps(self, call: _Call, plan: _Plan, run: _Run) -> None:
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


def _is_compiled(module: nn.Module) -> bool:
    is_wrapper = type(module).__name__ == "OptimizedModule"  # its import is slow
    return is_wrapper or getattr(module, "_compiled_call_impl", None) is not None


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _as_batch(x: Tensor, plan: _Plan, attention: AttentionCall, padded: int | None) -> Tensor:
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
