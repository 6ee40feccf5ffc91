"""Implicit-kernel attention and norm-aware attention analysis for PyTorch."""

from typing import Any

from ikattn import _library

# Before the other modules, which register fake kernels of the operators.
__version__ = _library.load()

from ikattn import analysis, conversion, integrations, nn, ops, reference, spectral
from ikattn._info import info
from ikattn.analysis import (
    Contributions,
    attribute,
    contributions,
    edge_contributions,
    load_maps,
    record,
    rollout,
    streamed_contributions,
)
from ikattn.conversion import calibrate, conversion_report, convert, revert
from ikattn.integrations.transformers import (
    decoding_cache,
)
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

__all__ = [
    "Contributions",
    "KeyFeatures",
    "MultiheadAttention",
    "RecurrentState",
    "__version__",
    "analysis",
    "attribute",
    "calibrate",
    "contributions",
    "conversion",
    "conversion_report",
    "convert",
    "decoding_cache",
    "deterministic",
    "edge_contributions",
    "implicit_kernel_attention",
    "implicit_kernel_attention_varlen",
    "implicit_kernel_edge_attention",
    "implicit_kernel_weights",
    "info",
    "integrations",
    "load_maps",
    "nn",
    "ops",
    "parameter_groups",
    "record",
    "reference",
    "regularization_loss",
    "revert",
    "rollout",
    "spectral",
    "streamed_contributions",
    "which_kernels",
]


def __getattr__(name: str) -> Any:
    """Imports ``ikattn.parallel`` where it is asked for: DTensor takes half a second."""
    if name == "parallel":
        import importlib

        return importlib.import_module("ikattn.parallel")
    raise AttributeError(f"module 'ikattn' has no attribute {name!r}")
