"""How ``nn.MultiheadAttention`` becomes ``ikattn.MultiheadAttention``, and back."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.activation import MultiheadAttention as StockMultiheadAttention

from ikattn.nn.kinds import KernelSettings, Kind
from ikattn.nn.multihead_attention import MultiheadAttention
from ikattn.spectral import Mikan

_NESTED_BEFORE = "_use_nested_tensor_before_ikattn"


class TorchAttention(Kind):
    """``nn.MultiheadAttention``."""

    title = "nn.MultiheadAttention"

    def holds(self, module: nn.Module) -> bool:
        return isinstance(module, StockMultiheadAttention)

    def is_ours(self, module: nn.Module) -> bool:
        return type(module) is MultiheadAttention and "forward" not in vars(module)

    def is_plain(self, module: nn.Module) -> bool:
        is_known = type(module) in (StockMultiheadAttention, MultiheadAttention)
        return is_known and "forward" not in vars(module)

    def describe(self, module: Any) -> str:
        return self.title

    def change(self, model: nn.Module, module: Any, settings: KernelSettings) -> None:
        """Changes the module's class, as torch.nn.utils.parametrize does; all it holds stays."""
        decoders = (x for x in model.modules() if isinstance(x, nn.TransformerDecoderLayer))
        is_cross = any(module is layer.multihead_attn for layer in decoders)
        if settings.spectral == "mikan" and is_cross:
            settings = settings._replace(spectral=partial(_keys_alone, settings), stationary=False)
        module.__class__ = MultiheadAttention
        module.set_kernel(**self.options_of(settings))

    def undo(self, module: Any) -> None:
        module.remove_kernel()

    def settle(self, model: nn.Module, settings: KernelSettings | None = None) -> None:
        """Keeps nn.TransformerEncoder from nesting padded input, but for the dot kernel.

        Nesting pays only on the fused path, which is that of the dot kernel. Where all kernels are
        such again, the encoder's first setting comes back.
        """
        for encoder in model.modules():
            if not isinstance(encoder, nn.TransformerEncoder):
                continue
            ours = (x for x in encoder.modules() if isinstance(x, MultiheadAttention))
            if any(getattr(module, "kernel", "dot") != "dot" for module in ours):
                vars(encoder).setdefault(_NESTED_BEFORE, encoder.use_nested_tensor)
                encoder.use_nested_tensor = False
            elif _NESTED_BEFORE in vars(encoder):
                encoder.use_nested_tensor = vars(encoder).pop(_NESTED_BEFORE)


def _keys_alone(settings: KernelSettings, attention: nn.MultiheadAttention) -> Mikan:
    """Makes a MIKAN that averages keys alone, for a module."""
    count, weight = settings.num_frequencies, attention.out_proj.weight
    return Mikan(
        attention.num_heads,
        attention.head_dim,
        MultiheadAttention.default_frequencies if count is None else count,
        pool="key",
        stationary=settings.stationary,
        seed=settings.seed,
        device=weight.device,
        dtype=weight.dtype,
    )
