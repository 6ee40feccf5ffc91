"""Opens runs: takes up what an attention was given and has made, however it was called."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from ikattn.integrations.transformers.interface import Given
from ikattn.recorder.calls.attention_call import AttentionCall
from ikattn.recorder.calls.delta_rules import GivenRules, given_rule
from ikattn.recorder.calls.hearing import Told
from ikattn.recorder.calls.products import Written, written_call
from ikattn.recorder.calls.routed_heads import RoutedHeads, experts_of
from ikattn.recorder.calls.sdpa import sdpa_call
from ikattn.recorder.calls.torch_attention import inputs_of, out_projection_of, torch_call
from ikattn.recorder.calls.transformers_attention import interface_call
from ikattn.recorder.plan.plan import Plan
from ikattn.recorder.runs.call import Call
from ikattn.recorder.runs.following import Follower
from ikattn.recorder.runs.making import Maker
from ikattn.recorder.runs.padding import fill_padding, has_other_keys, padding_of_decoder
from ikattn.recorder.runs.run import Run
from ikattn.recorder.sums.token_order import TokenOrder

_CROSS = ("encoder_hidden_states", "key_value_states", "cross_attention_states")


class Opener:
    """Opens a run for each attention that is called."""

    def __init__(self, maker: Maker, follower: Follower) -> None:
        self._maker, self._follower = maker, follower
        self._checks_all = maker.options.checks_all
        self.given_rules = GivenRules()
        self.left_out: dict[str, str] = {}  # layers that run and are not recorded, and why

    def torch_ran(
        self, call: Call, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        module: Any = plan.module
        kind, frequencies = plan.parts.kind, call.frequencies.pop(module, None)
        with self._maker.grad_mode():
            attention = torch_call(module, args, kwargs, kind, frequencies, call.padded_length)
        drops = module.training and module.dropout > 0
        if plan.parts.block == "found" and not plan.needs_block(attention.kind):
            plan = replace(plan, parts=replace(plan.parts, block="none"))  # nothing to follow
        run = self._begin(call, plan, attention, [], drops)
        y = output[0] if isinstance(output, tuple) else output
        run.projection = out_projection_of(module, plan.title)
        if plan.parts.block == "found" and not y.is_nested and y.numel():
            inputs = [x for x in inputs_of(module, args, kwargs) if x.numel()]
            run.order = TokenOrder.of(y, module.batch_first, inputs, call.norms)
            run.residuals[1:1] = run.order.inputs[1:]  # positions may be in the first alone
        is_empty = attention.query.numel() == 0 or y.numel() == 0
        if not (y.is_nested or is_empty or drops):
            self._check_torch(call, run, module, y)
        self._follower.projected(call, run, y)

    def _check_torch(self, call: Call, run: Run, module: Any, y: Tensor) -> None:
        """Claims heads and projection at once, where a module does not call its out-projection."""
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
        assert run.projection is not None
        apart = run.projected(run.projection, heads, own, self._checks_all)
        call.claim(run.claim(step, apart))

    def interface_called(self, call: Call, plan: Plan, given: Given, output: Any) -> None:
        """Takes up what a module passed to its attention function, and what that returned."""
        with self._maker.grad_mode():
            kind = self._kind_of(call, plan, given.query, given.key.size(-2))
            attention = interface_call(plan.module, given, kind)
            if self._leaves_out(call, plan, attention):
                return
            fill_padding(attention, given.attention_mask, self._mask_of_tokens(call, attention))
        context = output[0] if isinstance(output, tuple) else output
        merged = context.flatten(2) if context.dim() == 4 else context
        drops = plan.module.training and float(given.options.get("dropout") or 0.0) > 0
        experts, entered = experts_of(plan.module), call.running[-1] if call.running else None
        if experts is not None and entered is not None and entered.given is not None:
            with self._maker.grad_mode():
                routed = RoutedHeads.of(experts, entered.given.tensor)
                attention, projection = routed.call(attention), routed.projection
            run = self._begin(call, plan, attention, [routed.context(merged)], drops)
            run.routed, run.projection = routed, projection
            return
        run = self._begin(call, plan, attention, [merged], drops)
        if context.dim() == 4:
            self._follow(call, run, context, lambda own: own)

    def sdpa_called(self, call: Call, plan: Plan, told: Told) -> None:
        with self._maker.grad_mode():
            attention, dropout_p = sdpa_call(plan.title, told.args, told.kwargs)
            attention.kind = self._kind_of(call, plan, attention.query, attention.sizes[3])
            for entered in call.running:
                entered.projected.clear()
            mask = told.args[3] if len(told.args) > 3 else told.kwargs.get("attn_mask")
            fill_padding(attention, mask, self._mask_of_tokens(call, attention))
        merged = told.output.transpose(1, 2).flatten(2)
        run = self._begin(call, plan, attention, [merged], dropout_p > 0)
        self._follow(call, run, told.output, lambda own: own.transpose(1, 2))

    def recurrence_called(self, call: Call, plan: Plan, told: Told) -> None:
        """Takes up a call of a gated delta rule or Mamba-2, which returns heads and a state."""
        heads, after = told.output if isinstance(told.output, tuple) else (told.output, None)
        caller = threading.get_ident(), plan.module
        with self._maker.grad_mode():
            given, before = given_rule(plan.title, call.running[-1].mask, told)
            L = given.key.size(2)
            given = self.given_rules.take(caller, plan.title, given, before, after)
            attention = given.call(L)
        merged = heads.reshape(heads.size(0), L, -1)
        run = self._begin(call, plan, attention, [merged], drops=False)
        self._follow(call, run, heads, lambda own: own.view(heads.shape))

    def product_made(self, call: Call, plan: Plan, written: Written) -> None:
        """Takes up a product of weights and values that a module has written out."""
        with self._maker.grad_mode():
            attention, heads = written_call(plan.title, plan.module, written)
            attention.kind = self._kind_of(call, plan, heads, attention.sizes[3])
            if self._leaves_out(call, plan, attention):
                return
            for entered in call.running:
                entered.projected.clear()
            hidden = torch.where(attention.weights == 0, -torch.inf, 0.0)
            attention.attn_mask = hidden
            fill_padding(attention, hidden, self._mask_of_tokens(call, attention))
            attention.attn_mask = None
        merged = heads.transpose(1, 2).flatten(2)
        run = self._begin(call, plan, attention, [merged], written.drops)
        self._follow(call, run, written.made, lambda own: written.as_made(own.transpose(1, 2)))

    @staticmethod
    def _follow(call: Call, run: Run, heads: Tensor, of_tokens: Callable[[Tensor], Tensor]) -> None:
        """Follows heads in their module; ``of_tokens`` moves ``[B, L, H, d_v]`` to their axes."""
        attention, device = run.calls[-1], heads.device
        B, H, L, _ = attention.sizes
        first, numbers = (len(run.calls) - 1) * heads.numel(), heads.numel()

        def places() -> Tensor:
            return of_tokens(torch.arange(first, first + numbers, device=device).view(B, L, H, -1))

        for entered in reversed(call.running):
            if entered.module is run.plan.module and entered.following is not None:
                run.following = entered.following
                run.following.begin(heads, places, run.keep_heads)

    def _kind_of(self, call: Call, plan: Plan, query: Tensor, S: int) -> Literal["self", "cross"]:
        """Tells self- from cross-attention, for queries ``[B, H, L, d]`` and S keys."""
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
        looks_at_inputs = plan.seen_by in ("sdpa", "product")
        return "cross" if has_other_keys(entered, sizes, looks_at_inputs) else "self"

    def _leaves_out(self, call: Call, plan: Plan, attention: AttentionCall) -> bool:
        """Whether queries of a model of text are neither the module's tokens nor the text's.

        They may be tokens that the model adds, or one token's states in other layers.
        """
        given, batch = call.running[-1].given if call.running else None, call.batch
        texts = [ids.size(1) for ids in (batch.input_ids, batch.target_ids) if ids is not None]
        if attention.kind != "self" or given is None or not texts:
            return False
        sizes, (_, _, L, S) = given.tensor.shape, attention.sizes
        is_of_text = L in texts and L + (batch.begins or 0) == S
        if len(sizes) < 3 or (len(sizes) == 3 and (is_of_text or L in sizes[:2])):
            return False
        if len(sizes) == 4 and L in (sizes[1] * sizes[2], sizes[2] * sizes[3]):
            return False  # patches of an image, channels last or first
        call.reports[plan.module] = call.reports.get(plan.module, 0) + 1
        self.left_out[plan.name] = f"has {L} queries, no tokens of its input {list(sizes)}"
        return True

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
        self, call: Call, plan: Plan, attention: AttentionCall, contexts: list[Tensor], drops: bool
    ) -> Run:
        """Opens a run of a layer, or adds to the one whose module is still at it."""
        module, parts = plan.module, plan.parts
        call.reports[module] = call.reports.get(module, 0) + 1
        for run in tuple(call.pending):
            if run.plan.module is module and run.stage == "heads":
                run.calls.append(attention)
                run.contexts += contexts
                return run
            # another attention stands before what it waits for
            if not self._follower.ends(call, run) and run.plan.module is module:
                raise RuntimeError(
                    f"record: {plan.title} ran again, and {run.awaited} has not run since its "
                    f"first run; {plan.source} names it"
                )
        times = call.times_run[module] = call.times_run.get(module, 0) + 1
        name = plan.name if times == 1 else f"{plan.name}#{times}"
        parent = plan.ancestors[0] if plan.ancestors else None
        if attention.kind == "self":
            call.query_padding[parts.side] = attention.query_padding
            call.self_attention.setdefault(parent, {})[module] = attention.query_padding
        else:
            sizes = attention.sizes[::2]
            beside = list(call.self_attention.get(parent, {}).values())
            padding = None
            if parts.kind != "cross" and parts.side != "decoder":  # its own block tells, if one can
                padding = beside[0] if len(beside) == 1 else None
            elif parts.side in call.query_padding:
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
        run = Run(plan, name, [attention], contexts, residuals, given, drops)
        run.out_proj = parts.out_proj
        run.normed = [] if entered is None else list(entered.normed)
        if parts.block != "found":
            known = None if given is None or parts.block == "none" else given.tensor
            if parts.block != "none" and parts.pre_norm is not None:
                before = [(each.module, each.given) for each in call.running]
                seen = (x for by, x in (*reversed(call.norms), *before) if by is parts.pre_norm)
                known = next((each.tensor for each in seen if each is not None), None)
            run.around.residual = known
            run.residuals.sort(key=lambda seen: seen.tensor is not known)
        call.pending.append(run)
        return run
