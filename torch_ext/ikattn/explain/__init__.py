"""Explanations of whole models: attribution, comparison, corpora, alignment, image patches."""

from ikattn.explain.alignment import (
    Alignments,
    alignment_scores,
    read_alignments,
    word_alignment,
    words_of_subwords,
)
from ikattn.explain.attribution._attribute import attribute
from ikattn.explain.attribution.attribution import Attribution
from ikattn.explain.attribution.decomposed import block_maps, decomposed_norms
from ikattn.explain.attribution.faithfulness import Faithfulness, faithfulness
from ikattn.explain.attribution.zeroing import value_zeroing
from ikattn.explain.comparison.compare import compare
from ikattn.explain.comparison.probe import MapProbe
from ikattn.explain.corpora import CorpusSums, token_types
from ikattn.explain.image_tokens import image_tokens
from ikattn.explain.patches import patch_maps, plot_patches
from ikattn.explain.sinks import sinks
from ikattn.explain.through_layers import alti_plus, attention_flow

__all__ = [
    "Alignments",
    "Attribution",
    "CorpusSums",
    "Faithfulness",
    "MapProbe",
    "alignment_scores",
    "alti_plus",
    "attention_flow",
    "attribute",
    "block_maps",
    "compare",
    "decomposed_norms",
    "faithfulness",
    "image_tokens",
    "patch_maps",
    "plot_patches",
    "read_alignments",
    "sinks",
    "token_types",
    "value_zeroing",
    "word_alignment",
    "words_of_subwords",
]
