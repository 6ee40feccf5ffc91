"""The door: gives the attention of a model the implicit kernel, whatever kinds it holds."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from ikattn.conversion.modules import AttentionModule, conversion_report, kinds, select_modules
from ikattn.nn.functional import check_kernel
from ikattn.nn.kernels import Kernel
from ikattn.nn.kinds import KernelSettings, Kind, Sizes
from ikattn.nn.selection import Selection, check_unwrapped, describe_unseen, unseen_attention
from ikattn.spectral.factory import Spectral

Model = TypeVar("Model", bound=nn.Module)

_logger = logging.getLogger("ikattn")


@torch.inference_mode(False)  # frequencies are there to be trained
def convert(
    model: Model,
    kernel: Kernel = "implicit",
    *,
    select: Selection | None = None,
    p: float | Literal["learned"] | None = 2.0,
    num_frequencies: int | None = None,
    spectral: Spectral = "direct",
    stationary: bool = False,
    seed: int | None = None,
    sizes: Sizes | None = None,
    forget: bool = False,
) -> Model:
    """Gives every attention module of a model the implicit kernel, in place, and returns the model.

    It knows three kinds, of which a model may hold several. ``nn.MultiheadAttention`` becomes
    ``ikattn.MultiheadAttention``. GATConv, GATv2Conv and TransformerConv of PyTorch Geometric
    become the layers of ``ikattn.integrations.pyg``. A module of transformers that calls its
    ``AttentionInterface`` gets an ``ImplicitKernel`` as its child ``spectral``, and the model the
    attention implementation "ikattn_implicit", which reads it: self- and cross-attention, with
    caches, grouped heads and every mask.

    The modules stay the same objects and keep all they hold. Frequencies are new parameters, drawn
    for each module separately, of which an older optimiser must be told; their names hold
    ".spectral.". A module that has the kernel already is left alone, whatever its options. So are,
    with a warning, subclasses that someone else made and modules whose ``forward`` someone
    replaced. Convert before torch.compile and before wrapping for distributed training.

    docs/guide/drop_in.md and docs/guide/integrations.md say more, among it how models of
    transformers are saved and loaded. A model's own scaling of query . key acts on the query:
    dot-product attention of what the kernel takes would be exp(q . k / sqrt(d)).

    Args:
        model: Any module; it may be an attention module itself.
        kernel: "implicit"; nn.MultiheadAttention and the layers of PyG also take "dot" and "rbf".
        select: Which modules. A predicate of name and module; a pattern of names as in a shell
            ("encoder.*"); a type, of the module or of one that holds it
            (``nn.TransformerDecoderLayer``); a list of patterns and types; None: all. A module with
            several names is selected by any of them. A model of transformers has one attention
            implementation: all of its modules are selected, or none.
        p: Order of the norm in a key's magnitude, a real number >= 1; None: no magnitude;
            "learned", but for transformers: one for each head.
        num_frequencies: M, of each query head. None: 32, in layers of PyG 16.
        spectral: Where frequencies come from, as for ``MultiheadAttention``; transformers take
            names alone. Of a module, each attention module gets a copy, with the same first values.
            Of "mikan" the cross-attention of nn.TransformerDecoderLayer and the modules of
            transformers get ``pool="key"``: they are not told which queries are padding, or still
            to come. Where attention of transformers is causal, "mikan" is refused.
        stationary: One set of frequencies per head in place of two.
        seed: If given, the i-th module to be converted is seeded with ``seed + i``.
        sizes: For modules of transformers of which this package does not know it: from the module
            to its number of query heads and head size, (H, d).
        forget: Gives nn.MultiheadAttention and causal attention of transformers gates, as for
            ``MultiheadAttention``; select the modules of causal self-attention alone.

    Raises:
        TypeError: ``model`` is no module, or ``select`` no selection.
        ValueError: There is nothing to convert, an option is wrong or not one of the selected
            modules', the number of heads of a module is not known, kernels of a transformers model
            have other options already, or DDP or FSDP is around the model. Nothing has changed
            then.

    Source: K. Song et al., "Implicit Kernel Attention", AAAI 2021 (arXiv 2006.06147).

    Example:
        >>> import torch, ikattn
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> ikattn.convert(layer).self_attn.kernel
        'implicit'
    """
    check_kernel(kernel, None if p == "learned" else p)
    candidates = select_modules(model, select)
    convertible = [found for found in candidates if found.is_plain]
    refused = [found for found in candidates if not found.is_plain]
    if not convertible:
        raise ValueError(f"nothing that can be converted: {_describe(refused)}")
    settings = KernelSettings(kernel, p, num_frequencies, spectral, stationary, seed, sizes, forget)
    by_kind = _by_kind(convertible)
    if sizes is not None and all(kind.title != "attention of transformers" for kind in by_kind):
        held = ", ".join(kind.title for kind in by_kind)
        raise ValueError(f"convert: sizes is for attention of transformers, got {held}")
    for kind, modules in by_kind.items():
        kind.check(model, modules, settings)
    to_change = [found for found in convertible if found.kernel != kernel]
    if to_change and (kernel == "implicit" or (kernel == "rbf" and p == "learned")):
        check_unwrapped("convert", model)  # there will be new parameters
    with _all_or_nothing(model, [found.module for found in to_change]):
        for number, found in enumerate(to_change):
            own = settings._replace(seed=None if seed is None else seed + number)
            if isinstance(spectral, nn.Module):
                own = own._replace(spectral=copy.deepcopy(spectral))
            found.kind.change(model, found.module, own)
        for kind in by_kind:
            kind.settle(model, settings)
    if to_change:
        _logger.info("kernel=%r now: %s", kernel, ", ".join(map(str, to_change)))
    if len(to_change) < len(convertible):
        kept = [str(found) for found in convertible if found not in to_change]
        log = _logger.info if to_change else _logger.warning
        log("kernel=%r already, its options stay until revert: %s", kernel, ", ".join(kept))
    if refused:
        _logger.warning("not converted: %s", _describe(refused))
    unseen = unseen_attention(model, (found.module for found in conversion_report(model)))
    if unseen:
        warnings.warn(
            f"convert: {describe_unseen(unseen)} look like attention and stay as they are: they "
            "are no nn.MultiheadAttention, and do not call transformers' AttentionInterface",
            stacklevel=3,
        )
    return model


def revert(model: Model, *, select: Selection | None = None) -> Model:
    """Takes the kernels of this package out of a model, in place, and returns the model.

    What ``convert`` did is undone: classes, hooks, the encoders' nesting of padded input, the
    attention implementation of a transformers model ("sdpa" where the one before is not known).
    Weights stay as they are now; frequencies are dropped. Pass what ``convert`` was given: encoders
    around a part of it are not reached. Modules made as those of this package are reverted too;
    subclasses of them are left, with a warning.

    Args:
        model: Any module; it may be an attention module itself.
        select: As for ``convert``.

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
        raise ValueError(f"nothing to revert: {_describe(candidates)}")
    by_kind = _by_kind(ours)
    for kind, modules in by_kind.items():
        kind.check_undo(model, modules)
    for found in ours:
        found.kind.undo(found.module)
    for kind in by_kind:
        kind.settle(model)
    _logger.info("as before convert again: %s", ", ".join(map(str, ours)))
    if refused:
        _logger.warning("not reverted: %s", _describe(refused))
    return model


def _by_kind(found: Sequence[AttentionModule]) -> dict[Kind, list[nn.Module]]:
    grouped: dict[Kind, list[nn.Module]] = {}
    for one in found:
        grouped.setdefault(one.kind, []).append(one.module)
    return grouped


@contextmanager
def _all_or_nothing(model: nn.Module, modules: list[nn.Module]) -> Iterator[None]:
    """Gives the modules their class and contents back if something fails."""
    before = [(x, x.__class__, [dict(part) for part in _held_by(x)]) for x in modules]
    try:
        yield
    except BaseException:
        for module, kind, held in before:
            module.__class__ = kind
            for now, then in zip(_held_by(module), held, strict=True):
                now.clear()  # the same dictionary: handles of hooks know it
                now.update(then)
        for kind_of_attention in kinds():
            kind_of_attention.settle(model)
        raise


def _held_by(module: nn.Module) -> list[dict[Any, Any]]:
    """Returns the dictionaries that a change of kernel changes."""
    return [vars(module), module._modules, module._forward_pre_hooks]


def _describe(refused: Sequence[AttentionModule]) -> str:
    return "; ".join(f"{found} is {found.describe()}" for found in refused)
