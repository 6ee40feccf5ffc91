"""A cache that keeps the features of keys beside keys and values, for decoding.

transformers' caches hand keys and values of all tokens to the attention function, which would make
the features of all keys anew for every token. The layers of ``feature_cache`` mark the keys they
hand out, and the attention function finds their features there.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...key_features import KeyFeatures
from ._interface import import_transformers

__all__ = ["feature_cache", "layer_of"]

# Keys that a layer has handed out, and a weak reference to it.
_LAYERS = WeakTensorKeyDictionary()


def feature_cache(model: nn.Module) -> Any:
    """An empty cache for decoding with a model of "ikattn_implicit".

    It is transformers' ``DynamicCache`` (for encoder-decoders an ``EncoderDecoderCache`` of two)
    that also keeps the features of keys, so that a new token costs what it costs softmax attention.
    With any other cache the attention function makes all features anew for every token: the same
    numbers to rounding, some twenty times as slow for long sequences. A token takes 2 M float32
    numbers per query head more. Layers with a sliding window are left as they are.

    Args:
        model: A model after ``use_implicit_attention`` or from ``from_pretrained``.

    Returns:
        A cache, for ``past_key_values`` of ``model.generate`` or ``model.forward``; for one batch
        of sequences, as every cache.

    Raises:
        ImportError: transformers is missing.
        TypeError: ``model`` is no transformers model.

    Example:
        >>> import pytest, torch
        >>> transformers = pytest.importorskip("transformers")
        >>> from ikattn.integrations.transformers import feature_cache, use_implicit_attention
        >>> sizes = dict(n_embd=16, n_head=2, n_layer=1, vocab_size=9)
        >>> config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        >>> model = use_implicit_attention(transformers.GPT2LMHeadModel(config)).eval()
        >>> prompt, options = torch.tensor([[1, 2, 3]]), dict(max_new_tokens=4, do_sample=False)
        >>> plain = model.generate(prompt, **options)
        >>> kept = model.generate(prompt, past_key_values=feature_cache(model), **options)
        >>> torch.equal(plain, kept)
        True
    """
    transformers = import_transformers()
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise TypeError(
            "feature_cache: model must be a transformers PreTrainedModel, got "
            f"{type(model).__name__}"
        )
    own = transformers.DynamicCache(config=config)
    for layer in own.layers:
        if type(layer) is transformers.cache_utils.DynamicLayer:
            layer.__class__ = _layer_class()
            layer.kept = None
    if own.layer_class_to_replicate is not None:
        own.layer_class_to_replicate = _layer_class()
    if not getattr(config, "is_encoder_decoder", False):
        return own
    cross = transformers.DynamicCache()
    cross.layer_class_to_replicate = _layer_class()
    return transformers.EncoderDecoderCache(own, cross)


def layer_of(key: Tensor) -> Any:
    """The layer of a ``feature_cache`` that handed these keys out, or None."""
    reference = _LAYERS.get(key)
    layer = None if reference is None else reference()
    return layer if layer is not None and layer.keys is key else None


def _empty_layer() -> Any:
    return _layer_class()()


@functools.cache
def _layer_class() -> type[Any]:
    transformers = import_transformers()

    class FeatureLayer(transformers.cache_utils.DynamicLayer):  # type: ignore[misc, name-defined]
        """Keys and values of one attention layer, and what ``KeyFeatures`` keeps of the keys."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.kept: KeyFeatures | None = None

        def features_of(self, w1: Tensor, w2: Tensor | None, p: float | None) -> KeyFeatures:
            """Features of all keys; those that are new are made now."""
            if self.kept is None:
                self.kept = KeyFeatures(w1, w2, p=p)
            missing = self.keys[:, :, len(self.kept) :]
            if missing.size(2) > 0:
                self.kept.append(missing)
            return self.kept

        def update(self, *states: Any, **options: Any) -> tuple[Tensor, Tensor]:
            keys, values = super().update(*states, **options)
            self._mark()
            return keys, values

        def reset(self) -> None:
            super().reset()
            self.kept = None

        def crop(self, tokens_to_remove: int) -> None:
            super().crop(tokens_to_remove)
            if self.kept is not None:
                self.kept.crop(min(len(self.kept), self.get_seq_length()))
            self._mark()

        def reorder_cache(self, beam_idx: Tensor) -> None:
            super().reorder_cache(beam_idx)
            self._select(beam_idx)

        def batch_select_indices(self, indices: Tensor) -> None:
            super().batch_select_indices(indices)
            self._select(indices)

        def batch_repeat_interleave(self, repeats: int) -> None:
            before = 0 if self.keys is None or self.keys.dim() < 4 else self.keys.size(0)
            super().batch_repeat_interleave(repeats)
            self._select(torch.arange(before).repeat_interleave(repeats))

        def _select(self, indices: Tensor) -> None:
            if self.kept is not None:
                self.kept.select(indices)
            self._mark()

        def _mark(self) -> None:
            if self.keys is not None:
                _LAYERS[self.keys] = weakref.ref(self)

        def __reduce__(self) -> Any:
            return _empty_layer, (), vars(self)

    return FeatureLayer
