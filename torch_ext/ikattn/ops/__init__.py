"""The operators, and what one asks of them: which kernels a call takes, and why none is faster.

Importing this package registers the operators' fake kernels, which torch.compile and torch.export
take shapes from.
"""

from ikattn.ops._determinism import deterministic
from ikattn.ops.attention import (
    attention_from_features,
    implicit_kernel_attention,
    implicit_kernel_weights,
    similarity_and_magnitude,
    spectral_features,
)
from ikattn.ops.dropout import draw_dropout_seed, dropout_keep_mask, place_dropout_seed
from ikattn.ops.edges import (
    Edges,
    gat_edge_attention,
    implicit_kernel_edge_attention,
    softmax_edge_attention,
)
from ikattn.ops.exporting import decompositions
from ikattn.ops.kernels import which_kernels
from ikattn.ops.key_features import KeyFeatures
from ikattn.ops.moments import (
    attention_from_moments,
    causal_attention_from_moments,
    key_moments,
    merge_moments,
)
from ikattn.ops.packed import implicit_kernel_attention_varlen
from ikattn.ops.recurrent_state import RecurrentState

__all__ = [
    "Edges",
    "KeyFeatures",
    "RecurrentState",
    "attention_from_features",
    "attention_from_moments",
    "causal_attention_from_moments",
    "decompositions",
    "deterministic",
    "draw_dropout_seed",
    "dropout_keep_mask",
    "gat_edge_attention",
    "implicit_kernel_attention",
    "implicit_kernel_attention_varlen",
    "implicit_kernel_edge_attention",
    "implicit_kernel_weights",
    "key_moments",
    "merge_moments",
    "place_dropout_seed",
    "similarity_and_magnitude",
    "softmax_edge_attention",
    "spectral_features",
    "which_kernels",
]
