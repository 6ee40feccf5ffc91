"""The attention implementation "ikattn_implicit": implicit-kernel attention in any model.

Every module that calls transformers' ``AttentionInterface`` gets a child ``spectral`` with the
frequencies of its heads, or their generator; the attention function reads them there. So they are
the model's own parameters: saved, moved, trained and sharded with it.

Sizes: B batch, H query heads, G key/value heads, T queries, S keys, d head size, M frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from ..._masks import padded
from ...analysis._resolvers import calls_interface
from ...functional import check_kernel
from ...ops import draw_dropout_seed, implicit_kernel_attention, implicit_kernel_weights
from ...spectral import SOURCES, Direct, Ikan, Mikan
from ...spectral.direct import checked_size
from ...spectral.regularized import Regularized
from ._cache import layer_of
from ._interface import (
    Given,
    configs_of,
    import_transformers,
    is_causal,
    mask_of,
    register_attention,
)

__all__ = [
    "IMPLICIT",
    "ImplicitKernel",
    "from_pretrained",
    "kernel_of",
    "register_implicit",
    "scaled_query",
    "settings_of",
    "use_implicit_attention",
]

IMPLICIT = "ikattn_implicit"
_SETTINGS = "ikattn_implicit"  # in a model's config: the options of use_implicit_attention
# What the modules of transformers call H and d; a config may hold H under the first two.
_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_HEAD_SIZE = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size")

_FEW_QUERIES = 8  # that take features from a cache

Sizes: TypeAlias = Callable[[nn.Module], "tuple[int, int]"]
Model = TypeVar("Model", bound=nn.Module)


class ImplicitKernel(Direct):
    """The kernel of one attention layer: frequencies for each query head, and the norm's order.

    Args:
        num_heads, head_dim, num_frequencies, stationary, seed, device, dtype: As for
            ``ikattn.spectral.Direct``.
        p: Order of the norm in a key's magnitude, a real number >= 1; None: no magnitude.

    Raises:
        ValueError: num_frequencies or p is out of range.

    Example:
        >>> from ikattn.integrations.transformers import ImplicitKernel
        >>> ImplicitKernel(num_heads=2, head_dim=4, num_frequencies=8, p=3.0)
        ImplicitKernel(num_heads=2, head_dim=4, num_frequencies=8, stationary=False, p=3.0)
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_frequencies: int,
        *,
        p: float | None,
        **options: Any,
    ) -> None:
        check_kernel("implicit", p)
        super().__init__(num_heads, head_dim, num_frequencies, **options)
        self.p = p

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}"


class GeneratedKernel(Regularized):
    """The kernel of one attention layer whose frequencies a generator makes.

    Args:
        num_heads, head_dim, num_frequencies, stationary, seed, device, dtype: As for
            ``ikattn.spectral.Ikan``.
        spectral: "ikan", or "mikan", which averages keys alone here.
        p: Order of the norm in a key's magnitude, a real number >= 1; None: no magnitude.

    Raises:
        ValueError: num_frequencies or p is out of range.
    """

    drawn: tuple[Tensor, Tensor | None] | None = None  # the frequencies of the last call

    def __init__(self, *sizes: int, spectral: str, p: float | None, **options: Any) -> None:
        check_kernel("implicit", p)
        super().__init__()
        is_ikan = spectral == "ikan"
        self.spectral = Ikan(*sizes, **options) if is_ikan else Mikan(*sizes, pool="key", **options)
        self.p = p

    def reset_parameters(self) -> None:
        """Draws the networks anew."""
        assert isinstance(self.spectral, Ikan | Mikan)
        self.spectral.reset_parameters()

    def forward(
        self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """w1 and w2 for queries [B, H, T, d], keys [B, G, S, d] and padding [B, S]."""
        groups = query.size(1) // key.size(1)
        key = key.repeat_interleave(groups, 1) if groups > 1 else key
        drawn = self._frequencies(query, key, key_padding_mask, None)
        if not torch.compiler.is_compiling():
            self.drawn = drawn
        return drawn

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "drawn": None}

    def extra_repr(self) -> str:
        return f"p={self.p}"


_KERNELS = (ImplicitKernel, GeneratedKernel)


# --- For users


def use_implicit_attention(
    model: Model,
    *,
    p: float | None = 2.0,
    num_frequencies: int = 64,
    spectral: str = "direct",
    stationary: bool = False,
    seed: int | None = None,
    sizes: Sizes | None = None,
) -> Model:
    """Makes the attention of a transformers model implicit-kernel attention, in place.

    Every module that calls transformers' ``AttentionInterface`` gets an ``ImplicitKernel`` as its
    child ``spectral``, unless it has one, and the model the attention implementation
    "ikattn_implicit", which reads it: self- and cross-attention, encoders and decoders, with
    caches, grouped heads and every mask. Weights are kept. ``save_pretrained`` saves frequencies
    and options with the model, ``ikattn.integrations.transformers.from_pretrained`` loads them.
    ``model.set_attn_implementation("sdpa")`` leads back to softmax.

    A model's own scaling of query . key acts on the query: the kernel takes query and key such that
    dot-product attention of them would be exp(q . k / sqrt(d)). Where the scaling is 1 / sqrt(d)
    these are the model's; in models that hide it in the query, or in its weights (T5, OPT,
    Whisper), the query is multiplied by sqrt(d).

    Args:
        model: A ``PreTrainedModel``; an optimiser made before must be told of the new parameters.
        p: Order of the norm in a key's magnitude, a real number >= 1; None: no magnitude.
        num_frequencies: M, of each query head.
        spectral: Where frequencies come from: "direct", "stationary", "ikan" or "mikan", as for
            ``ikattn.MultiheadAttention``; ``ikattn.regularization_loss(model)`` is for the loss. In
            no call of transformers it is said which queries are padding, so "mikan" averages keys
            alone; where attention is causal it would see the future.
        stationary: One set of frequencies per head in place of two.
        seed: If given, the i-th layer's frequencies are a function of ``seed + i`` alone.
        sizes: For modules of which this package does not know it: from the module to its number of
            query heads and head size, (H, d).

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no transformers model.
        ValueError: An option is wrong, the model has kernels with other options already, no module
            calls the interface, the number of heads of one that does is not known, or one is causal
            and spectral "mikan"; nothing has changed then.
        ImportError: transformers is missing.

    Source: K. Song, Y. Jung, D. Kim, I. Moon, "Implicit Kernel Attention", AAAI 2021
    (arXiv 2006.06147).

    Example:
        >>> import pytest, torch
        >>> transformers = pytest.importorskip("transformers")
        >>> from ikattn.integrations.transformers import use_implicit_attention
        >>> sizes = dict(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
        >>> config = transformers.BertConfig(**sizes, intermediate_size=32, vocab_size=9)
        >>> model = use_implicit_attention(transformers.BertModel(config), num_frequencies=8)
        >>> model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 16])
        >>> model.encoder.layer[0].attention.self.spectral.w1.shape  # H * d * M
        torch.Size([128])
    """
    if not hasattr(model, "set_attn_implementation"):
        raise TypeError(
            "use_implicit_attention: model must be a transformers PreTrainedModel, got "
            f"{type(model).__name__}; for nn.MultiheadAttention there is ikattn.convert"
        )
    check_kernel("implicit", p)
    if spectral not in SOURCES:
        raise ValueError(f"spectral must be one of {SOURCES}, got {spectral!r}")
    options = {  # in types that JSON knows, whatever they came in
        "p": None if p is None else float(p),
        "num_frequencies": checked_size("num_frequencies", num_frequencies),
        "spectral": "direct" if spectral == "stationary" else spectral,
        "stationary": bool(stationary) or spectral == "stationary",
    }
    before = settings_of(model.config)
    if before != options and any(isinstance(m, _KERNELS) for m in model.modules()):
        raise ValueError(
            f"use_implicit_attention: the model has kernels with {before} already, got {options}"
        )
    _attach(model, options, seed, sizes)
    register_implicit()
    model.set_attn_implementation(IMPLICIT)  # type: ignore[operator]
    for config in configs_of(model):
        setattr(config, _SETTINGS, options)
    for module in model.modules():
        if calls_interface(module):
            # in a model made of models it may have a config that the call above does not reach
            module.config._attn_implementation_internal = IMPLICIT  # type: ignore[union-attr]
    return model


def from_pretrained(
    model_class: type[Any], path: Any, *args: Any, sizes: Sizes | None = None, **kwargs: Any
) -> Any:
    """Loads a model that ``save_pretrained`` saved after ``use_implicit_attention``.

    Args:
        model_class: A model class of transformers, or an Auto class.
        path: A directory or the name of a repository, as for ``model_class.from_pretrained``.
        sizes: As for ``use_implicit_attention``.
        args, kwargs: For ``model_class.from_pretrained``.

    Returns:
        The model, with its frequencies and the attention implementation "ikattn_implicit"; with
        ``output_loading_info=True`` a tuple of the model and what was loaded.

    Raises:
        ValueError: The checkpoint was saved without implicit attention, or another
            ``attn_implementation`` is asked for.
        ImportError: transformers is missing.

    Example:
        >>> import pytest, tempfile, torch
        >>> transformers = pytest.importorskip("transformers")
        >>> from ikattn.integrations.transformers import from_pretrained, use_implicit_attention
        >>> sizes = dict(n_embd=16, n_head=2, n_layer=1, vocab_size=9)
        >>> config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        >>> model = use_implicit_attention(transformers.GPT2LMHeadModel(config))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     loaded = from_pretrained(transformers.AutoModelForCausalLM, folder)
        >>> w1, again = (x.transformer.h[0].attn.spectral.w1 for x in (model, loaded))
        >>> torch.equal(w1, again)
        True
    """
    transformers = import_transformers()
    asked = kwargs.pop("attn_implementation", None)
    if asked not in (None, IMPLICIT):
        raise ValueError(
            f'from_pretrained: attn_implementation must be "{IMPLICIT}", which is the default, got '
            f"{asked!r}; model.set_attn_implementation changes it once the model is loaded"
        )
    config = kwargs.get("config")
    if config is None:
        hub = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
        about = {name: kwargs[name] for name in (*hub, "trust_remote_code") if name in kwargs}
        config = transformers.AutoConfig.from_pretrained(path, **about)
    settings = settings_of(config)
    if settings is None:
        raise ValueError(
            f"from_pretrained: {path} was saved without implicit attention; load it with "
            f"{model_class.__name__}.from_pretrained and call use_implicit_attention"
        )
    if not hasattr(model_class, "set_attn_implementation"):  # an Auto class
        with torch.device("meta"):
            model_class = type(model_class.from_config(config))
    register_implicit()
    kind: Any = _with_kernels(model_class, settings, sizes)
    wants_info = kwargs.pop("output_loading_info", False)
    model, info = kind.from_pretrained(
        path, *args, attn_implementation=IMPLICIT, output_loading_info=True, **kwargs
    )
    model.__class__ = model_class
    for name in info["missing_keys"]:  # of layers that the checkpoint lacks
        path = name.rpartition(".spectral.")[0]
        kernel = model.get_submodule(f"{path}.spectral") if path else None
        if isinstance(kernel, _KERNELS):
            kernel.reset_parameters()
    return (model, info) if wants_info else model


def register_implicit() -> None:
    """Registers "ikattn_implicit" with transformers."""
    register_attention(IMPLICIT, _implicit_attention, masks_of="sdpa")


def settings_of(config: Any) -> dict[str, Any] | None:
    """The options a model was given by ``use_implicit_attention``; None: it was not."""
    settings = getattr(config, _SETTINGS, None)
    return None if settings is None else {"spectral": "direct", **settings}


def kernel_of(module: nn.Module) -> Any:
    """The kernel of an attention module, or what has been put in its place.

    Raises:
        RuntimeError: There is none, or a source of frequencies alone.
    """
    kernel = getattr(module, "spectral", None)
    if kernel is None:
        raise RuntimeError(
            f'{type(module).__name__} has the attention implementation "{IMPLICIT}" but no '
            "frequencies: call ikattn.integrations.transformers.use_implicit_attention(model), or "
            "load the model with from_pretrained of that module"
        )
    if not hasattr(kernel, "p"):
        raise RuntimeError(
            f"{type(module).__name__}.spectral is a {type(kernel).__name__}, which has no order p: "
            "call use_implicit_attention(model, spectral=...), which takes names of sources"
        )
    return kernel


def scaled_query(query: Tensor, scaling: float | None) -> Tensor:
    """The query [B, H, T, d] whose dot product with a key is to be divided by sqrt(d)."""
    factor = 1.0 if scaling is None else scaling * math.sqrt(query.size(-1))
    return query if abs(factor - 1.0) < 1e-6 else query * factor


# --- Into a model


def _attach(
    model: nn.Module, options: dict[str, Any], seed: int | None, sizes: Sizes | None
) -> None:
    """Gives every module that calls the interface a kernel; checks all before it changes any."""
    found = {name: module for name, module in model.named_modules() if calls_interface(module)}
    if not found:
        raise ValueError(_describe_no_attention(model))
    spectral = options["spectral"]
    kind = ImplicitKernel if spectral == "direct" else partial(GeneratedKernel, spectral=spectral)
    options = {name: option for name, option in options.items() if name != "spectral"}
    kernels = {}
    for number, (name, module) in enumerate(found.items()):
        if getattr(module, "spectral", None) is not None:
            continue
        if spectral == "mikan" and getattr(module, "is_causal", True):
            raise ValueError(
                "use_implicit_attention: spectral='mikan' averages over whole sequences and would "
                f"let {name}, which is causal, see the future; expected 'ikan' or 'direct'"
            )
        heads, head_size = (sizes or _sizes_of)(module)
        like = next((x for x in module.parameters() if x.is_floating_point()), torch.empty(0))
        kernels[name] = kind(
            heads,
            head_size,
            seed=None if seed is None else seed + number,
            device=like.device,
            dtype=like.dtype,
            **options,
        ).train(module.training)
    for name, kernel in kernels.items():
        found[name].register_module("spectral", kernel)


def _sizes_of(module: nn.Module) -> tuple[int, int]:
    """H and d of an attention module.

    Raises:
        ValueError: It does not say.
    """

    def first(names: tuple[str, ...], *owners: Any) -> int | None:
        values = (getattr(owner, name, None) for owner in owners for name in names)
        return next((value for value in values if isinstance(value, int)), None)

    heads = first(_HEADS, module, getattr(module, "config", None))
    head_size = first(_HEAD_SIZE, module)
    if heads is None or head_size is None:
        numbers = {name: x for name, x in vars(module).items() if isinstance(x, int)}
        raise ValueError(
            f"use_implicit_attention: expected one of {', '.join(_HEADS)} and one of "
            f"{', '.join(_HEAD_SIZE)} in {type(module).__name__}, got {numbers}; pass "
            "sizes=lambda module: (heads, head_size)"
        )
    return heads, head_size


def _describe_no_attention(model: nn.Module) -> str:
    attention = {type(m).__name__ for m in model.modules() if "Attention" in type(m).__name__}
    stock = (
        "; ikattn.convert changes nn.MultiheadAttention"
        if "MultiheadAttention" in attention
        else ""
    )
    return (
        f"use_implicit_attention: no module of {type(model).__name__} calls transformers' "
        "AttentionInterface, through which alone attention can be exchanged; found "
        f"{', '.join(sorted(attention)) or 'no attention'}{stock}"
    )


def _with_kernels(
    model_class: type[nn.Module], settings: dict[str, Any], sizes: Sizes | None
) -> type[nn.Module]:
    """A class that makes the same model with kernels in it, so that a checkpoint finds them."""

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        _attach(self, settings, None, sizes)

    # transformers looks at the name and the source file of a class
    names = {"__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return type(model_class.__name__, (model_class,), names | {"__init__": init})


# --- The attention function


def _implicit_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Implicit-kernel attention as transformers calls its attention functions.

    Args:
        module: The attention module, with its kernel.
        query: [B, H, T, d].
        key, value: [B, G, S, d] and [B, G, S, d_v].
        attention_mask: Broadcastable to [B, H, T, S]; bool, True = may attend, or floating point.
        dropout: Probability on the weights; 0 outside training.
        scaling: Of query . key; see ``use_implicit_attention``.
        options: position_bias, added to the logits; is_causal; output_attentions.

    Returns:
        The output [B, T, H, d_v], and the weights [B, H, T, S] with output_attentions, else None.
    """
    _refuse(module, options)
    kernel = kernel_of(module)
    query = scaled_query(query, scaling)
    visibility = _visibility(module, Given(query, key, value, attention_mask, IMPLICIT, options))
    w1, w2 = kernel(query, key, _padding(kernel, key, visibility))
    arguments: dict[str, Any] = {
        "p": kernel.p,
        **visibility,
        "dropout_p": dropout,
        # one seed for both calls: the weights returned are the weights used
        "dropout_seed": draw_dropout_seed(query.device) if dropout > 0.0 else None,
        "enable_gqa": key.size(1) != query.size(1),
    }
    output = _from_kept_features(kernel, query, key, value, w1, w2, arguments, options)
    if output is None:
        output = implicit_kernel_attention(query, key, value, w1, w2, **arguments)
    output = output.transpose(1, 2).contiguous()
    if not options.get("output_attentions"):
        return output, None
    return output, implicit_kernel_weights(query, key, w1, w2, **arguments)


def _from_kept_features(
    kernel: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w1: Tensor,
    w2: Tensor | None,
    arguments: dict[str, Any],
    options: dict[str, Any],
) -> Tensor | None:
    """The output [B, H, T, d_v] where a ``feature_cache`` has the keys; None: make their features.

    Features are those of frequencies that stay as they are and depend on no input. Many queries,
    as those of a prompt, are worth making them in the operator, which keeps no weights.
    """
    if torch.compiler.is_compiling() or query.size(2) > _FEW_QUERIES or torch.is_grad_enabled():
        return None
    layer = layer_of(key)
    is_top_left = arguments.get("is_causal", False) and query.size(2) != key.size(2)
    if layer is None or type(kernel) is not ImplicitKernel or is_top_left:
        return None
    if arguments["dropout_p"] > 0.0 or options.get("output_attentions"):
        return None
    visible = {name: arguments[name] for name in ("attn_mask", "is_causal") if name in arguments}
    features = layer.features_of(kernel, w1, w2)
    return features.attend(query, value, **visible)  # type: ignore[no-any-return]


def _visibility(module: nn.Module, given: Given) -> dict[str, Any]:
    """Which key a query sees, as arguments of the operators."""
    if given.attention_mask is None and given.options.get("position_bias") is None:
        return {"is_causal": is_causal(module, given)}
    return {"attn_mask": mask_of(module, given)}


def _padding(kernel: nn.Module, key: Tensor, visibility: dict[str, Any]) -> Tensor | None:
    """Which keys no query sees, bool [B, S], for kernels that depend on their input."""
    if not isinstance(getattr(kernel, "spectral", None), Mikan):  # PEFT may have wrapped the kernel
        return None
    if visibility.get("is_causal"):
        raise RuntimeError(
            f'{IMPLICIT}: a causal call with spectral="mikan", which averages over whole '
            'sequences and would see the future; use spectral="ikan"'
        )
    mask = visibility.get("attn_mask")
    if mask is None:
        return None
    away = ~mask if mask.dtype == torch.bool else padded(mask)
    return away.all(1).all(1).expand(key.size(0), -1)


def _refuse(module: nn.Module, options: dict[str, Any]) -> None:
    """Raises NotImplementedError for what changes attention and has no meaning here."""
    reasons = {
        "softcap": "caps logits, which the implicit kernel does not have",
        "s_aux": "adds attention sinks to the logits, which the implicit kernel does not have",
        "cache": "is a paged cache, which is not supported",
    }
    for option, reason in reasons.items():
        if options.get(option) is not None:
            raise NotImplementedError(
                f"{IMPLICIT}: {type(module).__name__} passes {option}, which {reason}; use "
                'model.set_attn_implementation("eager")'
            )
