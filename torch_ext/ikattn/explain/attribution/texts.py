"""Texts and conversations as what a model is called with, by a tokenizer of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ikattn.explain.attribution._model import is_encoder_decoder, takes
from ikattn.explain.attribution._targets import predicts_next

Conversation: TypeAlias = Sequence[Mapping[str, str]]
"""Turns of a chat, each with a "role" and its "content"."""


def encoded(
    model: nn.Module, given: str | Conversation, tokenizer: Any
) -> tuple[dict[str, Tensor], int | None]:
    """Encodes a text or conversation, and counts the tokens before the answer.

    A conversation that ends with the assistant's turn holds its answer, which ends with that turn's
    text; after another turn the answer begins.
    """
    if tokenizer is None:
        raise ValueError(
            f"attribute: inputs that are text need tokenizer=, got None and {given!r:.60}"
        )
    is_pair = is_encoder_decoder(model)
    length = None
    if isinstance(given, str):
        made = dict(tokenizer(given, return_tensors="pt"))
        end = getattr(tokenizer, "eos_token_id", None)
        goes_on = predicts_next(model) and not is_pair and made["input_ids"].size(1) > 1
        if goes_on and end is not None and int(made["input_ids"][0, -1]) == end:
            made = {name: x[:, :-1] for name, x in made.items()}
    else:
        turns = [x for x in given if isinstance(x, Mapping) and {"role", "content"} <= x.keys()]
        is_answered = bool(turns) and turns[-1]["role"] == "assistant"
        if len(turns) < len(given) or len(turns) < 1 + is_answered or is_pair:
            raise ValueError(
                f"attribute: inputs must be a text, arguments by name, or, for a decoder, turns of "
                "a chat with 'role' and 'content' that begin before the assistant's, got "
                f"{given!r:.80}"
            )
        if is_answered and not turns[-1]["content"]:
            raise ValueError("attribute: the assistant's turn must have text, got ''")
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                "attribute: a conversation needs a tokenizer with a chat template, and "
                f"{type(tokenizer).__name__} has none: set tokenizer.chat_template, or give a text"
            )
        made = _of_turns(given, tokenizer)
        if is_answered:
            before = _of_turns(given[:-1], tokenizer)["input_ids"]
            length = before.size(1)
            if not torch.equal(made["input_ids"][:, :length], before):
                raise ValueError(
                    "attribute: the chat template writes the turns before the answer otherwise "
                    "when the answer follows; give token ids and prompt_length"
                )
    if made["input_ids"].numel() == 0:
        raise ValueError(f"attribute: inputs must hold a token, got {given!r}")
    made = taken_by(model, made)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return {name: x.to(device) for name, x in made.items() if isinstance(x, Tensor)}, length


def taken_by(model: nn.Module, made: dict[str, Any]) -> dict[str, Any]:
    """Leaves out what the model does not take, such as types of tokens."""
    if not takes(model, "input_ids"):
        return made  # a wrapper, which does not say
    return {name: x for name, x in made.items() if takes(model, name)}


def _of_turns(turns: Conversation, tokenizer: Any) -> dict[str, Tensor]:
    """Encodes a conversation in the tokenizer's template, open for the assistant's words."""
    is_answered = bool(turns) and turns[-1].get("role") == "assistant"
    option = "continue_final_message" if is_answered else "add_generation_prompt"
    options = {"return_tensors": "pt", "return_dict": True, option: True}
    return dict(tokenizer.apply_chat_template(list(turns), **options))


def target_of_text(
    model: Any, named: dict[str, Any], text: str, tokenizer: Any
) -> tuple[dict[str, Any], int | list[int]]:
    """Reads a target that is text: a class by its label, or the tokens of an answer.

    The arguments come back with a decoder's first token where it had none.
    """
    if not predicts_next(model):
        return named, _label(model, text, "target")
    is_pair = is_encoder_decoder(model)
    argument = "text_target" if is_pair else "text"
    ids = list(tokenizer(**{argument: text}, add_special_tokens=is_pair)["input_ids"])
    if not ids:
        raise ValueError(f"attribute: target must have a token, got {text!r}")
    return with_first_token(model, named), ids


def number_of_text(model: Any, text: str, tokenizer: Any) -> int:
    """Reads a class by its label, or the only token of a text."""
    if not predicts_next(model):
        return _label(model, text, "against")
    ids = [] if tokenizer is None else tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(
            f"attribute: against must be one token, by a tokenizer=, got {text!r}, which has "
            f"{len(ids) or 'none'}"
        )
    return int(ids[0])


def _label(model: Any, text: str, argument: str) -> int:
    labels = getattr(getattr(model, "config", None), "label2id", None) or {}
    if text not in labels:
        known = ", ".join(map(repr, labels)) or "none"
        raise ValueError(
            f"attribute: {argument} must be a label of the model, {known}, got {text!r}"
        )
    return int(labels[text])


def with_first_token(model: Any, named: dict[str, Any]) -> dict[str, Any]:
    """Adds the token that an encoder-decoder's decoder begins with to the arguments."""
    if not is_encoder_decoder(model) or named.get("decoder_input_ids") is not None:
        return named
    tokens, first = named["input_ids"], model.config.decoder_start_token_id
    if first is None:
        raise ValueError(
            f"attribute: {type(model).__name__} has no config.decoder_start_token_id, which its "
            "decoder would begin with: set it, or give decoder_input_ids"
        )
    start = tokens.new_full((tokens.size(0), 1), first)
    return {**named, "decoder_input_ids": start}
