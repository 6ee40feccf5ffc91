"""From one layer to the whole model: what each token of the input adds to an answer."""

from ikattn.explain.attribution._attribute import attribute
from ikattn.explain.attribution.attribution import Attribution
from ikattn.explain.attribution.blocks import block_maps
from ikattn.explain.attribution.cost import Estimate, estimate
from ikattn.explain.attribution.decomposed import decomposed_norms
from ikattn.explain.attribution.faithfulness import Faithfulness, faithfulness
from ikattn.explain.attribution.zeroing import value_zeroing

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
