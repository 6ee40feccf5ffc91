"""Frequencies of the heads of one rank, where tensor parallelism shares heads out over ranks.

Frequencies that are parameters are sharded: a rank holds those of its heads. A generator is the
same on all ranks. Each of them makes the frequencies of all heads, from the same noise, and takes
those of its own; what queries and keys tell the generator is gathered, averages of tokens alone.
"""

from __future__ import annotations

from torch import Tensor, nn

from ikattn._heads import HeadShare, local
from ikattn.spectral.direct import Direct
from ikattn.spectral.generator import Generator
from ikattn.spectral.ikan import Ikan
from ikattn.spectral.interface import Drawn, call_source
from ikattn.spectral.mikan import Mikan, average


def check_shareable(source: nn.Module | None) -> None:
    """Raises ValueError for a source whose frequencies cannot be made head by head."""
    if isinstance(source, Mikan) and source.faithful:
        raise ValueError(
            "tensor parallelism: Mikan(faithful='code') draws as one process alone can; expected "
            "faithful=None"
        )
    known = (Direct.forward, Ikan.forward, Mikan.forward)  # derived classes have them, too
    if source is not None and type(source).forward not in known:
        raise ValueError(
            "tensor parallelism: frequencies must come from ikattn.spectral.Direct, Ikan or Mikan, "
            f"for it is not known which heads are whose in a {type(source).__name__}"
        )


def shard_frequencies(source: nn.Module, share: HeadShare, src_data_rank: int | None = 0) -> None:
    """Makes a source's parameters those of this rank's heads, in place.

    Values of the rank ``src_data_rank`` of the mesh count; None: each rank's own.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placement = Shard(0) if isinstance(source, Direct) else Replicate()
    for module in source.modules():
        for name, w in module.named_parameters(recurse=False):
            spread = distribute_tensor(w, share.mesh, [placement], src_data_rank=src_data_rank)
            module.register_parameter(name, nn.Parameter(spread, requires_grad=w.requires_grad))
    assert isinstance(source, Direct | Generator)
    source.head_share = share


def call_shared_source(
    source: nn.Module,
    share: HeadShare,
    query: Tensor,
    key: Tensor,
    key_padding_mask: Tensor | None,
    query_padding_mask: Tensor | None,
) -> Drawn:
    """Calls a source for queries and keys of this rank's heads, [B, H / n, .., d].

    Frequencies are of H / n heads, and the regulariser is that of all heads.
    """
    if not isinstance(source, Generator):
        return call_source(source, query, key, key_padding_mask, query_padding_mask)
    if isinstance(source, Mikan):
        dtype = source.gain.dtype
        tokens = [average(query, query_padding_mask, dtype), average(key, key_padding_mask, dtype)]
        if source.pool == "key":
            tokens[0] = tokens[1]
        query, key = (share.joined(x, 1, for_own_heads=True).unsqueeze(2) for x in tokens)
    else:  # looks at sizes alone
        query = key = query.new_empty(query.size(0), share.num_heads, 0, query.size(3))
    parameters = {name: share.common(local(w)) for name, w in source.named_parameters()}
    w1, w2, regularization = call_source(source, query, key, None, parameters=parameters)
    if regularization is not None:  # every rank adds it to its loss
        part = regularization / share.ranks
        regularization = part + (regularization - part).detach()
    return share.own(w1, -3), None if w2 is None else share.own(w2, -3), regularization
