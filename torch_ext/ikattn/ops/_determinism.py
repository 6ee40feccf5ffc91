"""How far equal numbers give equal bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch


@contextmanager
def deterministic(level: Literal["run", "batch"]) -> Iterator[None]:
    """Opens a context in which the operators of attention promise as much as ``level`` says.

    ``"run"``, what holds without: the same call gives the same bits in every run, and on the CPU
    for every number of threads. ``"batch"``: a row of the output has the same bits whatever else
    is in the batch, whatever hidden keys follow those it sees, and whether it is one of a causal
    prefill, of a chunk of it, or a step by itself. docs/guide/batch_invariance.md has how, what it
    costs, and what it does not promise.

    The setting is that of the process, for all threads; a backward follows it while it runs.

    Args:
        level: ``"run"`` or ``"batch"``.

    Raises:
        RuntimeError: It is entered within a compiled function, which would not see it change.
        ValueError: level is another.

    Example:
        >>> import torch, ikattn
        >>> q, k, v = (torch.randn(4, 2, 40, 16) for _ in range(3))
        >>> w1, w2 = (0.1 * torch.randn(2, 16, 8) for _ in range(2))
        >>> with ikattn.deterministic("batch"):
        ...     prefill = ikattn.implicit_kernel_attention(q, k, v, w1, w2, is_causal=True)
        ...     step = ikattn.implicit_kernel_attention(
        ...         q[:1, :, 9:10], k[:1, :, :10], v[:1, :, :10], w1, w2
        ...     )
        >>> torch.equal(step, prefill[:1, :, 9:10])
        True
    """
    if level not in ("run", "batch"):
        raise ValueError(f"deterministic: level must be 'run' or 'batch', got {level!r}")
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "deterministic: enter it around the compiled function, not within: a compiled function "
            "keeps no change of settings"
        )
    before = torch.ops.ikattn.deterministic()
    torch.ops.ikattn.set_deterministic(level)
    try:
        yield
    finally:
        torch.ops.ikattn.set_deterministic(before)
