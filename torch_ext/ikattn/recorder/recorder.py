"""Fills a recording from hooks, while the model runs.

A call's way: a hook on the outermost module that runs opens a batch -> the attention runs, and
tells what it was given (a hook on ``nn.MultiheadAttention``, the attention function of a
transformers model, or ``F.scaled_dot_product_attention``) -> hooks on the modules around it see
where its output goes (``following.py``) -> with the norm after it the maps of that layer are made
(``making.py``), and all that they were made of is let go.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.activation import MultiheadAttention as StockMultiheadAttention
from torch.utils.hooks import RemovableHandle

from ikattn.integrations.transformers._interface import Given
from ikattn.maps.layers import Batch, Layer
from ikattn.maps.recording import Recording
from ikattn.nn._over_ranks import goes_over_ranks
from ikattn.recorder.calls.attention_call import AttentionCall
from ikattn.recorder.calls.heads import FollowedHeads
from ikattn.recorder.calls.hooks import Hook
from ikattn.recorder.calls.modes import check_is_plain_call, in_own_modes
from ikattn.recorder.calls.projection import describe, is_probing
from ikattn.recorder.calls.sdpa import sdpa_call
from ikattn.recorder.calls.torch_attention import (
    fused_layer_differs,
    inputs_of,
    out_projection_of,
    torch_call,
)
from ikattn.recorder.calls.transformers_attention import interface_call
from ikattn.recorder.plan.plan import Plan
from ikattn.recorder.runs.call import Call, Entered, note_ids, tokens_before
from ikattn.recorder.runs.following import Follower
from ikattn.recorder.runs.making import Maker, OnLayer, OnRun
from ikattn.recorder.runs.padding import (
    fill_padding,
    has_other_keys,
    mask_argument,
    padding_of_decoder,
)
from ikattn.recorder.runs.rows import RowsAsked
from ikattn.recorder.runs.run import Run
from ikattn.recorder.runs.transfers import Arrival
from ikattn.recorder.sums.claims import Settlement
from ikattn.recorder.sums.tensors import first_tensor
from ikattn.recorder.sums.token_order import TokenOrder

__all__ = ["OnLayer", "OnRun", "Recorder"]

_CROSS = ("encoder_hidden_states", "key_value_states", "cross_attention_states")


class _Ended(NamedTuple):
    """A call that has ended, whose maps and numbers are on their way."""

    layers: dict[str, Layer]
    batch: Batch
    settlement: Settlement
    arrival: Arrival


class Recorder:
    """Fills a recording from hooks."""

    def __init__(
        self,
        recording: Recording,
        *,
        to_cpu: bool,
        detach: bool,
        on_layer: OnLayer | None,
        check: Literal["rows", "all"],
        on_run: OnRun | None = None,
        rows: RowsAsked | None = None,
    ) -> None:
        self._recording = recording
        self._on_layer = on_layer
        self._checks_all = check == "all"
        self._maker = Maker(
            to_cpu=to_cpu, detach=detach, on_layer=on_layer, on_run=on_run, rows=rows
        )
        self._follower = Follower(self._maker, checks_all=self._checks_all)
        self._handles: list[RemovableHandle] = []
        self._lock = threading.Lock()
        self._calls_begun = 0
        self._ended: deque[_Ended] = deque()
        self._thread = threading.local()
        self._plans: dict[nn.Module, Plan] = {}
        self._watched: set[nn.Module] = set()
        self._around_sdpa: set[nn.Module] = set()  # whose linear modules are noted
        self._has_told_of_masks = False
        self._silent: dict[str, nn.Module] = {}  # that ran without a word, where it is no error

    # --- Hooks

    def add_hooks(self, model: nn.Module, plans: Sequence[Plan]) -> None:
        """Those of calls embrace the others: before them on the way in, after them on the way out.

        Every module around a layer is watched, so that a part of the model may be called alone.
        """
        self._plans = {plan.module: plan for plan in plans}
        around = {module: None for plan in plans for module in (plan.module, *plan.ancestors)}
        watched = list({model: None} | around)
        self._watched = set(watched)
        self._around_sdpa = {
            module
            for plan in plans
            if plan.seen_by == "sdpa"
            for module in (plan.module, *plan.ancestors[:2])
        }
        norms = {module for module in model.modules() if "Norm" in type(module).__name__}
        self._maker.plans, self._follower.norms = plans, norms
        roots = dict.fromkeys((plan.ancestors[:3] or (plan.module,))[-1] for plan in plans)
        near = {module: None for root in roots for module in root.modules()}
        for module in {**dict.fromkeys(watched), **near}:
            hook = module.register_forward_pre_hook(Hook(self._enter), with_kwargs=True)
            self._handles.append(hook)
        for plan in plans:
            spectral = getattr(plan.module, "spectral", None)
            if isinstance(plan.module, StockMultiheadAttention) and isinstance(spectral, nn.Module):
                noting = Hook(self._note_frequencies(plan.module))
                self._handles.append(spectral.register_forward_hook(noting))
        for module in {**near, **dict.fromkeys(watched)}:
            hook = module.register_forward_hook(Hook(self._exit), with_kwargs=True)
            self._handles.append(hook)
        for module in watched:
            hook = module.register_forward_hook(Hook(self._leave), always_call=True)
            self._handles.append(hook)

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._call is not None:
            self._abandon(self._call)
        self._follower.forget()
        if self._silent:
            is_told_not_to = any(
                getattr(module, "fused_attn", True) is False for module in self._silent.values()
            )
            hint = (
                ". It calls the former where its fused_attn is True: "
                "timm.layers.set_fused_attn(True, experimental=True) before the model is built"
            )
            warnings.warn(
                f"record: {', '.join(sorted(self._silent))} ran without calling "
                "F.scaled_dot_product_attention or transformers' AttentionInterface, and is not "
                f"recorded{hint if is_told_not_to else ''}",
                stacklevel=2,
            )

    def _note_frequencies(self, attention: nn.Module) -> Callable[..., None]:
        @in_own_modes
        def hook(spectral: nn.Module, args: Any, output: tuple[Any, ...]) -> None:
            if self._call is not None:  # a regulariser may follow w1 and w2
                self._call.frequencies[attention] = (output[0], output[1])

        return hook

    # --- Calls

    @property
    def _call(self) -> Call | None:
        return getattr(self._thread, "call", None)

    @in_own_modes
    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call, is_watched = self._call, module in self._watched
        if isinstance(module, nn.Linear) and call is not None and call.running:
            entered = call.running[-1]
            if entered.module in self._around_sdpa:
                _note_projected(entered, module, first_tensor(args, kwargs))
        is_norm = module in self._follower.norms
        if not is_watched and (call is None or not (call.pending or is_norm)):
            return
        if _is_in_backward() or is_probing():
            return  # a checkpointed layer that runs again; a module asked what it computes
        x = first_tensor(args, kwargs)
        if is_watched:
            check_is_plain_call(describe(module))
            if goes_over_ranks(module):
                raise RuntimeError(
                    f"record: {type(module).__name__} is in context_parallel, where no rank has "
                    "all weights of a query; record without it"
                )
            if call is not None and not call.is_alive:
                self._abandon(call)
                call = None
            if call is None:
                if x is not None and x.is_cuda and torch.cuda.is_current_stream_capturing():
                    raise RuntimeError(
                        "record: a call cannot be recorded while a CUDA graph captures it, for the "
                        "host checks what the model computes; record a call outside the capture"
                    )
                with self._lock:
                    call = self._thread.call = Call(self._calls_begun, sys._getframe(3))
                    self._calls_begun += 1
        if call is None:
            return
        if x is not None:
            for run in tuple(call.pending):
                self._follower.flows_in(call, run, module, x)
        if x is not None and is_norm and not is_watched:
            seen = call.see(x)
            call.norms.append((module, seen))
            if call.running:
                call.running[-1].normed.append(seen)
        if not is_watched:
            return
        if x is not None and isinstance(module, nn.TransformerEncoder):
            is_padded = not x.is_nested and x.dim() == 3
            call.padded_length = x.size(1) if is_padded else call.padded_length
        if isinstance(module, nn.TransformerEncoderLayer) and not self._has_told_of_masks:
            self._tell_of_masks(module, args, kwargs)
        given = None if x is None else call.see(x)
        mask = mask_argument(module, args, kwargs)
        if not call.running or call.batch.input_ids is None:
            note_ids(call.batch, args, kwargs, mask, self._maker.to_cpu_later)
        if call.batch.begins is None:
            call.batch.begins = tokens_before(kwargs)
        reports = call.reports.get(module, 0)
        entered = Entered(module, given, args, kwargs, mask, reports)
        call.running.append(entered)
        plan = self._plans.get(module)
        is_known = module in self._follower.plainly_fed
        if plan is not None and plan.seen_by != "torch" and not is_known:
            entered.following = FollowedHeads()
            entered.following.enter()

    def _tell_of_masks(
        self, layer: nn.TransformerEncoderLayer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Warns where outputs in the block are not those outside."""
        if fused_layer_differs(layer, args, kwargs):
            self._has_told_of_masks = True
            warnings.warn(
                "record: outputs in the block differ from those outside. There torch runs its "
                f"fused kernel of {describe(layer)}, which takes every number of a floating-point "
                "mask but 0 for -inf; here its ordinary code adds the mask to the logits, as "
                "torch.backends.mha.set_fastpath_enabled(False) has it outside, too",
                stacklevel=2,
            )

    @in_own_modes
    def _exit(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        call, plan = self._call, self._plans.get(module)
        is_outermost = call is not None and bool(call.running) and call.running[0].module is module
        if call is None or not (plan or call.pending or is_outermost):
            return
        if is_probing() or _is_in_backward():
            return
        if plan is not None and isinstance(module, StockMultiheadAttention):
            self._torch_ran(call, plan, args, kwargs, output)
        elif plan is not None:
            self._check_report(call, plan)
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        out = first_tensor(outputs, dict(output) if isinstance(output, dict) else {})
        x = first_tensor(args, kwargs)
        if x is not None and out is not None:
            for run in tuple(call.pending):
                self._follower.flows_out(call, run, module, x, out)
        if is_outermost and len(call.running) == 1:
            self._complete(call)

    def _complete(self, call: Call) -> None:
        """Keeps the batch: the call that opened it has come to its end without an error."""
        for run in tuple(call.pending):
            self._follower.nothing_follows(call, run)
        settlement = self._maker.settlement(call)
        arrival = self._maker.transfers.arrival()
        if self._on_layer is not None:
            self._maker.hand_over(call, waits=True)
            arrival.wait()
            settlement.check()
            with self._lock:
                self._recording.keep_layers(call.layers)
            return
        with self._lock:
            self._ended.append(_Ended(call.layers, call.batch, settlement, arrival))
        self.keep_ended(waits=False)

    def keep_ended(self, *, waits: bool) -> None:
        """Keeps the batches of calls that have ended, once their maps and all checks are there.

        Raises:
            RuntimeError: A layer of one does not add up; that one is not kept, the others are.
        """
        error: RuntimeError | None = None
        with self._lock:
            while self._ended and (waits or self._ended[0].arrival.is_over()):
                ended = self._ended[0]  # stays there, should somebody press Ctrl-C
                ended.arrival.wait()
                try:
                    ended.settlement.check()
                except RuntimeError as wrong:
                    error = error or wrong
                    self._ended.popleft()
                else:
                    self._recording.keep_layers(ended.layers)
                    self._recording.keep(self._ended.popleft().batch)
        if error is not None:
            raise error

    @in_own_modes
    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._call
        if call is None or not call.running or call.running[-1].module is not module:
            return
        following = call.running.pop().following
        if following is not None:
            following.leave()
        if not call.running:
            call.frame = None
            self._thread.call = None

    def _abandon(self, call: Call) -> None:
        """Lets go of a call that hooks were not told the end of, such as by Ctrl-C."""
        for entered in reversed(call.running):
            if entered.following is not None:
                entered.following.leave()
        self._thread.call = None

    def _check_report(self, call: Call, plan: Plan) -> None:
        """Raises RuntimeError where a module ran whose attention has not been seen."""
        entered = next((each for each in call.running if each.module is plan.module), None)
        if entered is None or call.reports.get(plan.module, 0) > entered.reports:
            return
        if plan.may_be_silent:
            self._silent[plan.name] = plan.module
            return
        implementation = getattr(
            getattr(plan.module, "config", None), "_attn_implementation_internal", None
        )
        now = "" if implementation is None else f" (its config says {implementation!r} now)"
        raise RuntimeError(
            f"record: {plan.title} ran, but its attention was not seen{now}: "
            "the attention implementation must stay what it was when the block began, and the "
            "module must compute its weights through it"
        )

    # --- Attention that has run

    def _torch_ran(
        self, call: Call, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        module: Any = plan.module
        with self._maker.grad_mode():
            attention = torch_call(
                module,
                args,
                kwargs,
                plan.parts.kind,
                call.frequencies.pop(module, None),
                call.padded_length,
            )
        drops = module.training and module.dropout > 0
        if plan.parts.block == "found" and not plan.needs_block(attention.kind):
            plan = replace(plan, parts=replace(plan.parts, block="none"))  # nothing to follow
        run = self._begin(call, plan, attention, None, drops)
        y = output[0] if isinstance(output, tuple) else output
        run.projection = out_projection_of(module)
        if plan.parts.block == "found" and not y.is_nested and y.numel():
            inputs = [x for x in inputs_of(module, args, kwargs) if x.numel()]
            run.order = TokenOrder.of(y, module.batch_first, inputs, call.norms)
            run.residuals[1:1] = run.order.inputs[1:]  # positions may be in the first alone
        if y.is_nested or attention.query.numel() == 0 or y.numel() == 0:
            self._follower.projected(call, run, y)
            return
        if not drops and getattr(module, "kernel", "dot") in ("dot", "rbf", "implicit"):
            self._check_torch(call, run, module, y)
        self._follower.projected(call, run, y)

    def _check_torch(self, call: Call, run: Run, module: Any, y: Tensor) -> None:
        """Of a module that does not call its out-projection: heads and projection at once."""
        own = y.unsqueeze(0) if y.dim() == 2 else y if module.batch_first else y.transpose(0, 1)
        if self._checks_all:
            heads = run.attention.context()
            if run.attention.query_padding is not None:
                there = ~run.attention.query_padding
                heads, own = heads[there].unsqueeze(0), own[there].unsqueeze(0)
        else:
            row = run.a_row()
            heads, own = run.attention.context_of_row(0, row.place), row.of(own[:1])
        step = "weights times values, through its out-projection, are not its output"
        apart = run.projected(out_projection_of(module), heads, own, self._checks_all)
        call.claim(run.claim(step, apart))

    @in_own_modes
    def interface_called(self, plan: Plan, given: Given, output: Any) -> None:
        """Takes up what a module passed to its attention function, and what that returned."""
        call = self._call
        if call is None or is_probing() or _is_in_backward():
            return
        with self._maker.grad_mode():
            kind = self._kind_of(call, plan, given.query, given.key.size(-2))
            attention = interface_call(plan.module, given, kind)
            fill_padding(attention, given.attention_mask, self._mask_of_tokens(call, attention))
        context = output[0] if isinstance(output, tuple) else output
        merged = context.flatten(2) if context.dim() == 4 else context
        drops = plan.module.training and float(given.options.get("dropout") or 0.0) > 0
        run = self._begin(call, plan, attention, merged, drops)
        if context.dim() == 4:
            self._follow(call, run, context, turned=False)

    @in_own_modes
    def sdpa_called(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        """Takes up a call of ``F.scaled_dot_product_attention``."""
        call = self._call
        if call is None or not call.running or is_probing() or _is_in_backward():
            return
        plan = self._plans.get(call.running[-1].module)
        if plan is None or plan.seen_by != "sdpa":
            return
        check_is_plain_call(plan.name)
        with self._maker.grad_mode():
            attention, dropout_p = sdpa_call(plan.title, args, kwargs)
            attention.kind = self._kind_of(call, plan, attention.query, attention.sizes[3])
            for entered in call.running:
                entered.projected.clear()
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            fill_padding(attention, mask, self._mask_of_tokens(call, attention))
        merged = output.transpose(1, 2)
        run = self._begin(call, plan, attention, merged.flatten(2), dropout_p > 0)
        self._follow(call, run, output, turned=True)

    @staticmethod
    def _follow(call: Call, run: Run, heads: Tensor, *, turned: bool) -> None:
        """Follows heads ``[B, L, H, d_v]``, or turned, ``[B, H, L, d_v]``, in their module."""
        number, shape, device = len(run.calls) - 1, heads.shape, heads.device

        def places() -> Tensor:
            B, one, two, d = shape
            first = number * shape.numel()
            own = torch.arange(first, first + shape.numel(), device=device)
            return own.view(B, two, one, d).transpose(1, 2) if turned else own.view(shape)

        for entered in reversed(call.running):
            if entered.module is run.plan.module and entered.following is not None:
                run.following = entered.following
                run.following.begin(heads, places, run.keep_heads)

    def _kind_of(self, call: Call, plan: Plan, query: Tensor, S: int) -> Literal["self", "cross"]:
        """Which of both a call of queries ``[B, H, L, d]`` and S keys is."""
        B, H, L, d = query.shape
        if plan.parts.kind is not None:
            return plan.parts.kind
        if not call.running:
            return "cross" if L > S else "self"
        if any(call.running[-1].kwargs.get(name) is not None for name in _CROSS):
            return "cross"
        # a module that computes weights alone may be called with heads, [B, H, L, d]
        around = (each for each in reversed(call.running[-3:]) if each.was_called_with_tokens)
        entered = next(around, call.running[-1])
        sizes = (B, H * d, L, S)
        return "cross" if has_other_keys(entered, sizes, plan.seen_by == "sdpa") else "self"

    def _mask_of_tokens(self, call: Call, attention: AttentionCall) -> Tensor | None:
        """The mask [B, S] that the innermost running module was given for its own tokens."""
        B, _, _, S = attention.sizes
        for entered in reversed(call.running):
            mask = entered.mask
            if mask is None:
                return None
            if isinstance(mask, Tensor) and mask.dim() == 2:
                fits = attention.kind == "self" and mask.shape == (B, S)
                return mask if fits else None
        return None

    def _begin(
        self,
        call: Call,
        plan: Plan,
        attention: AttentionCall,
        context: Tensor | None,
        drops: bool,
    ) -> Run:
        """Opens a run of a layer, or adds to the one whose module is still at it."""
        module, parts = plan.module, plan.parts
        call.reports[module] = call.reports.get(module, 0) + 1
        for run in tuple(call.pending):
            if run.plan.module is module and run.stage == "heads":
                run.calls.append(attention)
                run.contexts.append(context)
                return run
            if run.stage == "reading norm":
                self._follower.leave_unread(call, run)
                continue
            if run.plan.parts.block == "found" and run.stage == "sum":
                self._follower.without_sum(call, run)
            elif run.stage == "end of block":  # another attention stands before it
                self._maker.finish(call, run, run.plan.parts)
            elif run.plan.module is module:
                raise RuntimeError(
                    f"record: {plan.title} ran again, and {run.awaited} has not run since its "
                    f"first run; {plan.source} names it"
                )
        times = call.times_run[module] = call.times_run.get(module, 0) + 1
        name = plan.name if times == 1 else f"{plan.name}#{times}"
        if attention.kind == "self":
            call.query_padding[parts.side] = attention.query_padding
        elif parts.kind == "cross" or parts.side == "decoder":
            sizes = attention.sizes[::2]
            if parts.side in call.query_padding:
                padding = call.query_padding[parts.side]
            else:  # its self-attention is not recorded
                padding = padding_of_decoder(call.running, *sizes)
            if padding is not None and padding.shape == sizes:
                attention.query_padding = padding
        entered = next((each for each in call.running if each.module is module), None)
        given = None if entered is None else entered.given
        around = [each.given for each in reversed(call.running) if each.module is not module]
        norms = [seen for _, seen in reversed(call.norms)]
        residuals = [seen for seen in (given, *norms, *around[:3]) if seen is not None]
        run = Run(plan, name, [attention], [context], residuals, given, drops)
        run.out_proj = parts.out_proj
        run.normed = [] if entered is None else list(entered.normed)
        if parts.block != "found":
            run.around.residual = known = self._residual_of(call, run)
            run.residuals.sort(key=lambda seen: seen.tensor is not known)
        call.pending.append(run)
        return run

    def _residual_of(self, call: Call, run: Run) -> Tensor | None:
        """Of a layer whose parts are known: what the norm before it, or it, was called with."""
        parts = run.plan.parts
        if parts.block == "none":
            return None
        if parts.pre_norm is None:
            return None if run.given is None else run.given.tensor
        for module, seen in reversed(call.norms):
            if module is parts.pre_norm:
                return seen.tensor
        return next(
            (
                each.given.tensor
                for each in call.running
                if each.given and each.module is parts.pre_norm
            ),
            None,
        )


def _note_projected(entered: Entered, module: nn.Linear, x: Tensor | None) -> None:
    """Notes with a module that runs what one of its linear modules is called with."""
    if x is not None:
        _, made = entered.projected.get(x.data_ptr(), (x, 0))
        entered.projected[x.data_ptr()] = x, made + module.out_features


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
