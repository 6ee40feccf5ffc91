"""Maps of contributions: the operators that make them, recordings, files, pages and pictures."""

from ikattn.maps.contribution_maps import (
    Contributions,
    NormStats,
    contributions,
    streamed_contributions,
)
from ikattn.maps.edges import edge_contributions
from ikattn.maps.files import MapFileError, MapWriter
from ikattn.maps.importance import rank_tokens, token_importance
from ikattn.maps.layer_writer import LayerWriter
from ikattn.maps.layers import Batch, Layer
from ikattn.maps.ledger import shares
from ikattn.maps.mixing import alti, projection
from ikattn.maps.recording import Recording, load_maps
from ikattn.maps.reduction import Groups, PairMap, Reduction, TopK, TopSources
from ikattn.maps.summary import head_mean, layer_mean, token_mean
from ikattn.maps.through_layers import rollout

__all__ = [
    "Batch",
    "Contributions",
    "Groups",
    "Layer",
    "LayerWriter",
    "MapFileError",
    "MapWriter",
    "NormStats",
    "PairMap",
    "Recording",
    "Reduction",
    "TopK",
    "TopSources",
    "alti",
    "contributions",
    "edge_contributions",
    "head_mean",
    "layer_mean",
    "load_maps",
    "projection",
    "rank_tokens",
    "rollout",
    "shares",
    "streamed_contributions",
    "token_importance",
    "token_mean",
]
