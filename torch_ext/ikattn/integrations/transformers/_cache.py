"""A cache that keeps the features of keys beside keys and values, for decoding.

transformers' caches hand keys and values of all tokens to the attention function, which would make
the features of all keys anew for every token. The layers of ``feature_cache`` mark the keys they
hand out, and the attention function finds their features there.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ikattn._heads import local
from ikattn.integrations.transformers._interface import import_transformers
from ikattn.ops.key_features import KeyFeatures

__all__ = ["feature_cache", "layer_of"]

# Keys that a layer has handed out, and a weak reference to it.
_LAYERS = WeakTensorKeyDictionary()


def feature_cache(model: nn.Module) -> Any:
    """An empty cache for decoding with a model of "ikattn_implicit".

    It is transformers' ``DynamicCache`` (for encoder-decoders an ``EncoderDecoderCache`` of two)
    that also keeps the features of keys, so that a new token costs about what it costs softmax
    attention. With any other cache the attention function makes all features anew for every token:
    the same numbers to rounding, after many tokens in five to ten times the time. A token takes 2 M
    float32 numbers per query head more, and room for as many again. Layers with a sliding window
    are left as they are. A copied or saved cache, and one that was repeated or selected from, makes
    its features anew once. ``torch.compile`` takes the attention function's other way.

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
            layer.kept = WeakKeyDictionary()
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


def state_of(w: Tensor) -> tuple[Any, ...]:
    """What is another after w has changed; a tensor of inference mode counts no changes."""
    w = local(w)
    return w.data_ptr(), w.dtype, 0 if w.is_inference() else w._version


def _empty_layer() -> Any:
    return _layer_class()()


@functools.cache
def _layer_class() -> type[Any]:
    transformers = import_transformers()

    class FeatureLayer(transformers.cache_utils.DynamicLayer):  # type: ignore[misc, name-defined]
        """Keys and values of one attention layer, and what ``KeyFeatures`` keeps of the keys.

        Several attention modules may share the keys; each has its own kernel. Features can be made
        again from the keys at any time: what seldom happens to the keys drops them.
        """

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.kept: WeakKeyDictionary[nn.Module, tuple[Any, KeyFeatures]] = WeakKeyDictionary()

        def features_of(self, kernel: Any, w1: Tensor, w2: Tensor | None) -> KeyFeatures:
            """Features of all keys; those that are new are made now."""
            state = (kernel.p, *map(state_of, kernel.parameters()))
            before, features = self.kept.get(kernel, (None, None))
            if features is None or before != state:
                features = KeyFeatures(w1, w2, p=kernel.p)
                self.kept[kernel] = (state, features)
            missing = self.keys[:, :, len(features) :]
            if missing.size(2) > 0:
                features.append(missing)
            return features

        def update(self, *states: Any, **options: Any) -> tuple[Tensor, Tensor]:
            keys, values = super().update(*states, **options)
            self._mark()
            return keys, values

        def reset(self) -> None:
            self.kept.clear()
            super().reset()

        def crop(self, tokens_to_remove: int) -> None:
            super().crop(tokens_to_remove)
            for _, features in self.kept.values():
                features.crop(min(len(features), self.get_seq_length()))
            self._mark()

        def reorder_cache(self, beam_idx: Tensor) -> None:
            kept, self.kept = self.kept, WeakKeyDictionary()
            super().reorder_cache(beam_idx)
            for _, features in kept.values():
                features.select(beam_idx)
            self.kept = kept
            self._mark()

        def batch_select_indices(self, indices: Tensor) -> None:
            self.kept.clear()
            super().batch_select_indices(indices)
            self._mark()

        def batch_repeat_interleave(self, repeats: int) -> None:
            self.kept.clear()
            super().batch_repeat_interleave(repeats)
            self._mark()

        def _mark(self) -> None:
            if self.keys is not None and not torch.compiler.is_compiling():
                _LAYERS[self.keys] = weakref.ref(self)

        def __reduce__(self) -> Any:
            return _empty_layer, (), {name: x for name, x in vars(self).items() if name != "kept"}

        def __setstate__(self, state: dict[str, Any]) -> None:
            self.__dict__.update(state)
            self._mark()

    return FeatureLayer
