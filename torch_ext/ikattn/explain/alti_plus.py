"""ALTI+: what each token of the source and of the target before it brings to a translation.

Sizes: B batch, S source tokens, L target tokens.
Source: J. Ferrando, G. I. Gállego, B. Alastruey, C. Escolano, M. R. Costa-jussà, "Towards Opening
the Black Box of Neural Machine Translation", EMNLP 2022.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ikattn.maps.layers import RecordedMaps, check_whole
from ikattn.maps.through_layers import rollout


def alti_plus(recording: RecordedMaps, *, batch: int = 0) -> tuple[Tensor, Tensor]:
    r"""Rolls out an encoder-decoder's ALTI maps.

    With E the rollout of the encoder, the decoder's vectors are followed through its layers:

    .. math::
        R^y \leftarrow A R^y, \quad R^x \leftarrow A R^x

    at a self-attention, whose map is A, and, at a cross-attention with the map C, whose residual
    brings r_i = 1 - sum_j C_ij,

    .. math::
        R^y \leftarrow \mathrm{diag}(r) R^y, \quad R^x \leftarrow \mathrm{diag}(r) R^x + C E.

    The sum of a row of the first result is what the source brings. Where it is small, the model
    goes on with its own words: translations that have little to do with the source, hallucinations,
    are found by it (Dale et al., ACL 2023).

    Args:
        recording: Maps "alti" of every layer of attention in an encoder-decoder: of a call over the
            source and the whole translation, or ``joined()`` of those of ``generate``.
        batch: The number of a call.

    Returns:
        ``[B, L, S]`` and ``[B, L, L]``: what each token of the source, and each token that the
        decoder was given, brings to each of the decoder's vectors. Rows of both add up to 1.

    Raises:
        ValueError: There is no cross-attention, or a layer has no map.

    Example:
        >>> import torch, ikattn
        >>> model = torch.nn.Transformer(16, 2, 1, 1, 32, batch_first=True).eval()
        >>> with torch.no_grad(), ikattn.record(model, maps="alti") as recording:
        ...     output = model(torch.randn(1, 5, 16), torch.randn(1, 3, 16))
        >>> source, target = ikattn.explain.alti_plus(recording)
        >>> source.shape, target.shape
        (torch.Size([1, 3, 5]), torch.Size([1, 3, 3]))
        >>> torch.allclose(source.sum(-1) + target.sum(-1), torch.ones(1, 3))
        True
    """
    recording.check_recorded()
    if not -len(recording.batches) <= batch < len(recording.batches):
        raise ValueError(
            f"alti_plus: batch must be one of the {len(recording.batches)} calls, got {batch}"
        )
    maps = recording.batches[batch]
    names = [name for name in recording.layers if name in maps]
    crossing = [i for i, name in enumerate(names) if recording.layers[name].kind == "cross"]
    if not crossing or crossing[0] < 2:
        raise ValueError(
            "alti_plus: the recording must hold self-attention of an encoder, and a decoder that "
            "reads it, of one call over both texts or recording.joined() of generate's, got "
            f"{', '.join(names)}"
        )
    if recording.left_out:
        raise ValueError(
            f"alti_plus: attention was left out of the recording: {', '.join(recording.left_out)}"
        )
    for name in names:
        check_whole(maps[name], name, "alti_plus")
        if maps[name].alti is None:
            raise ValueError(f"alti_plus: {name} has no map 'alti'; record it with maps=('alti',)")
    first = crossing[0] - 1  # the decoder's first self-attention
    first_map, cross_map = maps[names[first]].alti, maps[names[crossing[0]]].alti
    assert first_map is not None
    assert cross_map is not None
    encoder = rollout(maps, map="alti", layers=names[:first], normalize=False)
    own = torch.eye(first_map.size(-1)).to(cross_map).expand_as(first_map)
    source = torch.zeros_like(cross_map)
    for name in names[first:]:
        map_ = maps[name].alti
        assert map_ is not None
        of = own if recording.layers[name].kind == "self" else encoder
        if map_.size(-1) != of.size(-2):
            raise ValueError(
                f"alti_plus: {name} has {map_.size(-1)} keys, where {of.size(-2)} vectors of "
                f"{names[first - 1] if of is encoder else names[first]} were followed: it reads "
                "something else, such as a cache, or another encoder"
            )
        if recording.layers[name].kind == "self":
            own, source = map_ @ own, map_ @ source
        else:
            rest = 1 - map_.sum(-1, keepdim=True)
            own, source = rest * own, rest * source + map_ @ encoder
    padding = maps[names[first]].query_padding
    if padding is not None:
        own, source = (x.masked_fill(padding.unsqueeze(-1), 0) for x in (own, source))
    return source, own
