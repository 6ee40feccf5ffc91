"""Maps of contributions: the operators that make them, recordings, files, pages and pictures."""

from ikattn.maps.contribution_maps import (
    Contributions,
    NormStats,
    contributions,
    streamed_contributions,
)
from ikattn.maps.edges import EdgeContributions, EdgeMaps, edge_contributions
from ikattn.maps.files import MapFileError, MapWriter
from ikattn.maps.importance import RankedToken, rank_tokens, token_importance
from ikattn.maps.layer_writer import LayerWriter
from ikattn.maps.layers import Batch, Layer
from ikattn.maps.ledger import LedgerFactors, LedgerShares, ledger_shares
from ikattn.maps.mixing import alti
from ikattn.maps.recording import Recording, load_maps
from ikattn.maps.reduction import (
    ColumnSums,
    Diagonal,
    Groups,
    PairMap,
    Reducing,
    Reduction,
    TopK,
    TopSources,
)
from ikattn.maps.summary import head_mean, layer_maps, layer_mean, token_mean
from ikattn.maps.through_layers import rollout

__all__ = [
    "Batch",
    "ColumnSums",
    "Contributions",
    "Diagonal",
    "EdgeContributions",
    "EdgeMaps",
    "Groups",
    "Layer",
    "LayerWriter",
    "LedgerFactors",
    "LedgerShares",
    "MapFileError",
    "MapWriter",
    "NormStats",
    "PairMap",
    "RankedToken",
    "Recording",
    "Reducing",
    "Reduction",
    "TopK",
    "TopSources",
    "alti",
    "contributions",
    "edge_contributions",
    "head_mean",
    "layer_maps",
    "layer_mean",
    "ledger_shares",
    "load_maps",
    "rank_tokens",
    "rollout",
    "streamed_contributions",
    "token_importance",
    "token_mean",
]
