"""Tokens as the text that they were: real letters, real spaces and line breaks."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from ikattn.maps.tokens import is_special

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # sentencepiece, for letters that it does not know
_ESCAPED = re.compile(rb"\\x([89a-f][0-9a-f])")  # of readable_tokens, for parts of a letter
_BYTE_LEVEL = str.maketrans("ĠĊ", " \n")


def texts_of(tokens: Sequence[str], *, byte_level: bool = False) -> list[str]:
    """Returns the text that each token adds; joined they are the text.

    Knows the marks of byte-level BPE ("Ġ"), sentencepiece ("▁"), WordPiece ("##"), subword-nmt
    ("@@") and CLIP ("</w>"). Tokens without any mark are words. A letter of several tokens stands
    at the last of them, and the others are empty. With ``byte_level`` they are of byte-level BPE,
    of which a text without spaces bears no mark.

    Example:
        >>> from ikattn.maps.words import texts_of
        >>> texts_of(["▁Fünf", "▁", "<0xE2>", "<0x82>", "<0xAC>", "<0x0A>"])
        [' Fünf', ' ', '', '', '€', '\\n']
        >>> "".join(texts_of(["[CLS]", "im", "##plicit", "kernel"]))
        '[CLS] implicit kernel'
    """
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    found: list[str] = []
    for token, text in zip(tokens, _with_spaces(tokens, byte_level), strict=True):
        if is_special(token):
            rest = decoder.decode(b"", True)
            decoder.reset()
            found.append(rest + text)
        else:
            found.append(decoder.decode(_bytes_of(text)))
    rest = decoder.decode(b"", True)
    if rest:  # of a letter that is not whole
        found[-1] += rest
    return found


def words_of_text(tokens: Sequence[str], *, byte_level: bool = False) -> list[int]:
    """The number of each token's word: one begins at a space, a new line, or a special token.

    Example:
        >>> from ikattn.maps.words import words_of_text
        >>> words_of_text(["[CLS]", "im", "##plicit", "kernel", "[SEP]"])
        [0, 1, 1, 2, 3]
    """
    numbers: list[int] = []
    ended = True  # what stands before ends a word
    for token, text in zip(tokens, texts_of(tokens, byte_level=byte_level), strict=True):
        begins = ended or is_special(token) or text[:1].isspace()
        numbers.append((numbers[-1] if numbers else -1) + begins)
        # a space by itself belongs to what follows it, if only a part of a letter
        closes = text.endswith("\n") or (bool(text.strip()) and text[-1:].isspace())
        ended = is_special(token) or closes
    return numbers


def text_span(tokens: Sequence[str], has_part: Sequence[bool]) -> slice:
    """Where a sequence's text stands between its padding.

    Padding is a run of one special token at an end of the sequence, whose scores are all 0; the
    empty tokens at the end are padding, too. On the right the first of the run ends the text,
    unless its name says padding.
    """
    start, stop = 0, len(tokens)

    def is_padding(j: int, run: str) -> bool:
        return tokens[j] == run and not has_part[j] and (not run or is_special(run))

    while start < stop and is_padding(start, tokens[0]):
        start += 1
    while stop > start and is_padding(stop - 1, tokens[-1]):
        stop -= 1
    name = tokens[-1] if tokens else ""
    if stop < len(tokens) and name and "pad" not in name.lower():
        stop += 1
    return slice(start, stop) if start < stop else slice(0, len(tokens))


def _with_spaces(tokens: Sequence[str], byte_level: bool) -> list[str]:
    """The tokens with spaces in place of the marks that they bear."""
    own = [token for token in tokens if not is_special(token)]
    if not byte_level and any(token.startswith("▁") for token in own):
        return [token.replace("▁", " ") for token in tokens]
    if byte_level or any(token.startswith(("Ġ", "Ċ")) for token in own):
        return [_of_byte_level(token) for token in tokens]
    if any(token.endswith("</w>") for token in own):
        return [re.sub("</w>$", " ", token) for token in tokens]
    texts = []
    before = "@@"
    for token in tokens:
        is_joined = before.endswith("@@") or (token.startswith("##") and len(token) > 2)
        body = token[2:] if token.startswith("##") and len(token) > 2 else token
        texts.append(("" if is_joined else " ") + body.removesuffix("@@"))
        before = token
    return texts


def _of_byte_level(token: str) -> str:
    """A mark before other letters is one alone, because Ġ is a letter of Maltese, too."""
    if not token.strip("ĠĊ"):
        return token.translate(_BYTE_LEVEL)
    return " " + token[1:] if token.startswith("Ġ") else token


def _bytes_of(text: str) -> bytes:
    byte = _BYTE.fullmatch(text.strip())
    if byte:
        return bytes.fromhex(byte[1])
    raw = text.encode(errors="backslashreplace")
    return _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()), raw)
