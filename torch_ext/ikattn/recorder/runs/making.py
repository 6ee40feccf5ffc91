"""Makes the maps of a run of attention whose block is known, and hands them on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.activation import MultiheadAttention as StockMultiheadAttention

from ikattn import _memory
from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.layers import Layer
from ikattn.maps.sequences import AXES
from ikattn.recorder.calls.modes import as_the_model_runs, model_has_gradients
from ikattn.recorder.plan.plan import Plan
from ikattn.recorder.plan.run_maps import convert_tensors, make_maps
from ikattn.recorder.runs.call import Call, MadeLayer
from ikattn.recorder.runs.rows import RowsAsked, pair_maps
from ikattn.recorder.runs.run import Run
from ikattn.recorder.runs.transfers import Transfers
from ikattn.recorder.sums.claims import Settlement

OnLayer: TypeAlias = Callable[[int, Layer, Contributions], None]


@dataclass(frozen=True)
class Options:
    """Arguments of ``ikattn.record`` beside layers and maps.

    Attributes:
        on_run: Called with each run when its maps are made.
        rows: Which rows to make, and what to keep of them; None: all.
    """

    to_cpu: bool = True
    detach: bool = True
    on_layer: OnLayer | None = None
    check: Literal["rows", "all"] = "rows"
    on_run: Callable[[Run], None] | None = None
    rows: RowsAsked | None = None

    @property
    def checks_all(self) -> bool:
        """Whether every row of heads and projections is compared, not one."""
        return self.check == "all"


class Maker:
    """Makes maps, and keeps them in their call or hands them over."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.plans: Sequence[Plan] = ()  # of all layers that are recorded
        self.transfers = Transfers()

    def finish(self, call: Call, run: Run, parts: Any) -> None:
        """Makes the maps of a run."""
        run.stage = "done"
        call.pending.remove(run)
        plan = run.plan = replace(run.plan, parts=parts)
        attention = run.attention
        if run.maps is None:
            residual = None if parts.block == "none" else run.around.residual
            if residual is not None:
                residual = as_batch(residual, run, call.padded_length)
            run.around.residual = residual
            wanted = plan.maps(attention.kind, run.why_no_block, has_run=True)
            run.maps = self.make(call, run, wanted)
        call.claim(run.noted_heads_claim())
        if self.options.on_run is not None:
            self.options.on_run(run)
        layer = Layer(
            run.name, attention.kind, parts.side, attention.query.size(1), parts.block, parts.family
        )
        call.layers[run.name] = layer
        if self.options.on_layer is None:
            call.batch.layers[run.name] = run.maps
        else:
            settlement = self.settlement(call)
            made = MadeLayer(layer, run.maps, settlement, self.transfers.arrival())
            call.made.append(made)
            self.hand_over(call, waits=False)

    def settlement(self, call: Call) -> Settlement:
        """Returns the claims of a call so far, on their way to the host."""
        return Settlement(call.claims, lambda x: self.transfers.to_cpu(x, is_kept=False))

    def hand_over(self, call: Call, *, waits: bool) -> None:
        """Gives ``on_layer`` the maps that are there, in turn; all, where it ``waits`` for them."""
        while call.made and (waits or call.made[0].arrival.is_over()):
            made = call.made.popleft()
            made.arrival.wait()
            made.settlement.check()
            assert self.options.on_layer is not None
            with as_the_model_runs(gradients=True):
                self.options.on_layer(call.index, made.layer, made.maps)

    def make(self, call: Call, run: Run, wanted: tuple[str, ...]) -> Contributions:
        plan, attention = run.plan, run.attention
        if why := attention.why_no_product:
            for name in ("similarity", "magnitude"):
                if name in plan.asked.required:
                    raise ValueError(f"record: {plan.title} has no map {name!r}: {why}")
            wanted = tuple(name for name in wanted if name not in ("similarity", "magnitude"))
        around = run.around
        if "alti" in plan.asked.required and (around.residual is None or around.output is None):
            raise ValueError(
                f"record: {plan.title} has no map 'alti': the sum of residual and attention was "
                f"not seen in this call{plan.dropout_hint}"
            )
        assert run.projection is not None
        self._check_room(call, run, wanted)
        with _memory.memory_for("record", f"the maps of layer {run.name}"):
            with self.grad_mode():
                weight = run.projection.weight
                if self.options.rows is None:
                    maps = make_maps(attention, weight, run.around, wanted)
                else:
                    maps = self.options.rows.make(attention, weight, run.around, wanted, run.name)
            move = self.to_cpu_later if self.options.to_cpu else lambda x: x
            return convert_tensors(maps, detach=self.options.detach, move=move)

    def _check_room(self, call: Call, run: Run, wanted: tuple[str, ...]) -> None:
        """Raises torch.OutOfMemoryError where the maps of this layer, and its like, do not fit.

        Asked at the first of them in a call, before its maps are made.
        """
        attention, rows, names = run.attention, self.options.rows, pair_maps(wanted)
        group = (run.plan.parts.side, attention.kind)
        is_small = not names or (rows is not None and rows.reduction is not None)
        if group in call.has_room or is_small:  # reduced maps are never whole
            return
        call.has_room.add(group)
        outermost = call.running[0].module if call.running else None
        device = attention.query.device
        alike = [
            plan
            for plan in self.plans
            if plan.parts.side == group[0] and plan.parts.kind in (None, group[1])
            if outermost in (plan.module, *plan.ancestors)
            if self.options.to_cpu or all(x.device == device for x in plan.module.parameters())
        ]
        layers = 1 if self.options.on_layer is not None else max(1, len(alike))
        B, H, L, S = attention.sizes
        if rows is not None:
            L = len(rows.of_call(attention, run.name).numbers)
        pairs = B * L * S * sum(H if "H" in AXES[name] else 1 for name in names)
        size = pairs * attention.value.element_size()
        kept_on = torch.device("cpu") if self.options.to_cpu else device
        for place, count in {device: 1, kept_on: layers}.items():
            free = _memory.free_memory(place)
            if free is not None and count * size > free:
                of_layers = "1 layer" if count == 1 else f"{count} layers"
                raise torch.OutOfMemoryError(
                    f"record: no memory for the maps {', '.join(names)} of {of_layers}, from "
                    f"{run.name} on: {B} x {L} x {S} pairs of {H} heads take "
                    f"{_in_words(count * size)}, and {_in_words(free)} of {place} are free; ask "
                    "for reduce= (such as 'columns'), layers= (fewer at a time) or queries= (some "
                    "rows), or write them to disk by on_layer= (ikattn.maps.LayerWriter)"
                )

    def to_cpu_later(self, x: Tensor) -> Tensor:
        return self.transfers.to_cpu(x, is_kept=self.options.on_layer is None)

    @contextlib.contextmanager
    def grad_mode(self) -> Iterator[None]:
        """Has maps their gradients, where the model has some and they are asked for."""
        if self.options.detach or not model_has_gradients():
            yield
            return
        # checkpoints count the tensors that are saved within them, and these are not the model's
        with torch.enable_grad(), saved_tensors_hooks(_itself, _itself):
            yield


def as_batch(x: Tensor, run: Run, padded: int | None) -> Tensor:
    """Returns the output of a layer's block, as ``[B, L, D]``.

    Raises:
        RuntimeError: It has other sizes than the attention's queries.
    """
    B, _, L, _ = run.attention.sizes
    if run.order is not None and run.order.shape is not None:
        return run.order.as_batch(x)
    if x.is_nested:
        sizes = None if padded is None else (B, padded, x.size(2))
        x = torch.nested.to_padded_tensor(x, 0.0, sizes)
    elif isinstance(run.plan.module, StockMultiheadAttention):
        if x.dim() == 2:
            x = x.unsqueeze(0)
        elif not run.plan.module.batch_first:
            x = x.transpose(0, 1)
    elif run.is_turned and x.shape[:-1] == (L, B):
        x = x.transpose(0, 1)
    elif x.shape[:-1] != (B, L) and x.numel() == B * L * x.size(-1):
        x = x.reshape(B, L, x.size(-1))
    if x.shape[:-1] != (B, L):
        chunk = [getattr(each, "chunk_size_feed_forward", 0) for each in run.plan.ancestors]
        hint = "; chunk_size_feed_forward must be 0" if any(chunk) else ""
        raise RuntimeError(
            f"record: {run.plan.title}: the residual and the inputs of the norms must have shape "
            f"[B, L, D] = [{B}, {L}, D], got {list(x.shape)}{hint}"
        )
    return x


def _in_words(size: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def _itself(x: Tensor) -> Tensor:
    return x
