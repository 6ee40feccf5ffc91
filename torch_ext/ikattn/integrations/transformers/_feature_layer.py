"""The layers of features of ``decoding_cache``, and the caches that they are in."""

from __future__ import annotations

import copy
import weakref
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ikattn.integrations.transformers._cache import FEATURE_LAYERS
from ikattn.integrations.transformers.interface import import_transformers
from ikattn.integrations.transformers.kernels import Frequencies
from ikattn.ops.key_features import KeyFeatures

transformers = import_transformers()


class FeatureLayer(transformers.cache_utils.DynamicLayer):  # type: ignore[misc, name-defined]
    """Keys and values of one attention layer, and what ``KeyFeatures`` keeps of the keys.

    Several attention modules may share the keys; each has its own kernel. Features can be made
    again from the keys at any time: what seldom happens to the keys drops them.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept: WeakKeyDictionary[nn.Module, tuple[Frequencies, KeyFeatures]]
        self.kept = WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and features."""
        tensors = [x for x in (self.keys, self.values) if x is not None]
        return sum(x.nbytes for x in (*tensors, *(kept for _, kept in self.kept.values())))

    def features_of(self, kernel: Any, w1: Tensor, w2: Tensor | None) -> KeyFeatures:
        """Returns features of all keys; those that are new are made now."""
        before, features = self.kept.get(kernel, (None, None))
        if features is None or before is None or not before.are_still(kernel.p, w1, w2):
            features = KeyFeatures(w1, w2, p=kernel.p)
            self.kept[kernel] = (Frequencies(kernel.p, w1, w2), features)
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
            FEATURE_LAYERS[self.keys] = weakref.ref(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "kept": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.kept = WeakKeyDictionary()
        self._mark()


class Measured:
    """A base of caches that tell their size, and whose copies are apart from them."""

    layers: list[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all that the layers hold."""
        return sum(_nbytes(layer) for layer in self.layers)

    def __copy__(self) -> Any:
        return copy.deepcopy(self)


def _nbytes(held: Any) -> int:
    """Returns the bytes of a layer, or of what one of transformers' own layers holds."""
    if isinstance(getattr(held, "nbytes", None), int):
        return int(held.nbytes)
    if isinstance(held, dict | list | tuple):
        return sum(map(_nbytes, held.values() if isinstance(held, dict) else held))
    return sum(map(_nbytes, vars(held).values())) if hasattr(held, "lazy_initialization") else 0


class FeatureCache(Measured, transformers.DynamicCache):  # type: ignore[misc, name-defined]
    """A ``DynamicCache`` that keeps features beside the keys, where a layer has no window."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for layer in self.layers:
            if type(layer) is transformers.cache_utils.DynamicLayer:
                layer.__class__ = FeatureLayer
                layer.kept = WeakKeyDictionary()
        if not self.layers:
            self.layer_class_to_replicate = FeatureLayer


class FeatureCaches(Measured, transformers.EncoderDecoderCache):  # type: ignore[misc, name-defined]
    """Two caches, of self-attention and of cross-attention."""

    @property
    def nbytes(self) -> int:
        """Bytes of both caches."""
        return int(self.self_attention_cache.nbytes + self.cross_attention_cache.nbytes)
