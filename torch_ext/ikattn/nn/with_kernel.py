"""The base of attention modules with a choice of kernel: options, state, checkpoints."""

from __future__ import annotations

import logging
from typing import Any, Literal, TypedDict

from torch import Tensor, nn

from ikattn.nn.functional import check_kernel
from ikattn.nn.kernels import Kernel
from ikattn.ops.forgetting import ForgetGates
from ikattn.ops.magnitude import LearnedOrder
from ikattn.spectral.direct import checked_size
from ikattn.spectral.factory import Spectral, check_spectral, make_spectral
from ikattn.spectral.regularized import Regularized

_logger = logging.getLogger("ikattn")


class ModuleOptions(TypedDict, total=False):
    """The options of a module's kernel, which ``ikattn.MultiheadAttention`` documents."""

    p: float | Literal["learned"] | None
    num_frequencies: int | None
    spectral: Spectral
    stationary: bool
    seed: int | None
    forget: bool


class WithKernel(Regularized):
    """A base of attention modules whose kernel can be chosen and changed."""

    can_forget = False
    default_frequencies = 32  # at heads of 64 a call takes about as long as with softmax

    kernel: Kernel
    p: float | None  # None where it is learned
    magnitude: LearnedOrder | None
    forget: ForgetGates | None

    def _choose_kernel(
        self,
        kernel: Kernel,
        *,
        num_heads: int,
        head_dim: int,
        like: Tensor,
        p: float | Literal["learned"] | None = 2.0,
        num_frequencies: int | None = None,
        spectral: Spectral = "direct",
        stationary: bool = False,
        seed: int | None = None,
        forget: bool = False,
    ) -> None:
        """Takes the options of ``MultiheadAttention``, with new frequencies for "implicit".

        Frequencies are for vectors of ``head_dim``, on the device and in the dtype of ``like``.
        Where an option is wrong, nothing has changed.
        """
        magnitude = None
        if p == "learned":
            p = None
            if kernel != "dot":
                magnitude = LearnedOrder(num_heads, device=like.device, dtype=like.dtype)
                magnitude.train(self.training)
        check_kernel(kernel, p)
        check_spectral(spectral, seed)
        num_frequencies = checked_size(
            "num_frequencies",
            self.default_frequencies if num_frequencies is None else num_frequencies,
        )
        gates = None
        if forget:
            if kernel != "implicit" or not self.can_forget:
                what = f"kernel={kernel!r} of {type(self).__name__}"
                raise ValueError(f"forget must be False for {what}, got {forget!r}")
            gates = ForgetGates(num_heads, head_dim, device=like.device, dtype=like.dtype)
        source = None
        if kernel == "implicit":
            given: Any = spectral
            if callable(given) and not isinstance(given, nn.Module):
                given = given(self)
            own: Any = {"num_heads": num_heads, "head_dim": head_dim, "seed": seed}
            own |= {"device": like.device, "dtype": like.dtype, "stationary": stationary}
            source = make_spectral(given, num_frequencies=num_frequencies, **own)
            source.train(self.training)
        self.kernel = kernel
        self.p = p
        self.register_module("magnitude", magnitude)
        self.register_module("spectral", source)
        self.register_module("forget", gates)
        self.regularization = None

    def _drop_kernel(self) -> None:
        """Takes away what ``_choose_kernel`` gave, before the class changes back."""
        for name in ("kernel", "p", "spectral", "magnitude", "forget", "regularization"):
            delattr(self, name)
        vars(self).pop("_regularized_in", None)

    def _reset_kernel(self) -> None:
        """Draws frequencies anew, and makes orders and gates the first ones again."""
        for name in ("spectral", "magnitude", "forget"):  # absent while upstream's constructor runs
            reset = getattr(getattr(self, name, None), "reset_parameters", None)
            if reset is not None:
                reset()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Lets a checkpoint without the kernel's parameters, as upstream's, leave them as is.

        Where they have no values yet, on the meta device, they are missing. Those of another kernel
        are unexpected, which torch overlooks where the child is None.
        """
        _, strict, _, unexpected_keys, _ = args
        children = {"spectral": "frequencies", "magnitude": "orders p", "forget": "gates"}
        for child, what in children.items():
            module, own = getattr(self, child), f"{prefix}{child}."
            given = [name for name in state_dict if name.startswith(own)]
            if module is None:
                unexpected_keys += given if strict else []
            elif not given and not any(x.is_meta for x in module.state_dict().values()):
                _logger.info("%s* is not in the checkpoint: %s stay as they are", own, what)
                state_dict.update(module.state_dict(prefix=own))
        super()._load_from_state_dict(state_dict, prefix, *args)
