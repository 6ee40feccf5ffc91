"""A cache that keeps the features of keys beside keys and values, for decoding.

transformers' caches hand keys and values of all tokens to the attention function, which would make
the features of all keys anew for every token. The layers of ``feature_cache`` mark the keys they
hand out, and the attention function finds their features there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ikattn.integrations.transformers._interface import import_transformers

__all__ = ["config_of", "feature_cache", "layer_of"]

# Keys that a layer has handed out, and a weak reference to it.
FEATURE_LAYERS = WeakTensorKeyDictionary()


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
        A cache, for ``cache`` of ``model.generate`` or ``past_key_values`` of ``model.forward``;
        for one batch of sequences, as every cache.

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
        >>> kept = model.generate(prompt, cache=feature_cache(model), **options)
        >>> torch.equal(plain, kept)
        True
    """
    config = config_of("feature_cache", model)
    from ikattn.integrations.transformers._feature_layer import FeatureCache, FeatureCaches

    own = FeatureCache(config=config)
    if not getattr(config, "is_encoder_decoder", False):
        return own
    return FeatureCaches(own, FeatureCache())


def config_of(function: str, model: nn.Module) -> Any:
    """Returns the config of a transformers model, or of one that something is around.

    Raises:
        ImportError: transformers is missing.
        TypeError: ``model`` is no transformers model.
    """
    import_transformers()
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise TypeError(
            f"{function}: model must be a transformers PreTrainedModel, got {type(model).__name__}"
        )
    return config


def layer_of(key: Tensor) -> Any:
    """Returns the layer of a ``feature_cache`` that handed these keys out, or None."""
    reference = FEATURE_LAYERS.get(key)
    layer = None if reference is None else reference()
    return layer if layer is not None and layer.keys is key else None
