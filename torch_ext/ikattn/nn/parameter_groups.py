"""Groups of a model's parameters for an optimiser: frequencies want steps of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from numbers import Real
from typing import Any

from torch import nn

from ikattn.nn.selection import wrapped
from ikattn.ops.magnitude import LearnedOrder
from ikattn.spectral import Direct, Generator
from ikattn.spectral.regularized import Regularized

# The share of the learning rate; docs/experiments/recall.md compares it with a hundredth
FREQUENCY_RATE = 0.1


def parameter_groups(
    model: nn.Module, *, lr: float, frequency_lr: float | None = None, weight_decay: float = 0.01
) -> list[dict[str, Any]]:
    """Groups the parameters of a model for an optimiser with weight decay such as AdamW.

    What makes the kernels is a group of its own: frequencies, the weights of their generators, and
    learned orders of the norm. It has no weight decay, which would widen the kernels, and a smaller
    learning rate, as frequencies are small. Biases, scales of norms and all else with fewer than
    two axes have no weight decay, either. Kernels are found wherever a module holds a source of
    ``ikattn.spectral`` or an ``ikattn.ops.magnitude.LearnedOrder``. Call it after the conversion.

    Args:
        model: Any module; one without kernels has no group of them.
        lr: Learning rate of the other groups.
        frequency_lr: Learning rate of the kernels; None: ``0.1 * lr``.
        weight_decay: Of the first group alone.

    Returns:
        Up to three groups, without the empty ones, each with "name", "params", "lr" and
        "weight_decay". Their names are "weights", "biases and norms" and "kernels". A shared
        parameter stands once, among the kernels if it is part of one; frozen ones are left out.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: No parameter can be trained, a rate or the decay is negative or not finite, or
            torch's FullyShardedDataParallel has flattened parameters, so that nobody can tell which
            they are.

    Example:
        >>> import torch, ikattn
        >>> model = ikattn.convert(torch.nn.TransformerEncoderLayer(16, 4))
        >>> groups = ikattn.parameter_groups(model, lr=1e-3, weight_decay=0.1)
        >>> [(group["name"], len(group["params"]), group["weight_decay"]) for group in groups]
        [('weights', 4, 0.1), ('biases and norms', 8, 0.0), ('kernels', 2, 0.0)]
        >>> optimizer = torch.optim.AdamW(groups)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"parameter_groups: model must be a torch.nn.Module, got {type(model).__name__}"
        )
    given = {"lr": lr, "frequency_lr": frequency_lr or 0.0, "weight_decay": weight_decay}
    for name, number in given.items():
        if not isinstance(number, Real) or not 0 <= number < math.inf:
            raise ValueError(f"parameter_groups: {name} must be a number >= 0, got {number!r}")
    for wrapper, name in wrapped(model):
        if wrapper == "FullyShardedDataParallel":  # the first version: parts of flat parameters
            raise ValueError(
                "parameter_groups: expected parameters with their own axes, got "
                f"FullyShardedDataParallel around {name or 'the model'}, which flattens them; "
                "shard with torch.distributed.fsdp.fully_shard"
            )
    of_kernels = {id(p) for module in _kernels(model) for p in module.parameters()}
    weights, vectors, kernels = list[nn.Parameter](), list[nn.Parameter](), list[nn.Parameter]()
    for p in model.parameters():
        if p.requires_grad:
            (kernels if id(p) in of_kernels else weights if p.dim() > 1 else vectors).append(p)
    kernel_lr = FREQUENCY_RATE * lr if frequency_lr is None else frequency_lr
    groups: list[dict[str, Any]] = [
        {"name": "weights", "params": weights, "lr": lr, "weight_decay": weight_decay},
        {"name": "biases and norms", "params": vectors, "lr": lr, "weight_decay": 0.0},
        {"name": "kernels", "params": kernels, "lr": kernel_lr, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError(
            "parameter_groups: expected a model with parameters to train, got a "
            f"{type(model).__name__} with {sum(1 for _ in model.parameters())}, all of them frozen"
        )
    return groups


@contextmanager
def having(objects: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    """Gives an attribute of objects a value for the time of the block."""
    before = [(x, getattr(x, name)) for x in objects]
    try:
        for x, _ in before:
            setattr(x, name, value)
        yield
    finally:
        for x, own in before:
            setattr(x, name, own)


def frozen(parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
    """Switches the gradients of parameters off for the time of the block."""
    return having((w for w in parameters if w.requires_grad), "requires_grad", False)


def _kernels(model: nn.Module) -> Iterator[nn.Module]:
    """Returns modules whose parameters make kernels; those of others' classes by their place."""
    for module in model.modules():
        if isinstance(module, Direct | Generator | LearnedOrder):
            yield module
        elif isinstance(module, Regularized):
            sources = (getattr(module, name, None) for name in ("spectral", "magnitude"))
            yield from (source for source in sources if isinstance(source, nn.Module))
