"""Implicit-kernel attention in any model of transformers: into it, and saved and loaded with it.

Every module that calls transformers' ``AttentionInterface`` gets a child ``spectral`` with the
frequencies of its heads, or their generator; the attention function reads them there. So they are
the model's own parameters: saved, moved, trained and sharded with it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from ikattn.integrations.transformers._attention import register_implicit
from ikattn.integrations.transformers._interface import (
    calls_interface,
    configs_of,
    import_transformers,
)
from ikattn.integrations.transformers._kernels import (
    IMPLICIT,
    KERNELS,
    SAVED,
    Sizes,
    attach_kernels,
)
from ikattn.integrations.transformers._parallel import add_to_plans, share_kernels
from ikattn.nn.functional import check_kernel
from ikattn.spectral import SOURCES
from ikattn.spectral.direct import checked_size
from ikattn.spectral.factory import check_spectral

__all__ = ["from_pretrained", "settings_of", "use_implicit_attention"]

_SETTINGS = "ikattn_implicit"  # in a model's config: the options of use_implicit_attention

Model = TypeVar("Model", bound=nn.Module)


@torch.inference_mode(False)  # frequencies are there to be trained
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
    Loaded in another way, such as by ``AutoModel`` or ``pipeline``, it raises; with
    ``attn_implementation="sdpa"`` it has softmax. ``model.set_attn_implementation("sdpa")`` leads
    back to softmax.

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
            calls the interface, the number of heads of one that does is not known, one is causal
            and spectral "mikan", or DDP or FSDP is around the model; nothing has changed then.
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
    check_spectral(spectral, seed)
    options = {  # in types that JSON knows, whatever they came in
        "p": None if p is None else float(p),
        "num_frequencies": checked_size("num_frequencies", num_frequencies),
        "spectral": "direct" if spectral == "stationary" else spectral,
        "stationary": bool(stationary) or spectral == "stationary",
    }
    before = settings_of(model.config)
    if before is not None and before.get("softmax_heads"):
        options["softmax_heads"] = True  # which ones, calibrate has told
    if before != options and any(isinstance(m, KERNELS) for m in model.modules()):
        raise ValueError(
            f"use_implicit_attention: the model has kernels with {before} already, got {options}"
        )
    attach_kernels(model, options, seed, sizes)
    register_implicit()
    model.set_attn_implementation(IMPLICIT)  # type: ignore[operator]
    _note_in_configs(model, options)
    add_to_plans(model)
    share_kernels(model)
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
        ValueError: The checkpoint was saved without implicit attention, another
            ``attn_implementation`` is asked for, or heads have softmax that the config does not
            name.
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
    register_implicit()  # before a model is made, which looks the implementation up
    if not hasattr(model_class, "set_attn_implementation"):  # an Auto class
        with torch.device("meta"):
            model_class = type(model_class.from_config(config))
    kind: Any = _with_kernels(model_class, settings, sizes)
    wants_info = kwargs.pop("output_loading_info", False)
    model, info = kind.from_pretrained(
        path, *args, attn_implementation=IMPLICIT, output_loading_info=True, **kwargs
    )
    modules = {name for name, _ in model.named_modules()}
    lost = [x for x in map(str, info["unexpected_keys"]) if x.rpartition(".")[0] in modules]
    absent = set(info["missing_keys"])  # with all of a layer that the checkpoint lacks
    lost += [x for x in absent if f"{x.rpartition('.')[0]}.w1" not in absent]
    lost = [name for name in lost if name.endswith("spectral.softmax_heads")]
    if lost:
        raise ValueError(
            f"from_pretrained: {path} and its config do not agree on whether heads compute "
            f"softmax ({', '.join(lost)}); ikattn.calibrate(keep=...) notes it in both"
        )
    model.__class__ = model_class
    for module in model.modules():
        if isinstance(module, KERNELS):
            module.split_heads()  # reads a buffer, once
    _note_in_configs(model, settings)
    for name in info["missing_keys"]:  # of layers that the checkpoint lacks
        path = name.rpartition(".spectral.")[0]
        kernel = model.get_submodule(f"{path}.spectral") if path else None
        if isinstance(kernel, KERNELS):
            kernel.reset_parameters()
    return (model, info) if wants_info else model


def _note_in_configs(model: Any, options: dict[str, Any]) -> None:
    """What is saved with the model: its options, and which attention it must not be loaded without.

    transformers keeps the implementation to itself when it saves a config; from this attribute it
    reads one again. So a model loaded without the frequencies, or without ikattn, is an error, and
    not softmax attention.
    """
    for config in configs_of(model):
        setattr(config, _SETTINGS, options)
        config.attn_implementation = SAVED


def note_softmax_heads(model: nn.Module) -> None:
    """Tells the configs whether kernels have heads with softmax, so that checkpoints find them."""
    kernels = [module for module in model.modules() if isinstance(module, KERNELS)]
    has_some = any(kernel.split_heads() is not None for kernel in kernels)
    for kernel in kernels:
        none = torch.zeros(_heads_of(kernel), dtype=torch.bool) if has_some else None
        if kernel.split_heads() is None:
            kernel.keep_softmax(none)
    for config in configs_of(model):
        if getattr(config, _SETTINGS, None) is None:  # of a model without kernels within this one
            continue
        settings = {**getattr(config, _SETTINGS)}
        settings.pop("softmax_heads", None)
        setattr(config, _SETTINGS, settings | ({"softmax_heads": True} if has_some else {}))


def _heads_of(kernel: Any) -> int:
    """H of a kernel."""
    return int(getattr(kernel, "num_heads", None) or kernel.spectral.num_heads)


def settings_of(config: Any) -> dict[str, Any] | None:
    """The options a model was given by ``use_implicit_attention``; None: it was not."""
    settings = getattr(config, _SETTINGS, None)
    return None if settings is None else {"spectral": "direct", **settings}


def _with_kernels(
    model_class: type[nn.Module], settings: dict[str, Any], sizes: Sizes | None
) -> type[nn.Module]:
    """A class that makes the same model with kernels in it, so that a checkpoint finds them."""

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        attach_kernels(self, settings, None, sizes)
        add_to_plans(self)

    # transformers looks at the name and the source file of a class
    names = {"__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return type(model_class.__name__, (model_class,), names | {"__init__": init})
