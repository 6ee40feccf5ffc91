"""Claims: equations between tensors that a model computed, looked at later.

On a GPU the host would wait for every number that it looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ikattn.recorder.sums.distances import Distance, offs_of


class Claim(NamedTuple):
    """That rows are the same.

    It outlives its run, and so holds nothing of it but a few rows and names.
    """

    layer: str
    step: str  # what the rows would say if they differed
    distance: Distance
    hint: str = ""
    at_fault: Callable[[], None] | None = None  # called where it does not hold

    def error(self, off: float) -> RuntimeError:
        """Returns the error of rows that are so far apart, over the largest number."""
        return RuntimeError(
            f"record: {self.layer} does not add up: {self.step}, which is off by "
            f"{100 * off:.3g} % of the largest number{self.hint}"
        )


class Settlement:
    """Claims, taken from a list, whose numbers are on their way to the host.

    ``to_cpu`` copies a tensor to the CPU; the copy may be filled later.
    """

    def __init__(self, claims: list[Claim], to_cpu: Callable[[Tensor], Tensor]) -> None:
        self._claims, claims[:] = list(claims), []
        alike = offs_of(claim.distance for claim in self._claims)
        self._copies = [(own, to_cpu(offs)) for own, offs in alike]

    def check(self) -> None:
        """Looks at the numbers, which must have arrived.

        Raises:
            RuntimeError: That of the first claim which does not hold.
        """
        wrong = {
            number: off
            for own, copy in self._copies
            for number, off in zip(own, copy.tolist(), strict=True)
            if off > self._claims[number].distance.tolerance
        }
        for number in wrong:
            at_fault = self._claims[number].at_fault
            if at_fault is not None:
                at_fault()
        if wrong:
            first = min(wrong)
            raise self._claims[first].error(wrong[first])


def settle(claims: list[Claim]) -> None:
    """Looks at all claims at once, and takes them from the list; the host waits for them.

    Raises:
        RuntimeError: That of the first which does not hold.
    """
    Settlement(claims, Tensor.cpu).check()
