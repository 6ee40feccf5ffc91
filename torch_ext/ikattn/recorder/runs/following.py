"""Where the output of attention goes, module by module, until its block is known and checked.

The out-projection, the sum with the residual, and the norms after it: ``runs.py`` has what is
compared at each step. With the last step the maps of the layer are made (``making.py``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ikattn.maps.contribution_maps import NormStats
from ikattn.recorder.calls.heads import Product
from ikattn.recorder.calls.projection import Projection, describe
from ikattn.recorder.calls.routed_heads import RoutedHeads
from ikattn.recorder.plan.run_maps import awaited_norms
from ikattn.recorder.runs.call import Call
from ikattn.recorder.runs.making import Maker, as_batch
from ikattn.recorder.runs.projections import Projections, check_is_alone, is_handed_on, is_unary
from ikattn.recorder.runs.residual_sum import is_sum
from ikattn.recorder.runs.run import Run
from ikattn.recorder.runs.torch_blocks import block_of, second_half, why_no_norm
from ikattn.recorder.sums.claims import Settlement
from ikattn.recorder.sums.finding import Variant
from ikattn.recorder.sums.tensors import rows_of, same_rows, see, takes_waiting

_NO_SUM = "no module near it was given, or has made, the sum of a residual and its output"


class Follower:
    """Follows runs of attention from their heads to the end of their blocks."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self._checks_all = maker.options.checks_all
        self.norms: set[nn.Module] = set()  # of the model
        self._projections = Projections(maker.options)
        self.plainly_fed: set[nn.Module] = set()  # whose heads are projected as they are
        self._known_readers: set[nn.Module] = set()  # norms that act as they are taken for

    def flows_in(self, call: Call, run: Run, module: nn.Module, x: Tensor) -> None:
        """A module is called with ``x``."""
        if run.stage not in ("heads", "projection"):
            check_is_alone(run, module, x)
        if run.stage == "heads" and module is not run.plan.module:
            if run.out_proj is module:
                run.join()
                if not self._is_fed(call, run, module, x):
                    raise RuntimeError(
                        f"record: {run.plan.name} does not add up: its out-projection, a "
                        f"{describe(module)}, was called with {list(x.shape)}, which are not its "
                        f"heads, {list(run.contexts[0].shape)}, or a multiple{self._why(run)}"
                        f"{run.plan.class_hint}"
                    )
            elif run.out_proj is None and self._is_fed(call, run, module, x):
                if any(module is each.module for each in call.running):
                    return
                if not is_unary(module):
                    run.why_no_projection = f"a {describe(module)} takes them beside other inputs"
                    return
                run.join()
                run.out_proj = module
            else:
                return
            run.heads, run.stage = x, "projection"
        elif run.stage == "sum":
            if any(module is each.module for each in call.running):
                return
            if is_sum(run, x, module, call, is_input=True):
                self._summed(call, run, module, x)
            elif module is run.plan.parts.norm:
                self._no_sum(call, run, module, x)
        elif (run.stage == "norm" and module is run.norm) or (
            run.stage == "second norm" and module is run.plan.parts.second_norm
        ):
            run.norm_input = x
        elif run.stage == "reading norm":
            self._is_read(run, module, x)

    def _is_fed(self, call: Call, run: Run, module: nn.Module, x: Tensor) -> bool:
        """Whether ``x`` is the heads of a run, or a multiple of them."""
        if run.out_proj is None and module in self.norms:
            return False
        if run.is_fed_to(x):
            self.plainly_fed.add(run.plan.module)
            return True
        return run.is_fed_gated(x, call.claims)

    def _take_product(self, call: Call, run: Run, product: Product | None) -> None:
        """Takes a linear map that an attention module has applied itself for its out-projection."""
        if product is None or run.plan.parts.out_proj is not None:
            return
        if not (run.is_fed_to(product.x) or run.is_fed_gated(product.x, call.claims)):
            return
        run.join()
        run.heads = product.x
        run.note_heads(self._checks_all)
        run.projection = Projection(product.weight, product.bias)
        apart = run.projected(run.projection, product.x, product.made, self._checks_all)
        call.claim(run.claim("the product that it applies makes something else", apart))
        if run.gate is not None:
            run.projection = run.projection.of_columns(run.gate.columns)
        self.projected(call, run, product.made)

    def _take_routed(self, call: Call, run: Run, routed: RoutedHeads, y: Tensor) -> None:
        """Takes the output of a layer whose experts project their heads."""
        assert run.projection is not None
        run.note_heads(self._checks_all)
        heads = routed.gated(run.contexts[0])
        apart = run.projected(run.projection, heads, y, self._checks_all)
        call.claim(run.claim("the heads of its experts, projected, are not its output", apart))
        self.projected(call, run, y)

    @staticmethod
    def _why(run: Run) -> str:
        """Returns the operation between heads and an out-projection, as far as it was seen."""
        why = run.why_no_projection
        if not why and run.following is not None and run.following.stop:
            why = f"they went through {run.following.stop!r}, which is no multiplication"
        return why and f": {why}"

    def flows_out(self, call: Call, run: Run, module: nn.Module, x: Tensor, out: Tensor) -> None:
        """A module has made ``out`` of ``x``."""
        if run.stage == "heads" and module is run.plan.module:
            if run.routed is not None:
                self._take_routed(call, run, run.routed, out)
            elif run.following is not None:
                self._take_product(call, run, run.following.product)
        elif run.stage == "projection" and module is run.out_proj:
            assert run.heads is not None
            is_found = run.plan.parts.out_proj is None
            if is_found and is_handed_on(x, out):
                run.out_proj, run.stage = None, "heads"  # dropout in evaluation, an identity
                return
            if run.scales is None:
                run.note_heads(self._checks_all)
            projection = self._projections.of(call, run, module, run.heads, out)
            if run.scales is not None:
                projection = projection.after(run.scales)
            if run.gate is not None:
                projection = projection.of_columns(run.gate.columns)
            if is_found and run.is_probed and self._projections.scales(module, projection):
                run.scales, run.contexts = projection, [out]
                run.out_proj, run.stage = None, "heads"  # the out-projection comes after it
                return
            run.projection = projection
            self.projected(call, run, out)
        elif run.stage == "sum":
            is_around = module in run.plan.ancestors
            if module is run.plan.module or module is run.out_proj:
                return
            if not is_around:
                run.follow(module, x, out)
                return
            if is_sum(run, out, module, call, is_input=False):
                self._summed(call, run, None, out)
                return
            if module is run.plan.limit:
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
            made = None if run.last_norm is None else run.last_norm[2]
            is_alike = made is not None and out.shape == made.shape
            if made is not None and is_alike and (out is made or same_rows(out, rows_of(made))):
                found = self._second_norm(run)
                if found is not None:
                    parts = replace(run.plan.parts, second_norm=found[0])
                    run.plan, run.stage = replace(run.plan, parts=parts), "second norm"
                    self._normed(call, run, *found)
                    return
            if module is run.plan.ancestors[:3][-1]:
                self._maker.finish(call, run, run.plan.parts)
        elif module in self.norms:
            run.last_norm = (module, x, out)
        else:
            run.note_other(out)

    @staticmethod
    def _second_norm(run: Run) -> tuple[nn.Module, Tensor, Tensor] | None:
        """The norm that ran last, with its input and output, if it may be the second half's."""
        assert run.last_norm is not None
        if run.order is not None:
            return second_half(run.order, *run.last_norm)
        apart = run.second_half(see(run.last_norm[1]))
        if run.plan.module.training or apart is None or not apart.is_too_far:
            return run.last_norm
        return None

    def projected(self, call: Call, run: Run, y: Tensor) -> None:
        parts = run.plan.parts
        if parts.block == "none":
            self._maker.finish(call, run, parts)
            return
        if y.is_nested and parts.block == "found":
            self._without_block(call, run, "its output is nested, and its rows are not followed")
            return
        if y.is_nested:
            run.stage, run.norm = "norm", parts.norm  # no sum to find: the parts name the norm
            return
        run.contexts, run.heads = [], None
        if parts.block != "found" and not run.plan.needs_block(run.attention.kind):
            # made here, where what they are made of is let go
            run.maps = self._maker.make(call, run, run.plan.maps(run.attention.kind))
            call.claim(run.noted_heads_claim())
        run.variants, run.stage = [Variant(call.see(y))], "sum"

    def _summed(self, call: Call, run: Run, module: nn.Module | None, x: Tensor) -> None:
        """``x`` is the residual plus the attention's output; ``module`` is called with it."""
        parts = run.plan.parts
        if run.why_no_block:
            if parts.block != "found":
                raise RuntimeError(
                    f"record: {run.plan.name} does not add up: {run.why_no_block}; by "
                    f"{run.plan.source} its block is {parts.block!r}"
                )
            self._maker.finish(call, run, replace(parts, block="none"))
            return
        if run.output_norm is not None:
            norm, before, after = run.output_norm
            with self._maker.grad_mode():
                if run.order is not None:
                    given = run.order.items_first(run.order.three_axes)
                else:
                    given = as_batch(before, run, call.padded_length)
                stats = NormStats.of(norm, given)
            if run.order is None:  # else the sum has told it in every row
                call.claim(run.norm_claim(norm, stats, see(before), see(after)))
            run.around.output_norm = stats
        if parts.block == "found":
            is_norm = module is not None and "Norm" in type(module).__name__
            is_post = is_norm and run.is_post_norm()
            if run.order is not None:
                is_one = is_norm and module is not None and not list(module.children())
                block = block_of(run, module if is_one else None)
                if block is None:
                    why = "whether a norm stands before the attention or after the sum is not seen"
                    self._without_block(call, run, why)
                    return
                is_post = block == "post"
            parts = replace(
                parts, block="post" if is_post else "pre", norm=module if is_post else None
            )
            run.plan, run.is_found = replace(run.plan, parts=parts), True
        if parts.block == "pre" or parts.norm is None:
            may_be_post = run.order is not None and not run.order.is_normed
            if run.plan.wants("alti") and not may_be_post:
                run.around.output = as_batch(x, run, call.padded_length)
            wanted = () if run.maps is not None else run.plan.maps(run.attention.kind)
            if run.has_other or not (may_be_post or awaited_norms(parts, wanted)):
                self._maker.finish(call, run, parts)
                return
            run.stage, run.norm_input, run.total = "reading norm", x, call.see(x)
            if module is not None:
                self._is_read(run, module, x)
            return
        run.norm, run.stage = parts.norm, "norm"
        if module is parts.norm:
            run.norm_input = x

    def ends(self, call: Call, run: Run) -> bool:
        """Ends a run whose next step does not come, if maps can be made without it."""
        parts = run.plan.parts
        if run.stage == "reading norm":
            self._leave_unread(call, run)
        elif run.stage == "sum" and parts.block == "found":
            self._without_block(call, run, run.why_no_block or _NO_SUM)
        elif run.stage == "end of block":
            self._maker.finish(call, run, parts)
        else:
            return False
        return True

    def _without_block(self, call: Call, run: Run, why: str) -> None:
        """Makes the maps of a run whose block is not known, and why."""
        run.why_no_block = why
        self._maker.finish(call, run, replace(run.plan.parts, block="none", norm=None))

    def _no_sum(self, call: Call, run: Run, module: nn.Module | None, x: Tensor) -> None:
        """The block has gone on, and nothing was the residual plus the attention's output."""
        parts = run.plan.parts
        if parts.block == "found":
            self._without_block(call, run, run.why_no_block or _NO_SUM)
            return
        if not run.plan.module.training and x.numel():
            of = "what the norm after it was given" if module is not None else "its block's output"
            y = run.variants[0].rows
            residual = run.around.residual
            rest = f"; the output is {float(y.abs().max()):.3g} at most"
            if residual is not None and x.numel() == residual.numel():
                rest += f", what was added {float((x - residual.view_as(x)).abs().max()):.3g}"
            raise RuntimeError(
                f"record: {run.plan.name} does not add up: its output and its residual, or any "
                f"multiple, are not {of}{rest}. By {run.plan.source} its block is "
                f"{parts.block!r}, and its residual what "
                f"{'it' if parts.pre_norm is None else 'the norm before it'} was called with"
            )
        # dropout stands in between: what went into the norm is what it really got
        if module is not None and module is parts.norm:
            run.norm, run.stage, run.norm_input = parts.norm, "norm", x
        else:
            self._maker.finish(call, run, parts)

    def _normed(self, call: Call, run: Run, norm: nn.Module, x: Tensor, out: Tensor) -> None:
        """A norm that was awaited has run."""
        stage = run.stage
        order = run.order if stage == "norm" else None
        if order is not None and (why := why_no_norm(order, norm, x, out)):
            self._without_block(call, run, why)
            return
        with self._maker.grad_mode():
            if run.maps is None:
                stats = NormStats.of(norm, as_batch(x, run, call.padded_length))
            else:  # two rows will do for the check
                stats = NormStats.of(norm, rows_of(x).to(x.dtype).unsqueeze(0))
        run.norm_input = None
        if not x.is_nested and x.numel():
            call.claim(run.norm_claim(norm, stats, call.see(x), call.see(out)))
        parts = run.plan.parts
        if stage == "norm":
            run.around.norm = stats
            if run.plan.wants("alti"):
                run.around.output = as_batch(out, run, call.padded_length)
        else:
            run.around.second_norm = stats
            if not run.plan.module.training and not x.is_nested and x.numel():
                apart = run.second_half(call.see(x))
                if apart is not None:
                    step = (
                        "what its block's second norm was given is not the output of the first "
                        "plus that of a module"
                    )
                    call.claim(run.claim(step, apart))
        wanted = () if run.is_found else run.plan.maps(run.attention.kind)
        if stage == "norm" and "second_norm" in awaited_norms(parts, wanted):
            run.stage, run.others = "second norm", []
            run.norm_output = None if x.is_nested or not x.numel() else call.see(out).rows
            return
        asked = {*run.plan.asked.required, *run.plan.asked.where_defined}
        if stage == "norm" and run.is_found and {"encoder", "mixing_ratio"} & asked:
            run.stage, run.others, run.norm_output = "end of block", [], call.see(out).rows
            if run.order is not None:
                run.order.first_half, run.order.others = out, []
            return
        self._maker.finish(call, run, parts)

    def _is_read(self, run: Run, module: nn.Module, x: Tensor) -> None:
        """Takes the first norm that is called with the sum of a "pre" block."""
        total, parts = run.norm_input, run.plan.parts
        is_norm = "Norm" in type(module).__name__ and not list(module.children())
        if total is None or parts.second_norm is not None or not is_norm:
            return
        here, there = ((y.data_ptr(), y.shape, y.stride()) for y in (x, total))
        if here != there or run.total is None or not run.total.is_as_it_was:
            return
        if run.order is None or run.order.is_normed:
            run.plan = replace(run.plan, parts=replace(parts, second_norm=module))
        else:  # the attention read what it is added to: the norm stands after it
            run.plan = replace(run.plan, parts=replace(parts, block="post", norm=module))
            run.norm, run.stage = module, "norm"

    def _leave_unread(self, call: Call, run: Run) -> None:
        """No norm has read the sum of a "pre" block."""
        run.norm_input = None
        self._maker.finish(call, run, replace(run.plan.parts, second_norm=None))

    def _read(self, call: Call, run: Run, norm: nn.Module, x: Tensor, out: Tensor) -> None:
        """The norm before the second half of a "pre" block has run; one of another kind is left."""
        if run.order is not None and why_no_norm(run.order, norm, x, out):
            self._leave_unread(call, run)
            return
        is_required = "encoder" in run.plan.asked.required
        is_known = is_required or (takes_waiting(x) and norm in self._known_readers)
        try:
            with self._maker.grad_mode():
                stats = NormStats.of(norm, as_batch(x, run, call.padded_length))
            claim = run.norm_claim(norm, stats, call.see(x), call.see(out))
            if not x.numel():
                pass  # no row to compare
            elif is_known:
                fault = partial(self._known_readers.discard, norm)
                call.claim(claim._replace(at_fault=fault))
            else:
                Settlement([claim], Tensor.cpu).check()  # the host waits for it
                self._known_readers.add(norm)
        except (TypeError, RuntimeError) as error:
            if is_known or isinstance(error, torch.OutOfMemoryError):
                raise
            self._leave_unread(call, run)
            return
        run.around.second_norm, run.norm_input = stats, None
        self._maker.finish(call, run, run.plan.parts)

    def nothing_follows(self, call: Call, run: Run) -> None:
        """The call is over, and a run still waits."""
        if run.stage == "heads":
            known = run.plan.parts.out_proj
            seen = "no module was called with its heads, or a multiple of them"
            if known is not None:
                seen = f"its out-projection, a {describe(known)}, did not run in this call"
            raise RuntimeError(
                f"record: {run.plan.title} cannot be recorded: {seen}{self._why(run)}. layers=... "
                "leaves it out"
            )
        if self.ends(call, run):
            return
        if run.stage == "sum" and run.plan.parts.block == "pre":
            self._maker.finish(call, run, run.plan.parts)  # its block was not run whole
            return
        raise RuntimeError(
            f"record: {run.plan.title} ran, and {run.awaited} did not run after it in this call; "
            f"{'it was called with the sum' if run.is_found else f'{run.plan.source} names it'}"
        )
