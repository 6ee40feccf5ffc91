"""The kinds of attention that ``ikattn.convert`` knows, and what each has to say of its modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import nn

from ikattn.nn.kernels import Kernel
from ikattn.spectral.factory import Spectral

Sizes: TypeAlias = Callable[[nn.Module], "tuple[int, int]"]


class KernelSettings(NamedTuple):
    """The options of ``ikattn.convert``, for one module."""

    kernel: Kernel
    p: float | Literal["learned"] | None
    num_frequencies: int | None  # None: as many as the module has by default
    spectral: Spectral
    stationary: bool
    seed: int | None
    sizes: Sizes | None
    forget: bool


class Kind:
    """A base of the kinds of attention modules."""

    title: str  # a plural, for messages

    def holds(self, module: nn.Module) -> bool:
        """Whether the module is of this kind, converted or not, or derived by somebody else."""
        raise NotImplementedError

    def is_ours(self, module: nn.Module) -> bool:
        """Whether the module has a kernel of this package, and is not changed otherwise."""
        raise NotImplementedError

    def is_plain(self, module: nn.Module) -> bool:
        """Whether nobody else has changed what the module computes."""
        return True

    def kernel_of(self, module: Any) -> str | None:
        """Returns the kernel of one of ours, None of another."""
        return getattr(module, "kernel", None)

    def describe(self, module: Any) -> str:
        """Returns what a module that is not ours is, for a table."""
        return type(module).__name__

    def check(
        self, model: nn.Module, modules: Sequence[nn.Module], settings: KernelSettings
    ) -> None:
        """Raises TypeError or ValueError where these modules do not take the settings."""

    def change(self, model: nn.Module, module: Any, settings: KernelSettings) -> None:
        """Gives one module its kernel."""
        raise NotImplementedError

    def undo(self, module: Any) -> None:
        """Takes the kernel away; weights stay."""
        raise NotImplementedError

    def check_undo(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        """Raises ValueError where these modules cannot lose their kernels without others."""

    def settle(self, model: nn.Module, settings: KernelSettings | None = None) -> None:
        """Brings what is around the modules in line with them; None: nothing was converted."""

    def options_of(self, settings: KernelSettings) -> dict[str, Any]:
        """Returns the settings as arguments of a module's ``set_kernel``."""
        return {name: x for name, x in settings._asdict().items() if name != "sizes"}
