"""The report of a calibration, by layer and head."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class CalibratedModule(NamedTuple):
    """How near an implicit kernel came to softmax attention, on data it was not fitted to.

    Attributes:
        names: Of the module in the model.
        before, after: [H], the Frobenius norm of the weights' error relative to that of the softmax
            weights, before and after the fit to the weights.
        output_before, output_after: The same of the module's output, before and after the steps on
            it; the layers before it are then those that have been calibrated. None without such
            steps.
        softmax_heads: Numbers of the heads that compute softmax.
    """

    names: list[str]
    before: Tensor
    after: Tensor
    output_before: float | None = None
    output_after: float | None = None
    softmax_heads: tuple[int, ...] = ()

    def __str__(self) -> str:
        name = " = ".join(name or "the model itself" for name in self.names)
        text = f"{name}: error of the weights {self.before.mean():.3f} -> {self.after.mean():.3f}"
        if self.output_before is not None:
            text += f", of the output {self.output_before:.3f} -> {self.output_after:.3f}"
        if self.softmax_heads:
            text += f", softmax in heads {', '.join(map(str, self.softmax_heads))}"
        return text


class CalibrationReport(tuple[CalibratedModule, ...]):
    """The layers of a calibration; prints as a table by layer and head."""

    __slots__ = ()

    def __str__(self) -> str:
        """Prints a line a layer: errors of the heads' weights after the fit, then of the output.

        Heads that compute softmax are in brackets.
        """
        rows = [("layer", "error of the weights by head", "of the output")]
        for layer in self:
            heads = [f"{error:.2f}" for error in layer.after.tolist()]
            heads = [
                f"({error})" if head in layer.softmax_heads else error
                for head, error in enumerate(heads)
            ]
            output = "" if layer.output_after is None else f"{layer.output_after:.2f}"
            rows.append((layer.names[0] or "the model itself", " ".join(heads), output))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
        return "\n".join(map(str.rstrip, lines))
