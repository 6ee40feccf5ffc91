"""The kernel of an attention module of transformers, and how it gets there.

Sizes: H query heads, d head size, M frequencies.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ikattn._heads import local
from ikattn.integrations.transformers.interface import tell_of_another_kernel
from ikattn.nn.functional import check_kernel
from ikattn.nn.kinds import Sizes
from ikattn.nn.softmax_heads import SoftmaxHeads
from ikattn.ops.forgetting import ForgetGates
from ikattn.spectral import Direct, Ikan, Mikan
from ikattn.spectral.regularized import Regularized

IMPLICIT = "ikattn_implicit"  # the attention implementation
# Its name in saved configs: transformers quotes it where nobody has imported ikattn.
SAVED = f"{IMPLICIT} (import ikattn, then ikattn.integrations.transformers.from_pretrained)"
# Names of H and d in modules of transformers; a config may hold H under the first two.
_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_HEAD_SIZE = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size")


class ImplicitKernel(Direct, SoftmaxHeads):
    """The kernel of one attention layer: frequencies for each query head, and the norm's order.

    Sizes and options are those of ``ikattn.spectral.Direct``; p is the order of the norm in a key's
    magnitude, a real number >= 1, or None: no magnitude.
    """

    key_heads: int | None = None  # where the model's config tells

    def __init__(self, *sizes: int, p: float | None, **options: Any) -> None:
        check_kernel("implicit", p)
        super().__init__(*sizes, **options)
        self.p = p

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}"


class GeneratedKernel(Regularized, SoftmaxHeads):
    """The kernel of one attention layer whose frequencies a generator makes, and the norm's order.

    Sizes and options are those of ``ikattn.spectral.Ikan``; "mikan" averages keys alone here.
    """

    drawn: tuple[Tensor, Tensor | None] | None = None  # the frequencies of the last call
    key_heads: int | None = None  # where the model's config tells

    def __init__(self, *sizes: int, spectral: str, p: float | None, **options: Any) -> None:
        check_kernel("implicit", p)
        super().__init__()
        is_ikan = spectral == "ikan"
        self.spectral = Ikan(*sizes, **options) if is_ikan else Mikan(*sizes, pool="key", **options)
        self.p = p

    def reset_parameters(self) -> None:
        """Draws the networks anew."""
        assert isinstance(self.spectral, Ikan | Mikan)
        self.spectral.reset_parameters()

    def forward(
        self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns w1 and w2 for queries [B, H, L, d], keys [B, G, S, d] and padding [B, S]."""
        groups = query.size(1) // key.size(1)
        key = key.repeat_interleave(groups, 1) if groups > 1 else key
        drawn = self._frequencies(query, key, key_padding_mask, None)
        if not torch.compiler.is_compiling():
            self.drawn = drawn
        return drawn

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "drawn": None}

    def extra_repr(self) -> str:
        return f"p={self.p}"


KERNELS = (ImplicitKernel, GeneratedKernel)


class Frequencies:
    """The order p and the frequencies of a call, and whether those of a later call are the same.

    It looks at numbers, not at modules: something may be around a kernel, as PEFT's wrapper is.
    """

    def __init__(self, p: float | None, w1: Tensor, w2: Tensor | None) -> None:
        self._p = p
        self._values = [local(w).detach().clone() for w in (w1, w2) if w is not None]
        self._note(w1, w2)

    def _note(self, w1: Tensor, w2: Tensor | None) -> None:
        # references, without which other tensors might come to lie in their place
        self._seen = [local(w).detach() for w in (w1, w2) if w is not None]
        self._places = [_place_of(w) for w in self._seen]

    def are_still(self, p: float | None, w1: Tensor, w2: Tensor | None) -> bool:
        """Whether a later call has the same ones."""
        now = [local(w).detach() for w in (w1, w2) if w is not None]
        if p != self._p or len(now) != len(self._values):
            return False
        if None not in self._places and [_place_of(w) for w in now] == self._places:
            return True
        pairs = list(zip(now, self._values, strict=True))
        is_alike = all(x.dtype == y.dtype and x.device == y.device for x, y in pairs)
        if not is_alike or not all(torch.equal(x, y) for x, y in pairs):
            return False
        self._note(w1, w2)
        return True

    def __reduce__(self) -> Any:
        return Frequencies, (self._p, *self._values, None)[:3]


def _place_of(w: Tensor) -> tuple[Any, ...] | None:
    """Returns what differs after w has changed; None: a tensor of inference_mode does not tell."""
    return None if w.is_inference() else (w.data_ptr(), w.shape, w.stride(), w.dtype, w._version)


def kernel_of(module: nn.Module) -> Any:
    """Returns the kernel of an attention module, or what has been put in its place."""
    kernel = getattr(module, "spectral", None)
    if kernel is None:
        raise RuntimeError(
            f'{type(module).__name__} has the attention implementation "{IMPLICIT}" but no '
            "frequencies: call ikattn.convert(model), or load the model with "
            "ikattn.integrations.transformers.from_pretrained"
        )
    if not hasattr(kernel, "p"):
        raise RuntimeError(
            f"{type(module).__name__}.spectral is a {type(kernel).__name__}, which has no order p: "
            "call ikattn.convert(model, spectral=...) with the name of a source"
        )
    return kernel


def attach_kernel(
    name: str, module: nn.Module, options: dict[str, Any], seed: int | None, sizes: Sizes | None
) -> None:
    """Gives a module that calls the interface a kernel as its child ``spectral``."""
    spectral = options["spectral"]
    if spectral == "mikan" and getattr(module, "is_causal", True):
        raise ValueError(
            "convert: spectral='mikan' averages over whole sequences and would let "
            f"{name}, which is causal, see the future; expected 'ikan' or 'direct'"
        )
    if any(_is_offloaded(part) for part in module.modules()):
        raise ValueError(
            f"convert: accelerate offloads the weights of {name}: convert the model before it is "
            "offloaded"
        )
    kind = ImplicitKernel if spectral == "direct" else partial(GeneratedKernel, spectral=spectral)
    heads, head_size = (sizes or _sizes_of)(module)
    like = next((x for x in module.parameters() if x.is_floating_point()), torch.empty(0))
    own = {name: options[name] for name in ("p", "stationary")}
    own |= {"seed": seed, "device": like.device, "dtype": like.dtype}
    kernel = kind(heads, head_size, options["num_frequencies"], **own).train(module.training)
    if options.get("softmax_heads", False):
        kernel.keep_softmax(torch.zeros(heads, dtype=torch.bool))
    if options.get("forget"):
        size = getattr(module, "v_head_dim", head_size)
        kernel.forget = ForgetGates(heads, size, device=like.device, dtype=like.dtype)
    kernel.key_heads = _first_int(_KEY_HEADS, getattr(module, "config", None))
    module.register_module("spectral", kernel)
    module.register_forward_pre_hook(_tell_if_unused)


def detach_kernel(module: nn.Module) -> None:
    del module.spectral
    hooks = module._forward_pre_hooks
    for number in [number for number, hook in hooks.items() if hook is _tell_if_unused]:
        del hooks[number]


def _is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate brings the weights of a module in for its calls alone."""
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(x, "offload", False) for x in (hook, *getattr(hook, "hooks", ())))


def _tell_if_unused(module: nn.Module, args: Any) -> None:
    """Tells where the config's attention has been set to another than the implicit kernel's."""
    if not torch.compiler.is_compiling():
        tell_of_another_kernel(module, IMPLICIT)


def _sizes_of(module: nn.Module) -> tuple[int, int]:
    heads = _first_int(_HEADS, module, getattr(module, "config", None))
    head_size = _first_int(_HEAD_SIZE, module)
    if heads is None or head_size is None:
        numbers = {name: x for name, x in vars(module).items() if isinstance(x, int)}
        raise ValueError(
            f"convert: expected one of {', '.join(_HEADS)} and one of "
            f"{', '.join(_HEAD_SIZE)} in {type(module).__name__}, got {numbers}; pass "
            "sizes=lambda module: (heads, head_size)"
        )
    return heads, head_size


def _first_int(names: tuple[str, ...], *owners: Any) -> int | None:
    values = (getattr(owner, name, None) for owner in owners for name in names)
    return next((value for value in values if isinstance(value, int)), None)
