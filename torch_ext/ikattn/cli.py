"""The command line: python -m ikattn info."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ikattn.info import report


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ikattn", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="print versions, instruction set and threads")
    parsed = parser.parse_args(arguments)
    if parsed.command == "info":
        print(report())
    return 0
