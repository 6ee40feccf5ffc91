"""Tensor parallelism over heads: every rank computes some heads of multi-head attention.

Sizes: N batch, L queries, S keys, E model size, H heads of all ranks, d = E / H head size, n ranks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.functional import linear
from torch.nn.modules.activation import MultiheadAttention as StockMultiheadAttention

from ikattn._heads import HeadShare, local, whole
from ikattn.integrations.transformers.kernels import KERNELS
from ikattn.integrations.transformers.parallel import share_kernel
from ikattn.nn.functional import ExtraKeys
from ikattn.nn.kernels import Wanted
from ikattn.nn.masks import Masks
from ikattn.nn.multihead_attention import MultiheadAttention
from ikattn.nn.projection import InProjection, Projection, project
from ikattn.spectral.shared import check_shareable, shard_frequencies

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class HeadParallelAttention(MultiheadAttention):
    """``ikattn.MultiheadAttention`` whose parameters are DTensors, sharded by heads.

    ``HeadParallel`` makes it of one. Input and output are whole on every rank. The in-projection is
    in three parameters, ``q_proj_weight``, ``k_proj_weight`` and ``v_proj_weight``, for a rank's
    rows of a packed one are no neighbours.
    """

    head_share: HeadShare

    def reset_parameters(self) -> None:
        """Draws every parameter anew, as one process does, with the first rank's generator."""
        parameters = {name: w for name, w in self._parameters.items() if w is not None}
        like = parameters["q_proj_weight"]
        plain = StockMultiheadAttention(
            self.embed_dim,
            self.num_heads,
            bias=self.in_proj_bias is not None,
            add_bias_kv=self.bias_k is not None,
            kdim=self.kdim,
            vdim=self.vdim,
            device=like.device,
            dtype=like.dtype,
        )
        _separate(plain)
        drawn = dict(plain.named_parameters())
        for name, w in (*parameters.items(), *self.out_proj.named_parameters(prefix="out_proj")):
            with whole(w) as values:
                values.copy_(drawn[name])
        self._reset_kernel()

    def set_kernel(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses, for heads are shared out."""
        raise RuntimeError(
            "set_kernel: the heads of this module are shared out over ranks, and new frequencies "
            "would not be; change the kernel before parallelize_module"
        )

    def remove_kernel(self) -> NoReturn:
        """Refuses, as ``set_kernel``."""
        self.set_kernel()

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        masks: Masks,
        wanted: Wanted,
        query_padding: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        share = self.head_share
        for name, x in (("query", query), ("key", key), ("value", value)):
            if hasattr(x, "to_local"):
                raise TypeError(
                    f"MultiheadAttention under HeadParallel: {name} must be a plain tensor, whole "
                    "on every rank, got a DTensor; torch's PrepareModuleInput(..., "
                    "use_local_output=True) with desired layouts Replicate() makes one"
                )
        inputs = {id(x): share.common(x) for x in (query, key, value)}  # one tensor stays one
        query, key, value = (inputs[id(x)] for x in (query, key, value))
        padding, attention = (  # whose gradients are those of all heads
            None if mask is None else share.common(mask)
            for mask in (masks.padding, masks.attention)
        )
        if attention is not None and attention.dim() == 3:  # [N H, L, S]
            of_heads = attention.unflatten(0, (-1, self.num_heads))
            attention = share.own(of_heads, 1).flatten(0, 1)
        masks = masks._replace(padding=padding, attention=attention)
        output, weights = super()._attend(query, key, value, masks, wanted, query_padding)
        if weights is None:
            return output, None
        if wanted.average:
            return output, share.summed(weights / share.ranks)
        return output, share.joined(weights, weights.dim() - 3)

    def _projection(self) -> Projection:
        q, k, v = (local(getattr(self, name)) for name in _SEPARATE)
        bias: Tensor | None = self.in_proj_bias
        if bias is not None:  # whole on every rank, like that of the out-projection
            parts = self.head_share.common(local(bias)).view(3, -1)
            bias = self.head_share.own(parts, 1).flatten()
        source = InProjection(
            self.embed_dim, self.head_share.own_heads, None, (q, k, v), bias, True
        )
        return partial(project, source)

    def _extra_keys(self, query: Tensor) -> ExtraKeys:
        k, v = (None if bias is None else local(bias) for bias in (self.bias_k, self.bias_v))
        return ExtraKeys(k, v, self.add_zero_attn)

    def _out_projection(self, merged: Tensor) -> Tensor:
        """Projects this rank's columns [.., E / n] to the output of all heads [.., E]."""
        output = self.head_share.summed(linear(merged, local(self.out_proj.weight)))
        return output if self.out_proj.bias is None else output + local(self.out_proj.bias)


def share_heads(module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None) -> nn.Module:
    """Makes a ``MultiheadAttention`` a ``HeadParallelAttention``, in place."""
    if isinstance(module, HeadParallelAttention):
        return module  # has several names in the model
    if type(module) is not MultiheadAttention:
        raise TypeError(
            "HeadParallel: expected an ikattn.MultiheadAttention that nobody has changed, got "
            f"{type(module).__module__}.{type(module).__qualname__}"
        )
    if not isinstance(module.out_proj, nn.Linear):
        raise TypeError(
            "HeadParallel: out_proj must be a Linear, without adapters, got "
            f"{type(module.out_proj).__name__}"
        )
    if any(hasattr(w, "to_local") for w in module.parameters()):
        raise TypeError(
            "HeadParallel: expected plain parameters, got DTensors; call parallelize_module before "
            "what makes them, such as fully_shard"
        )
    share = HeadShare.checked("HeadParallel", mesh, module.num_heads)
    check_shareable(module.spectral)
    _separate(module)
    _shard(module, share, src_data_rank)
    if module.spectral is not None:
        shard_frequencies(module.spectral, share, src_data_rank)
    module.head_share = share
    module.__class__ = HeadParallelAttention
    return module


def _shard(module: MultiheadAttention, share: HeadShare, src_data_rank: int | None) -> None:
    """Makes all parameters but those of frequencies DTensors."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def distribute(owner: nn.Module, name: str, placement: Placement) -> None:
        w = getattr(owner, name)
        if w is not None:
            spread = distribute_tensor(w, share.mesh, [placement], src_data_rank=src_data_rank)
            owner.register_parameter(name, nn.Parameter(spread, requires_grad=w.requires_grad))

    for name in _SEPARATE:
        distribute(module, name, Shard(0))
    distribute(module, "in_proj_bias", Replicate())
    for name in ("bias_k", "bias_v"):
        distribute(module, name, Shard(2))
    distribute(module.out_proj, "weight", Shard(1))
    distribute(module.out_proj, "bias", Replicate())
    if module.magnitude is not None:
        distribute(module.magnitude, "raw", Shard(0))
        module.magnitude.head_share = share


@torch.no_grad()
def _separate(module: StockMultiheadAttention) -> None:
    """Splits a packed in-projection into the three parameters that torch has for other sizes."""
    if not module._qkv_same_embed_dim:
        return
    packed = module.in_proj_weight
    for name, rows in zip(_SEPARATE, packed.chunk(3), strict=True):
        weight = nn.Parameter(rows.clone(), requires_grad=packed.requires_grad)
        module.register_parameter(name, weight)
    module.register_parameter("in_proj_weight", None)
    module._qkv_same_embed_dim = False


class HeadParallel(ParallelStyle):
    """A style of ``parallelize_module``: every rank computes some heads of an attention module.

    For ``ikattn.MultiheadAttention``: rank r of n has the heads r H / n to (r + 1) H / n - 1, with
    their rows of the in-projection, columns of the out-projection, frequencies and orders p. Input
    and output are whole on every rank, and a call sends one sum of outputs; its backward pass one
    of the gradients of query, key and value. For the kernels of transformers models
    (``ikattn.convert``): the frequencies alone, as the projections need styles of torch's own.

    docs/guide/parallel.md tells of checkpoints, dropout, generators, and what is refused.

    Example:
        >>> import torch, ikattn
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from ikattn.parallel import HeadParallel
        >>> def shared_out(mesh):  # in each process that torchrun starts
        ...     return parallelize_module(ikattn.MultiheadAttention(16, 4), mesh, HeadParallel())
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shares out a module, as ``parallelize_module`` asks; it must be one of those above."""
        if isinstance(module, KERNELS):
            share_kernel(module, device_mesh, self.src_data_rank)
            return module
        return share_heads(module, device_mesh, self.src_data_rank)


def tensor_parallel_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Makes a plan that shares out the heads of all attention modules that this package knows.

    Args:
        model: One with ``ikattn.MultiheadAttention``, or a transformers model after
            ``ikattn.convert``, of which the plan names the kernels alone. Of stock
            nn.MultiheadAttention, which is not in the plan, every rank computes all.

    Returns:
        ``HeadParallel()`` by the name of each module, for ``parallelize_module``. Join it to styles
        of other modules by ``|``. Make optimisers afterwards: parameters are new.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: It has no such attention.

    Example:
        >>> import torch, ikattn
        >>> from ikattn.parallel import tensor_parallel_plan
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> model = ikattn.convert(torch.nn.TransformerEncoder(layer, 2))
        >>> list(tensor_parallel_plan(model))
        ['layers.0.self_attn', 'layers.1.self_attn']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"tensor_parallel_plan: model must be a torch.nn.Module, got {type(model).__name__}"
        )
    plan: dict[str, ParallelStyle] = {
        name: HeadParallel()
        for name, module in model.named_modules()
        if isinstance(module, (MultiheadAttention, *KERNELS))
    }
    if not plan:
        raise ValueError(
            "tensor_parallel_plan: expected a model with ikattn.MultiheadAttention, such as "
            "ikattn.convert makes, or a transformers model after ikattn.convert, got a "
            f"{type(model).__name__} without"
        )
    return plan
