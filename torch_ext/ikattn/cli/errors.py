"""Exceptions that end a command, and the one place that turns exceptions into sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


class AnalyzeError(Exception):
    """A run that cannot go on; its text is for the user."""


class Notice(UserWarning):
    """A warning that is always told, once."""


@contextmanager
def doing(step: str) -> Iterator[None]:
    """Makes any exception an AnalyzeError that begins with the step of a command."""
    try:
        yield
    except Exception as error:
        raise AnalyzeError(f"{step}: {sentence(error)}") from error


def sentence(error: BaseException) -> str:
    """Returns one line for people on any exception, of ours or of a library."""
    if isinstance(error, BrokenPipeError):
        return "the program that reads the output has closed it"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    lines = str(error).strip().splitlines() or [""]
    said = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])
    said = re.sub(r"^(record|attribute): |\s+(?=\s)", "", said)
    if isinstance(error, (AnalyzeError, OSError, ValueError, RuntimeError, ImportError)) and said:
        return said
    kind = type(error).__name__  # a library's own, whose text may be a name or a number
    return f"{kind}: {said}; --debug shows where" if said else f"{kind}; --debug shows where"
