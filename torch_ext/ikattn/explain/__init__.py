"""What attention really does: recordings of real models, maps, rollouts, files and pictures."""

from ikattn.analysis._alti import alti
from ikattn.analysis._norms_attention import register_norms
from ikattn.analysis._recorder.parts import AttentionParts
from ikattn.analysis._recorder.record import record
from ikattn.analysis._recorder.resolvers import register_resolver
from ikattn.analysis.alignment import (
    AlignmentScores,
    GoldAlignments,
    alignment_error_rate,
    alignment_scores,
    read_alignments,
    read_gold_alignments,
    word_alignment,
    words_of_subwords,
)
from ikattn.analysis.alti_plus import alti_plus
from ikattn.analysis.attribution import (
    Attribution,
    Estimate,
    Faithfulness,
    attribute,
    block_maps,
    decomposed_norms,
    estimate,
    faithfulness,
    value_zeroing,
)
from ikattn.analysis.comparison import Comparison, MapDistance, MapProbe, compare
from ikattn.analysis.contributions import (
    Contributions,
    NormStats,
    contributions,
    streamed_contributions,
)
from ikattn.analysis.corpus import TOKEN_TYPES, CorpusMeans, CorpusSums, token_types
from ikattn.analysis.files import MapFileError, MapWriter
from ikattn.analysis.flow import attention_flow
from ikattn.analysis.graphs import EdgeContributions, EdgeMaps, edge_contributions
from ikattn.analysis.layer_writer import LayerWriter
from ikattn.analysis.maps import Batch, Layer
from ikattn.analysis.patches import patch_maps, plot_patches
from ikattn.analysis.recording import Recording, load_maps
from ikattn.analysis.reduction import (
    Columns,
    Diagonal,
    Groups,
    PairMap,
    Reducing,
    Reduction,
    TopK,
    TopSources,
)
from ikattn.analysis.summary import (
    Factors,
    LedgerShares,
    head_mean,
    layer_maps,
    layer_mean,
    ledger_shares,
    token_mean,
)
from ikattn.analysis.through_layers import RankedToken, rank_tokens, rollout, token_importance

__all__ = [
    "TOKEN_TYPES",
    "AlignmentScores",
    "AttentionParts",
    "Attribution",
    "Batch",
    "Columns",
    "Comparison",
    "Contributions",
    "CorpusMeans",
    "CorpusSums",
    "Diagonal",
    "EdgeContributions",
    "EdgeMaps",
    "Estimate",
    "Factors",
    "Faithfulness",
    "GoldAlignments",
    "Groups",
    "Layer",
    "LayerWriter",
    "LedgerShares",
    "MapDistance",
    "MapFileError",
    "MapProbe",
    "MapWriter",
    "NormStats",
    "PairMap",
    "RankedToken",
    "Recording",
    "Reducing",
    "Reduction",
    "TopK",
    "TopSources",
    "alignment_error_rate",
    "alignment_scores",
    "alti",
    "alti_plus",
    "attention_flow",
    "attribute",
    "block_maps",
    "compare",
    "contributions",
    "decomposed_norms",
    "edge_contributions",
    "estimate",
    "faithfulness",
    "head_mean",
    "layer_maps",
    "layer_mean",
    "ledger_shares",
    "load_maps",
    "patch_maps",
    "plot_patches",
    "rank_tokens",
    "read_alignments",
    "read_gold_alignments",
    "record",
    "register_norms",
    "register_resolver",
    "rollout",
    "streamed_contributions",
    "token_importance",
    "token_mean",
    "token_types",
    "value_zeroing",
    "word_alignment",
    "words_of_subwords",
]
