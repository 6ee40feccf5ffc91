"""Swaps the attention of an existing model for ``ikattn.MultiheadAttention``."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from torch import nn
from torch.nn.modules.activation import MultiheadAttention as StockMultiheadAttention

from ikattn.functional import Kernel, check_kernel
from ikattn.multihead_attention import MultiheadAttention

Selection: TypeAlias = Callable[[str, nn.Module], bool] | str | Sequence[str]
Model = TypeVar("Model", bound=nn.Module)

_logger = logging.getLogger("ikattn")


class _Found(NamedTuple):
    """An attention module of the model, and every name it goes by there."""

    module: StockMultiheadAttention
    names: list[str]

    def __str__(self) -> str:
        return " = ".join(name or "the model itself" for name in self.names)


def convert(
    model: Model,
    kernel: Kernel = "implicit",
    *,
    select: Selection | None = None,
    p: float | Literal["learned"] | None = 2.0,
    num_frequencies: int = 64,
    spectral: str | nn.Module = "direct",
    stationary: bool = False,
    seed: int | None = None,
) -> Model:
    """Makes every nn.MultiheadAttention of a model an ``ikattn.MultiheadAttention``, in place.

    The modules stay the same objects and keep all they hold: weights (an optimiser made before
    keeps working), device, dtype, training and requires_grad flags, hooks, sharing. Frequencies are
    new parameters, drawn for each module separately, of which an older optimiser must be told:
    ``optimizer.add_param_group({"params": [...]})``; their names hold ".spectral.".

    A module that has the kernel already is left alone. So are, with a warning, subclasses that
    someone else made (parametrised and sharded modules are such) and modules whose ``forward``
    someone replaced. The logger "ikattn" says at level INFO what was done. Convert before
    torch.compile and before wrapping for distributed training.

    Args:
        model: Any module; it may be an nn.MultiheadAttention itself.
        kernel: "dot", "rbf" or "implicit".
        select: Which ones. A predicate of name and module; a pattern of names as in a shell
            ("encoder.*"); a list of patterns; None: all. A module with several names is selected by
            any of them.
        p, num_frequencies, stationary: As for ``MultiheadAttention``.
        spectral: As for ``MultiheadAttention``; of a module, each attention module gets a copy.
        seed: If given, the i-th module to be converted is seeded with ``seed + i``.

    Returns:
        ``model``.

    Raises:
        ValueError: There is nothing to convert, or an option is wrong.

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
    candidates = _select(model, select)
    convertible = [found for found in candidates if _is_convertible(found.module)]
    refused = [found for found in candidates if found not in convertible]
    if not convertible:
        raise ValueError(f"nothing that can be converted: {_describe_refused(refused)}")
    to_change = [found for found in convertible if getattr(found.module, "kernel", None) != kernel]
    for found in to_change:
        _change(found.module, kernel, options)
        options["seed"] = None if seed is None else options["seed"] + 1
    if kernel != "dot":
        _stop_nesting(model)
    if to_change:
        _logger.info("kernel=%r now: %s", kernel, ", ".join(map(str, to_change)))
    if len(to_change) < len(convertible):
        kept = [str(found) for found in convertible if found not in to_change]
        _logger.info("kernel=%r before: %s", kernel, ", ".join(kept))
    if refused:
        _logger.warning("not converted: %s", _describe_refused(refused))
    return model


def _select(model: nn.Module, select: Selection | None) -> list[_Found]:
    """Returns the selected attention modules, each once, in the order of their first names.

    Raises:
        ValueError: There are none.
    """
    by_module: dict[nn.Module, _Found] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, StockMultiheadAttention):
            by_module.setdefault(module, _Found(module, [])).names.append(name)
    if not by_module:
        types = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(f"no nn.MultiheadAttention in this model of {', '.join(types)}")
    selected = [found for found in by_module.values() if _is_selected(found, select)]
    if not selected:
        names = ", ".join(map(str, by_module.values()))
        raise ValueError(f"select={select!r} matches none of the attention modules: {names}")
    return selected


def _is_selected(found: _Found, select: Selection | None) -> bool:
    if select is None:
        return True
    if callable(select):
        return any(select(name, found.module) for name in found.names)
    patterns = [select] if isinstance(select, str) else select
    return any(fnmatchcase(name, pattern) for name in found.names for pattern in patterns)


def _is_convertible(module: nn.Module) -> bool:
    """Whether nobody else has changed what the module computes."""
    is_known = type(module) in (StockMultiheadAttention, MultiheadAttention)
    return is_known and "forward" not in vars(module)


def _change(module: Any, kernel: Kernel, options: dict[str, Any]) -> None:
    """Changes the module's class, as torch.nn.utils.parametrize does: all that it holds stays."""
    before = module.__class__
    module.__class__ = MultiheadAttention
    try:
        module.set_kernel(kernel, **{**options, "spectral": copy.deepcopy(options["spectral"])})
    except Exception:
        module.__class__ = before
        raise


def _stop_nesting(model: nn.Module) -> None:
    """Keeps nn.TransformerEncoder from nesting padded input, which pays only on its fused path."""
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(
            isinstance(module, MultiheadAttention) and module.kernel != "dot"
            for module in encoder.modules()
        ):
            encoder.use_nested_tensor = False


def _describe_refused(refused: list[_Found]) -> str:
    return "; ".join(
        f"{found} is a {type(found.module).__module__}.{type(found.module).__qualname__}"
        + (" with a forward of its own" if "forward" in vars(found.module) else "")
        for found in refused
    )
