"""The caches for decoding: one of features beside keys and values, and one of states.

transformers' caches hand keys and values of all tokens to the attention function, which would make
the features of all keys anew for every token. The layers of the caches here note the keys that they
hand out; the attention function finds the layer by its keys, and the features or the state there.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ikattn.integrations.transformers.interface import calls_interface, import_transformers
from ikattn.integrations.transformers.kernels import IMPLICIT
from ikattn.spectral import Direct, Generator

CacheKind = Literal["auto", "features", "state"]

# Keys that a layer has handed out, and a weak reference to it, by the kind of cache.
LAYERS = {kind: WeakTensorKeyDictionary() for kind in ("features", "state")}


def decoding_cache(
    model: nn.Module,
    kind: CacheKind = "auto",
    *,
    tokens: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Any:
    """Makes an empty cache for decoding with a transformers model after ``ikattn.convert``.

    With any other cache the attention function makes all features anew for every token: the same
    numbers to rounding, after many tokens in five to ten times the time. ``nbytes`` is what the
    cache takes; copies and pickles are apart from it.

    "features" is transformers' ``DynamicCache`` (for encoder-decoders an ``EncoderDecoderCache`` of
    two) that also keeps the features of keys. A copied or saved cache, and one that was repeated or
    selected from, makes its features anew once. "state" is a ``DynamicCache`` with a
    :class:`ikattn.RecurrentState` in each layer in place of keys and values, so that neither its
    size nor the time of a token grows with the tokens. docs/guide/decoding.md compares them, and
    lists what a state refuses. With F = 2 M it is the faster one from some 2 F^2 tokens on.

    Args:
        model: A model after ``ikattn.convert`` or from ``from_pretrained``; something may be around
            it or its kernels, such as PEFT.
        kind: "features", "state", or "auto": a state where the model has states and ``tokens`` are
            at least 2 F^2, else features.
        tokens: Length of a sequence, the prompt included, for "auto"; None: not known.
        dtype: Type of a state's sums, as for ``RecurrentState``.

    Returns:
        A cache, for ``cache`` of ``model.generate`` or ``past_key_values`` of ``model.forward``;
        for one batch of sequences, as every cache.

    Raises:
        ImportError: transformers is missing.
        NotImplementedError: "state" is asked for, and the model is of a kind that has none.
        TypeError: ``model`` is no transformers model.
        ValueError: kind is another.

    Example:
        >>> import ikattn, pytest, torch
        >>> transformers = pytest.importorskip("transformers")
        >>> sizes = dict(n_embd=16, n_head=2, n_layer=1, vocab_size=9)
        >>> config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        >>> model = ikattn.convert(transformers.GPT2LMHeadModel(config), num_frequencies=8).eval()
        >>> prompt, options = torch.tensor([[1, 2, 3]]), dict(max_new_tokens=4, do_sample=False)
        >>> plain = model.generate(prompt, **options)
        >>> caches = [ikattn.decoding_cache(model, tokens=n) for n in (100, 1000)]
        >>> [type(cache.layers[0]).__name__ for cache in caches]
        ['FeatureLayer', 'StateLayer']
        >>> all(torch.equal(plain, model.generate(prompt, cache=x, **options)) for x in caches)
        True
    """
    if kind not in get_args(CacheKind):
        raise ValueError(f"decoding_cache: kind must be one of {get_args(CacheKind)}, got {kind!r}")
    import_transformers()
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise TypeError(
            "decoding_cache: model must be a transformers PreTrainedModel, got "
            f"{type(model).__name__}"
        )
    sources = [module for module in model.modules() if isinstance(module, Direct | Generator)]
    # from 2 F^2 tokens on a state is faster than features
    enough = max((8.0 * source.num_frequencies**2 for source in sources), default=float("inf"))
    if kind == "state" or (kind == "auto" and tokens is not None and tokens >= enough):
        try:
            configs = _configs_of_kernels(model)
            from ikattn.integrations.transformers._layers import StateCache

            return StateCache(dtype, configs, type(model).__name__, config)
        except NotImplementedError:
            if kind == "state":
                raise
    from ikattn.integrations.transformers._layers import FeatureCache, FeatureCaches

    own = FeatureCache(config=config)
    if not getattr(config, "is_encoder_decoder", False):
        return own
    return FeatureCaches(own, FeatureCache())


def layer_of(key: Tensor, kind: str) -> Any:
    """Returns the layer of a kind of cache that handed these keys out last, or None."""
    reference = LAYERS[kind].get(key)
    layer = None if reference is None else reference()
    return layer if layer is not None and layer.handed is key else None


def _configs_of_kernels(model: Any) -> list[Any]:
    """Returns the configs that say which attention the modules of a model have."""
    configs = []
    if getattr(model.config, "is_encoder_decoder", False):
        raise NotImplementedError(
            f"decoding_cache: {type(model).__name__} is an encoder-decoder, for which there is "
            'kind="features" alone'
        )
    for name, module in model.named_modules():
        if not calls_interface(module):
            continue
        implementation = module.config._attn_implementation
        if implementation == IMPLICIT and getattr(module, "spectral", None) is None:
            raise NotImplementedError(
                f"decoding_cache: {name} has no frequencies; call ikattn.convert"
            )
        if implementation != IMPLICIT:
            raise NotImplementedError(
                f"decoding_cache: {name} has the attention implementation {implementation!r}, "
                f'which needs all keys; call ikattn.convert, or set "{IMPLICIT}"'
            )
        configs.append(module.config)
    return configs
