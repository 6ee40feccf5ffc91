"""Implicit-kernel attention and norm-aware attention analysis for PyTorch."""

from ikattn import _library

# Before the other modules, which register fake kernels of the operators.
__version__ = _library.load()

from ikattn import analysis, reference
from ikattn._decompositions import decompositions
from ikattn._info import info
from ikattn._library import cmake_prefix_path
from ikattn._selection import ConversionReport, conversion_report
from ikattn.analysis.files import load_maps
from ikattn.analysis.record import record
from ikattn.analysis.rollout import rollout
from ikattn.calibration import CalibratedModule, calibrate
from ikattn.contributions import (
    Contributions,
    NormStats,
    contributions,
    streamed_contributions,
)
from ikattn.convert import convert, revert
from ikattn.fast_path import which_kernels, why_not_fast
from ikattn.functional import multi_head_attention_forward
from ikattn.key_features import KeyFeatures
from ikattn.multihead_attention import MultiheadAttention
from ikattn.ops import (
    attention_from_features,
    decompose,
    draw_dropout_seed,
    dropout_keep_mask,
    implicit_kernel_attention,
    implicit_kernel_weights,
    spectral_features,
)
from ikattn.regularization import regularization_loss

__all__ = [
    "CalibratedModule",
    "Contributions",
    "ConversionReport",
    "KeyFeatures",
    "MultiheadAttention",
    "NormStats",
    "__version__",
    "analysis",
    "attention_from_features",
    "calibrate",
    "cmake_prefix_path",
    "contributions",
    "conversion_report",
    "convert",
    "decompose",
    "decompositions",
    "draw_dropout_seed",
    "dropout_keep_mask",
    "implicit_kernel_attention",
    "implicit_kernel_weights",
    "info",
    "load_maps",
    "multi_head_attention_forward",
    "record",
    "reference",
    "regularization_loss",
    "revert",
    "rollout",
    "spectral_features",
    "streamed_contributions",
    "which_kernels",
    "why_not_fast",
]
