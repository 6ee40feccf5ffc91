"""From one layer to the whole model: what each token of the input adds to an answer."""

from ikattn.analysis.attribution._attribute import attribute
from ikattn.analysis.attribution.attribution import Attribution
from ikattn.analysis.attribution.blocks import block_maps
from ikattn.analysis.attribution.cost import Estimate, estimate
from ikattn.analysis.attribution.decomposed import decomposed_norms
from ikattn.analysis.attribution.faithfulness import Faithfulness, faithfulness
from ikattn.analysis.attribution.zeroing import value_zeroing

__all__ = [
    "Attribution",
    "Estimate",
    "Faithfulness",
    "attribute",
    "block_maps",
    "decomposed_norms",
    "estimate",
    "faithfulness",
    "value_zeroing",
]
