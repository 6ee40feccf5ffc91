"""Attention layers as calibration sees them, those of torch and those of transformers.

Sizes: B batch, H query heads, L queries, S keys, E model size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ikattn.conversion.modules import AttentionModule, select_modules
from ikattn.nn.multihead_attention import MultiheadAttention
from ikattn.nn.parameter_groups import having
from ikattn.nn.selection import Selection
from ikattn.ops.attention import implicit_kernel_weights
from ikattn.recorder.calls.attention_call import AttentionCall
from ikattn.recorder.calls.torch_attention import torch_call
from ikattn.recorder.runs.padding import fill_padding
from ikattn.spectral.interface import call_source, unwrapped

# Names that modules of transformers have for tokens that are not their own.
_OTHERS = ("key_value_states", "encoder_hidden_states")

Listener = Callable[["Layer", AttentionCall], None]

_TORCH, _INTERFACE = "nn.MultiheadAttention", "attention of transformers"


class Layer:
    """An attention module with an implicit kernel, of torch or of transformers."""

    def __init__(self, found: AttentionModule) -> None:
        self.names, self.module = found.names, found.module
        self.source: Any = found.module.spectral  # what the module calls for its frequencies
        self.kernel: Any = unwrapped(self.source)  # without what is around it
        self.is_torch = found.kind.title == _TORCH
        # the module that knows which heads compute softmax
        self.owner: Any = self.module if self.is_torch else self.kernel

    def __str__(self) -> str:
        return " = ".join(name or "the model itself" for name in self.names)

    @property
    def frequencies(self) -> list[nn.Parameter]:
        """The parameters of the kernel's source that are to be fitted."""
        return [w for w in self.kernel.parameters() if w.requires_grad]

    def weights(self, call: AttentionCall) -> Tensor:
        """Returns the implicit kernel's normalised weights [B, H, L, S] of a call."""
        query, key, key_bias = call.query, call.key, call.key_bias
        p, magnitude = self.owner.p, getattr(self.module, "magnitude", None)
        if self.is_torch:
            w1, w2, _ = call_source(self.source, query, key, call.key_padding, call.query_padding)
        else:
            w1, w2 = self.kernel(query, key, call.key_padding)
        if magnitude is not None:
            learned = magnitude(key, call.key_padding)
            p, key_bias = None, learned if key_bias is None else learned + key_bias
        return implicit_kernel_weights(
            query,
            key,
            w1.to(query.dtype),
            None if w2 is None else w2.to(query.dtype),
            p=p,
            key_bias=key_bias,
            attn_mask=call.attn_mask,
            enable_gqa=query.size(1) != key.size(1),
        )


def layers_of(model: nn.Module, select: Selection | None) -> list[Layer]:
    """Returns the selected layers with implicit kernels, in the order of their names."""
    found = [
        Layer(one)
        for one in select_modules(model, select)
        if one.kind.title in (_TORCH, _INTERFACE) and one.is_ours and one.kernel == "implicit"
    ]
    if not found:
        raise ValueError(
            f"calibrate: expected a model with implicit kernels, got a {type(model).__name__} "
            "without; ikattn.convert makes them"
        )
    return found


@contextmanager
def as_softmax(model: nn.Module, layers: Iterable[Layer]) -> Iterator[None]:
    """Makes every implicit kernel of the model softmax for the time of the block.

    The layers tell which kinds of kernels there are.
    """
    ours = (module for module in model.modules() if isinstance(module, MultiheadAttention))
    with ExitStack() as stack:
        implicit = [module for module in ours if module.kernel == "implicit"]
        stack.enter_context(having(implicit, "kernel", "dot"))
        if not all(layer.is_torch for layer in layers):
            from ikattn.integrations.transformers.interface import softmax_in_place

            stack.enter_context(softmax_in_place(model))
        yield


@contextmanager
def listening(
    model: nn.Module, layers: Iterable[Layer], batch: Any, listener: Listener
) -> Iterator[None]:
    """Tells ``listener`` of what each layer's attention is given, for the time of the block.

    It is called with the layer and its call, before the layer's output is there. ``batch`` is what
    the model is called with, whose attention_mask tells of padding.
    """
    by_module = {layer.module: layer for layer in layers}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(module, nn.MultiheadAttention)
        listener(by_module[module], torch_call(module, args, kwargs, None, None, None))

    with ExitStack() as stack:
        for module, layer in by_module.items():
            if layer.is_torch:
                hook = module.register_forward_pre_hook(note, with_kwargs=True, prepend=True)
                stack.enter_context(hook)
        of_interface = [module for module, layer in by_module.items() if not layer.is_torch]
        if of_interface:
            from ikattn.integrations.transformers.attention import scaled_query
            from ikattn.recorder.calls import transformers_attention

            crosses: dict[nn.Module, bool] = {}

            def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                crosses[module] = _reads_others(module, args, kwargs)

            for module in of_interface:
                stack.enter_context(module.register_forward_pre_hook(look, with_kwargs=True))
            is_one_stack = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)

            def hear(module: nn.Module, given: Any, _: Any) -> None:
                if module not in of_interface:
                    return
                is_self = not crosses[module] and given.query.size(2) == given.key.size(2)
                kind = "self" if is_self else "cross"
                call = transformers_attention.interface_call(module, given, kind)
                call.query, call.scaling = scaled_query(call.query, call.scaling), None
                tells = is_one_stack and is_self and given.attention_mask is not None
                of_tokens = _mask_of_tokens(batch, call) if tells else None
                fill_padding(call, given.attention_mask, of_tokens)
                listener(by_module[module], call)

            stack.enter_context(transformers_attention.listening(model, hear))
        yield


def _reads_others(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of a module of transformers is cross-attention."""
    try:
        given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    except TypeError:
        given = kwargs
    given = given | given.get("kwargs", {})
    return any(given.get(name) is not None for name in _OTHERS)


def _mask_of_tokens(batch: Any, call: AttentionCall) -> Tensor | None:
    """Returns the batch's attention_mask [B, S], where it is one of the call's keys."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    sizes = (call.key.size(0), call.key.size(2))
    return mask if isinstance(mask, Tensor) and tuple(mask.shape) == sizes else None
