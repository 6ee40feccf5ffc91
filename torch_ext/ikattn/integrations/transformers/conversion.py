"""Implicit-kernel attention in any model of transformers: into it, and saved and loaded with it.

Every module that calls transformers' ``AttentionInterface`` gets a child ``spectral`` with the
frequencies of its heads, or their generator; the attention function reads them there. So they are
the model's own parameters: saved, moved, trained and sharded with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ikattn.integrations.transformers.attention import register_implicit
from ikattn.integrations.transformers.interface import (
    calls_interface,
    configs_of,
    import_transformers,
)
from ikattn.integrations.transformers.kernels import (
    IMPLICIT,
    KERNELS,
    SAVED,
    attach_kernel,
    detach_kernel,
)
from ikattn.integrations.transformers.parallel import add_to_plans, remove_from_plans, share_kernels
from ikattn.nn.kinds import KernelSettings, Kind, Sizes
from ikattn.nn.multihead_attention import MultiheadAttention
from ikattn.spectral.direct import checked_size
from ikattn.spectral.factory import SOURCES, check_spectral

_SETTINGS = "ikattn_implicit"  # in a model's config: the options of convert
_BEFORE = "_attention_before_ikattn"  # in a model: its attention implementation before convert


class InterfaceAttention(Kind):
    """Modules that call transformers' ``AttentionInterface``."""

    title = "attention of transformers"

    def holds(self, module: nn.Module) -> bool:
        return calls_interface(module)

    def is_ours(self, module: nn.Module) -> bool:
        return getattr(module, "spectral", None) is not None

    def kernel_of(self, module: Any) -> str | None:
        runs = getattr(module.config, "_attn_implementation_internal", None)
        return "implicit" if self.is_ours(module) and runs == IMPLICIT else None

    def check(
        self, model: nn.Module, modules: Sequence[nn.Module], settings: KernelSettings
    ) -> None:
        taken = {
            "kernel": (settings.kernel == "implicit", "'implicit'"),
            "p": (settings.p != "learned", "a number or None"),
            "spectral": (isinstance(settings.spectral, str), f"one of {SOURCES}"),
        }
        for name, (is_taken, expected) in taken.items():
            if not is_taken:
                raise ValueError(
                    f"convert: attention of transformers takes {name} = {expected}, got "
                    f"{getattr(settings, name)!r}; select leaves modules out"
                )
        if settings.spectral not in SOURCES:
            raise ValueError(f"spectral must be one of {SOURCES}, got {settings.spectral!r}")
        check_spectral(settings.spectral, settings.seed)
        others = {type(x).__name__ for x in modules if not getattr(x, "is_causal", True)}
        if settings.forget and others:
            raise ValueError(
                f"convert: forget must be False for {', '.join(sorted(others))}, which is not "
                "causal, got True"
            )
        options = _options_of(settings)
        self._check_whole("convert", model, modules)
        for part in _models_in(model):
            if not set(part.modules()).intersection(modules):
                continue
            before = settings_of(part.config)
            kept = {x: y for x, y in (before or {}).items() if x in {*options, "forget"}}
            if before is not None and kept != options and any(map(self.is_ours, part.modules())):
                raise ValueError(
                    f"convert: the model has kernels with {kept} already, got {options}"
                )

    def check_undo(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        self._check_whole("revert", model, modules)

    def change(self, model: nn.Module, module: Any, settings: KernelSettings) -> None:
        if not self.is_ours(module):
            options = _options_of(settings, module.config)
            attach_kernel(type(module).__name__, module, options, settings.seed, settings.sizes)

    def undo(self, module: Any) -> None:
        detach_kernel(module)

    def settle(self, model: nn.Module, settings: KernelSettings | None = None) -> None:
        """Makes each transformers model run, save and share out the kernels that it has."""
        for part in _models_in(model):
            attention = [module for module in part.modules() if calls_interface(module)]
            if not any(map(self.is_ours, attention)):
                _forget_kernels(part)
            elif settings is not None:
                before = part.config._attn_implementation
                if before not in (IMPLICIT, SAVED):
                    part.__dict__.setdefault(_BEFORE, before)
                options = _options_of(settings, part.config)
                options |= {"others": True} if _others_are_alike(part, options) else {}
                register_implicit()
                part.set_attn_implementation(IMPLICIT)
                _note_in_configs(part, options)
                add_to_plans(part)
                share_kernels(part)
                for module in attention:
                    # in a model made of models its config may be one that the call did not reach
                    module.config._attn_implementation_internal = IMPLICIT

    def _check_whole(self, caller: str, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        wanted, reached = set(modules), set[nn.Module]()
        for part in _models_in(model):
            own = {module for module in part.modules() if calls_interface(module)}
            reached |= own
            if wanted & own not in (own, set()):
                raise ValueError(
                    f"{caller}: select names {len(wanted & own)} of the {len(own)} attention "
                    f"modules of {type(part).__name__}, which has one attention implementation "
                    "for all of them; select all or none"
                )
        if wanted - reached:
            raise ValueError(
                f"{caller}: {type(model).__name__} is a part of a transformers model, whose config "
                "names one attention implementation for all parts; expected the PreTrainedModel"
            )


TRANSFORMERS = InterfaceAttention()


def _models_in(model: nn.Module) -> list[Any]:
    """Returns the outermost models of transformers in a model."""
    found: list[Any] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and hasattr(module, "set_attn_implementation"):
            found.append(module)
            inside.update(module.modules())
    return found


def _options_of(settings: KernelSettings, config: Any = None) -> dict[str, Any]:
    """Returns the settings as configs keep them, with what a config says of softmax heads."""
    before = settings_of(config) or {}
    count = settings.num_frequencies
    count = MultiheadAttention.default_frequencies if count is None else count
    is_stationary = settings.spectral == "stationary"
    options = {
        "p": None if settings.p is None else float(settings.p),
        "num_frequencies": checked_size("num_frequencies", count),
        "spectral": "direct" if is_stationary else settings.spectral,
        "stationary": bool(settings.stationary) or is_stationary,
    }
    options |= {"forget": True} if settings.forget else {}
    return options | ({"softmax_heads": True} if before.get("softmax_heads") else {})


def _others_are_alike(model: nn.Module, options: dict[str, Any]) -> bool:
    """Whether a model also has nn.MultiheadAttention, all of it converted in the same way."""
    others = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    return bool(others) and all(
        getattr(module, "kernel", None) == "implicit"
        and module.p == options["p"]
        and (module.forget is not None) == options.get("forget", False)
        for module in others
    )


def _forget_kernels(model: Any) -> None:
    """Gives a model without kernels the attention it had before ``convert``."""
    if settings_of(model.config) is None:
        return
    default = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    for config in configs_of(model):
        for name in (_SETTINGS, "attn_implementation"):
            vars(config).pop(name, None)
    remove_from_plans(model)
    before = vars(model).pop(_BEFORE, default)
    model.set_attn_implementation(before)
    module: Any
    for module in model.modules():
        if calls_interface(module) and module.config._attn_implementation_internal == IMPLICIT:
            module.config._attn_implementation_internal = before


def from_pretrained(
    model_class: type[Any], path: Any, *args: Any, sizes: Sizes | None = None, **kwargs: Any
) -> Any:
    """Loads a model that ``save_pretrained`` saved after ``ikattn.convert``.

    Args:
        model_class: A model class of transformers, or an Auto class.
        path: A directory or the name of a repository, as for ``model_class.from_pretrained``.
        sizes: As for ``ikattn.convert``.
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
        >>> import ikattn
        >>> from ikattn.integrations.transformers import from_pretrained
        >>> sizes = dict(n_embd=16, n_head=2, n_layer=1, vocab_size=9)
        >>> config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        >>> model = ikattn.convert(transformers.GPT2LMHeadModel(config))
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
            f"{model_class.__name__}.from_pretrained and call ikattn.convert"
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
    for name in info["missing_keys"]:  # layers that the checkpoint lacks
        path = name.rpartition(".spectral.")[0]
        kernel = model.get_submodule(f"{path}.spectral") if path else None
        gates: Any = getattr(kernel, "forget", None)
        if ".forget." in name and gates is not None:
            gates.reset_parameters()
        elif isinstance(kernel, KERNELS):
            kernel.reset_parameters()
    return (model, info) if wants_info else model


def _note_in_configs(model: Any, options: dict[str, Any]) -> None:
    """Notes what is saved with the model: its options, and the attention it must be loaded with.

    transformers keeps the implementation to itself when it saves a config; from this attribute it
    reads one again. So a model loaded without the frequencies, or without ikattn, is an error, and
    not softmax attention.
    """
    for config in configs_of(model):
        setattr(config, _SETTINGS, options)
        config.attn_implementation = SAVED


def note_softmax_heads(model: nn.Module) -> None:
    """Tells the configs whether kernels have heads with softmax, so that checkpoints find them."""
    kernels: list[Any] = [module for module in model.modules() if isinstance(module, KERNELS)]
    has_some = any(kernel.split_heads() is not None for kernel in kernels)
    for kernel in kernels:
        if kernel.split_heads() is None:
            heads = int(getattr(kernel, "num_heads", None) or kernel.spectral.num_heads)
            kernel.keep_softmax(torch.zeros(heads, dtype=torch.bool) if has_some else None)
    for config in configs_of(model):
        if settings := settings_of(config):  # None: a model without kernels within this one
            settings.pop("softmax_heads", None)
            setattr(config, _SETTINGS, settings | ({"softmax_heads": True} if has_some else {}))


def settings_of(config: Any) -> dict[str, Any] | None:
    """Returns the options a model was given by ``ikattn.convert``; None: it was not."""
    settings = getattr(config, _SETTINGS, None)
    return None if settings is None else {"spectral": "direct", **settings}


def _with_kernels(
    model_class: type[nn.Module], settings: dict[str, Any], sizes: Sizes | None
) -> type[nn.Module]:
    """Makes a class of the same model with kernels in it, so that a checkpoint finds them."""

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        for name, module in [x for x in self.named_modules() if calls_interface(x[1])]:
            if getattr(module, "spectral", None) is None:
                attach_kernel(name, module, settings, None, sizes)
        for module in self.modules():
            if settings.get("others") and type(module) is nn.MultiheadAttention:
                module.__class__ = MultiheadAttention
                names = ("p", "num_frequencies", "spectral", "stationary")
                made: Any = module
                own = {name: settings[name] for name in names}
                made.set_kernel("implicit", **own, forget=settings.get("forget", False))
        add_to_plans(self)

    # transformers looks at the name and the source file of a class
    names = {"__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return type(model_class.__name__, (model_class,), names | {"__init__": init})
