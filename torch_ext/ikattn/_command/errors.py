"""What ends a command."""

from __future__ import annotations

__all__ = ["AnalyzeError"]


class AnalyzeError(Exception):
    """A run that cannot go on; its text is for the user."""
