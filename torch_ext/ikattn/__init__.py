"""Implicit-kernel attention and norm-aware attention analysis for PyTorch."""

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
from ikattn.integrations.transformers import feature_cache, use_implicit_attention
from ikattn.nn import MultiheadAttention, multi_head_attention_forward
from ikattn.ops import (
    Edges,
    KeyFeatures,
    attention_from_features,
    decompositions,
    deterministic,
    gat_edge_attention,
    implicit_kernel_attention,
    implicit_kernel_edge_attention,
    implicit_kernel_weights,
    similarity_and_magnitude,
    softmax_edge_attention,
    spectral_features,
    which_kernels,
    why_not_fast,
)
from ikattn.spectral import regularization_loss

__all__ = [
    "Contributions",
    "Edges",
    "KeyFeatures",
    "MultiheadAttention",
    "__version__",
    "analysis",
    "attention_from_features",
    "attribute",
    "calibrate",
    "contributions",
    "conversion",
    "conversion_report",
    "convert",
    "decompositions",
    "deterministic",
    "edge_contributions",
    "feature_cache",
    "gat_edge_attention",
    "implicit_kernel_attention",
    "implicit_kernel_edge_attention",
    "implicit_kernel_weights",
    "info",
    "integrations",
    "load_maps",
    "multi_head_attention_forward",
    "nn",
    "ops",
    "record",
    "reference",
    "regularization_loss",
    "revert",
    "rollout",
    "similarity_and_magnitude",
    "softmax_edge_attention",
    "spectral",
    "spectral_features",
    "streamed_contributions",
    "use_implicit_attention",
    "which_kernels",
    "why_not_fast",
]
