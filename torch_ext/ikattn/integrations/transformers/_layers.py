"""The layers of ``decoding_cache``, of features or of states, and the caches that they are in."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ikattn.integrations.transformers._cache import LAYERS
from ikattn.integrations.transformers._masks import shown_keys
from ikattn.integrations.transformers.interface import import_transformers
from ikattn.integrations.transformers.kernels import IMPLICIT, Frequencies
from ikattn.ops.key_features import KeyFeatures
from ikattn.ops.recurrent_state import RecurrentState

transformers = import_transformers()

_HIDDEN = -1e30  # masks of floating-point numbers hide pairs with less


# --- Features


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
    def handed(self) -> Tensor | None:
        return self.keys  # type: ignore[no-any-return]

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
            LAYERS["features"][self.keys] = weakref.ref(self)

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


# --- States


class _Weakly:
    """Objects that a layer knows and does not own: copies know them, what is loaded does not."""

    def __init__(self, objects: Iterable[Any] = ()) -> None:
        self._references = [weakref.ref(x) for x in objects]

    def alive(self) -> list[Any]:
        """Returns those that are still there."""
        return [x for x in (reference() for reference in self._references) if x is not None]

    def __deepcopy__(self, memo: Any) -> _Weakly:
        return self

    def __reduce__(self) -> Any:
        return _Weakly, ()


class StateLayer(transformers.cache_utils.CacheLayerMixin):  # type: ignore[misc, name-defined]
    """The tokens of one attention layer, as a state."""

    is_sliding = False
    is_croppable = False

    def __init__(self, dtype: torch.dtype, configs: _Weakly) -> None:
        super().__init__()
        self.dtype = dtype
        self.configs = configs
        self.reset()

    @property
    def nbytes(self) -> int:
        """Bytes of the state; 0 before the first token."""
        return 0 if self.state is None else self.state.nbytes

    def reset(self) -> None:
        self.state: RecurrentState | None = None
        self.frequencies: Frequencies | None = None  # with which the state was made
        self.module = _Weakly()  # the attention module whose keys are in the state
        self.visible: Tensor | None = None  # [B], keys of the state that are not hidden
        self.handed: Tensor | None = None  # keys that are not yet in the state
        self.length = 0
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        others = {x._attn_implementation for x in self.configs.alive()} - {IMPLICIT}
        if others:
            raise RuntimeError(
                f'decoding_cache: tokens do not reach the attention function "{IMPLICIT}", which '
                f"alone knows the keys before them: the model's config names {sorted(others)}; "
                f'call model.set_attn_implementation("{IMPLICIT}")'
            )
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "decoding_cache: torch.compile has no states; call it eagerly"
            )
        self.lazy_initialization(key, value)
        self.handed = key
        self.length += key.size(2)
        LAYERS["state"][key] = weakref.ref(self)
        return key, value

    def attend(
        self,
        module: nn.Module,
        kernel: tuple[float | None, Tensor, Tensor | None],
        tokens: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        log_decay: Tensor | None,
    ) -> Tensor:
        """Returns attention [B, H, L, d_v] of new queries, keys and values; they enter the state.

        The kernel is p, w1 and w2; the mask is as the module was given it, and log_decay [B, H, L].
        """
        p, w1, w2 = kernel
        query, key, value = tokens
        length, past = query.size(2), self.length - key.size(2)
        if self.state is None or self.frequencies is None:
            w2 = None if w2 is None else w2.detach()
            self.state = RecurrentState(w1.detach(), w2, p=p, dtype=self.dtype)
            self.frequencies = Frequencies(*kernel)
        elif self.module.alive() not in ([module], []):
            raise NotImplementedError(
                f"decoding_cache: {type(module).__name__} got a state with keys of another "
                "attention module, in a copy of the model or in a layer that both share; begin "
                "again with a new cache, or take a cache of features"
            )
        elif not self.frequencies.are_still(*kernel):
            raise NotImplementedError(
                "decoding_cache: the keys before are in the state with other frequencies than "
                f"those that {type(module).__name__} has now; begin again with a new cache"
            )
        self.module = _Weakly([module])
        if mask is None and length > 1 and past > 0:
            _refuse_mask("there is none, for several queries after keys before")
        visible = _visible_keys(mask, length, past, query.size(0))
        bias = self._bias_of(visible, past, query)
        output = self.state.extend(query, key, value, bias, log_decay=log_decay)
        self.handed = None
        return output

    def _bias_of(self, visible: Tensor | None, past: int, query: Tensor) -> Tensor | None:
        """Makes -inf for new keys that are hidden; checks that those before are as they were."""
        batch, length = query.size(0), query.size(2)
        before = self.visible
        if before is None:
            before = torch.zeros(batch, dtype=torch.int64, device=query.device)
        if visible is None:
            self.visible = before + length
            if bool((before != past).any()):
                _refuse_mask("it shows keys that were hidden when they came")
            return None
        if bool((visible[:, :past].sum(1) != before).any()):
            _refuse_mask("it does not show the keys before that it showed when they came")
        new = visible[:, past:]
        self.visible = before + new.sum(1)
        bias = torch.zeros(new.shape, device=new.device).masked_fill(~new, -torch.inf)
        return bias[:, None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise NotImplementedError(
                "decoding_cache: a state forgets no token, so that no call can be taken back, as "
                "assisted generation does; a cache of features can"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.state is not None and self.visible is not None:
            self.state.reorder(beam_idx)
            self.visible = self.visible.index_select(0, beam_idx.to(self.visible.device))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.visible is not None:
            self.reorder_cache(torch.arange(self.visible.size(0))[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.visible is not None:
            order = torch.arange(self.visible.size(0))
            self.reorder_cache(order.repeat_interleave(repeats))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "state": copy.copy(self.state)}

    def offload(self) -> None:
        raise NotImplementedError("decoding_cache: a state is not offloaded; it is of one size")


class StateCache(Measured, transformers.DynamicCache):  # type: ignore[misc, name-defined]
    """A ``DynamicCache`` of states in place of keys and values."""

    def __init__(self, dtype: torch.dtype, configs: list[Any], model: str, config: Any) -> None:
        super().__init__(config=config)
        plain = transformers.cache_utils.DynamicLayer
        others = {type(layer).__name__ for layer in self.layers if type(layer) is not plain}
        if others:
            raise NotImplementedError(
                f"decoding_cache: {model} has layers of {', '.join(sorted(others))}; a state "
                "stands for keys and values of all tokens, and not for these; a cache of features "
                "takes them"
            )
        make = partial(StateLayer, dtype, _Weakly(configs))
        self.layers = [make() for _ in self.layers]
        if not self.layers:
            self.layer_class_to_replicate = make

    def update(self, *states: Any, **options: Any) -> tuple[Tensor, Tensor]:
        stuck = [i for i, layer in enumerate(self.layers) if layer.handed is not None]
        if stuck:
            raise RuntimeError(
                f"decoding_cache: layer {stuck[0]} was given tokens that never entered its state: "
                "their call was refused or interrupted, or another attention function than "
                f'"{IMPLICIT}" computed it; begin again with a new cache'
            )
        return super().update(*states, **options)  # type: ignore[no-any-return]


def _visible_keys(mask: Tensor | None, length: int, past: int, batch: int) -> Tensor | None:
    """Returns the keys [B, S] that a causal mask with padding shows; None: all.

    The mask is [B or 1, H or 1, L, S], of ``length`` L, after ``past`` S - L tokens.
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        if not bool(((mask == 0) | (mask <= _HIDDEN)).all()):
            _refuse_mask("it adds other numbers than 0 and -inf to logits")
        mask = mask == 0
    if mask.dim() != 4 or mask.size(3) != past + length:
        _refuse_mask(
            f"its shape is {list(mask.shape)}, for {length} queries and {past} keys before"
        )
    visible = shown_keys(mask, is_causal=True)
    if visible is None:
        _refuse_mask("it differs by query, or by head, otherwise than a causal one does")
    return visible.expand(batch, -1)


def _refuse_mask(why: str) -> NoReturn:
    raise NotImplementedError(
        f"decoding_cache: a state takes causal masks with padding, and not this one: {why}; a "
        "cache of features takes it"
    )
