"""Lightning: a callback that logs a probe's numbers while a model trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ikattn._optional import optional

optional("lightning", "ikattn.integrations.lightning", "'ikattn[lightning]'")

from lightning import Callback, LightningModule, Trainer  # noqa: E402

__all__ = ["ProbeCallback"]


class ProbeCallback(Callback):
    """Logs what a function of the model gives, every so many steps or after each validation.

    It is called first before the first step, so that a probe knows where the training began; with
    what training is precise in; and on process zero alone, with the module that is not wrapped, so
    it must not wait for other processes. The numbers go to the trainer's loggers at the step that
    they belong to, whatever ``log_every_n_steps`` is.

    Args:
        probe: From the module to numbers by name, such as :class:`ikattn.explain.MapProbe`. It
            must leave the module as it is.
        every: Steps of the optimiser; None: after each validation.

    Attributes:
        history: The steps and what was logged then.

    Raises:
        ValueError: every is less than 1.

    Example:
        >>> import torch, ikattn
        >>> from ikattn.integrations.lightning import ProbeCallback
        >>> probe = ikattn.explain.MapProbe(torch.randn(3, 5, 16))
        >>> callback = ProbeCallback(probe, every=100)  # lightning.Trainer(callbacks=[callback])
    """

    def __init__(
        self, probe: Callable[[nn.Module], dict[str, float]], *, every: int | None = 100
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"ProbeCallback: every must be 1 or more steps, got {every}")
        self.history: list[tuple[int, dict[str, float]]] = []
        self._probe = probe
        self._every = every
        self._last = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        # a step may take several batches, and a batch several steps
        every = self._every
        if every is not None and trainer.global_step // every > self._last // every:
            self._log(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._every is None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._log(trainer, pl_module)

    def _log(self, trainer: Trainer, module: LightningModule) -> None:
        self._last = trainer.global_step
        if not trainer.is_global_zero:
            return
        with trainer.precision_plugin.forward_context():
            found = self._probe(module)
        self.history.append((trainer.global_step, found))
        for logger in trainer.loggers:
            logger.log_metrics(found, step=trainer.global_step)
