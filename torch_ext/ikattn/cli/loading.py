"""A model of Hugging Face transformers that reads text, and its tokenizer, loaded without noise."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ikattn._optional import optional
from ikattn.cli.errors import AnalyzeError, Notice, doing
from ikattn.integrations.transformers import from_pretrained
from ikattn.integrations.transformers.conversion import settings_of

_TRIED = 4  # tokens
_transformers = partial(optional, "transformers", "this", "'ikattn[analyze]'")


@contextmanager
def hushed() -> Iterator[None]:
    """A context in which transformers shows neither bars nor what it logs below errors."""
    logging = _transformers().utils.logging
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


@dataclass(frozen=True)
class Loaded:
    """A model of transformers, in eval mode, and its tokenizer."""

    model: Any
    tokenizer: Any
    vocabulary: int  # rows of the model's smallest table of tokens
    positions: int  # the longest sequence that its tables of positions have rows for
    missing: list[str]  # names of parameters that its files lack, in their order in the model
    trial: dict[str, Tensor]  # what it was called with to find these

    def check(self, ids: Tensor) -> None:
        """Raises AnalyzeError unless ids of the tokenizer are in the model's table."""
        largest = int(ids.max()) if ids.numel() else 0
        if largest >= self.vocabulary:
            raise AnalyzeError(
                f"the tokenizer gives {self.tokenizer.convert_ids_to_tokens(largest)!r} the number "
                f"{largest}, and the model has a table of {self.vocabulary} tokens: they are not "
                "of one model"
            )


def load(
    name: str,
    kind_of: Callable[[Any, Any], Any],
    about: dict[str, Any],
    device: str | None,
    **options: Any,
) -> Loaded:
    """Loads a model, with frequencies if it was saved with them, and tries it on a few tokens.

    ``kind_of`` gives the class to load by, of transformers and the config. The options ``about``
    are for config, tokenizer and model, others for the model alone, and no device leaves it to
    these. AnalyzeError says what is not there or not whole, or that the model does not read text.
    """
    transformers = _transformers()
    with doing(f"cannot load the model {name}"):
        config = transformers.AutoConfig.from_pretrained(name, **about)
    base = transformers.MODEL_MAPPING.get(type(config), None)
    reads = getattr(base, "main_input_name", "input_ids")
    if reads != "input_ids":
        raise AnalyzeError(
            f"{name} ({config.model_type}) reads {reads}, and this command gives it text; "
            "ikattn.record takes any call of a model"
        )
    kind = kind_of(transformers, config)
    with doing(f"cannot load the model {name}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **about)
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            raise AnalyzeError("it has no tokenizer with words; save one beside it")
        options |= about | {"output_loading_info": True}
        if settings_of(config) is None:
            model, info = kind.from_pretrained(name, **options)
        else:  # convert gave it frequencies
            model, info = from_pretrained(kind, name, **options)
    missing = [own for own, _ in model.named_parameters() if own in info["missing_keys"]]
    model = model.eval() if device is None else model.to(device).eval()
    padding = {tokenizer.pad_token_id, getattr(config, "pad_token_id", None)}
    ids = [i for i in range(_TRIED + len(padding)) if i not in padding][_TRIED - 1 :: -1]
    trial = {"input_ids": torch.tensor([ids], device=model.device)}
    if config.is_encoder_decoder:
        trial["decoder_input_ids"] = trial["input_ids"]
    step = f"{name} ({config.model_type}), called with {_TRIED} token ids and nothing else"
    with doing(step), torch.no_grad(), _Tables(ids) as tables:
        model(**trial)
    return Loaded(model, tokenizer, tables.tokens, tables.positions, missing, trial)


def warn_of_missing(name: str, parameters: Sequence[str]) -> None:
    """Tells of parameters that a model's files lack, if there are any."""
    if parameters:
        more = f" and {len(parameters) - 3} more" if len(parameters) > 3 else ""
        text = f"{name} has no weights for {', '.join(parameters[:3])}{more}: they are random"
        warnings.warn(text, Notice, stacklevel=2)


class _Tables(TorchFunctionMode):
    """Notes the tables that a call reads: of tokens, and of positions, which are consecutive.

    Attributes:
        tokens: Rows of the smallest table of tokens.
        positions: The longest sequence that the tables of positions have rows for; some have rows
            before that of the first position, for padding.
    """

    def __init__(self, ids: list[int]) -> None:
        super().__init__()
        self.tokens = self.positions = sys.maxsize
        self._ids = ids

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.embedding and len(args) > 1 and args[0].numel():
            table, rows = args[1], args[0].reshape(-1, args[0].size(-1))
            row = rows[0].tolist() if bool((rows == rows[0]).all()) else []
            if row == self._ids:
                self.tokens = min(self.tokens, table.size(0))
            elif row and row == list(range(row[0], row[0] + len(self._ids))):
                self.positions = min(self.positions, table.size(0) - row[0])
        return func(*args, **(kwargs or {}))
