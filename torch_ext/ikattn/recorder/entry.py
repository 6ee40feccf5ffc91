"""``ikattn.record``: the maps of a model's attention, taken from ordinary forward calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from ikattn.maps.layer_writer import LayerWriter
from ikattn.maps.recording import Recording
from ikattn.maps.reduction import Reduction
from ikattn.nn.selection import Selection
from ikattn.recorder.calls.delta_rules import hearing_delta_rules
from ikattn.recorder.calls.modes import without_compiled_code
from ikattn.recorder.calls.sdpa import hearing_sdpa
from ikattn.recorder.calls.transformers_attention import listening
from ikattn.recorder.graphs import graph_layers
from ikattn.recorder.plan.plan import Asked, asked_maps, describe, plan_layers
from ikattn.recorder.plan.run_maps import ALL_MAPS
from ikattn.recorder.recorder import Recorder
from ikattn.recorder.runs.making import OnLayer, Options
from ikattn.recorder.runs.rows import Queries, check_kinds, rows_asked


def record(
    model: nn.Module,
    maps: Iterable[str] | None = ("summed",),
    *,
    layers: Selection | None = None,
    to_cpu: bool = True,
    detach: bool = True,
    on_layer: OnLayer | None = None,
    check: Literal["rows", "all"] = "rows",
    reduce: str | Reduction | Callable[[Tensor, int], Tensor] | None = None,
    queries: Queries | None = None,
) -> contextlib.AbstractContextManager[Recording]:
    """Records what every token contributes, in every layer of attention, while the model runs.

    Records ``nn.MultiheadAttention``, stock and ours, every module that computes its weights
    through Hugging Face's attention interface or ``F.scaled_dot_product_attention``, modules named
    for attention that multiply a softmax with values themselves, and gated delta rules and Mamba-2
    of transformers, whose weights have signs and whose rows do not add up to 1. The block around it
    is found by what its tensors add up to. Each layer is held to what it computed: its heads, its
    out-projection, the sum with the residual, the norm after it. Inside the block the model is
    called as ever: arguments, return values and gradients stay what they are, but torch's fused
    kernel of a whole ``nn.TransformerEncoderLayer``, which hides the attention, is replaced by the
    same layer's ordinary code, and what torch.compile made runs as written. After the block the
    model is as it was before it.

    Each call of the model gives one batch; so does each direct call of a part of it, such as the
    encoder pass of ``generate``, each of whose steps is a call of its own. A call that raises gives
    none. Several threads may call the model; batches are in the order in which calls ended.
    Recordings of one model may be nested, and each gets every call.

    Weights are computed once more, in float32 at least, from the queries and keys that the model
    projected; large ones are never held, unless a map for every head is asked for. In training they
    are the weights before dropout, while what went into a norm is what it really got. A layer that
    is run several times in one call is ``name``, ``name#2`` and so on. Learned and zero keys
    (``add_bias_kv``, ``add_zero_attn``) are the last columns of a map.

    Of PyTorch Geometric's GATConv, GATv2Conv and TransformerConv, stock and ours, the maps are of
    edges: weights, norms of what each head moves, and of all heads together, in
    ``recording.edges``, whatever ``maps`` names. There weights are those that were applied.

    Args:
        model: Any module that holds attention.
        maps: Names of maps: "value_norms", "per_head", "summed" (N), "with_residual" (N_Res),
            "with_norm" (N_ResLN), "encoder" (N_Enc), "alti" (:func:`ikattn.maps.alti`, through
            the norm after the residual sum where there is one; of cross-attention the residual has
            the rest of a row), "projection" (:func:`ikattn.maps.projection`, on the attention's own
            output), "mixing_ratio" (of each map from
            "summed" to "encoder" that the layer has), "weights", "similarity", "magnitude";
            "ledger" stands for the last three with "value_norms" and "per_head", and "all" for all
            of these that a layer has. None: what a layer has, except those for every head, those of
            the ledger, "alti" and "projection". In cross-attention "with_norm" and "encoder" hold
            what comes from the keys alone: the residual has no column.
        layers: Which layers, as in ``ikattn.convert``: a predicate of name and module; a pattern of
            names as in a shell ("encoder.*"); a type, of the layer or of what holds it; a list of
            patterns and types; None: all.
        to_cpu: Move maps to the CPU as they are made. From a GPU they go to page-locked memory
            while the model goes on, up to 2 GiB that the recording keeps; ``batches`` waits for
            them.
        detach: Maps have no gradient. False: they are differentiable where grad mode is on.
        on_layer: Called with the number of the forward call, the layer and its maps as soon as they
            are there, in the thread that runs the model; the recording then keeps no maps. A call
            that raises later may have handed over some layers.
        check: "rows" holds two rows of every tensor to what the model computed, "all" every row.
        reduce: What to keep of each map of queries and keys, in ``reduced`` of a layer's maps:
            "columns", "diagonal", "top_k" (8 of each row), or an object of
            :class:`ikattn.maps.TopK`, ``Groups`` or your own
            :class:`ikattn.maps.Reduction`. A function of rows ``[B, R, S]`` (``[B, H, R, S]``)
            and the number of the first query returns a tensor ``[B, R, ..]``; those of blocks of
            rows stand below each other. ``[L, S]`` is never held. None: whole maps.
        queries: The rows to make, a slice or a list of numbers, in every layer and call. They count
            each sequence's tokens of that call without padding, from the first, or from the last
            where they are negative; in cross-attention those of the decoder. Rows that a slice
            finds in other sequences alone are 0, and padding. Runs of consecutive queries are made
            at once. None: all.

    Yields:
        The recording, filled as calls end. Shapes are those of ``Contributions``; unbatched input
        is a batch of one.

    Raises:
        TypeError: model is no module, or an out-projection is no linear map.
        ValueError: A map does not exist, or a layer does not have it (the message says why); layers
            selects none; the model holds no attention; its attention implementation is neither
            "eager" nor "sdpa"; reduce="diagonal" of cross-attention; queries, or keys of a group,
            that a sequence lacks.
        torch.OutOfMemoryError: In a forward call, at its first layer: maps of all layers need more
            memory than is free.
        NotImplementedError: The model's attention cannot be recorded. In a forward call: a
            recurrence goes on from a state of calls that were not recorded.
        RuntimeError: In a forward call: a layer does not add up to what it computed; a layer ran,
            and its attention was not seen; a norm that should follow it did not run. On a GPU the
            first of these comes later, in the next call, where ``batches`` is read, or at the end
            of the block; such a call is not kept.

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
    return recorded(
        model,
        maps,
        layers=layers,
        to_cpu=to_cpu,
        detach=detach,
        on_layer=on_layer,
        check=check,
        rows=rows_asked(reduce, queries),
    )


@contextlib.contextmanager
def recorded(
    model: nn.Module,
    maps: Iterable[str] | Asked | None,
    *,
    layers: Selection | None = None,
    **asked: Any,
) -> Iterator[Recording]:
    """``record`` with what ``Options`` has."""
    options = Options(**asked)
    if not isinstance(model, nn.Module):
        raise TypeError(f"record: model must be a torch.nn.Module, got {type(model).__name__}")
    if options.check not in ("rows", "all"):
        raise ValueError(f'record: check must be "rows" or "all", got {options.check!r}')
    graphs = graph_layers(model, layers)
    for name in graphs:
        if options.rows is not None:
            raise ValueError(
                f"record: reduce and queries must be None for layers that attend over a graph, "
                f"such as {name or 'the model'}, whose maps are of edges; leave them out by layers="
            )
        if options.on_layer is not None:
            raise ValueError(
                f"record: on_layer is not called for layers that attend over a graph, such as "
                f"{name or 'the model'}: leave them out by layers=, or take recording.graphs"
            )
    plans, unseen = plan_layers(model, asked_maps(maps), layers, may_be_none=bool(graphs))
    if options.rows is not None:
        check_kinds(plans, options.rows)
    defined = {name for plan in plans for name in plan.maps(plan.parts.kind)}
    recording = Recording(describe(model), tuple(name for name in ALL_MAPS if name in defined))
    recording.left_out = tuple(unseen)
    writer = getattr(options.on_layer, "__self__", None)
    if isinstance(writer, LayerWriter):
        writer.describe(recording)
    recorder = Recorder(recording, options)
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_compiled_code())
        heard: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
            "interface": (listening, recorder.interface_called),
            "sdpa": (hearing_sdpa, partial(recorder.function_called, "sdpa")),
            "delta rule": (hearing_delta_rules, partial(recorder.function_called, "delta rule")),
        }
        for source in {plan.seen_by for plan in plans} & heard.keys():
            hearing, tell = heard[source]
            stack.enter_context(hearing(model, tell))
        stack.callback(recorder.remove_hooks)
        recorder.add_hooks(model, plans, graphs)
        recording.await_batches_by(lambda: recorder.keep_ended(waits=True))
        try:
            yield recording
        except BaseException:
            with contextlib.suppress(RuntimeError):  # not in place of what has come up
                recorder.keep_ended(waits=True)
            raise
        else:
            recorder.keep_ended(waits=True)
        finally:
            recording.await_batches_by(None)
