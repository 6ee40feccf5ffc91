"""Asking beforehand which kernels a call of the attention operator takes.

Symbols as in ``ikattn.ops``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ikattn.ops.options import AttentionOptions, changed


class KernelChoice(NamedTuple):
    """The kernels of one pass; ``str`` of it is a sentence.

    Attributes:
        algorithm: ``"quadratic"`` in the length, or ``"linear"``; ``"none"`` where there are no
            kernels.
        unit: On CPU the instruction set: ``"avx512"``, ``"avx2"`` or ``"baseline"``; with products
            of 16 bits ``"avx512_vnni"``, ``"avx512_bf16"`` or ``"amx"``. On CUDA ``"cuda_cores"``,
            ``"tensor_cores"`` (mma.sync), or ``"hopper"`` (its wgmma). ``"none"``, likewise.
        reason: Why nothing faster computes the pass, or nothing does. None: this is the fastest.
        scores: ``"int8"`` where features are rounded to integers of 8 bits, which are multiplied at
            twice the rate; ``"float16x2"`` where tensor cores multiply float32, in full precision,
            as sums of two numbers of float16 each; None: in the precision of the unit.
        proven: What has run all these kernels' tests: ``"H200 at c2071f5"``, a GPU and a commit;
            ``"this machine, on 2026-11-28"``, by ``python -m ikattn selftest --enable``; ``"the
            CPU"``. None: no GPU has run some of them.

    Example:
        >>> from ikattn.ops.kernels import KernelChoice
        >>> print(KernelChoice("linear", "avx512", None))
        linear time on avx512
        >>> print(KernelChoice("quadratic", "cuda_cores", "float64"))
        quadratic time on CUDA cores: float64
    """

    algorithm: str
    unit: str
    reason: str | None
    scores: str | None = None
    proven: str | None = None

    def __str__(self) -> str:
        unit = {
            "cuda_cores": "CUDA cores",
            "tensor_cores": "tensor cores",
            "hopper": "Hopper's tensor cores",
        }.get(self.unit, self.unit)
        said = "no kernels" if self.unit == "none" else f"{self.algorithm} time on {unit}"
        if self.scores is not None:
            said += f", scores in {self.scores}"
        return said if self.reason is None else f"{said}: {self.reason}"


class Kernels(NamedTuple):
    """The answer of :func:`which_kernels`, for both passes of a call.

    Example:
        >>> import torch, ikattn
        >>> q, w = torch.randn(1, 2, 40, 16), torch.randn(2, 16, 8)
        >>> forward, backward = ikattn.which_kernels(q, q, q, w)
        >>> forward == ikattn.which_kernels(q, q, q, w).forward
        True
    """

    forward: KernelChoice
    backward: KernelChoice


def which_kernels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w1: Tensor,
    w2: Tensor | None = None,
    *,
    device: torch.device | str | None = None,
    **options: Unpack[AttentionOptions],
) -> Kernels:
    """Tells which kernels :func:`ikattn.implicit_kernel_attention` takes, forward and backward.

    Nothing is computed; what is told follows from the device, types, sizes, options and the
    settings of torch and of the environment. Quadratic is time proportional to L S, linear to
    L + S. What depends on numbers is not foreseen: queries, or heads, that linear time would not be
    exact for take the quadratic kernels in the same call.

    Args:
        query, key, value, w1, w2, options: As in :func:`ikattn.implicit_kernel_attention`.
        device: Answer for this device; None: that of query.

    Returns:
        Of each pass a :class:`KernelChoice`. :func:`ikattn.implicit_kernel_weights`, which
        ``need_weights=True`` takes, is always quadratic.

    Raises:
        RuntimeError, TypeError, ValueError: As in :func:`ikattn.implicit_kernel_attention`.

    Example:
        >>> import torch, ikattn
        >>> q, w = torch.randn(1, 2, 9000, 16), torch.randn(2, 16, 8)
        >>> ikattn.which_kernels(q, q, q, w).forward.algorithm
        'linear'
        >>> ikattn.which_kernels(q, q, q, w, dropout_p=0.1).forward.algorithm
        'quadratic'
    """
    if options.get("dropout_p", 0.0) > 0:  # nothing is drawn for a question
        options.setdefault("dropout_seed", torch.zeros(2, dtype=torch.int64, device=query.device))
    answer = torch.ops.ikattn.which_kernels(
        query,
        key,
        value,
        w1,
        w2,
        device="" if device is None else str(device),
        **changed("which_kernels", options, query),
    )
    forward, backward = (
        KernelChoice(algorithm, unit, reason or None, scores or None, proven or None)
        for (algorithm, unit, reason, scores), proven in zip(
            (answer[:4], answer[4:8]), answer[8:], strict=True
        )
    )
    return Kernels(forward, backward)
