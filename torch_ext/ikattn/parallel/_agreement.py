"""Ranks compare what they were called with, so that none waits for one that does something else."""

from __future__ import annotations

import torch
from torch import Tensor

from ikattn.parallel._ranks import Ranks
from ikattn.parallel._ring import Call

_NUMBERS, _REASON = 80, 1024  # numbers of a row that ranks compare, bytes of a reason
_ALGORITHMS = ("quadratic", "linear", None)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def refuse(ranks: Ranks, device: torch.device, why: str) -> None:
    """Comes to the ranks' comparison with nothing but a reason, which the others raise."""
    rows = ranks.gather(torch.full((_NUMBERS,), torch.nan, dtype=torch.float64, device=device))
    _tell_refusals(ranks, rows, why)


def _tell_refusals(ranks: Ranks, rows: Tensor, why: str | None) -> None:
    """Exchanges the reasons of ranks that refuse, where there are any."""
    refuses = rows[:, 0].isnan()
    if not bool(refuses.any()):
        return
    text = ("" if why is None else why).encode()[:_REASON]
    own = torch.zeros(_REASON, dtype=torch.uint8)
    own[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    reasons = ranks.gather(own.to(rows.device)).cpu()
    if why is not None:
        return
    rank = int(refuses.nonzero()[0])
    reason = bytes(reasons[rank].tolist()).rstrip(b"\0").decode(errors="replace")
    raise ValueError(f"context_parallel_attention: rank {rank} refuses its part: {reason}")


def agree(
    call: Call,
    tensors: tuple[Tensor | None, ...],
    algorithm: str | None,
    *,
    linear: bool,
    drawn: bool,
) -> None:
    """Compares what the ranks were called with, before anything else is exchanged.

    The call gets what all have to know of each other: threads, and the first rank's dropout seed.
    """
    query, _, _, w1, w2, _ = tensors
    assert query is not None
    signature: dict[str, float] = {}
    for name, x in zip(("query", "key", "value", "w1", "w2", "key_bias"), tensors, strict=True):
        sizes = () if x is None else tuple(x.shape)
        for axis in range(4):
            signature[f"size {axis} of {name}"] = sizes[axis] if axis < len(sizes) else -1
        signature[f"dtype of {name}"] = -1 if x is None else _DTYPES.index(x.dtype)
        signature[f"requires_grad of {name}"] = (
            torch.is_grad_enabled() and x is not None and x.requires_grad
        )
    for name, w in (("w1", w1), ("w2", w2)):
        wide = torch.zeros(1) if w is None else w.detach().double()
        signature[f"the sum of {name}"] = float(wide.sum())
        signature[f"the sum of |{name}|"] = float(wide.abs().sum())
    for name, option in call.options.items():
        signature[name] = -1.0 if option is None else float(option)
    signature["is_causal"] = call.is_causal
    signature["layout"] = call.layout.count
    signature["algorithm"] = _ALGORITHMS.index(algorithm)
    signature["linear time, which IKATTN_LINEAR_TIME and deterministic decide"] = linear
    seed = torch.zeros(2, dtype=torch.int64) if call.dropout_seed is None else call.dropout_seed
    halves = seed.contiguous().view(torch.int32).tolist()  # which numbers of a row hold exactly
    for n, half in enumerate(halves):
        signature[f"dropout_seed, part {n}"] = -1 if drawn else half
    signature["whether dropout_seed is given"] = not drawn
    numbers = [*map(float, signature.values()), torch.get_num_threads(), *map(float, halves)]
    row = torch.zeros(_NUMBERS, dtype=torch.float64)
    row[1 : 1 + len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    rows = call.ranks.gather(row.to(query.device)).cpu()
    _tell_refusals(call.ranks, rows, None)
    rows = rows[:, 1 : 1 + len(numbers)]
    for place, name in enumerate(signature):
        column = rows[:, place]
        differs = (column != column[0]) & ~(column.isnan() & column[0].isnan())
        if differs.any():
            other = int(differs.nonzero()[0])
            raise ValueError(
                f"context_parallel_attention: ranks must agree on {name}, got "
                f"{_told(name, column[0])} on rank 0 and {_told(name, column[other])} on rank "
                f"{other}"
            )
    call.threads = int(rows[:, len(signature)].max())
    if call.dropout_seed is not None:
        of_first = rows[0, -4:].to(torch.int32).view(torch.int64)
        call.dropout_seed = of_first.to(query.device)


def _told(name: str, number: Tensor) -> str:
    """Names a number of a signature by the argument it stands for."""
    value = float(number)
    if name.startswith("dtype"):
        return "none" if value < 0 else str(_DTYPES[int(value)])
    if name == "algorithm":
        return str(_ALGORITHMS[int(value)])
    return f"{value:.17g}"
