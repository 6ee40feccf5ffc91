"""The tokens of recorded calls as people read them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor

from ikattn.analysis.maps import Batch

__all__ = ["Tokens", "is_byte_level", "readable_tokens", "tokens_of_batch"]

# For each sequence its tokens; of a single sequence the tokens themselves; or a tokenizer.
Tokens: TypeAlias = "Sequence[Sequence[str]] | Sequence[str] | Any"


def readable_tokens(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The tokens of ids, those of byte-level BPE in the text's own letters.

    Byte-level tokenizers (GPT-2, RoBERTa, Llama 3, Qwen) write each byte as a letter of their own:
    "Ã¶" is "ö". A token that ends within a letter shows its bytes, as in ``\\xc3``. The mark of a
    word's beginning stays, "Ġ" or "▁".

    Args:
        tokenizer: One of transformers: it has ``convert_ids_to_tokens``.
        ids: Of one sequence.
    """
    tokens = [str(token) for token in tokenizer.convert_ids_to_tokens(list(ids))]
    if not is_byte_level(tokenizer):
        return tokens
    special = set(getattr(tokenizer, "all_special_tokens", ()))
    return [token if token in special else _from_bytes(token) for token in tokens]


def tokens_of_batch(
    tokenizer: Any, batch: Batch
) -> tuple[list[list[str]] | None, list[list[str]] | None]:
    """The tokens of a recorded call and of its decoder, without padding; None where unknown."""

    def of(ids: Tensor | None, mask: Tensor | None) -> list[list[str]] | None:
        if ids is None:
            return None
        rows = ids.tolist()
        if mask is None or mask.shape != ids.shape:
            return [readable_tokens(tokenizer, row) for row in rows]
        return [
            readable_tokens(tokenizer, [x for x, kept in zip(row, there, strict=True) if kept])
            for row, there in zip(rows, mask.tolist(), strict=True)
        ]

    return of(batch.input_ids, batch.input_mask), of(batch.target_ids, batch.target_mask)


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
