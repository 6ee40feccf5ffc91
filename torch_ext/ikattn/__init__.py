"""Implicit-kernel attention, and norm-aware maps of what attention moves, for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ikattn import _library

# Before the other modules, which register fake kernels of the operators.
__version__ = _library.load()

from ikattn import nn, ops, spectral
from ikattn._info import info
from ikattn._optional import when_imported
from ikattn.nn import MultiheadAttention, multi_head_attention_forward, parameter_groups
from ikattn.ops import (
    Edges,
    KeyFeatures,
    RecurrentState,
    attention_from_features,
    decompositions,
    deterministic,
    gat_edge_attention,
    implicit_kernel_attention,
    implicit_kernel_attention_varlen,
    implicit_kernel_edge_attention,
    implicit_kernel_weights,
    similarity_and_magnitude,
    softmax_edge_attention,
    spectral_features,
    which_kernels,
    why_not_fast,
)
from ikattn.spectral import regularization_loss

if TYPE_CHECKING:
    from ikattn import conversion, explain, integrations, maps, parallel, recorder, reference
    from ikattn.conversion import calibrate, conversion_report, convert, revert
    from ikattn.explain import attribute
    from ikattn.integrations.transformers import (
        decoding_cache,
        feature_cache,
        state_cache,
        use_implicit_attention,
    )
    from ikattn.maps import (
        Contributions,
        contributions,
        load_maps,
        rollout,
        streamed_contributions,
    )
    from ikattn.recorder import record

__all__ = [
    "Contributions",
    "Edges",
    "KeyFeatures",
    "MultiheadAttention",
    "RecurrentState",
    "__version__",
    "attention_from_features",
    "attribute",
    "calibrate",
    "contributions",
    "conversion",
    "conversion_report",
    "convert",
    "decoding_cache",
    "decompositions",
    "deterministic",
    "explain",
    "feature_cache",
    "gat_edge_attention",
    "implicit_kernel_attention",
    "implicit_kernel_attention_varlen",
    "implicit_kernel_edge_attention",
    "implicit_kernel_weights",
    "info",
    "integrations",
    "load_maps",
    "maps",
    "multi_head_attention_forward",
    "nn",
    "ops",
    "parallel",
    "parameter_groups",
    "record",
    "recorder",
    "reference",
    "regularization_loss",
    "revert",
    "rollout",
    "similarity_and_magnitude",
    "softmax_edge_attention",
    "spectral",
    "spectral_features",
    "state_cache",
    "streamed_contributions",
    "use_implicit_attention",
    "which_kernels",
    "why_not_fast",
]

# Rooms that are imported when they are first used, each with its names that stand here, too.
_LATER = {
    "conversion": ("calibrate", "conversion_report", "convert", "revert"),
    "explain": ("attribute",),
    "integrations": (),
    "integrations.transformers": (
        "decoding_cache",
        "feature_cache",
        "state_cache",
        "use_implicit_attention",
    ),
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
    return sorted({*globals(), *__all__})


def _register_attentions() -> None:
    """Registers attention functions by the names that saved models have for them."""
    import_module("ikattn.integrations.transformers")
    import_module("ikattn.recorder")


when_imported("transformers.modeling_utils", _register_attentions)
