"""Starts an implicit kernel near the softmax attention that it replaces.

One pass over calibration data with the dot kernel notes queries, keys and the weights that softmax
makes of them; then the frequencies of each module are fitted to these weights by least squares.
Sizes: N batch, H heads, L queries, S keys, d head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ikattn import reference
from ikattn.analysis._recorder.attention_call import AttentionCall
from ikattn.analysis._recorder.torch_attention import torch_call
from ikattn.nn.multihead_attention import MultiheadAttention
from ikattn.nn.selection import AttentionModule, Selection, select_modules
from ikattn.spectral.interface import call_source

__all__ = ["CalibratedModule", "calibrate"]

# Weights that are kept of a call, and of a module in all.
_OF_CALL, _OF_MODULE = 1 << 19, 1 << 22
_HELD_OUT = 5  # one sequence, or query, in so many


class CalibratedModule(NamedTuple):
    """How near an implicit kernel came to softmax attention, on data it was not fitted to.

    Attributes:
        names: Of the module in the model.
        before, after: [H], the Frobenius norm of the weights' error relative to that of the softmax
            weights, before and after the fit.
    """

    names: list[str]
    before: Tensor
    after: Tensor

    def __str__(self) -> str:
        name = " = ".join(name or "the model itself" for name in self.names)
        return f"{name}: error of the weights {self.before.mean():.3f} -> {self.after.mean():.3f}"


@torch.inference_mode(False)
def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    select: Selection | None = None,
    steps: int = 300,
    learning_rate: float = 0.01,
) -> list[CalibratedModule]:
    """Fits the frequencies of a model's implicit kernels to the softmax attention they replace.

    For a converted model with trained weights: fine-tuning then starts near where the model was.
    Only frequencies change. The fit minimises, for each head, the squared difference of the
    normalised weights over the squared softmax weights, with Adam; it begins at the frequencies
    that are there and keeps the best of those it visits, by one sequence in five that are not
    fitted to. At most four million weights of a module are used. A scale of a head's kernel is not
    fitted: normalisation cancels it, but for the 1e-5 that is added to the kernel's square.

    Args:
        model: With modules of kernel "implicit"; called in eval mode, without grad, while they
            compute the dot kernel.
        batches: Inputs: a tensor, a tuple of positional or a dict of keyword arguments each.
        select: Which modules, as for ``convert``.
        steps: Of Adam, for each module.
        learning_rate: Of Adam, falling to 0 as a cosine.

    Returns:
        For each module how near it was and is.

    Raises:
        TypeError: batches is one batch, or steps no whole number.
        ValueError: There is no implicit kernel, no batch, steps < 1, a module was not called or
            has no frequencies that require grad, or its softmax weights are not finite.

    Example:
        >>> import torch, ikattn
        >>> model = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> model = ikattn.convert(model, num_frequencies=16, seed=0)
        >>> report = ikattn.calibrate(model, [torch.randn(10, 7, 16)], steps=20)
        >>> bool(report[0].after.square().mean() <= report[0].before.square().mean())
        True
    """
    if isinstance(batches, Tensor | Mapping | str):
        raise TypeError(
            "calibrate: batches must be an iterable of batches, each a tensor, a tuple of "
            "positional or a dict of keyword arguments, got one "
            f"{type(batches).__name__}: [batch] is one batch"
        )
    if not isinstance(steps, Integral):
        raise TypeError(f"calibrate: steps must be a whole number, got {steps!r}")
    if steps < 1:
        raise ValueError(f"calibrate: steps must be at least 1, got {steps}")
    chosen = [
        found
        for found in select_modules(model, select)
        if isinstance(found.module, MultiheadAttention) and found.kernel == "implicit"
    ]
    if not chosen:
        raise ValueError("calibrate: expected a model with implicit kernels, got one without")
    for found in chosen:
        if not _fitted(found.module):
            raise ValueError(
                f"calibrate: expected frequencies that require grad, got frozen ones in {found}; "
                "select leaves modules out"
            )
    calls = _softmax_calls(model, chosen, batches)
    return [_fit(found, calls[found.module], steps, learning_rate) for found in chosen]


def _softmax_calls(
    model: nn.Module, chosen: list[AttentionModule], batches: Iterable[Any]
) -> dict[nn.Module, list[AttentionCall]]:
    """Runs the model with softmax attention and returns what each module was given."""
    calls: dict[nn.Module, list[AttentionCall]] = {found.module: [] for found in chosen}
    left = dict.fromkeys(calls, _OF_MODULE)
    names = {found.module: found for found in chosen}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(module, MultiheadAttention)
        if left[module] <= 0:
            return
        call = torch_call(module, args, kwargs, None, None, None)
        call = _of_no_inference_mode(_some_queries(call))
        if not call.weights.isfinite().all():
            raise ValueError(
                f"calibrate: expected batches with finite attention weights, got NaN in "
                f"{names[module]}"
            )
        left[module] -= call.weights.numel()
        calls[module].append(call)

    batches = list(batches)
    if not batches:
        raise ValueError("calibrate: expected at least one batch, got none")
    with _as_softmax(model, list(calls)), torch.no_grad():
        hooks = [
            module.register_forward_pre_hook(note, with_kwargs=True, prepend=True)
            for module in calls
        ]
        try:
            for batch in batches:
                if isinstance(batch, Mapping):
                    model(**batch)
                else:
                    model(*(batch if isinstance(batch, tuple | list) else (batch,)))
        finally:
            for hook in hooks:
                hook.remove()
    for found in chosen:
        if not calls[found.module]:
            raise ValueError(f"calibrate: {found} was not called in {len(batches)} batches")
    return calls


@contextmanager
def _as_softmax(model: nn.Module, modules: list[nn.Module]) -> Iterator[None]:
    training = {module: module.training for module in model.modules()}
    model.eval()
    for module in modules:
        vars(module)["kernel"] = "dot"
    try:
        yield
    finally:
        for module in modules:
            vars(module)["kernel"] = "implicit"
        for module, mode in training.items():
            module.training = mode


def _some_queries(call: AttentionCall) -> AttentionCall:
    """Returns the call with as many of its queries as are kept, at even distances."""
    B, H, T, S = call.sizes
    step = max(1, (B * H * T * S) // _OF_CALL)
    if step > 1:
        call.query = call.query[:, :, ::step].contiguous()
        if call.attn_mask is not None and call.attn_mask.size(-2) == T:
            call.attn_mask = call.attn_mask[..., ::step, :]
        if call.query_padding is not None:
            call.query_padding = call.query_padding[:, ::step]
    return call


def _of_no_inference_mode(call: AttentionCall) -> AttentionCall:
    """Copies the tensors that autograd refuses to save."""
    for name, x in vars(call).items():
        if isinstance(x, Tensor) and x.is_inference():
            setattr(call, name, x.clone())
    return call


def _fitted(module: nn.Module) -> list[nn.Parameter]:
    assert isinstance(module, MultiheadAttention)
    assert module.spectral is not None
    return [w for w in module.spectral.parameters() if w.requires_grad]


_HALF = (torch.float16, torch.bfloat16)


@contextmanager
def _in_float32(module: MultiheadAttention) -> Iterator[None]:
    """Of 16 bits a step of the optimiser would be lost, or infinite."""
    parts = [part for part in (module.spectral, module.magnitude) if part is not None]
    tensors = [x for part in parts for x in (*part.parameters(), *part.buffers())]
    narrow = [(x, x.dtype) for x in tensors if x.dtype in _HALF]
    for x, _ in narrow:
        x.data = x.data.float()
    try:
        yield
    finally:
        for x, dtype in narrow:
            x.data = x.data.to(dtype)


def _fit(
    found: AttentionModule, calls: list[AttentionCall], steps: int, learning_rate: float
) -> CalibratedModule:
    module, parameters = found.module, _fitted(found.module)
    assert isinstance(module, MultiheadAttention)
    gradients = [w.grad for w in parameters]
    first = [w.detach().clone() for w in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        with (
            _in_float32(module),
            torch.enable_grad(),
            torch.autocast(calls[0].query.device.type, enabled=False),
        ):
            before, after = _descend(module, parameters, calls, steps, learning_rate)
    except BaseException:
        with torch.no_grad():
            for parameter, value in zip(parameters, first, strict=True):
                parameter.copy_(value)
        raise
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    return CalibratedModule(found.names, before.detach().sqrt(), after.detach().sqrt())


def _descend(
    module: MultiheadAttention,
    parameters: list[nn.Parameter],
    calls: list[AttentionCall],
    steps: int,
    learning_rate: float,
) -> tuple[Tensor, Tensor]:
    """Fits the parameters and returns the errors of what is held out, [H], before and after."""
    optimiser = torch.optim.Adam(parameters, learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    before = best = _errors(module, calls)[1]
    state = [w.detach().clone() for w in parameters]
    for _ in range(steps):
        fitted, held_out = _errors(module, calls)
        if held_out.mean() < best.mean():
            best = held_out
            state = [w.detach().clone() for w in parameters]
        gradients = torch.autograd.grad(fitted.sum(), parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimiser.step()
        schedule.step()
    last = _errors(module, calls)[1]
    if last.mean() < best.mean():
        return before, last
    with torch.no_grad():
        for parameter, kept in zip(parameters, state, strict=True):
            parameter.copy_(kept)
    return before, best


def _errors(module: MultiheadAttention, calls: list[AttentionCall]) -> tuple[Tensor, Tensor]:
    """Returns squared relative errors of the heads, [H]: of what is fitted to, and of the rest."""
    assert module.spectral is not None
    sums: list[Tensor] = []
    for call in calls:
        query, key = call.query, call.key
        w1, w2, _ = call_source(module.spectral, query, key, call.key_padding, call.query_padding)
        p, key_bias = module.p, call.key_bias
        if module.magnitude is not None:
            magnitude = module.magnitude(key, call.key_padding)
            p, key_bias = None, magnitude if key_bias is None else magnitude + key_bias
        weights = reference.implicit_kernel_weights(
            query,
            key,
            w1.to(query.dtype),
            None if w2 is None else w2.to(query.dtype),
            p=p,
            key_bias=key_bias,
            attn_mask=call.attn_mask,
        )
        error, size = ((weights - call.weights).square(), call.weights.square())
        of_rows = torch.stack([error.sum(-1), size.sum(-1)])  # [2, N, H, L]
        if call.query_padding is not None:
            of_rows = of_rows.masked_fill(call.query_padding[:, None], 0.0)
        if query.size(0) < _HELD_OUT:  # hold out queries rather than sequences
            of_rows = of_rows.transpose(1, 3)  # [2, L, H, N]
        held_out = torch.arange(of_rows.size(1), device=query.device) % _HELD_OUT == 0
        parts = [of_rows[:, ~held_out], of_rows[:, held_out]]
        sums.append(torch.stack([part.sum((1, 3)) for part in parts]))  # [2, 2, H]
    errors, sizes = torch.stack(sums).sum(0).unbind(1)
    fitted, rest = errors / sizes.clamp_min(torch.finfo(sizes.dtype).tiny)
    return fitted, rest
