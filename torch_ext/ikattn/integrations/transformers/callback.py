"""transformers' Trainer: a callback that logs a probe's numbers while a model trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from ikattn.integrations.transformers._interface import import_transformers

import_transformers()

from transformers import TrainerCallback  # noqa: E402

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["ProbeCallback"]


class ProbeCallback(TrainerCallback):
    """Logs what a function of the model gives, every so many steps or after each evaluation.

    It is called first before the first step, so that a probe knows where the training began; and on
    process zero alone, with the model that is not wrapped, so it must not wait for other processes.
    The numbers go through ``trainer.log``: into ``state.log_history`` and to all that report.

    Args:
        trainer: It hears of the callback by ``trainer.add_callback``.
        probe: From the model to numbers by name, such as :class:`ikattn.explain.MapProbe`. It must
            leave the model as it is.
        every: Steps of the optimiser; None: after each evaluation.

    Raises:
        ValueError: every is less than 1.

    Example:
        >>> import ikattn
        >>> from ikattn.integrations.transformers.callback import ProbeCallback
        >>> def add_probe(trainer, inputs):
        ...     probe = ikattn.explain.MapProbe(inputs)
        ...     trainer.add_callback(ProbeCallback(trainer, probe, every=100))
    """

    def __init__(
        self,
        trainer: Trainer,
        probe: Callable[[nn.Module], dict[str, float]],
        *,
        every: int | None = 100,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"ProbeCallback: every must be 1 or more steps, got {every}")
        self._trainer = trainer
        self._probe = probe
        self._every = every

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._log(state, control, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._every is not None and state.global_step % self._every == 0:
            self._log(state, control, kwargs["model"])

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._every is None:
            self._log(state, control, kwargs["model"])

    def _log(self, state: Any, control: Any, model: nn.Module) -> None:
        if not state.is_world_process_zero:
            return
        found = self._probe(self._trainer.accelerator.unwrap_model(model))
        logs_own = control.should_log  # the trainer's own numbers of this step, still to come
        self._trainer.log(dict(found))
        control.should_log = self._trainer.control.should_log = logs_own
