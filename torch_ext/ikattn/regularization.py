"""The regularisers of all layers of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ikattn.multihead_attention import MultiheadAttention


def regularization_loss(model: nn.Module) -> Tensor:
    """The sum of what the generators of all attention layers ask to be added to the loss.

    Every layer keeps the regulariser of its last call. A layer that is used several times in one
    pass counts once, with that of its last use.

    Args:
        model: Any module; its ``ikattn.MultiheadAttention`` modules have been called.

    Returns:
        A scalar, in nats times the generators' weights; 0 where no generator has a regulariser. It
        is a mean over the samples of the batch and, as in an evidence lower bound, belongs to a
        log-likelihood of the whole data set: divide it by the number of training examples where the
        loss is a mean.

    Raises:
        RuntimeError: A generator has not been called yet.

    Source: K. Song, Y. Jung, D. Kim, I. Moon, "Implicit Kernel Attention", AAAI 2021
    (arXiv 2006.06147), whose code adds the last layer's alone.

    Example:
        >>> import torch, ikattn
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> model = ikattn.convert(torch.nn.TransformerEncoder(layer, 2), spectral="mikan")
        >>> loss = model(torch.randn(3, 5, 16)).square().mean()
        >>> loss = loss + ikattn.regularization_loss(model) / 1000
        >>> loss.backward()
    """
    terms: list[Tensor] = []
    for name, module in model.named_modules():
        if not isinstance(module, MultiheadAttention):
            continue
        if module.regularization is not None:
            terms.append(module.regularization)
        elif getattr(module.spectral, "regularizes", False):
            raise RuntimeError(
                f"{name or 'the attention'} has no regulariser: call the model first, in this "
                "process, without exporting it"
            )
    if terms:
        device = terms[0].device
        return torch.stack([term.to(device) for term in terms]).sum()
    first = next(model.parameters(), None)
    return torch.zeros((), device=None if first is None else first.device)
