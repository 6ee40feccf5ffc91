"""The tokens of recorded calls as people read them."""

from __future__ import annotations

import functools
import re
from collections.abc import Container, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ikattn.maps.layers import Batch

# For each sequence its tokens; of a single sequence the tokens themselves; or a tokenizer.
Tokens: TypeAlias = "Sequence[Sequence[str]] | Sequence[str] | Any"

# Shapes of special tokens: </s>, <|endoftext|>, [CLS], [/INST], and languages, en_XX, eng_Latn;
# letters of sentencepiece that are written as bytes, <0x0A>, are text.
_SPECIAL = re.compile(
    r"<(?!0x[0-9A-F]{2}>)[^<>\s]+>|\[/?[A-Z_]+\d*\]|[a-z]{2}_[A-Z]{2}|[a-z]{3}_[A-Z][a-z]{3}"
)
_UNKNOWN = re.compile(r"[<\[]\|?unk(nown)?\|?[>\]]", re.IGNORECASE)


class _Token(str):
    """A token whose tokenizer says whether it is a special one."""

    is_special: bool


def is_special(token: str, listed: Container[str] = ()) -> bool:
    """Whether a token is no part of the text, such as ``</s>`` and ``[CLS]``.

    A token that :func:`readable_tokens` made is what its tokenizer's lists say; of others the shape
    tells, or that it is ``listed``. The token in the place of an unknown word is text: it stands
    for a word.
    """
    if _UNKNOWN.fullmatch(token) and not getattr(token, "is_special", False):
        return False
    if isinstance(token, _Token):
        return token.is_special or token in listed
    return token in listed or _SPECIAL.fullmatch(token) is not None


def readable_tokens(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The tokens of one sequence's ids, those of byte-level BPE in the text's own letters.

    Byte-level tokenizers (GPT-2, RoBERTa, Llama 3, Qwen) write each byte as a letter of their own:
    "Ã¶" is "ö". A token that ends within a letter shows its bytes, as in ``\\xc3``. The mark of a
    word's beginning stays, "Ġ" or "▁". Each token knows whether its tokenizer lists it as special.
    """
    tokens = [str(token) for token in tokenizer.convert_ids_to_tokens(list(ids))]
    special = _listed_by(tokenizer)
    is_text = [token not in special for token in tokens]
    if is_byte_level(tokenizer):
        pairs = zip(tokens, is_text, strict=True)
        tokens = [_from_bytes(token) if text else token for token, text in pairs]
    if not hasattr(tokenizer, "all_special_tokens"):
        return tokens
    found = [_Token(token) for token in tokens]
    for token, text in zip(found, is_text, strict=True):
        token.is_special = not text
    return list(found)


def _listed_by(tokenizer: Any) -> set[str]:
    """The special tokens by a tokenizer's lists, without one that only stands for unknown words."""
    roles = dict(getattr(tokenizer, "special_tokens_map", None) or {})
    unknown = str(roles.pop("unk_token", None) or getattr(tokenizer, "unk_token", None))
    named = {str(token) for token in roles.values() if not isinstance(token, (list, tuple))}
    listed = {str(token) for token in getattr(tokenizer, "all_special_tokens", ())}
    added = dict(getattr(tokenizer, "added_tokens_decoder", None) or {}).values()
    listed |= {str(token) for token in added if getattr(token, "special", False)}
    return named | (listed - {unknown})


def tokens_of_batch(
    tokenizer: Any, batch: Batch
) -> tuple[list[list[str]] | None, list[list[str]] | None]:
    """The tokens of a recorded call and of its decoder, without padding; None where unknown."""
    ids, mask = batch.input_ids, batch.input_mask
    if mask is None and ids is not None and batch.target_ids is None:  # masks of pairs alone
        told = (maps.query_padding for maps in batch.values())
        mask = next((~x for x in told if x is not None and x.shape == ids.shape), None)
    given = (ids, mask), (batch.target_ids, batch.target_mask)
    own, of_target = (x if x is None else tokens_of_ids(tokenizer, x, mask) for x, mask in given)
    return own, of_target


def tokens_of_ids(tokenizer: Any, ids: Tensor, mask: Tensor | None) -> list[list[str]]:
    """The tokens of sequences, ``[B, S]``, without padding where the mask has their shape."""
    there = torch.ones_like(ids) if mask is None or mask.shape != ids.shape else mask
    rows = zip(ids.cpu(), there.cpu().bool(), strict=True)
    return [readable_tokens(tokenizer, row[kept].tolist()) for row, kept in rows]


def is_byte_level(tokenizer: Any) -> bool:
    """Whether a tokenizer writes each byte as a letter of its own."""
    if hasattr(tokenizer, "byte_decoder"):
        return True
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "ByteLevel" in repr(getattr(backend, "decoder", ""))


def _from_bytes(token: str) -> str:
    """A token of the byte alphabet as text, its leading space as the alphabet has it."""
    alphabet = _alphabet()
    if any(letter not in alphabet for letter in token):
        return token  # added to the vocabulary as it is
    start = "Ġ" if token.startswith("Ġ") else ""
    text = bytes(alphabet[letter] for letter in token[len(start) :])
    return start + text.decode("utf-8", errors="backslashreplace")


@functools.cache
def _alphabet() -> dict[str, int]:
    """The letter that byte-level tokenizers write for each byte (Radford et al., GPT-2, 2019)."""
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    letters = {chr(byte): byte for byte in own}
    return letters | {chr(256 + n): byte for n, byte in enumerate(others)}
