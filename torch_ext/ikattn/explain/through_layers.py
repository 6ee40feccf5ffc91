"""Recorded maps followed through the layers: ALTI+ of encoder-decoders, and attention flow.

Sizes: B batch, S source tokens, L tokens of one text or of the target, N layers.
Sources: J. Ferrando, G. I. Gállego, B. Alastruey, C. Escolano, M. R. Costa-jussà, "Towards Opening
the Black Box of Neural Machine Translation", EMNLP 2022, for ALTI+; S. Abnar, W. Zuidema,
"Quantifying Attention Flow in Transformers", ACL 2020, section 3, for the flow.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ikattn._optional import optional
from ikattn.maps.importance import token_index
from ikattn.maps.layers import RecordedMaps, check_whole
from ikattn.maps.summary import Maps
from ikattn.maps.through_layers import Residual, Steps, rollout


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
    altis: list[Tensor] = []
    for name in names:
        check_whole(maps[name], name, "alti_plus")
        map_ = maps[name].alti
        if map_ is None:
            raise ValueError(f"alti_plus: {name} has no map 'alti'; record it with maps=('alti',)")
        altis.append(map_)
    first = crossing[0] - 1  # the decoder's first self-attention
    encoder = rollout(maps, map="alti", layers=names[:first], normalize=False)
    own = torch.eye(altis[first].size(-1)).to(altis[first + 1]).expand_as(altis[first])
    source = torch.zeros_like(altis[first + 1])
    for name, map_ in zip(names[first:], altis[first:], strict=True):
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


def attention_flow(
    maps: Maps,
    position: int | Tensor,
    *,
    map: str = "encoder",
    normalize: bool = True,
    layers: Iterable[str] | None = None,
    residual: Residual = None,
    padding: Tensor | None = None,
) -> Tensor:
    """Measures how much can flow from an output token to each input token, maps being capacities.

    An edge from token i after layer l to token j before it carries at most ``A_l[i, j]``, A_l being
    the layer's map. Rollout adds the products along all paths; the largest flow takes no more
    through a token than its edges carry. Needs networkx. Time O(L) maximum flows a sequence, each
    through N L^2 edges: for sentences, not for documents.

    Args:
        maps, map, normalize, layers, residual, padding: Arguments of :func:`ikattn.rollout`;
            attention flow as published is ``map="weights", residual=0.5``.
        position: A token's place, as for :func:`token_importance`, or one for each sequence.

    Returns:
        ``[B, L]``, 0 at padding; not normalised: each is at most the sum of a row.

    Raises:
        ModuleNotFoundError: networkx is missing.
        ValueError, KeyError, LookupError: Errors of :func:`token_importance`.

    Example:
        >>> import pytest, torch
        >>> networkx = pytest.importorskip("networkx")
        >>> from ikattn.explain import attention_flow
        >>> weights = [torch.full((1, 2, 2), 0.5) for _ in range(3)]
        >>> attention_flow(weights, 0)
        tensor([[1., 1.]])
    """
    networkx = optional("networkx", "attention_flow", "networkx")
    if isinstance(position, slice):
        raise TypeError(
            f"attention_flow: position must be an int or an int64 tensor [B], got {position}"
        )
    chosen = Steps(maps, normalize, map, layers, residual, "attention_flow")
    steps, hidden = chosen.factors(padding), chosen.padding(padding)
    B, L = steps[-1].shape[:2]
    index = token_index(position, hidden, B, L, steps[-1].device)
    found = steps[-1].new_zeros(B, L)
    for b, i in enumerate(index.tolist()):
        graph = networkx.DiGraph()  # of (l, t), token t after layer l, and tokens before it
        for layer, step in enumerate(steps, start=1):
            pairs = step[b].detach().double().cpu()
            for t, j in (pairs > 0).nonzero().tolist():
                graph.add_edge((layer, t), (layer - 1, j), capacity=float(pairs[t, j]))
        for j in range(L):
            if graph.has_node((0, j)) and graph.has_node((len(steps), i)):
                found[b, j] = networkx.maximum_flow_value(graph, (len(steps), i), (0, j))
    return found
