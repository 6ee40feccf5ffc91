"""Tensor parallelism over heads: a plan for ``torch.distributed.tensor.parallel``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ikattn.integrations.transformers.kernels import KERNELS
from ikattn.integrations.transformers.parallel import share_kernel
from ikattn.nn.multihead_attention import MultiheadAttention
from ikattn.parallel._attention import share_heads

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class HeadParallel(ParallelStyle):
    """A style of ``parallelize_module``: every rank computes some heads of an attention module.

    For ``ikattn.MultiheadAttention``: rank r of n has the heads r H / n to (r + 1) H / n - 1, with
    their rows of the in-projection, columns of the out-projection, frequencies and orders p. Input
    and output are whole on every rank, and a call sends one sum of outputs; its backward pass one
    of the gradients of query, key and value. A packed ``in_proj_weight`` becomes three parameters,
    named as torch names them where sizes differ, and ``ikattn.MultiheadAttention`` loads them again
    as one.

    For the kernels of transformers models (``ikattn.convert``): the frequencies alone. The
    projections need styles of torch's own.

    A generator of frequencies (``Ikan``, ``Mikan``) stays whole on every rank, makes the
    frequencies of all heads of the noise that the first rank draws, and its regulariser is that of
    all heads. Dropout has other masks than in one process: each head still has its own.

    Example:
        >>> import torch, ikattn
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from ikattn.parallel import HeadParallel
        >>> def shared_out(mesh):  # in each process that torchrun starts
        ...     return parallelize_module(ikattn.MultiheadAttention(16, 4), mesh, HeadParallel())
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shares out a module, as ``parallelize_module`` asks.

        Raises:
            TypeError: It is another module.
            ValueError: The ranks do not divide the heads, the mesh has several dimensions, or the
                frequencies are from a source of the caller's own.
        """
        if isinstance(module, KERNELS):
            share_kernel(module, device_mesh, self.src_data_rank)
            return module
        return share_heads(module, device_mesh, self.src_data_rank)


def tensor_parallel_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Makes a plan that shares out the heads of all attention modules that this package knows.

    Args:
        model: An ``ikattn.MultiheadAttention``, any model with some, such as ``ikattn.convert``
            returns, or a transformers model after ``ikattn.convert``, of which the plan
            names the kernels alone. Stock nn.MultiheadAttention is not in the plan: every rank
            computes all of it. ``ikattn.convert(model, kernel="dot")`` keeps its numbers.

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
