"""Attribution: the part that each token of the input has in a model's answer."""

from ikattn.explain.attribution._attribute import attribute
from ikattn.explain.attribution.attribution import Attribution
from ikattn.explain.attribution.decomposed import block_maps, decomposed_norms
from ikattn.explain.attribution.faithfulness import Faithfulness, faithfulness
from ikattn.explain.attribution.zeroing import value_zeroing

__all__ = [
    "Attribution",
    "Faithfulness",
    "attribute",
    "block_maps",
    "decomposed_norms",
    "faithfulness",
    "value_zeroing",
]
