"""A model of Hugging Face transformers that reads text, and its tokenizer, loaded without noise."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ikattn._command.errors import AnalyzeError, doing
from ikattn.integrations.transformers import from_pretrained
from ikattn.integrations.transformers._implicit import settings_of

__all__ = ["hushed", "load", "the_transformers"]


def the_transformers() -> Any:
    """Returns the library.

    Raises:
        AnalyzeError: It is not installed.
    """
    if find_spec("transformers") is None:
        raise AnalyzeError("this needs transformers: pip install 'ikattn[analyze]'")
    return import_module("transformers")


@contextmanager
def hushed() -> Iterator[None]:
    """A context in which transformers shows neither bars nor what it logs below errors."""
    logging = the_transformers().utils.logging
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


def load(
    name: str, kind_of: Callable[[Any, Any], Any], about: dict[str, Any], **options: Any
) -> tuple[Any, Any]:
    """Loads a model in eval mode, with frequencies if it was saved with them, and its tokenizer.

    Args:
        name: A directory, or a name on the hub.
        kind_of: Gives the class to load by, of transformers and the model's config.
        about: Options for config, tokenizer and model.
        options: Options for the model alone.

    Raises:
        AnalyzeError: It is not there, not whole, or reads something else than text.
    """
    transformers = the_transformers()
    with doing(f"cannot load the model {name}"):
        config = transformers.AutoConfig.from_pretrained(name, **about)
        kind = kind_of(transformers, config)
    base = transformers.MODEL_MAPPING.get(type(config), None)
    reads = getattr(kind, "main_input_name", getattr(base, "main_input_name", "input_ids"))
    if reads != "input_ids":
        raise AnalyzeError(
            f"{name} ({config.model_type}) reads {reads}, and this command gives it text; "
            "ikattn.record takes any call of a model"
        )
    with doing(f"cannot load the model {name}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **about)
        options |= about | {"output_loading_info": True}
        if settings_of(config) is None:
            model, info = kind.from_pretrained(name, **options)
        else:  # use_implicit_attention gave it frequencies
            model, info = from_pretrained(kind, name, **options)
    missing = [own for own, _ in model.named_parameters() if own in info["missing_keys"]]
    if missing:
        warnings.warn(
            f"{name} has no weights for {', '.join(missing[:3])}"
            f"{' and others' if len(missing) > 3 else ''}: they are random",
            stacklevel=2,
        )
    return model.eval(), tokenizer
