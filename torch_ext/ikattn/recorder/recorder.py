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
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.activation import MultiheadAttention as StockMultiheadAttention
from torch.utils.hooks import RemovableHandle

from ikattn.integrations.transformers.interface import Given
from ikattn.maps.edges import EdgeMaps
from ikattn.maps.layers import Batch, Layer
from ikattn.maps.recording import Recording
from ikattn.nn.over_ranks import goes_over_ranks
from ikattn.recorder.calls.heads import FollowedHeads
from ikattn.recorder.calls.hearing import Told
from ikattn.recorder.calls.hooks import Hook
from ikattn.recorder.calls.modes import check_is_plain_call, in_own_modes
from ikattn.recorder.calls.products import Written, WrittenOut
from ikattn.recorder.calls.projection import describe, is_probing
from ikattn.recorder.calls.torch_attention import fused_layer_differs
from ikattn.recorder.graphs import GraphLayer
from ikattn.recorder.plan.plan import KNOWN_ATTENTION, Plan
from ikattn.recorder.runs.call import Call, Entered, note_ids, tokens_before
from ikattn.recorder.runs.following import Follower
from ikattn.recorder.runs.making import Maker, Options
from ikattn.recorder.runs.opening import Opener
from ikattn.recorder.runs.padding import mask_argument
from ikattn.recorder.runs.transfers import Arrival
from ikattn.recorder.sums.claims import Settlement
from ikattn.recorder.sums.tensors import first_tensor


class _Ended(NamedTuple):
    """A call that has ended, whose maps and numbers are on their way."""

    layers: dict[str, Layer]
    batch: Batch
    settlement: Settlement
    arrival: Arrival


class Recorder:
    """Fills a recording from hooks."""

    def __init__(self, recording: Recording, options: Options) -> None:
        self._recording, self._options = recording, options
        self._maker = Maker(options)
        self._follower = Follower(self._maker)
        self._opener = Opener(self._maker, self._follower)
        self._handles: list[RemovableHandle] = []
        self._lock = threading.Lock()
        self._calls_begun = 0
        self._ended: deque[_Ended] = deque()
        self._thread = threading.local()
        self._plans: dict[nn.Module, Plan] = {}
        self._watched: dict[nn.Module, None] = {}
        self._around_sdpa: set[nn.Module] = set()  # whose linear modules are noted
        self._has_told_of_masks = False

    # --- Hooks

    def add_hooks(
        self, model: nn.Module, plans: Sequence[Plan], graphs: Mapping[str, nn.Module]
    ) -> None:
        """Adds hooks; those of calls come first on the way in, and last on the way out.

        Every module around a layer is watched, so that a part of the model may be called alone.
        """
        self._maker.plans, self._plans = plans, {plan.module: plan for plan in plans}
        around = [module for plan in plans for module in (plan.module, *plan.ancestors)]
        self._watched = dict.fromkeys([model, *around, *graphs.values()])
        self._around_sdpa = {
            module
            for plan in plans
            if plan.seen_by in ("sdpa", "product")
            for module in (plan.module, *plan.ancestors[:2])
        }
        self._follower.norms = {x for x in model.modules() if "Norm" in type(x).__name__}
        roots = dict.fromkeys((plan.ancestors[:3] or (plan.module,))[-1] for plan in plans)
        near = dict.fromkeys(module for root in roots for module in root.modules())
        add = self._handles.append
        for module in self._watched | near:
            add(module.register_forward_pre_hook(Hook(self._enter), with_kwargs=True))
        for plan in plans:
            spectral = getattr(plan.module, "spectral", None)
            if isinstance(plan.module, StockMultiheadAttention) and isinstance(spectral, nn.Module):
                note = partial(self._note_frequencies, plan.module)
                add(spectral.register_forward_hook(Hook(note)))
        for name, layer in graphs.items():
            self._handles += GraphLayer(name, self._options, self._edges_made).add_hooks(layer)
        for module in near | self._watched:
            add(module.register_forward_hook(Hook(self._exit), with_kwargs=True))
        for module in self._watched:
            add(module.register_forward_hook(Hook(self._leave), always_call=True))

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._call is not None:
            self._abandon(self._call)
        for reason in dict.fromkeys(self._opener.left_out.values()):
            names = sorted(x for x, own in self._opener.left_out.items() if own == reason)
            warnings.warn(f"record: {', '.join(names)} {reason}, and is not recorded", stacklevel=2)

    @in_own_modes
    def _note_frequencies(
        self, attention: nn.Module, spectral: nn.Module, args: Any, output: tuple[Any, ...]
    ) -> None:
        if self._call is not None:  # a regulariser may follow w1 and w2
            self._call.frequencies[attention] = (output[0], output[1])

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
                fed = first_tensor(args, kwargs)
                if fed is not None:
                    _, made = entered.projected.get(fed.data_ptr(), (fed, 0))
                    entered.projected[fed.data_ptr()] = fed, made + module.out_features
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
        if (
            isinstance(module, nn.TransformerEncoderLayer)
            and not self._has_told_of_masks
            and fused_layer_differs(module, args, kwargs)
        ):
            self._has_told_of_masks = True
            warnings.warn(
                "record: outputs in the block differ from those outside. There torch runs its "
                f"fused kernel of {describe(module)}, which takes every number of a floating-point "
                "mask but 0 for -inf; here its ordinary code adds the mask to the logits, as "
                "torch.backends.mha.set_fastpath_enabled(False) has it outside, too",
                stacklevel=1,
            )
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
        is_of_torch = plan is not None and plan.seen_by == "torch"
        if plan is not None and (plan.seen_by == "product" or not (is_known or is_of_torch)):
            told = partial(self._product_made, call, plan, reports)
            hears = plan.seen_by in ("sdpa", "product") and plan.writes_out
            entered.following = FollowedHeads(WrittenOut(told) if hears else None)
            entered.following.enter()

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
            self._opener.torch_ran(call, plan, args, kwargs, output)
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
        if call.edges:
            self._recording.graphs.append(call.edges)
        if self._options.on_layer is not None:
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
        entered = next((each for each in call.running if each.module is plan.module), None)
        if entered is None or call.reports.get(plan.module, 0) > entered.reports:
            return
        if plan.seen_by not in ("torch", "interface"):  # it may compute without what tells of it
            self._opener.left_out[plan.name] = f"ran as none of {KNOWN_ATTENTION}"
            return
        config = getattr(plan.module, "config", None)
        implementation = getattr(config, "_attn_implementation_internal", None)
        now = "" if implementation is None else f" (its config says {implementation!r} now)"
        raise RuntimeError(
            f"record: {plan.title} ran, but its attention was not seen{now}: "
            "the attention implementation must be one that can be recorded, such as sdpa, and the "
            "module must compute its weights through it"
        )

    # --- Attention that has run

    @in_own_modes
    def interface_called(self, module: nn.Module, given: Given, output: Any) -> None:
        """Takes up what a module passed to its attention function, and what that returned."""
        call, plan = self._call, self._plans.get(module)
        if call is None or plan is None or is_probing() or _is_in_backward():
            return
        if plan.seen_by == "interface":
            self._opener.interface_called(call, plan, given, output)

    @in_own_modes
    def function_called(self, kind: str, told: Told) -> None:
        """Takes up a call of ``F.scaled_dot_product_attention`` or of a recurrence."""
        call = self._call
        if call is None or not call.running or is_probing() or _is_in_backward():
            return
        plan = self._plans.get(call.running[-1].module)
        if plan is not None and plan.seen_by == kind:
            check_is_plain_call(plan.name)
            is_sdpa = kind == "sdpa"
            take = self._opener.sdpa_called if is_sdpa else self._opener.recurrence_called
            take(call, plan, told)

    @in_own_modes
    def _product_made(self, call: Call, plan: Plan, reports: int, written: Written) -> None:
        """Takes up a product that a module has written out; ``reports`` are those before its run.

        A module that has called a function for its attention multiplies something else.
        """
        is_called = plan.seen_by != "product" and call.reports.get(plan.module, 0) > reports
        is_own = call.running[-1].module is plan.module
        if is_own and not (is_called or is_probing() or _is_in_backward()):
            self._opener.product_made(call, plan, written)

    def _edges_made(self, name: str, maps: EdgeMaps) -> None:
        """Takes the maps of one run of a layer over a graph; a further run is ``name#2``."""
        call = self._call
        if call is not None and not _is_in_backward():
            number = 1 + sum(own.partition("#")[0] == name for own in call.edges)
            call.edges[name if number == 1 else f"{name}#{number}"] = maps


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
