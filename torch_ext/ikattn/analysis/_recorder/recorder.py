"""Fills a recording from hooks, while the model runs.

A call's way: a hook on the outermost module that runs opens a batch -> the attention runs, and
tells what it was given (a hook on ``nn.MultiheadAttention``, the attention function of a
transformers model, or ``F.scaled_dot_product_attention``) -> hooks on the modules around it see
where its output goes (``runs.py``) -> with the norm after it the maps of that layer are made, and
all that they were made of is let go.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.activation import MultiheadAttention as StockMultiheadAttention
from torch.utils.hooks import RemovableHandle

from ikattn._memory import memory_for
from ikattn._precision import without_autocast
from ikattn.analysis._recorder.attention_call import (
    AttentionCall,
    awaited_norms,
    convert_tensors,
    make_maps,
)
from ikattn.analysis._recorder.calls import Call, Entered, note_ids
from ikattn.analysis._recorder.flow import Distance, first_tensor, rows_of
from ikattn.analysis._recorder.hooks import Hook
from ikattn.analysis._recorder.padding import fill_padding, mask_argument
from ikattn.analysis._recorder.plan import Plan
from ikattn.analysis._recorder.projection import (
    Projection,
    describe,
    effective_projection,
    is_probing,
    plain_projection,
)
from ikattn.analysis._recorder.room import check_room
from ikattn.analysis._recorder.rows import RowsAsked
from ikattn.analysis._recorder.runs import Claim, Run, settle
from ikattn.analysis._recorder.sdpa import sdpa_call
from ikattn.analysis._recorder.torch_attention import out_projection_of, torch_call
from ikattn.analysis._recorder.transfers import Transfers
from ikattn.analysis._recorder.transformers_attention import interface_call
from ikattn.analysis.contributions import Contributions, NormStats
from ikattn.analysis.maps import Layer
from ikattn.analysis.recording import Recording
from ikattn.integrations.transformers._interface import Given
from ikattn.nn._over_ranks import goes_over_ranks

__all__ = ["OnLayer", "OnRun", "Recorder"]

OnLayer: TypeAlias = Callable[[int, Layer, Contributions], None]
OnRun: TypeAlias = Callable[[Run], None]

_CROSS = ("encoder_hidden_states", "key_value_states", "cross_attention_states")


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
        self._to_cpu = to_cpu
        self._detach = detach
        self._on_layer = on_layer
        self._on_run = on_run
        self._rows = rows
        self._checks_all = check == "all"
        self._transfers = Transfers()
        self._handles: list[RemovableHandle] = []
        self._lock = threading.Lock()
        self._calls_begun = 0
        self._thread = threading.local()
        self._plans: dict[nn.Module, Plan] = {}
        self._watched: set[nn.Module] = set()
        self._norms: set[nn.Module] = set()
        self._projections: dict[nn.Module, Projection] = {}
        self._limits: dict[nn.Module, nn.Module | None] = {}
        self._silent: set[str] = set()  # layers that ran without a word, where that is no error

    # --- Hooks

    def add_hooks(self, model: nn.Module, plans: Sequence[Plan]) -> None:
        """Those of calls embrace the others: before them on the way in, after them on the way out.

        Every module around a layer is watched, so that a part of the model may be called alone.
        """
        self._plans = {plan.module: plan for plan in plans}
        around = {module: None for plan in plans for module in (plan.module, *plan.ancestors)}
        watched = list({model: None} | around)
        self._watched = set(watched)
        self._norms = {module for module in model.modules() if "Norm" in type(module).__name__}
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
        self._projections.clear()
        if self._silent:
            warnings.warn(
                f"record: {', '.join(sorted(self._silent))} ran without calling "
                "F.scaled_dot_product_attention or transformers' AttentionInterface, and is not "
                "recorded",
                stacklevel=2,
            )

    def _note_frequencies(self, attention: nn.Module) -> Callable[..., None]:
        def hook(spectral: nn.Module, args: Any, output: tuple[Any, ...]) -> None:
            if self._call is not None:  # a regulariser may follow w1 and w2
                self._call.frequencies[attention] = (output[0], output[1])

        return hook

    # --- Calls

    @property
    def _call(self) -> Call | None:
        return getattr(self._thread, "call", None)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call, is_watched = self._call, module in self._watched
        is_norm = module in self._norms
        if not is_watched and (call is None or not (call.pending or is_norm)):
            return
        if _is_in_backward() or is_probing():
            return  # a checkpointed layer that runs again; a module asked what it computes
        x = first_tensor(args, kwargs)
        if is_watched:
            if goes_over_ranks(module):
                raise RuntimeError(
                    f"record: {type(module).__name__} is in context_parallel, where no rank has "
                    "all weights of a query; record without it"
                )
            if call is not None and not call.is_alive:
                call = self._thread.call = None
            if call is None:
                if x is not None and x.is_cuda and torch.cuda.is_current_stream_capturing():
                    raise RuntimeError(
                        "record: a call cannot be recorded while a CUDA graph captures it, for the "
                        "host checks what the model computes; record a call outside the capture"
                    )
                with self._lock:
                    call = self._thread.call = Call(self._calls_begun, sys._getframe(2))
                    self._calls_begun += 1
        if call is None:
            return
        if x is not None:
            for run in tuple(call.pending):
                self._flows_in(call, run, module, x)
        if x is not None and is_norm and not is_watched and x.numel():
            call.norms.append((module, call.see(x)))
        if not is_watched:
            return
        if x is not None and isinstance(module, nn.TransformerEncoder):
            is_padded = not x.is_nested and x.dim() == 3
            call.padded_length = x.size(1) if is_padded else call.padded_length
        given = None if x is None or x.numel() == 0 else call.see(x)
        mask = mask_argument(module, args, kwargs)
        if not call.running or call.batch.input_ids is None:
            note_ids(call.batch, args, kwargs, mask, self._to_cpu_later)
        call.running.append(Entered(module, given, kwargs, mask, call.reports.get(module, 0)))

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
                self._flows_out(call, run, module, x, out)
        if is_outermost and len(call.running) == 1:
            self._complete(call)

    def _complete(self, call: Call) -> None:
        """Keeps the batch: the call that opened it has come to its end without an error."""
        for run in tuple(call.pending):
            self._nothing_follows(call, run)
        settle(call.claims)
        self._hand_over(call, waits=True)
        self._transfers.arrival().wait()
        with self._lock:
            for name, layer in call.layers.items():
                self._recording.layers.setdefault(name, layer)
            if self._on_layer is None:
                self._recording.batches.append(call.batch)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._call
        if call is None or not call.running or call.running[-1].module is not module:
            return
        call.running.pop()
        if not call.running:
            call.frame = None
            self._thread.call = None

    def _check_report(self, call: Call, plan: Plan) -> None:
        """Raises RuntimeError where a module ran whose attention has not been seen."""
        entered = next((each for each in call.running if each.module is plan.module), None)
        if entered is None or call.reports.get(plan.module, 0) > entered.reports:
            return
        if plan.may_be_silent:
            self._silent.add(plan.name)
            return
        implementation = getattr(
            getattr(plan.module, "config", None), "_attn_implementation_internal", None
        )
        now = "" if implementation is None else f" (its config says {implementation!r} now)"
        raise RuntimeError(
            f"record: {plan.name} was to be recorded and ran, but its attention was not seen{now}: "
            "the attention implementation must stay what it was when the block began, and the "
            "module must compute its weights through it"
        )

    # --- Attention that has run

    def _torch_ran(
        self, call: Call, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        module: Any = plan.module
        with self._grad_mode():
            attention = torch_call(
                module,
                args,
                kwargs,
                plan.parts.kind,
                call.frequencies.pop(module, None),
                call.padded_length,
            )
        drops = module.training and module.dropout > 0
        run = self._begin(call, plan, attention, None, drops)
        y = output[0] if isinstance(output, tuple) else output
        run.projection = out_projection_of(module)
        if y.is_nested or attention.query.numel() == 0 or y.numel() == 0:
            self._projected(call, run, y)
            return
        if not drops and getattr(module, "kernel", "dot") in ("dot", "rbf", "implicit"):
            with torch.no_grad(), without_autocast(y.device):
                self._check_torch(call, run, module, y)
        self._projected(call, run, y)

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
            heads, own = run.attention.row(0, row.place).context(), row.of(own[:1])
        step = "weights times values, through its out-projection, are not its output"
        apart = run.projected(out_projection_of(module), heads, own, self._checks_all)
        call.claims.append(Claim(apart, lambda off: run.fails(step, off)))

    def interface_called(self, plan: Plan, given: Given, output: Any) -> None:
        """Takes up what a module passed to its attention function, and what that returned."""
        call = self._call
        if call is None or is_probing() or _is_in_backward():
            return
        with self._grad_mode():
            attention = interface_call(plan.module, given, self._kind_of(call, plan))
            fill_padding(attention, given.attention_mask, self._mask_of_tokens(call, attention))
        context = output[0] if isinstance(output, tuple) else output
        merged = context.flatten(2) if context.dim() == 4 else context
        drops = plan.module.training and float(given.options.get("dropout") or 0.0) > 0
        self._begin(call, plan, attention, merged, drops)

    def sdpa_called(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        """Takes up a call of ``F.scaled_dot_product_attention``."""
        call = self._call
        if call is None or not call.running or is_probing() or _is_in_backward():
            return
        plan = self._plans.get(call.running[-1].module)
        if plan is None or plan.seen_by != "sdpa":
            return
        with self._grad_mode():
            attention, dropout_p = sdpa_call(args, kwargs, self._kind_of(call, plan) or "self")
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            fill_padding(attention, mask, self._mask_of_tokens(call, attention))
        self._begin(call, plan, attention, output.transpose(1, 2).flatten(2), dropout_p > 0)

    def _kind_of(self, call: Call, plan: Plan) -> str | None:
        if plan.parts.kind is not None:
            return plan.parts.kind
        entered = call.running[-1] if call.running else None
        if entered is not None and any(entered.kwargs.get(name) is not None for name in _CROSS):
            return "cross"
        return None

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
                self._leave_unread(call, run)
                continue
            if run.plan.module is module:
                raise RuntimeError(
                    f"record: {plan.name} ran again before the norm after it; its resolver must be "
                    "wrong"
                )
            if run.plan.parts.block == "found" and run.stage == "sum":
                self._finish(call, run, replace(run.plan.parts, block="none"))
            elif run.stage == "end of block":  # another attention stands before it
                self._finish(call, run, run.plan.parts)
        times = call.times_run[module] = call.times_run.get(module, 0) + 1
        name = plan.name if times == 1 else f"{plan.name}#{times}"
        if attention.kind == "self":
            call.query_padding[parts.side] = attention.query_padding
        elif parts.kind == "cross":
            padding = call.query_padding.get(parts.side)
            if padding is not None and padding.shape == attention.sizes[::2]:
                attention.query_padding = padding
        given = next((each.given for each in call.running if each.module is module), None)
        around = [each.given for each in reversed(call.running) if each.module is not module]
        norms = [seen for _, seen in reversed(call.norms)]
        residuals = [seen for seen in (given, *norms, *around[:3]) if seen is not None]
        run = Run(plan, name, [attention], [context], residuals, given, drops)
        run.out_proj = parts.out_proj
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

    # --- Where its output goes

    def _flows_in(self, call: Call, run: Run, module: nn.Module, x: Tensor) -> None:
        """A module is called with ``x``."""
        if run.stage == "heads" and module is not run.plan.module:
            if run.out_proj is module:
                run.join()
                if not run.is_fed_to(x) and run.contexts[0] is not None:
                    raise RuntimeError(
                        f"record: {run.plan.name} does not add up: its out-projection was called "
                        f"with {list(x.shape)}, which is not what the attention computed, "
                        f"{list(run.contexts[0].shape)}: something stands in between"
                    )
            elif run.out_proj is None and run.is_fed_to(x):
                if any(module is each.module for each in call.running) or not _is_unary(module):
                    return
                run.join()
                run.out_proj = module
            else:
                return
            run.heads, run.stage = x, "projection"
        elif run.stage == "sum":
            if any(module is each.module for each in call.running):
                return
            if run.is_sum(x, with_others=False):
                self._summed(call, run, module, x)
            elif module is run.plan.parts.norm:
                self._no_sum(call, run, module, x)
        elif (run.stage == "norm" and module is run.norm) or (
            run.stage == "second norm" and module is run.plan.parts.second_norm
        ):
            run.norm_input = x
        elif run.stage == "reading norm":
            self._is_read(run, module, x)

    def _flows_out(self, call: Call, run: Run, module: nn.Module, x: Tensor, out: Tensor) -> None:
        """A module has made ``out`` of ``x``."""
        if run.stage == "projection" and module is run.out_proj:
            assert run.heads is not None
            with torch.no_grad(), without_autocast(x.device):
                claim = run.heads_claim(self._checks_all)
            if claim is not None:
                call.claims.append(claim)
            run.projection = self._projection_of(call, run, module, run.heads, out)
            self._projected(call, run, out)
        elif run.stage == "sum":
            is_around = module in run.plan.ancestors
            if module is run.plan.module or module is run.out_proj:
                return
            if not is_around:
                run.follow(module, x, out)
                return
            if run.is_sum(out, with_others=True):
                self._summed(call, run, None, out)
                return
            if module is self._limit_of(run):
                self._no_sum(call, run, None, out)
        elif module is run.awaited_norm and run.norm_input is not None:
            made = self._read if run.stage == "reading norm" else self._normed
            made(call, run, module, run.norm_input, out)
        elif run.stage == "reading norm" and module in run.plan.ancestors[:3]:
            self._leave_unread(call, run)
        elif run.stage == "second norm":
            run.note_other(out)
        elif run.stage == "end of block":
            self._toward_end(call, run, module, x, out)

    def _toward_end(self, call: Call, run: Run, module: nn.Module, x: Tensor, out: Tensor) -> None:
        """Finds the norm whose output is the block's: the second of a block that was found."""
        if module in run.plan.ancestors:
            last = run.last_norm
            is_last = last is not None and last[2].shape == out.shape
            if last is not None and is_last and torch.equal(rows_of(last[2]), rows_of(out)):
                norm, norm_input, norm_output = last
                apart = run.second_half(norm_input)
                if run.plan.module.training or apart is None or not apart.is_too_far:
                    parts = replace(run.plan.parts, second_norm=norm)
                    run.plan, run.stage = replace(run.plan, parts=parts), "second norm"
                    self._normed(call, run, norm, norm_input, norm_output)
                    return
            if module is run.plan.ancestors[:3][-1]:
                self._finish(call, run, run.plan.parts)
        elif module in self._norms:
            run.last_norm = (module, x, out)
        else:
            run.note_other(out)

    def _projection_of(
        self, call: Call, run: Run, module: nn.Module, x: Tensor, y: Tensor
    ) -> Projection:
        """What an out-projection computes, cached for the recording unless it has a gradient."""
        step = (
            f"its out-projection, a {describe(module)}, makes something else of its heads than the "
            "linear map that it is taken for"
        )
        plain = plain_projection(module)
        run.is_probed = plain is None
        known = plain or self._projections.get(module)
        apart = None if known is None else self._apart(run, known, x, y)
        has_changed = run.is_probed and apart is not None and apart.is_too_far
        if known is None or has_changed:
            with self._grad_mode(), without_autocast(x.device):
                known = effective_projection(module, x.size(-1), x)
            if self._detach:
                self._projections[module] = known
            apart = self._apart(run, known, x, y)
        if apart is not None:
            call.claims.append(Claim(apart, lambda off: run.fails(step, off)))
        return known

    def _apart(self, run: Run, projection: Projection, x: Tensor, y: Tensor) -> Distance | None:
        """How far a projection of heads ``x`` is from ``y``; None where there are none."""
        if not x.numel():
            return None
        with torch.no_grad(), without_autocast(x.device):
            return run.projected(projection, x, y, self._checks_all)

    def _projected(self, call: Call, run: Run, y: Tensor) -> None:
        parts = run.plan.parts
        if run.attention.query.numel() == 0 or y.numel() == 0:
            is_found = parts.block == "found"
            self._finish(call, run, replace(parts, block="none") if is_found else parts)
            return
        if parts.block == "none":
            self._finish(call, run, parts)
            return
        if y.is_nested:
            run.stage, run.norm = "norm", parts.norm  # no sum to find: the parts name the norm
            return
        run.contexts, run.heads = [], None
        if parts.block != "found" and not run.plan.needs_block(run.attention.kind):
            # made here, where what they are made of is let go
            run.maps = self._make_maps(call, run, run.plan.maps(run.attention.kind))
        run.begin_sum(y)

    def _limit_of(self, run: Run) -> nn.Module | None:
        """The module around the layer at whose end its sum must have been formed."""
        if run.plan.module not in self._limits:
            self._limits[run.plan.module] = self._find_limit(run.plan)
        return self._limits[run.plan.module]

    @staticmethod
    def _find_limit(plan: Plan) -> nn.Module | None:
        parts, ancestors = plan.parts, plan.ancestors
        known = parts.pre_norm or parts.norm
        if known is not None:
            for module in ancestors:
                if any(part is known for part in module.modules()):
                    return module
        return ancestors[min(2, len(ancestors) - 1)] if ancestors else None

    def _summed(self, call: Call, run: Run, module: nn.Module | None, x: Tensor) -> None:
        """``x`` is the residual plus the attention's output; ``module`` is called with it."""
        parts = run.plan.parts
        if run.why_no_block:
            if parts.block != "found":
                raise RuntimeError(
                    f"record: {run.plan.name} does not add up: {run.why_no_block}; its block is no "
                    f"{parts.block!r} block"
                )
            self._finish(call, run, replace(parts, block="none"))
            return
        if run.output_norm is not None:
            norm, before, after = run.output_norm
            with self._grad_mode():
                stats = NormStats.of(norm, _as_batch(before, run, call.padded_length))
            with torch.no_grad(), without_autocast(x.device):
                call.claims.append(run.norm_claim(norm, stats, before, after))
            run.around.output_norm = stats
        if parts.block == "found":
            is_norm = module is not None and "Norm" in type(module).__name__
            is_post = is_norm and run.is_post_norm()
            parts = replace(
                parts, block="post" if is_post else "pre", norm=module if is_post else None
            )
            run.plan, run.is_found = replace(run.plan, parts=parts), True
        if parts.block == "pre" or parts.norm is None:
            if run.plan.wants("alti"):
                run.around.output = _as_batch(x, run, call.padded_length)
            wanted = () if run.maps is not None else run.plan.maps(run.attention.kind)
            if run.has_other or not awaited_norms(parts, wanted):
                self._finish(call, run, parts)
                return
            run.stage, run.norm_input = "reading norm", x
            if module is not None:
                self._is_read(run, module, x)
            return
        run.norm, run.stage = parts.norm, "norm"
        if module is parts.norm:
            run.norm_input = x

    def _no_sum(self, call: Call, run: Run, module: nn.Module | None, x: Tensor) -> None:
        """The block has gone on, and nothing was the residual plus the attention's output."""
        parts = run.plan.parts
        if parts.block == "found":
            self._finish(call, run, replace(parts, block="none"))
            return
        if not run.plan.module.training:
            of = "what the norm after it was given" if module is not None else "its block's output"
            y = run.variants[0].rows
            residual = run.around.residual
            rest = f"; the output is {float(y.abs().max()):.3g} at most"
            if residual is not None and x.numel() == residual.numel():
                rest += f", what was added {float((x - residual.view_as(x)).abs().max()):.3g}"
            raise RuntimeError(
                f"record: {run.plan.name} does not add up: its output and its residual, or any "
                f"multiple, are not {of}{rest}. Its block is no {parts.block!r} block of "
                f"{parts.family}, or changes its residual in between"
            )
        # dropout stands in between: what went into the norm is what it really got
        if module is not None and module is parts.norm:
            run.norm, run.stage, run.norm_input = parts.norm, "norm", x
        else:
            self._finish(call, run, parts)

    def _normed(self, call: Call, run: Run, norm: nn.Module, x: Tensor, out: Tensor) -> None:
        """A norm that was awaited has run."""
        stage = run.stage
        with self._grad_mode():
            if run.maps is None:
                stats = NormStats.of(norm, _as_batch(x, run, call.padded_length))
            else:  # two rows will do for the check
                stats = NormStats.of(norm, rows_of(x).to(x.dtype).unsqueeze(0))
        run.norm_input = None
        if not x.is_nested and x.numel():
            with torch.no_grad(), without_autocast(x.device):
                call.claims.append(run.norm_claim(norm, stats, x, out))
        parts = run.plan.parts
        if stage == "norm":
            run.around.norm = stats
            if run.plan.wants("alti"):
                run.around.output = _as_batch(out, run, call.padded_length)
        else:
            run.around.second_norm = stats
            if not run.plan.module.training and not x.is_nested and x.numel():
                with torch.no_grad():
                    apart = run.second_half(x)
                if apart is not None:
                    step = (
                        "what its block's second norm was given is not the output of the first "
                        "plus that of a module"
                    )
                    call.claims.append(Claim(apart, lambda off: run.fails(step, off)))
        wanted = () if run.is_found else run.plan.maps(run.attention.kind)
        if stage == "norm" and "second_norm" in awaited_norms(parts, wanted):
            run.stage, run.others = "second norm", []
            run.norm_output = None if x.is_nested or not x.numel() else rows_of(out)
            return
        asked = {*run.plan.asked.required, *run.plan.asked.where_defined}
        if stage == "norm" and run.is_found and {"encoder", "mixing_ratio"} & asked:
            run.stage, run.others, run.norm_output = "end of block", [], rows_of(out)
            return
        self._finish(call, run, parts)

    def _is_read(self, run: Run, module: nn.Module, x: Tensor) -> None:
        """Takes the first norm that is called with the sum of a "pre" block."""
        total, parts = run.norm_input, run.plan.parts
        is_norm = "Norm" in type(module).__name__ and not list(module.children())
        if total is None or parts.second_norm is not None or not is_norm:
            return
        if x.data_ptr() == total.data_ptr() and x.shape == total.shape:
            run.plan = replace(run.plan, parts=replace(parts, second_norm=module))

    def _leave_unread(self, call: Call, run: Run) -> None:
        """No norm has read the sum of a "pre" block."""
        run.norm_input = None
        self._finish(call, run, replace(run.plan.parts, second_norm=None))

    def _read(self, call: Call, run: Run, norm: nn.Module, x: Tensor, out: Tensor) -> None:
        """The norm before the second half of a "pre" block has run; one of another kind is left."""
        try:
            with self._grad_mode():
                stats = NormStats.of(norm, _as_batch(x, run, call.padded_length))
            with torch.no_grad(), without_autocast(x.device):
                settle([run.norm_claim(norm, stats, x, out)])
        except (TypeError, RuntimeError) as error:
            is_memory = isinstance(error, torch.OutOfMemoryError)
            if is_memory or "encoder" in run.plan.asked.required:
                raise
            self._leave_unread(call, run)
            return
        run.around.second_norm, run.norm_input = stats, None
        self._finish(call, run, run.plan.parts)

    def _nothing_follows(self, call: Call, run: Run) -> None:
        """The call is over, and a run still waits."""
        if run.stage == "heads" and run.plan.parts.block == "found":
            raise RuntimeError(
                f"record: no module was called with the heads of {run.name}: its out-projection "
                "must be a module"
            )
        if run.stage == "heads":
            raise RuntimeError(
                f"record: the out-projection of {run.name} did not run in this call; its resolver "
                "must be wrong"
            )
        if run.plan.parts.block == "found" and run.stage == "sum":
            self._finish(call, run, replace(run.plan.parts, block="none"))
            return
        if run.stage == "reading norm":
            self._leave_unread(call, run)
            return
        if run.stage == "end of block":
            self._finish(call, run, run.plan.parts)
            return
        if run.stage == "sum" and run.plan.parts.block == "pre":
            self._finish(call, run, run.plan.parts)  # its block was not run whole
            return
        raise RuntimeError(
            f"record: a norm that should follow {run.name} did not run in this call; its "
            "resolver must be wrong"
        )

    # --- Maps

    def _finish(self, call: Call, run: Run, parts: Any) -> None:
        """Makes the maps of a run."""
        run.stage = "done"
        call.pending.remove(run)
        plan = run.plan = replace(run.plan, parts=parts)
        attention = run.attention
        if run.maps is None:
            if run.around.residual is not None and parts.block != "none":
                residual = _as_batch(run.around.residual, run, call.padded_length)
                run.around.residual = residual
            else:
                run.around.residual = None
            wanted = plan.maps(attention.kind, run.why_no_block, has_run=True)
            run.maps = self._make_maps(call, run, wanted)
        if self._on_run is not None:
            self._on_run(run)
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
            call.batch.layers[run.name] = run.maps
        else:
            settle(call.claims)
            call.made.append((layer, run.maps, self._transfers.arrival()))
            self._hand_over(call, waits=False)

    def _hand_over(self, call: Call, *, waits: bool) -> None:
        """Gives ``on_layer`` the maps that are there, in turn; all, where it ``waits`` for them."""
        while call.made and (waits or call.made[0][2].is_over()):
            layer, maps, arrival = call.made.popleft()
            arrival.wait()
            assert self._on_layer is not None
            self._on_layer(call.index, layer, maps)

    def _make_maps(self, call: Call, run: Run, wanted: tuple[str, ...]) -> Contributions:
        plan, attention = run.plan, run.attention
        if attention.softcap is not None or attention.sinks is not None:
            for name in ("similarity", "magnitude"):
                if name in plan.asked.required:
                    raise ValueError(
                        f"record: {plan.name} has no map {name!r}: its logits have a soft cap or "
                        "sinks, so that weights are no product of similarity and magnitude"
                    )
            wanted = tuple(name for name in wanted if name not in ("similarity", "magnitude"))
        around = run.around
        if "alti" in plan.asked.required and (around.residual is None or around.output is None):
            raise ValueError(
                f"record: {plan.name} has no map 'alti': the sum of residual and attention was not "
                "found; in training dropout may hide it"
            )
        assert run.projection is not None
        self._check_room(call, run, wanted)
        with memory_for("record", f"the maps of layer {run.name}"):
            with self._grad_mode(), without_autocast(attention.query.device):
                weight = run.projection.weight
                if self._rows is None:
                    maps = make_maps(attention, weight, run.around, wanted)
                else:
                    maps = self._rows.make(attention, weight, run.around, wanted, run.name)
            move = self._to_cpu_later if self._to_cpu else lambda x: x
            return convert_tensors(maps, detach=self._detach, move=move)

    def _check_room(self, call: Call, run: Run, wanted: tuple[str, ...]) -> None:
        """Raises torch.OutOfMemoryError where the maps of this layer, and its like, do not fit.

        Asked at the first of them in a call, before its maps are made.
        """
        group = (run.plan.parts.side, run.attention.kind)
        if group in call.has_room:
            return
        call.has_room.add(group)
        outermost = call.running[0].module if call.running else None
        alike = [
            plan
            for plan in self._plans.values()
            if plan.parts.side == group[0] and plan.parts.kind in (None, group[1])
            if outermost in (plan.module, *plan.ancestors)
        ]
        layers = 1 if self._on_layer is not None else max(1, len(alike))
        check_room(run.attention, run.name, wanted, self._rows, layers, self._to_cpu)

    def _to_cpu_later(self, x: Tensor) -> Tensor:
        return self._transfers.to_cpu(x, is_kept=self._on_layer is None)

    def _grad_mode(self) -> torch.set_grad_enabled:
        return torch.set_grad_enabled(torch.is_grad_enabled() and not self._detach)


def _is_unary(module: nn.Module) -> bool:
    """Whether a module can be called with one tensor: not, for example, with a residual beside."""
    parameters = inspect.signature(module.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(x.default is x.empty for x in parameters if x.kind in kinds) <= 1


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _as_batch(x: Tensor, run: Run, padded: int | None) -> Tensor:
    """What a layer's block passes on, as ``[B, T, D]``.

    Raises:
        RuntimeError: It has other sizes than the attention's queries.
    """
    B, _, T, _ = run.attention.sizes
    if x.is_nested:
        sizes = None if padded is None else (B, padded, x.size(2))
        x = torch.nested.to_padded_tensor(x, 0.0, sizes)
    elif isinstance(run.plan.module, StockMultiheadAttention):
        if x.dim() == 2:
            x = x.unsqueeze(0)
        elif not run.plan.module.batch_first:
            x = x.transpose(0, 1)
    elif x.shape[:-1] != (B, T) and x.numel() == B * T * x.size(-1):
        x = x.reshape(B, T, -1)
    if x.shape[:-1] != (B, T):
        raise RuntimeError(
            f"record: {run.plan.name}: the residual and the inputs of the norms must have shape "
            f"[B, T, D] = [{B}, {T}, D], got {list(x.shape)}; chunked feed-forward layers "
            "(chunk_size_feed_forward) cannot be recorded with their norms"
        )
    return x
