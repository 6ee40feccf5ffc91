"""The command lines of the experiments."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser whose --help ends with a program's whole description: its files and examples."""
    first, _, rest = (description or "").partition("\n")
    return argparse.ArgumentParser(
        description=first,
        epilog=rest.strip("\n"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _is_number(p: str) -> bool:
    try:
        return 1 <= float(p) < math.inf
    except ValueError:
        return False


def add_options(parser: argparse.ArgumentParser, plotted: str) -> None:
    """Adds what every experiment takes; ``plotted`` is what its plot shows."""
    add = parser.add_argument
    add("--csv", type=Path, help="write every run to this file")
    add("--plot", type=Path, help=f"draw the {plotted} into this file")
    add("--threads", type=int, default=1, help="for torch; default: 1")


def check_options(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    at_least_one: Sequence[str],
    files: Sequence[str] = ("csv", "plot"),
) -> None:
    """Ends the program, with a message, at an option that is out of range.

    Args:
        parser: Says it.
        options: What it has parsed.
        at_least_one: Names of options that count something; None is in range.
        files: Names of options that name files to write, or None.
    """
    counts = [getattr(options, name) for name in at_least_one]
    if any(count is not None and count < 1 for count in counts):
        names = [f"--{name}" for name in at_least_one]
        parser.error(f"{', '.join(names[:-1])} and {names[-1]} must be at least 1")
    for p in getattr(options, "p", None) or []:
        if p not in ("none", "learned") and not _is_number(p):
            parser.error(f"--p must be numbers of at least 1, 'none' or 'learned', got {p!r}")
    paths = {name: getattr(options, name) for name in files}
    given = [path.absolute() for path in paths.values() if path is not None]
    if len(set(given)) < len(given):
        parser.error(f"{', '.join(f'--{name}' for name in files)} must be different files")
    for name, path in paths.items():
        if path is None:
            continue
        if not path.parent.is_dir():
            parser.error(f"there is no directory {path.parent}")
        if path.is_dir():
            parser.error(f"{path} is a directory")
        try:
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            parser.error(f"cannot write {path}: {error}")
        if name == "plot":
            _check_picture(parser, path)


def _check_picture(parser: argparse.ArgumentParser, path: Path) -> None:
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        parser.error("--plot needs matplotlib: pip install 'ikattn[demo]'")
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        parser.error(f"--plot must end in one of {', '.join(sorted(kinds))}, got {path.name}")


def run_program(
    main: Callable[[], None],
    kept: str = "runs that had ended are in --csv, if there is one",
) -> None:
    """Calls ``main``; Ctrl-C ends it in one line, which says what is ``kept``."""
    try:
        main()
    except KeyboardInterrupt:
        name = Path(sys.argv[0]).name
        print(f"\n{name}: interrupted; {kept}", file=sys.stderr)
        sys.exit(130)
