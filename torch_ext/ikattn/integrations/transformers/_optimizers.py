"""The optimiser of transformers' Trainer, with the groups of ``ikattn.parameter_groups``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ikattn.integrations.transformers.interface import import_transformers
from ikattn.nn.parameter_groups import parameter_groups

if TYPE_CHECKING:
    from transformers import TrainingArguments


def optimizers(
    model: nn.Module, args: TrainingArguments, frequency_lr: float | None = None
) -> tuple[torch.optim.Optimizer, None]:
    """Makes what ``Trainer(optimizers=)`` takes, so that frequencies have steps of their own.

    Frequencies have no decay, as :func:`ikattn.parameter_groups` says. The class of the optimiser
    and its options are those of ``args``; Trainer makes its schedule, which scales every group.

    Args:
        model: A model with implicit attention; adapters of PEFT may be around it.
        args: Of the Trainer.
        frequency_lr: Learning rate of frequencies. None: a tenth of ``args.learning_rate``.

    Returns:
        The optimiser, and None in the place of the schedule. Where Trainer refuses ``optimizers=``
        (FSDP, ``model_init``), call it in a Trainer's own ``create_optimizer``.

    Raises:
        ImportError: transformers is missing.
        NotImplementedError: The optimiser of ``args`` chooses parameters by itself, as GaLore and
            LOMO do.
        ValueError: As :func:`ikattn.parameter_groups`.

    Example:
        >>> import ikattn, pytest, tempfile
        >>> transformers = pytest.importorskip("transformers")
        >>> _ = pytest.importorskip("accelerate")
        >>> from ikattn.integrations.transformers import optimizers
        >>> sizes = dict(n_embd=16, n_head=2, n_layer=1, vocab_size=9)
        >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        >>> model = ikattn.convert(model, num_frequencies=8)
        >>> folder = tempfile.mkdtemp()
        >>> args = transformers.TrainingArguments(folder, learning_rate=1e-3, weight_decay=0.1)
        >>> trainer = transformers.Trainer(model, args, optimizers=optimizers(model, args))
        >>> [(group["name"], group["weight_decay"]) for group in trainer.optimizer.param_groups]
        [('weights', 0.1), ('biases and norms', 0.0), ('kernels', 0.0)]
    """
    trainer: Any = import_transformers().Trainer
    kind, options = trainer.get_optimizer_cls_and_kwargs(args, model)
    chosen = {"params", "model", "optimizer_dict"} & options.keys()
    if chosen or not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise NotImplementedError(
            f"optimizers: args.optim is {str(args.optim)!r}, which chooses parameters by itself; "
            "expected an optimiser that takes groups, such as 'adamw_torch'"
        )
    rates = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    return kind(parameter_groups(model, **rates, frequency_lr=frequency_lr), **options), None
