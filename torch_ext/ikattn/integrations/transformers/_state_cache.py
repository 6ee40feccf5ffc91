"""A cache of one size for any number of tokens: each layer holds a ``RecurrentState``.

transformers' caches hand keys and values of all tokens to the attention function. A layer here
hands on what it was given, new tokens alone, and remembers that it did; the attention function
finds the layer by the keys, and takes the rest from its state.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ikattn.integrations.transformers._cache import feature_cache, state_of
from ikattn.integrations.transformers._interface import calls_interface, import_transformers
from ikattn.integrations.transformers._kernels import IMPLICIT, ImplicitKernel
from ikattn.integrations.transformers._padding import shown_keys
from ikattn.ops.recurrent_state import RecurrentState

__all__ = ["decoding_cache", "state_cache", "state_layer_of"]

# Keys that a layer has handed on, and a weak reference to it.
_LAYERS = WeakTensorKeyDictionary()
_HIDDEN = -1e30  # what masks of floating-point numbers hide pairs with is below


def state_cache(model: nn.Module, *, dtype: torch.dtype = torch.float64) -> Any:
    """An empty cache for decoding whose size, and time of a token, do not grow with the tokens.

    It is transformers' ``DynamicCache`` with a :class:`ikattn.RecurrentState` in each layer in
    place of keys and values: ``M (2 M + 1) (d_v + 1)`` numbers a query head. With F = 2 M it is
    the faster one from some 2 F^2 tokens on, in float32 from F^2; before, ``feature_cache`` is.
    ``decoding_cache`` chooses by that. Beams, padding and prompts in parts are in.

    Not supported, and refused: models whose frequencies depend on their input, encoder-decoders,
    layers with a sliding window, assisted generation and ``crop`` (a state forgets no token), masks
    other than causal with padding, calls with dropout, ``output_attentions``, a gradient or
    ``torch.compile``, and frequencies that change on the way. Paged caches are no caches of this
    kind.

    Args:
        model: A decoder after ``use_implicit_attention`` or from ``from_pretrained``, with
            frequencies of its own (``spectral="direct"`` or ``"stationary"``).
        dtype: Of the sums, as for ``RecurrentState``.

    Returns:
        A cache, for ``past_key_values`` of ``model.generate`` or ``model.forward``; for one batch
        of sequences, as every cache.

    Raises:
        ImportError: transformers is missing.
        NotImplementedError: The model is of a kind that has no state.
        TypeError: ``model`` is no transformers model.

    Example:
        >>> import pytest, torch
        >>> transformers = pytest.importorskip("transformers")
        >>> from ikattn.integrations.transformers import state_cache, use_implicit_attention
        >>> sizes = dict(n_embd=16, n_head=2, n_layer=1, vocab_size=9)
        >>> config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> model = use_implicit_attention(model, num_frequencies=8)
        >>> prompt, options = torch.tensor([[1, 2, 3]]), dict(max_new_tokens=4, do_sample=False)
        >>> plain = model.generate(prompt, **options)
        >>> kept = model.generate(prompt, past_key_values=state_cache(model), **options)
        >>> torch.equal(plain, kept)
        True
    """
    transformers = import_transformers()
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise TypeError(
            f"state_cache: model must be a transformers PreTrainedModel, got {type(model).__name__}"
        )
    configs = _refuse_model(model)
    cache = transformers.DynamicCache(config=config)
    plain = transformers.cache_utils.DynamicLayer
    others = {type(layer).__name__ for layer in cache.layers if type(layer) is not plain}
    if others:
        raise NotImplementedError(
            f"state_cache: {type(model).__name__} has layers of {', '.join(sorted(others))}; a "
            "state keeps every token, without a sliding window; feature_cache takes them"
        )
    layer_class: Any = _layer_class()
    make = functools.partial(layer_class, dtype, configs)
    cache.layers = [make() for _ in cache.layers]
    if cache.layer_class_to_replicate is not None:
        cache.layer_class_to_replicate = make
    return cache


def decoding_cache(model: nn.Module, tokens: int) -> Any:
    """The faster cache for so many tokens: ``state_cache`` from 2 F^2 on, F = 2 M features.

    Args:
        model: As for ``feature_cache``.
        tokens: Of a sequence, the prompt included.

    Returns:
        A ``state_cache`` where that is the faster one and the model has states, else a
        ``feature_cache``.

    Raises:
        ImportError, TypeError: As of ``feature_cache``.

    Example:
        >>> import pytest
        >>> transformers = pytest.importorskip("transformers")
        >>> from ikattn.integrations.transformers import decoding_cache, use_implicit_attention
        >>> config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=9)
        >>> model = transformers.GPT2LMHeadModel(config)
        >>> model = use_implicit_attention(model, num_frequencies=8)
        >>> short, long = decoding_cache(model, 100), decoding_cache(model, 1000)
        >>> type(short.layers[0]).__name__, type(long.layers[0]).__name__
        ('FeatureLayer', 'StateLayer')
    """
    kernels = [module for module in model.modules() if isinstance(module, ImplicitKernel)]
    features = 2 * max((kernel.num_frequencies for kernel in kernels), default=0)
    if kernels and tokens >= 2 * features**2:
        try:
            return state_cache(model)
        except NotImplementedError:  # of a kind that has no states
            pass
    return feature_cache(model)


def state_layer_of(key: Tensor) -> Any:
    """The layer of a ``state_cache`` that handed these keys on, or None."""
    reference = _LAYERS.get(key)
    layer = None if reference is None else reference()
    return layer if layer is not None and layer.handed is key else None


def _refuse_model(model: Any) -> list[weakref.ref[Any]]:
    """The configs that say which attention its modules have."""
    configs = []
    if getattr(model.config, "is_encoder_decoder", False):
        raise NotImplementedError(
            f"state_cache: {type(model).__name__} is an encoder-decoder; feature_cache takes it"
        )
    for name, module in model.named_modules():
        if not calls_interface(module):
            continue
        kernel = getattr(module, "spectral", None)
        implementation = module.config._attn_implementation
        if implementation != IMPLICIT or kernel is None:
            raise NotImplementedError(
                f"state_cache: {name} has the attention implementation {implementation!r}, which "
                f'needs all keys; call use_implicit_attention, or set "{IMPLICIT}"'
            )
        if type(kernel) is not ImplicitKernel:
            raise NotImplementedError(
                f"state_cache: the frequencies of {name} depend on its input, and those of tokens "
                "before would change with every new one"
            )
        configs.append(weakref.ref(module.config))
    return configs


def _visible_keys(mask: Tensor | None, length: int, past: int, batch: int) -> Tensor | None:
    """Which keys [B, past + L] a mask of causal attention with padding shows; None: all.

    Args:
        mask: [B or 1, H or 1, L, S], True = may attend, or None.
        length: L.
        past: Tokens before, S - L.
        batch: B.
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
        f"state_cache: a state takes causal masks with padding, and not this one: {why}; "
        "feature_cache takes it"
    )


@functools.cache
def _layer_class() -> type[Any]:
    transformers = import_transformers()

    class StateLayer(transformers.cache_utils.CacheLayerMixin):  # type: ignore[misc, name-defined]
        """The tokens of one attention layer, as a state."""

        is_sliding = False
        is_croppable = False

        def __init__(self, dtype: torch.dtype, configs: list[weakref.ref[Any]]) -> None:
            super().__init__()
            self.dtype = dtype
            self.configs = configs
            self.reset()

        def reset(self) -> None:
            self.state: RecurrentState | None = None
            self.kernel: tuple[Any, ...] = ()  # the module, and what is another after a change
            self.visible: Tensor | None = None  # [B], keys of the state that are not hidden
            self.handed: Tensor | None = None  # keys that are not yet in the state
            self.has_failed = False  # whether a call was refused when some layers had its tokens
            self.length = 0
            self.is_initialized = False

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            self.is_initialized = True

        def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            if self.has_failed:
                raise RuntimeError(
                    "state_cache: a call before was refused, and some layers may have its tokens; "
                    "begin again with a new cache"
                )
            configs = [reference() for reference in self.configs]
            others = [x for x in configs if x and x._attn_implementation != IMPLICIT]
            if self.handed is not None or others:
                raise RuntimeError(
                    "state_cache: tokens do not reach the attention function "
                    f'"{IMPLICIT}", which alone knows the keys before them'
                )
            if torch.compiler.is_compiling():
                raise NotImplementedError(
                    "state_cache: torch.compile has no states; call it eagerly"
                )
            self.lazy_initialization(key, value)
            self.handed = key
            self.length += key.size(2)
            _LAYERS[key] = weakref.ref(self)
            return key, value

        def attend(
            self,
            kernel: Any,
            frequencies: tuple[Tensor, Tensor | None],
            tokens: tuple[Tensor, Tensor, Tensor],
            mask: Tensor | None,
        ) -> Tensor:
            """Attention [B, H, L, d_v] of new queries, keys and values, which enter the state."""
            self.has_failed = True  # until all has gone well
            output = self._attended(kernel, frequencies, tokens, mask)
            self.has_failed, self.handed = False, None
            return output

        def _attended(
            self,
            kernel: Any,
            frequencies: tuple[Tensor, Tensor | None],
            tokens: tuple[Tensor, Tensor, Tensor],
            mask: Tensor | None,
        ) -> Tensor:
            query, key, value = tokens
            length, past = query.size(2), self.length - key.size(2)
            now = (weakref.ref(kernel), kernel.p, *map(state_of, kernel.parameters()))
            if self.state is None:
                w1, w2 = (None if w is None else w.detach() for w in frequencies)
                assert w1 is not None
                self.state = RecurrentState(w1, w2, p=kernel.p, dtype=self.dtype)
                self.kernel = now
            elif self.kernel != now:
                raise NotImplementedError(
                    "state_cache: the keys before are in the state with other frequencies: they "
                    "changed, or two attention modules share a layer"
                )
            if mask is None and length > 1 and past > 0:
                _refuse_mask("there is none, for several queries after keys before")
            visible = _visible_keys(mask, length, past, query.size(0))
            bias = self._bias_of(visible, past, query)
            return self.state.extend(query, key, value, bias)

        def _bias_of(self, visible: Tensor | None, past: int, query: Tensor) -> Tensor | None:
            """-inf for new keys that are hidden; checks that those before are as they were."""
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
                    "state_cache: a state forgets no token, so that no call can be taken back, as "
                    "assisted generation does; feature_cache can"
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

        def offload(self) -> None:
            raise NotImplementedError("state_cache: a state is not offloaded; it is of one size")

    return StateLayer
