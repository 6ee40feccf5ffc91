"""Implicit-kernel attention, and norm-aware maps of what attention moves, for PyTorch."""

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ikattn import _library

# Before the other modules, which register fake kernels of the operators.
__version__ = _library.load()

from ikattn import nn as nn
from ikattn import ops as ops
from ikattn import spectral as spectral
from ikattn._info import info
from ikattn._optional import when_imported
from ikattn.nn import MultiheadAttention, parameter_groups
from ikattn.ops import (
    KeyFeatures,
    RecurrentState,
    deterministic,
    implicit_kernel_attention,
    implicit_kernel_attention_varlen,
    implicit_kernel_edge_attention,
    implicit_kernel_weights,
    which_kernels,
)
from ikattn.spectral import regularization_loss

if TYPE_CHECKING:
    from ikattn import conversion as conversion
    from ikattn import explain as explain
    from ikattn import integrations as integrations
    from ikattn import maps as maps
    from ikattn import parallel as parallel
    from ikattn import recorder as recorder
    from ikattn import reference as reference
    from ikattn.conversion import calibrate, conversion_report, convert, revert
    from ikattn.explain import attribute
    from ikattn.integrations.transformers import decoding_cache
    from ikattn.maps import Contributions, contributions, load_maps, rollout, streamed_contributions
    from ikattn.recorder import record

__all__ = [
    "Contributions",
    "KeyFeatures",
    "MultiheadAttention",
    "RecurrentState",
    "__version__",
    "attribute",
    "calibrate",
    "contributions",
    "conversion_report",
    "convert",
    "decoding_cache",
    "deterministic",
    "implicit_kernel_attention",
    "implicit_kernel_attention_varlen",
    "implicit_kernel_edge_attention",
    "implicit_kernel_weights",
    "info",
    "load_maps",
    "parameter_groups",
    "record",
    "regularization_loss",
    "revert",
    "rollout",
    "streamed_contributions",
    "which_kernels",
]

# Rooms that are imported when they are first used, each with its names that stand here, too.
_LATER = {
    "conversion": ("calibrate", "conversion_report", "convert", "revert"),
    "explain": ("attribute",),
    "integrations": (),
    "integrations.transformers": ("decoding_cache",),
    "maps": ("Contributions", "contributions", "load_maps", "rollout", "streamed_contributions"),
    "parallel": (),
    "recorder": ("record",),
    "reference": (),
}


def __getattr__(name: str) -> Any:
    """Imports the room of a name where the name is first used (PEP 562)."""
    for room, names in _LATER.items():
        if name == room or name in names:
            module = import_module(f"ikattn.{room}")
            value = globals()[name] = module if name == room else getattr(module, name)
            return value
    raise AttributeError(f"module 'ikattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the names of this module with those that are imported later."""
    return sorted({*globals(), *__all__, *_LATER})


# It registers the attention function by the names that saved models have for it.
_integration = partial(import_module, "ikattn.integrations.transformers")
when_imported("transformers.modeling_utils", _integration)
