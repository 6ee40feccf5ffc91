"""The command ``python -m ikattn``: maps of a corpus, attributions of answers, and self-tests."""

from ikattn.cli.command import main

__all__ = ["main"]
