"""A cache of one size for any number of tokens: each layer holds a ``RecurrentState``.

transformers' caches hand keys and values of all tokens to the attention function. A layer here
hands on what it was given, new tokens alone, and remembers that it did; the attention function
finds the layer by the keys, and takes the rest from its state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ikattn.integrations.transformers._cache import config_of, feature_cache
from ikattn.integrations.transformers._interface import calls_interface
from ikattn.integrations.transformers._kernels import IMPLICIT
from ikattn.spectral import Direct, Generator

__all__ = ["decoding_cache", "state_cache", "state_layer_of"]

# Keys that a layer has handed on, and a weak reference to it.
STATE_LAYERS = WeakTensorKeyDictionary()


def state_cache(model: nn.Module, *, dtype: torch.dtype = torch.float64) -> Any:
    """An empty cache for decoding whose size, and time of a token, do not grow with the tokens.

    It is transformers' ``DynamicCache`` with a :class:`ikattn.RecurrentState` in each layer in
    place of keys and values: ``M (2 M + 1) (d_v + 1)`` numbers a query head. With F = 2 M it is
    the faster one from some 2 F^2 tokens on, in float32 from F^2; before, ``feature_cache`` is.
    ``decoding_cache`` chooses by that. Beams, padding and prompts in parts are in.

    ``nbytes`` is what it takes; copies and pickles are apart from it.

    Not supported, and refused: encoder-decoders, layers with a sliding window, assisted generation
    and ``crop`` (a state forgets no token), masks other than causal with padding, calls with
    dropout, ``output_attentions``, a gradient or ``torch.compile``, and frequencies that change on
    the way. Paged caches are no caches of this kind.

    Args:
        model: A decoder after ``use_implicit_attention`` or from ``from_pretrained``; something
            may be around it or its kernels, such as PEFT.
        dtype: Of the sums, as for ``RecurrentState``.

    Returns:
        A cache, for ``cache`` of ``model.generate`` or ``past_key_values`` of ``model.forward``;
        for one batch of sequences, as every cache.

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
        >>> kept = model.generate(prompt, cache=state_cache(model), **options)
        >>> torch.equal(plain, kept)
        True
    """
    config = config_of("state_cache", model)
    configs = _configs_of_kernels(model)
    from ikattn.integrations.transformers._state_layer import StateCache

    return StateCache(dtype, configs, type(model).__name__, config)


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
    sources = [module for module in model.modules() if isinstance(module, Direct | Generator)]
    features = 2 * max((source.num_frequencies for source in sources), default=0)
    if sources and tokens >= 2 * features**2:
        try:
            return state_cache(model)
        except NotImplementedError:  # of a kind that has no states
            pass
    return feature_cache(model)


def state_layer_of(key: Tensor) -> Any:
    """Returns the layer of a ``state_cache`` that handed these keys on, or None."""
    reference = STATE_LAYERS.get(key)
    layer = None if reference is None else reference()
    return layer if layer is not None and layer.handed is key else None


def _configs_of_kernels(model: Any) -> list[Any]:
    """Returns the configs that say which attention the modules of a model have.

    Raises:
        NotImplementedError: The model is an encoder-decoder, or attention needs all keys.
    """
    configs = []
    if getattr(model.config, "is_encoder_decoder", False):
        raise NotImplementedError(
            f"state_cache: {type(model).__name__} is an encoder-decoder; feature_cache takes it"
        )
    for name, module in model.named_modules():
        if not calls_interface(module):
            continue
        implementation = module.config._attn_implementation
        if implementation == IMPLICIT and getattr(module, "spectral", None) is None:
            raise NotImplementedError(
                f"state_cache: {name} has no frequencies; call use_implicit_attention"
            )
        if implementation != IMPLICIT:
            raise NotImplementedError(
                f"state_cache: {name} has the attention implementation {implementation!r}, which "
                f'needs all keys; call use_implicit_attention, or set "{IMPLICIT}"'
            )
        configs.append(module.config)
    return configs
