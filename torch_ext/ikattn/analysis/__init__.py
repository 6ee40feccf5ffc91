"""What attention really does: recordings of real models, maps, rollouts, files and pictures."""

from ikattn.analysis._resolvers import AttentionParts, register_resolver
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
from ikattn.analysis.files import MapFileError, MapWriter, load_maps
from ikattn.analysis.record import record
from ikattn.analysis.recording import Batch, Layer, Recording
from ikattn.analysis.rollout import RankedToken, rank_tokens, token_importance
from ikattn.analysis.summary import (
    Factors,
    LedgerShares,
    head_mean,
    layer_maps,
    layer_mean,
    ledger_shares,
    token_mean,
)

__all__ = [
    "AlignmentScores",
    "AttentionParts",
    "Batch",
    "Factors",
    "GoldAlignments",
    "Layer",
    "LedgerShares",
    "MapFileError",
    "MapWriter",
    "RankedToken",
    "Recording",
    "alignment_error_rate",
    "alignment_scores",
    "head_mean",
    "layer_maps",
    "layer_mean",
    "ledger_shares",
    "load_maps",
    "rank_tokens",
    "read_alignments",
    "read_gold_alignments",
    "record",
    "register_resolver",
    "token_importance",
    "token_mean",
    "word_alignment",
    "words_of_subwords",
]
