"""Swaps the attention of an existing model for ``ikattn.MultiheadAttention``, and back."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from ikattn.nn._kernels import Kernel
from ikattn.nn.functional import check_kernel
from ikattn.nn.multihead_attention import MultiheadAttention
from ikattn.nn.selection import AttentionModule, Selection, check_unwrapped, select_modules
from ikattn.spectral import Mikan, Spectral

Model = TypeVar("Model", bound=nn.Module)

_NESTED_BEFORE = "_use_nested_tensor_before_ikattn"

_logger = logging.getLogger("ikattn")


@torch.inference_mode(False)  # frequencies are there to be trained
def convert(
    model: Model,
    kernel: Kernel = "implicit",
    *,
    select: Selection | None = None,
    p: float | Literal["learned"] | None = 2.0,
    num_frequencies: int = 64,
    spectral: Spectral = "direct",
    stationary: bool = False,
    seed: int | None = None,
) -> Model:
    """Makes every nn.MultiheadAttention of a model an ``ikattn.MultiheadAttention``, in place.

    The modules stay the same objects and keep all they hold: weights (an optimiser made before
    keeps working), device, dtype, training and requires_grad flags, hooks, sharing. Frequencies are
    new parameters, drawn for each module separately, of which an older optimiser must be told:
    ``optimizer.add_param_group({"params": [...]})``; their names hold ".spectral.".

    A module that has the kernel already is left alone, whatever its options. So are, with a
    warning, subclasses that someone else made (parametrised and sharded modules are such) and
    modules whose ``forward`` someone replaced. The logger "ikattn" says at level INFO what was
    done. Convert before torch.compile and before wrapping for distributed training.

    Args:
        model: Any module; it may be an nn.MultiheadAttention itself.
        kernel: "dot", "rbf" or "implicit".
        select: Which ones. A predicate of name and module; a pattern of names as in a shell
            ("encoder.*"); a type, of the module or of one that holds it
            (``nn.TransformerDecoderLayer``); a list of patterns and types; None: all. A module with
            several names is selected by any of them.
        p, num_frequencies, stationary: As for ``MultiheadAttention``.
        spectral: As for ``MultiheadAttention``. Of a module, each attention module gets a copy,
            with the same first values. Of "mikan" the cross-attention of nn.TransformerDecoderLayer
            gets ``pool="key"``: it is not told which queries are padding, or still to come.
        seed: If given, the i-th module to be converted is seeded with ``seed + i``.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no module, or ``select`` no selection.
        ValueError: There is nothing to convert, an option is wrong, or DDP or FSDP is around the
            model already. Whatever is raised, nothing has changed then.

    Source: K. Song, Y. Jung, D. Kim, I. Moon, "Implicit Kernel Attention", AAAI 2021
    (arXiv 2006.06147).

    Example:
        >>> import torch, ikattn
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> ikattn.convert(layer).self_attn.kernel
        'implicit'
    """
    check_kernel(kernel, None if p == "learned" else p)
    options: dict[str, Any] = {
        "p": p,
        "num_frequencies": num_frequencies,
        "spectral": spectral,
        "stationary": stationary,
        "seed": seed,
    }
    candidates = select_modules(model, select)
    convertible = [found for found in candidates if found.is_plain]
    refused = [found for found in candidates if not found.is_plain]
    if not convertible:
        raise ValueError(f"nothing that can be converted: {_describe(refused)}")
    to_change = [found for found in convertible if found.kernel != kernel]
    if to_change and (kernel == "implicit" or (kernel == "rbf" and p == "learned")):
        check_unwrapped("convert", model)  # there will be new parameters
    of_keys = _cross_attention(model) if spectral == "mikan" else set()
    with _all_or_nothing(model, [found.module for found in to_change]):
        for found in to_change:
            alone = found.module in of_keys
            _change(found.module, kernel, _keys_alone(options) if alone else options)
            options["seed"] = None if seed is None else options["seed"] + 1
        _settle_nesting(model)
    if to_change:
        _logger.info("kernel=%r now: %s", kernel, ", ".join(map(str, to_change)))
    if len(to_change) < len(convertible):
        kept = [str(found) for found in convertible if found not in to_change]
        _logger.info("kernel=%r before: %s", kernel, ", ".join(kept))
    if refused:
        _logger.warning("not converted: %s", _describe(refused))
    return model


def revert(model: Model, *, select: Selection | None = None) -> Model:
    """Makes every ``ikattn.MultiheadAttention`` of a model an nn.MultiheadAttention, in place.

    What ``convert`` did is undone: the class, the forward pre-hook, the encoders' nesting of padded
    input. Weights stay as they are now, trained or not; frequencies are dropped. An optimiser that
    was told of them keeps them, without gradients. Pass what ``convert`` was given: encoders around
    a part of it are not reached. Modules made as ``ikattn.MultiheadAttention``
    are reverted too; subclasses of it are left, with a warning.

    Args:
        model: Any module; it may be an ``ikattn.MultiheadAttention`` itself.
        select: As for ``convert``.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no module, or ``select`` no selection.
        ValueError: There is nothing to revert.

    Example:
        >>> import torch, ikattn
        >>> layer = ikattn.convert(torch.nn.TransformerEncoderLayer(16, 4))
        >>> type(ikattn.revert(layer).self_attn)
        <class 'torch.nn.modules.activation.MultiheadAttention'>
    """
    candidates = select_modules(model, select)
    ours = [found for found in candidates if found.is_ours]
    refused = [found for found in candidates if not found.is_plain]
    if not ours:
        others = ", ".join(f"{found} is {found.describe()}" for found in candidates)
        raise ValueError(f"nothing to revert: {others}")
    for found in ours:
        assert isinstance(found.module, MultiheadAttention)
        found.module.remove_kernel()
    _settle_nesting(model)
    _logger.info("nn.MultiheadAttention again: %s", ", ".join(map(str, ours)))
    if refused:
        _logger.warning("not reverted: %s", _describe(refused))
    return model


def _change(module: Any, kernel: Kernel, options: dict[str, Any]) -> None:
    """Changes the module's class, as torch.nn.utils.parametrize does: all that it holds stays."""
    spectral = options["spectral"]
    if isinstance(spectral, nn.Module):
        spectral = copy.deepcopy(spectral)
    module.__class__ = MultiheadAttention
    module.set_kernel(kernel, **{**options, "spectral": spectral})


@contextmanager
def _all_or_nothing(model: nn.Module, modules: list[nn.Module]) -> Iterator[None]:
    """Makes the modules what they were if something fails."""
    before = [(x, x.__class__, [dict(part) for part in _held_by(x)]) for x in modules]
    try:
        yield
    except BaseException:
        for module, kind, held in before:
            module.__class__ = kind
            for now, then in zip(_held_by(module), held, strict=True):
                now.clear()  # the same dictionary: handles of hooks know it
                now.update(then)
        _settle_nesting(model)
        raise


def _held_by(module: nn.Module) -> list[dict[Any, Any]]:
    """What a change of kernel changes."""
    return [vars(module), module._modules, module._forward_pre_hooks]


def _cross_attention(model: nn.Module) -> set[nn.Module]:
    """The cross-attention of torch's decoder layers."""
    layers = (x for x in model.modules() if isinstance(x, nn.TransformerDecoderLayer))
    return {layer.multihead_attn for layer in layers}


def _keys_alone(options: dict[str, Any]) -> dict[str, Any]:
    """The same options for a MIKAN that averages keys alone."""

    def source(attention: nn.MultiheadAttention) -> Mikan:
        weight = attention.out_proj.weight
        return Mikan(
            attention.num_heads,
            attention.head_dim,
            options["num_frequencies"],
            pool="key",
            stationary=options["stationary"],
            seed=options["seed"],
            device=weight.device,
            dtype=weight.dtype,
        )

    return {**options, "spectral": source, "stationary": False}


def _settle_nesting(model: nn.Module) -> None:
    """Keeps nn.TransformerEncoder from nesting padded input, which pays only on its fused path.

    That is the path of the dot kernel. Where all kernels are such again, what was set comes back.
    """
    for encoder in model.modules():
        if not isinstance(encoder, nn.TransformerEncoder):
            continue
        if any(getattr(module, "kernel", "dot") != "dot" for module in _ours(encoder)):
            vars(encoder).setdefault(_NESTED_BEFORE, encoder.use_nested_tensor)
            encoder.use_nested_tensor = False
        elif _NESTED_BEFORE in vars(encoder):
            encoder.use_nested_tensor = vars(encoder).pop(_NESTED_BEFORE)


def _ours(model: nn.Module) -> Iterable[MultiheadAttention]:
    return (module for module in model.modules() if isinstance(module, MultiheadAttention))


def _describe(refused: list[AttentionModule]) -> str:
    return "; ".join(f"{found} is {found.describe()}" for found in refused)
