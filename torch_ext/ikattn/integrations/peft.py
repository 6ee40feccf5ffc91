"""PEFT: adapters for converted models, and the frequencies that are trained with them.

LoRA finds the projections of an ``ikattn.MultiheadAttention`` by itself. What it cannot do is train
the frequencies, which it freezes with the rest of the model: ``modules_to_save=["spectral"]`` works
for transformers models, but PEFT refuses it within attention that has an adapter itself.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from ikattn._optional import optional
from ikattn.nn.multihead_attention import MultiheadAttention

__all__ = ["merge_and_unload", "with_trainable_frequencies"]

Model = TypeVar("Model", bound=nn.Module)


def with_trainable_frequencies(model: Model, adapter_name: str = "default") -> Model:
    """Makes frequencies a part of the adapter that a model is going to get; returns the model.

    They are trained and saved with it, and loaded if the model that the adapter is loaded into has
    been through this function as well. ``merge_and_unload`` of this module ends it. Call this once
    for each adapter, with its name: one for which it was not called runs with the model's first
    frequencies, also if its file holds others.

    Args:
        model: A converted model, before ``peft.get_peft_model`` or ``PeftModel.from_pretrained``;
            for a further adapter what these returned.
        adapter_name: As for these, ``add_adapter`` or ``load_adapter``.

    Raises:
        ValueError: There are no frequencies in the model's ``ikattn.MultiheadAttention``.
        ImportError: PEFT is missing.

    Example:
        >>> import pytest, torch, ikattn
        >>> peft = pytest.importorskip("peft")
        >>> from ikattn.integrations.peft import with_trainable_frequencies
        >>> model = ikattn.convert(torch.nn.TransformerEncoderLayer(16, 4))
        >>> config = peft.LoraConfig(target_modules=["self_attn"])
        >>> model = peft.get_peft_model(with_trainable_frequencies(model), config)
        >>> trained = [name for name, w in model.named_parameters() if w.requires_grad]
        >>> sum("lora_" in name for name in trained), sum(".spectral." in name for name in trained)
        (4, 2)
    """
    wrapper = _wrapper()
    attention = [
        module
        for module in model.modules()
        if isinstance(module, MultiheadAttention) and module.spectral is not None
    ]
    if not attention:
        raise ValueError(
            "with_trainable_frequencies: expected ikattn.MultiheadAttention with "
            f"kernel='implicit', got a {type(model).__name__} without; in a transformers model "
            "modules_to_save=['spectral'] does it"
        )
    for module in attention:
        wrapped: Any = module.spectral
        if not isinstance(wrapped, wrapper):
            module.spectral = wrapper(wrapped, adapter_name)
        elif adapter_name not in wrapped.modules_to_save:
            wrapped.update(adapter_name)
    return model


def merge_and_unload(model: Any, **options: Any) -> nn.Module:
    """Merges the adapter into the model, as PEFT does, and the adapter's frequencies.

    Args:
        model: A ``PeftModel``.
        options: For ``model.merge_and_unload``.

    Returns:
        The model without anything of PEFT.

    Example:
        >>> import pytest, torch, ikattn
        >>> peft = pytest.importorskip("peft")
        >>> from ikattn.integrations.peft import merge_and_unload, with_trainable_frequencies
        >>> model = ikattn.convert(torch.nn.TransformerEncoderLayer(16, 4))
        >>> config = peft.LoraConfig(target_modules=["self_attn"])
        >>> model = peft.get_peft_model(with_trainable_frequencies(model), config)
        >>> type(merge_and_unload(model).self_attn.spectral).__name__
        'Direct'
    """
    wrapper = _wrapper()
    merged: nn.Module = model.merge_and_unload(**options)
    for module in merged.modules():
        if isinstance(module, MultiheadAttention) and isinstance(module.spectral, wrapper):
            wrapped: Any = module.spectral
            module.spectral = wrapped.modules_to_save[wrapped.active_adapters[0]]
    return merged


def _wrapper() -> Any:
    """PEFT's class for modules that are trained in full and saved with the adapter."""
    return optional("peft.utils", "ikattn.integrations.peft", "'ikattn[peft]'").ModulesToSaveWrapper
