"""Attention of a sequence whose tokens are shared out over ranks.

Symbols as in ``ikattn.ops``; W ranks. L queries and S keys are those of one rank.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from ikattn._precision import lowered
from ikattn.integrations.transformers.kernels import IMPLICIT, KERNELS
from ikattn.nn.over_ranks import AttendingBy
from ikattn.ops.kernels import which_kernels
from ikattn.ops.options import DEFAULTS, AttentionOptions, changed
from ikattn.parallel._agreement import agree, refuse
from ikattn.parallel._layout import Layout, LayoutName
from ikattn.parallel._ranks import Ranks
from ikattn.parallel._ring import Call, Ring
from ikattn.parallel._sums import sums_attention
from ikattn.spectral.interface import unwrapped

Algorithm: TypeAlias = Literal["quadratic", "linear"]
Group: TypeAlias = "DeviceMesh | dist.ProcessGroup | None"


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w1: Tensor,
    w2: Tensor | None = None,
    *,
    group: Group = None,
    layout: LayoutName = "zigzag",
    algorithm: Algorithm | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Attends where every rank has a part of the tokens.

    Every rank calls it with its own tokens, and gets the output of its own queries over the keys of
    all ranks: what one process computes, to rounding. docs/guide/parallel.md tells what ranks send
    each other. Before anything else they compare what they were called with, so that an error is
    the same sentence on all of them, and none waits for another.

    Args:
        query: ``[B, H, L, d]``, of this rank.
        key: ``[B, G, S, d]``, of this rank; causal: L = S.
        value: ``[B, G, S, d_v]``, of this rank.
        w1: Frequencies ``[H, d, M]`` or ``[G, d, M]``, the same on all ranks.
        w2: As w1, or None.
        group: The ranks: a ``DeviceMesh`` of one dimension, a process group, or None for all.
        layout: Which tokens rank r has: "contiguous", chunk r of W; "zigzag", chunks r and
            2W - 1 - r of 2W, one after the other. :class:`ContextParallel` has ``shard`` for both.
        algorithm: "quadratic" or "linear"; None: as one process would take the whole.
        key_bias: Broadcastable to ``[B, H, S]`` or ``[B, G, S]``, for this rank's keys.
        attn_mask: Must be None.
        dropout_p, dropout_seed: As in :func:`ikattn.implicit_kernel_attention`. The mask is that of
            the whole, whatever the number of ranks; chunks must be multiples of 16 tokens. Without
            a seed the first rank draws one for all.
        is_causal: Whether a query sees keys up to its own place alone.
        p, enable_gqa, eps, magnitude_scale: As in :func:`ikattn.implicit_kernel_attention`.

    Returns:
        ``[B, H, L, d_v]``. Differentiable once, on all ranks together, in query, key, value, w1, w2
        and key_bias. Gradients of frequencies are this rank's part; those of all ranks add up.

    Raises:
        RuntimeError: torch.distributed is not initialised; or a rank does not answer, which the
            message names.
        NotImplementedError: attn_mask is given.
        ValueError: Ranks differ in shapes, dtypes, frequencies or options; or what one process
            would refuse.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from ikattn.parallel import context_parallel_attention
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> q, k, v = (torch.randn(1, 2, 64, 8) for _ in range(3))
        >>> w1 = 0.1 * torch.randn(2, 8, 16)
        >>> context_parallel_attention(q, k, v, w1, is_causal=True).shape
        torch.Size([1, 2, 64, 8])
        >>> dist.destroy_process_group()
    """
    named = DEFAULTS | changed("context_parallel_attention", options, torch.empty(0))
    is_drawn = options.get("dropout_seed") is None
    key_bias, attn_mask = named.pop("key_bias", None), named.pop("attn_mask", None)
    seed, is_causal = named.pop("dropout_seed", None), named.pop("is_causal")
    ranks = Ranks(group)
    call = Call(ranks, Layout(layout, ranks.size), is_causal, named)
    if named["dropout_p"] > 0:
        call.dropout_seed = seed
    query, key, value = lowered(query, key, value)
    tensors = (query, key, value, w1, w2, key_bias)
    with torch.autocast(query.device.type, enabled=False):
        try:
            _check_here(call, tensors, algorithm, attn_mask)
            is_linear = _is_linear(call, tensors, algorithm)
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            refuse(ranks, query.device, f"{type(error).__name__}: {error}")
            raise
        agree(call, tensors, algorithm, linear=is_linear, drawn=is_drawn)
        bias = None
        if key_bias is not None:
            shape = (query.size(0), key_bias.size(-2) if key_bias.dim() > 1 else 1, key.size(2))
            bias = key_bias.expand(shape)
        attend: Any = sums_attention if is_linear else Ring.apply
        output: Tensor = attend(call, query, key, value, w1, w2, bias)
        return output


def _check_here(
    call: Call, tensors: tuple[Any, ...], algorithm: str | None, attn_mask: Tensor | None
) -> None:
    """Refuses what one process would refuse, in its words, and what cannot be shared out."""
    if attn_mask is not None:
        raise NotImplementedError(
            "context_parallel_attention: attn_mask must be None, got "
            f"{list(attn_mask.shape)}: a rank has not the pairs that a mask is of; is_causal and "
            "key_bias are supported"
        )
    if algorithm not in (None, "quadratic", "linear"):
        raise ValueError(
            'context_parallel_attention: algorithm must be "quadratic", "linear" or None, got '
            f"{algorithm!r}"
        )
    query, key, value, w1, w2, key_bias = tensors
    options = dict(call.options, is_causal=call.is_causal, key_bias=key_bias)
    if call.dropout_seed is not None:
        options["dropout_seed"] = call.dropout_seed
    torch.ops.ikattn.check_implicit_kernel_attention(query, key, value, w1, w2, **options)
    if w1.dim() != 3:
        raise ValueError(
            "context_parallel_attention: w1 must have shape [H, d, M] or [G, d, M], the same for "
            f"all batch items, got {list(w1.shape)}"
        )
    chunks = len(call.layout.chunks(0))
    for name, tokens in (("query", query.size(2)), ("key", key.size(2))):
        if tokens % chunks != 0:
            raise ValueError(
                f"context_parallel_attention: {name} must have a multiple of {chunks} tokens on "
                f"each rank, the chunks of layout={call.layout.name!r}, got {tokens}"
            )
        if call.dropout_seed is not None and tokens // chunks % 16 != 0:
            raise ValueError(
                f"context_parallel_attention: with dropout {name} must have a multiple of "
                f"{16 * chunks} tokens on each rank, got {tokens}"
            )
    if call.is_causal and query.size(2) != key.size(2):
        raise ValueError(
            "context_parallel_attention: with is_causal, a rank must have as many keys as queries, "
            f"{query.size(2)}, got {key.size(2)}"
        )
    if call.dropout_seed is not None and call.dropout_seed.numel() != 2:
        raise ValueError(
            "context_parallel_attention: dropout_seed must be an int64 tensor of shape [2], got "
            f"{list(call.dropout_seed.shape)}"
        )
    if algorithm == "linear" and call.dropout_seed is not None:
        raise ValueError(
            'context_parallel_attention: algorithm="linear" takes no dropout, got '
            f"dropout_p={call.options['dropout_p']}"
        )


def _is_linear(call: Call, tensors: tuple[Any, ...], algorithm: str | None) -> bool:
    """Whether one process would take linear time for the whole, or the caller asks for it."""
    if algorithm is not None:
        return algorithm == "linear"
    *tokens, w1, w2, _ = tensors
    if call.dropout_seed is not None or any(x.numel() == 0 for x in tokens):
        return False

    def whole(x: Tensor) -> Tensor:  # one token for all: nobody reads them
        return x.detach()[:, :, :1].expand(-1, -1, x.size(2) * call.ranks.size, -1)

    frequencies = w1.detach(), None if w2 is None else w2.detach()
    options = {"is_causal": call.is_causal, "enable_gqa": call.options["enable_gqa"]}
    query, key, value = map(whole, tokens)
    kernels = which_kernels(query, key, value, *frequencies, **options)
    return kernels.forward.algorithm == "linear"


class ContextParallel:
    """A model whose attention goes over the tokens of all ranks, while entered.

    Made by :func:`context_parallel`.
    """

    def __init__(
        self, model: nn.Module, group: Group, layout: LayoutName, algorithm: Algorithm | None
    ) -> None:
        self._ranks = Ranks(group)
        self._layout = Layout(layout, self._ranks.size)
        self._modules = _attention_in(model)
        options: Any = {"group": self._ranks.group, "layout": layout, "algorithm": algorithm}
        self._attend = partial(context_parallel_attention, **options)
        self._refuse = partial(refuse, self._ranks)
        self._undo = ExitStack()

    def shard(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Returns this rank's tokens of a whole sequence, such as ids, positions or padding masks.

        Labels that a model shifts by itself are to be shifted before they are sharded, for the last
        token of a chunk has its successor on another rank: ``labels=None, shift_labels=..`` of
        transformers.

        Args:
            whole: The same on every rank.
            dim: The axis of tokens, a multiple of W of them, or of 2W with layout="zigzag".

        Raises:
            ValueError: The length is another one.
        """
        return self._layout.shard(whole, dim, self._ranks.number)

    def unshard(self, part: Tensor, dim: int = 1) -> Tensor:
        """Returns the whole of what the ranks have, on every rank; without gradients."""
        part = part.detach().contiguous()
        parts = [torch.empty_like(part) for _ in range(self._ranks.size)]
        dist.all_gather(parts, part, group=self._ranks.group)
        return self._layout.unshard(parts, dim)

    def __enter__(self) -> ContextParallel:
        with ExitStack() as stack:
            for module in self._modules:
                stack.callback(AttendingBy(module, self._attend, self._refuse).remove)
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()


def context_parallel(
    model: nn.Module,
    mesh: Group = None,
    *,
    layout: LayoutName = "zigzag",
    algorithm: Algorithm | None = None,
) -> ContextParallel:
    """Makes the attention of a model go over the tokens of all ranks.

    Every rank calls the model with its part of the tokens; what is not attention works token by
    token and knows nothing of it. Positions must be told, for a rank's first token is not the
    sequence's: ``position_ids=context.shard(positions)``. Each rank's gradients are of its own
    tokens; those of all ranks add up to the whole's.

    Args:
        model: With ``ikattn.MultiheadAttention``, as ``ikattn.convert`` makes, or of transformers,
            after ``ikattn.convert``.
        mesh: The ranks: a ``DeviceMesh`` of one dimension, a process group, or None for all.
        layout: Which tokens a rank has; see :func:`context_parallel_attention`.
        algorithm: "quadratic", "linear", or None: what is faster for the whole.

    Returns:
        A context manager, with ``shard`` and ``unshard``. The model is as before outside of it.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: No module of the model has an implicit kernel, one has a kernel of another kind,
            or frequencies that depend on whole sequences.

    Example:
        >>> import torch, torch.distributed as dist, ikattn
        >>> from ikattn.parallel import context_parallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        >>> model = ikattn.convert(layer)
        >>> with context_parallel(model) as context:
        ...     model(context.shard(torch.randn(2, 64, 16))).shape
        torch.Size([2, 64, 16])
        >>> dist.destroy_process_group()
    """
    return ContextParallel(model, mesh, layout, algorithm)


def _attention_in(model: nn.Module) -> list[nn.Module]:
    found = []
    for name, module in model.named_modules():
        of_torch = isinstance(module, nn.MultiheadAttention)
        kernel = unwrapped(getattr(module, "spectral", None))
        if not of_torch and not isinstance(kernel, KERNELS):
            continue
        reason = None
        if of_torch and getattr(module, "kernel", "dot") != "implicit":
            reason = "another kernel than the implicit one; ikattn.convert changes it"
        elif of_torch and (module.bias_k is not None or module.add_zero_attn):
            reason = "keys of its own, which every rank would add"
        elif any(getattr(source, "pools", False) for source in module.spectral.modules()):
            reason = "frequencies that depend on whole sequences, which no rank has"
        elif not of_torch:
            config: Any = module.config
            if config._attn_implementation != IMPLICIT:
                name_of = config._attn_implementation
                reason = f"the attention implementation {name_of!r}, not {IMPLICIT!r}"
            elif getattr(config, "attention_chunk_size", None) is not None:
                reason = "chunked attention, whose masks are of a rank's own tokens"
        if reason is not None:
            raise ValueError(
                f"context_parallel: {name or 'model'}, a {type(module).__name__}, has {reason}"
            )
        found.append(module)
    if not found:
        raise ValueError(
            "context_parallel: expected a model with ikattn.MultiheadAttention, or of transformers "
            f"after ikattn.convert, got {type(model).__name__} without either"
        )
    return found
