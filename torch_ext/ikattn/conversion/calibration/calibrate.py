"""Starts an implicit kernel near the softmax attention that it replaces.

One pass over calibration data notes what each layer is given and what it gives with softmax, to
which each layer in turn is then fitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from numbers import Integral, Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ikattn._precision import without_autocast
from ikattn.conversion.calibration.layers import Layer, as_softmax, layers_of, listening
from ikattn.conversion.calibration.outputs import (
    Rates,
    Target,
    fit_to_outputs,
    in_float32,
    rows_of,
    run,
)
from ikattn.conversion.calibration.report import CalibratedModule, CalibrationReport
from ikattn.conversion.calibration.weights import fit_to_weights, some_queries
from ikattn.nn.parameter_groups import having
from ikattn.nn.selection import Selection
from ikattn.recorder.calls.attention_call import AttentionCall

Trained = Literal["frequencies", "attention"]

_OF_MODULE = 1 << 22  # weights that are kept of a module
_OF_OUTPUTS = 0.3  # the learning rate of frequencies in the steps on outputs, to the other one


@torch.inference_mode(False)
def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    select: Selection | None = None,
    steps: int = 300,
    learning_rate: float = 0.01,
    output_steps: int = 200,
    train: Trained = "frequencies",
    projection_learning_rate: float = 3e-4,
    keep: float | None = None,
) -> CalibrationReport:
    """Fits a model's implicit kernels to the softmax attention they replace, layer by layer.

    For a converted model with trained weights: fine-tuning then starts near where the model was.
    First the fit minimises, for each head, the squared difference of the normalised weights over
    the squared softmax weights. Then it draws each layer's output to what the softmax layer gave,
    by the squared error over the square. docs/guide/calibration.md describes both steps. A scale
    of a head's kernel is not fitted, as normalisation cancels it. At most four million weights of
    a module are used; the outputs of all layers are held for all batches, [tokens, model size]
    each.

    Args:
        model: After ``ikattn.convert``, or with ``ikattn.MultiheadAttention`` of kernel "implicit";
            called in eval mode, without grad, while all its implicit kernels compute softmax.
        batches: Inputs: a tensor, a tuple of positional or a dict of keyword arguments each.
            ``attention_mask`` of a dict tells which tokens are padding.
        select: Which modules, as for ``convert``.
        steps: Of Adam, on the weights of each module; 0: none.
        learning_rate: Of Adam, falling to 0 as a cosine.
        output_steps: Of Adam, on the output of each module, a batch each; 0: none.
        train: What these change: "frequencies", or "attention", which is all parameters of the
            attention modules that require grad, projections too.
        projection_learning_rate: Of the parameters that are no frequencies; those have three tenths
            of ``learning_rate`` then.
        keep: Heads whose weights still have a larger relative error than this, after the steps on
            them, compute softmax from then on, those of one module beside the others. Such a module
            is not of linear time. None: those that did before, if any.

    Returns:
        For each module how near it was and is; prints as a table by layer and head.

    Raises:
        TypeError: batches is one batch, or steps no whole number.
        ValueError: There is no implicit kernel, no batch, a number is out of range, input_ids are
            none of the model's, a module was not called, has no frequencies that require grad,
            shares its kernel with another, was given single tokens or nothing but padding, or its
            softmax weights are not finite. Of the module at which an error occurs everything is as
            it was; those before it are calibrated.

    Example:
        >>> import torch, ikattn
        >>> model = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> model = ikattn.convert(model, num_frequencies=16, seed=0)
        >>> report = ikattn.calibrate(model, [torch.randn(10, 7, 16)], steps=20, output_steps=20)
        >>> bool(report[0].after.square().mean() <= report[0].before.square().mean())
        True
    """
    numbers = {
        "learning_rate": learning_rate,
        "projection_learning_rate": projection_learning_rate,
        "keep": 1.0 if keep is None else keep,
    }
    given = _checked(batches, {"steps": steps, "output_steps": output_steps}, numbers)
    if train not in get_args(Trained):
        raise ValueError(f"calibrate: train must be one of {get_args(Trained)}, got {train!r}")
    layers = layers_of(model, select)
    for layer in layers:
        if not layer.frequencies:
            raise ValueError(
                f"calibrate: expected frequencies that require grad, got frozen ones in {layer}; "
                "select leaves modules out"
            )
        if any(getattr(x, "forget", None) is not None for x in (layer.module, layer.kernel)):
            raise ValueError(f"calibrate: {layer} has gates, and so cannot come near softmax")
        if getattr(layer.module, "head_share", getattr(layer.kernel, "head_share", None)):
            raise ValueError(
                f"calibrate: the heads of {layer} are shared out over ranks; calibrate the model "
                "before"
            )
    if len({id(layer.kernel) for layer in layers}) < len(layers):
        raise ValueError(
            "calibrate: expected a kernel for each layer, got one that several modules share; "
            "select leaves modules out"
        )
    rates = Rates(
        _OF_OUTPUTS * learning_rate, projection_learning_rate if train == "attention" else None
    )
    configs = (getattr(module, "config", None) for module in model.modules())
    caching = [config for config in configs if getattr(config, "use_cache", None) is True]
    # without caches of keys, which grow where a layer runs alone
    with having(model.modules(), "training", False), having(caching, "use_cache", False):
        model.eval()
        seen = _Seen(model, layers, given, with_outputs=output_steps > 0)
        for layer in layers:
            if not seen.calls[layer]:
                raise ValueError(f"calibrate: {layer} was not called in {len(given)} batches")
        report = {}
        try:
            for layer in layers:
                with _all_or_nothing(layer):
                    report[layer] = _fit(layer, seen.calls[layer], steps, learning_rate, keep)
        finally:
            if keep is not None and not all(layer.is_torch for layer in layers):
                from ikattn.integrations.transformers.conversion import note_softmax_heads

                note_softmax_heads(model)  # for its checkpoints
        for layer in seen.order if output_steps else ():
            targets, device = seen.targets[layer], seen.calls[layer][0].query.device
            with _all_or_nothing(layer), torch.enable_grad(), without_autocast(device):
                before, after = fit_to_outputs(model, layer, given, targets, output_steps, rates)
            report[layer] = report[layer]._replace(output_before=before, output_after=after)
    return CalibrationReport(report[layer] for layer in layers)


def _checked(
    batches: Iterable[Any], counts: dict[str, int], numbers: dict[str, float]
) -> list[Any]:
    if isinstance(batches, Tensor | Mapping | str):
        raise TypeError(
            "calibrate: batches must be an iterable of batches, each a tensor, a tuple of "
            "positional or a dict of keyword arguments, got one "
            f"{type(batches).__name__}: [batch] is one batch"
        )
    for name, count in counts.items():
        if not isinstance(count, Integral):
            raise TypeError(f"calibrate: {name} must be a whole number, got {count!r}")
        if count < 0:
            raise ValueError(f"calibrate: {name} must not be negative, got {count}")
    for name, number in numbers.items():
        if not isinstance(number, Real) or not 0.0 < number < float("inf"):
            raise ValueError(f"calibrate: {name} must be a positive number, got {number!r}")
    given = list(batches)
    if not given:
        raise ValueError("calibrate: expected at least one batch, got none")
    return given


class _Seen:
    """Inputs and outputs of the layers, while the model computed softmax.

    Of each layer there are the calls that are kept, and for each batch its outputs; ``order`` has
    the layers as the model calls them.
    """

    def __init__(
        self, model: nn.Module, layers: list[Layer], batches: list[Any], *, with_outputs: bool
    ) -> None:
        self.calls: dict[Layer, list[AttentionCall]] = {layer: [] for layer in layers}
        self.targets: dict[Layer, list[list[Target]]] = {layer: [] for layer in layers}
        self.order: list[Layer] = []
        self._left = dict.fromkeys(layers, _OF_MODULE)
        self._padding: dict[Layer, Tensor | None] = {}
        with ExitStack() as stack:
            stack.enter_context(as_softmax(model, layers))
            stack.enter_context(torch.no_grad())
            for layer in layers if with_outputs else ():
                hook = layer.module.register_forward_hook(partial(self._gave, layer))
                stack.enter_context(hook)
            for number, batch in enumerate(batches):
                _check_tokens(model, batch, number)
                for layer in layers:
                    self.targets[layer].append([])
                with listening(model, layers, batch, self._given):
                    run(model, batch)

    def _given(self, layer: Layer, call: AttentionCall) -> None:
        if layer not in self.order:
            self.order.append(layer)
        self._padding[layer] = call.query_padding
        if self._left[layer] <= 0:
            return
        call = some_queries(call)
        if not call.weights.isfinite().all():
            raise ValueError(
                f"calibrate: expected batches with finite attention weights, got NaN in {layer}"
            )
        self._left[layer] -= call.weights.numel()
        self.calls[layer].append(call)

    def _gave(self, layer: Layer, module: nn.Module, _: Any, output: Any) -> None:
        rows = rows_of(output, module).detach().clone()
        self.targets[layer][-1].append(Target(rows, self._padding.get(layer)))


def _check_tokens(model: nn.Module, batch: Any, number: int) -> None:
    if isinstance(batch, Mapping):
        has_cache = any(batch.get(name) is not None for name in ("past_key_values", "cache"))
        if has_cache or batch.get("use_cache"):
            raise ValueError(
                f"calibrate: expected batches without a cache of keys, got one in batch {number}; "
                "leave past_key_values, cache and use_cache out"
            )
        ids = batch.get("input_ids")
    else:
        ids = batch[0] if isinstance(batch, tuple) and batch else batch
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        return
    embeddings = None
    with suppress(NotImplementedError, AttributeError):  # models with several towers raise it
        embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    count = getattr(embeddings, "num_embeddings", None)
    if count is None or ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= count:
        raise ValueError(
            f"calibrate: input_ids must be in [0, {count}), the model's vocabulary, got "
            f"{low} to {high} in batch {number}; ids of the model's own tokenizer are"
        )


def _fit(
    layer: Layer, calls: list[AttentionCall], steps: int, learning_rate: float, keep: float | None
) -> CalibratedModule:
    """Fits to the weights, and lets heads keep softmax; reports without outputs."""
    magnitude, device = getattr(layer.module, "magnitude", None), calls[0].query.device
    parts = [layer.kernel] if magnitude is None else [layer.kernel, magnitude]
    with in_float32(parts), torch.enable_grad(), without_autocast(device):
        before, after = fit_to_weights(layer, calls, steps, learning_rate)
    if keep is not None:
        softmax = after > keep
        layer.owner.keep_softmax(softmax if bool(softmax.any()) else None)
    split = layer.owner.split_heads()
    heads = () if split is None else split.softmax
    return CalibratedModule(layer.names, before, after, softmax_heads=heads)


@contextmanager
def _all_or_nothing(layer: Layer) -> Iterator[None]:
    """Gives the layer's parameters their values back if an error ends the block."""
    parameters = [w for w in layer.module.parameters() if w.requires_grad]
    first = [w.detach().clone() for w in parameters]
    gradients = [w.grad for w in parameters]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for parameter, value in zip(parameters, first, strict=True):
                parameter.copy_(value)
        raise
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
