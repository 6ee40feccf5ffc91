"""Where the frequencies of an implicit kernel come from.

A spectral source is any ``torch.nn.Module`` with

    forward(query, key, key_padding_mask) -> (w1, w2) or (w1, w2, regularization)
        query             [B, H, L, d]  projected queries
        key               [B, H, S, d]  projected keys
        key_padding_mask  [B, S] bool, True = ignore this key, or None
        w1                [H, d, M] or [B, H, d, M], in cycles per unit of query
        w2                like w1, or None for a stationary kernel
        regularization    scalar, for ``ikattn.regularization_loss``, or None

and, if it has random initial values, ``reset_parameters()``. A source that says ``pools = True``
looks at whole sequences: it is given a fourth argument, ``query_padding_mask`` [B, L] or None, and
refuses causal attention, to which it would show the future.

``Direct``: the frequencies are parameters. ``Stationary``: so, with w2 = w1. ``Ikan``: a network
makes them of Gaussian noise. ``Mikan``: so, of noise whose distribution, joint over the heads, is
inferred from queries and keys. docs/guide/spectral.md compares them.

Source: K. Song et al., "Implicit Kernel Attention", AAAI 2021 (arXiv 2006.06147).
"""

from ikattn.spectral.direct import Direct, Stationary
from ikattn.spectral.generator import Generator
from ikattn.spectral.ikan import Ikan
from ikattn.spectral.mikan import Mikan
from ikattn.spectral.profile import kernel_profile, plot_kernel
from ikattn.spectral.regularized import regularization_loss

__all__ = [
    "Direct",
    "Generator",
    "Ikan",
    "Mikan",
    "Stationary",
    "kernel_profile",
    "plot_kernel",
    "regularization_loss",
]
