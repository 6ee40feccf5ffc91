"""Explanations of whole models: attribution, comparison, corpora, alignment, image patches."""

from ikattn.explain.alignment import (
    AlignmentScores,
    GoldAlignments,
    alignment_error_rate,
    alignment_scores,
    read_alignments,
    read_gold_alignments,
    word_alignment,
    words_of_subwords,
)
from ikattn.explain.alti_plus import alti_plus
from ikattn.explain.attention_flow import attention_flow
from ikattn.explain.attribution import (
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
from ikattn.explain.comparison import Comparison, MapDistance, MapProbe, compare
from ikattn.explain.corpora import TOKEN_TYPES, CorpusMeans, CorpusSums, token_types
from ikattn.explain.patches import patch_maps, plot_patches

__all__ = [
    "TOKEN_TYPES",
    "AlignmentScores",
    "Attribution",
    "Comparison",
    "CorpusMeans",
    "CorpusSums",
    "Estimate",
    "Faithfulness",
    "GoldAlignments",
    "MapDistance",
    "MapProbe",
    "alignment_error_rate",
    "alignment_scores",
    "alti_plus",
    "attention_flow",
    "attribute",
    "block_maps",
    "compare",
    "decomposed_norms",
    "estimate",
    "faithfulness",
    "patch_maps",
    "plot_patches",
    "read_alignments",
    "read_gold_alignments",
    "token_types",
    "value_zeroing",
    "word_alignment",
    "words_of_subwords",
]
