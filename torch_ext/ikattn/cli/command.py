"""Maps of every layer of attention, and attributions of answers, from the command line."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from ikattn._info import info
from ikattn._library import cmake_prefix_path
from ikattn.cli.errors import Notice, sentence
from ikattn.cli.job import FORMATS, GROUPS, TABLE, Job, Source, drawable_maps
from ikattn.recorder.plan.run_maps import ALL_MAPS

_KNOWN_MAPS = (*ALL_MAPS, *GROUPS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status: 0, 1 failed, 2 usage, 130 interrupted.

    No exception leaves it but SystemExit, by which argparse ends a wrong usage: each becomes one
    sentence on stderr, with ``--debug`` after its traceback, and each warning another.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started this process
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    parsed = argparse.Namespace(command="", debug=False)
    said: set[str] = set()

    def say(text: str) -> None:
        with suppress(OSError):  # stderr may be a closed pipe
            print(text, file=sys.stderr, flush=True)

    def warn(message: Warning | str, *_: object, **__: object) -> None:
        text = str(message).strip().partition("\n")[0]
        if text not in said:  # Python repeats itself where a library has changed its filters
            said.add(text)
            say(f"ikattn {parsed.command}: {text}")

    try:
        with warnings.catch_warnings():
            warnings.showwarning = warn
            warnings.simplefilter("always", Notice)
            _parser().parse_args(arguments, parsed)
            made = parsed.run(parsed, say)
            if isinstance(made, str):  # letters that the encoding lacks are written as escapes
                encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
                print(made.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
        return 0 if isinstance(made, str) else int(made)
    except SystemExit:
        raise
    except BaseException as error:  # panics of libraries in Rust are no Exception
        if parsed.debug:
            traceback.print_exc()
        if isinstance(error, KeyboardInterrupt):
            say(f"\n{str(error) or 'interrupted'}")
            return 130
        say(f"ikattn {parsed.command}: {sentence(error)}")
        return 1
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # nobody can read it; the interpreter would try again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ikattn", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add(commands, "info", lambda *_: info(), help="print versions, instruction set and threads")
    _add_selftest(commands)
    _add_analyze(commands)
    _add_attribute(commands)
    help_ = "print where CMake finds ikattn and its torch"
    paths = f"{cmake_prefix_path()};{torch.utils.cmake_prefix_path}"
    _add(commands, "cmake-prefix-path", lambda *_: paths, help=help_)
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace, Callable[[str], None]], str | int],
    *,
    help: str,
    description: str | None = None,
) -> argparse.ArgumentParser:
    """Adds a subcommand, which ``run`` does: it is given the options and how to tell of things.

    It returns the text to print, or, of a command that prints for itself, the exit status.
    """
    parser = commands.add_parser(name, help=help, description=description or help)
    parser.add_argument("--debug", action="store_true", help="show the traceback of what failed")
    parser.set_defaults(run=run, parser=parser)
    return parser


def _add_selftest(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "selftest",
        _selftest,
        help="run every family of kernels of this machine and compare it with the reference",
        description="Runs small calls of every family of kernels, each in a process of its own "
        "with a time limit, against the reference in float64. The exit status is 1 where a family "
        "fails.",
    )
    add = parser.add_argument
    add(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: %(default)s",
    )
    add("--unproven", action="store_true", help="families that no GPU has proven, too")
    add("--json", type=Path, metavar="FILE", help="also write what is printed, for an issue")
    add(
        "--enable",
        action="store_true",
        help="time the unproven families, too; those that pass and are faster than what they "
        "replace are on by default from now on, for this build, GPU and driver",
    )
    add("--forget", action="store_true", help="take back what --enable has turned on")


def _selftest(parsed: argparse.Namespace, say: Callable[[str], None]) -> int:
    from ikattn.cli import selftest

    return selftest.main(parsed)


def _add_analyze(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "analyze",
        _analyze,
        help="write the attention maps of a model for each line of a text",
        description="Runs a model of Hugging Face transformers over lines of text and writes the "
        "maps of each line. The same command goes on where an earlier one stopped.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR_OR_ID", help="its directory, or name on the hub")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", action="append", metavar="T", help="a line; may be repeated")
    text.add_argument(
        "--file",
        type=Path,
        metavar="F",
        help="UTF-8, one sequence a line; or a table, .jsonl, one JSON object a line",
    )
    add("--column", metavar="C", help="of the table (default: text)")
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--target-text",
        action="append",
        metavar="T",
        help="what the decoder reads; may be repeated",
    )
    target.add_argument("--target-file", type=Path, metavar="F", help="likewise, by lines")
    target.add_argument("--target-column", metavar="C", help="likewise, of the same table")
    add(
        "--maps",
        default="usual",
        help=f"any of {', '.join(_KNOWN_MAPS)}, with commas; each layer gives those that it has; "
        "usual: all but similarity, magnitude, per_head, alti and projection (default: "
        "%(default)s); ledger: the first three of these, weights and value_norms",
    )
    add(
        "--layers",
        metavar="LAYERS",
        help="patterns of names ('encoder.*') or numbers in the order in which layers run, from 0 "
        "on, the last one -1, with commas (default: all)",
    )
    add(
        "--format",
        dest="formats",
        default="html",
        metavar="FORMATS",
        help=f"any of {', '.join(FORMATS)}, with commas (default: %(default)s); sums: means over "
        "all lines, by layer, head and type of token, with a page, summary.html",
    )
    add(
        "--out",
        required=True,
        type=_directory,
        metavar="DIR",
        help="receives a file for each line and, with html, index.html; with sums, their page",
    )
    add("--batch-size", type=_positive, default=8, metavar="N", help="default: %(default)s")
    add("--max-length", type=_positive, metavar="N", help="in tokens; longer lines are cut")
    add("--device", type=_device, default="cpu", help="default: %(default)s")
    add("--restart", action="store_true", help="replace the results of an earlier run")


def _add_attribute(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "attribute",
        _attribute,
        help="tell which tokens of a prompt made a model's answer",
        description="Runs a model of Hugging Face transformers on a prompt and prints what each "
        "token adds to the logits of the target: a text that continues the prompt, a translation, "
        "or a class. Without a target it is what the model answers itself, which is printed first.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR_OR_ID", help="its directory, or name on the hub")
    add("--prompt", required=True, metavar="T", help="what the model reads")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--pair", metavar="T", help="the second sentence, of a classifier of two")
    kind.add_argument(
        "--chat", action="store_true", help="the prompt is a user's turn in the chat template"
    )
    add("--target", metavar="T", help="the answer, or a class by number or label")
    add("--against", metavar="T", help="a token, or class, whose logit is taken off")
    add("--method", default="decompx", help="decompx, alti_logit, rollout:MAP (%(default)s)")
    add("--new-tokens", type=_positive, default=20, metavar="N", help="default: %(default)s")
    add("--dtype", default="auto", choices=("auto", "float32", "float16", "bfloat16", "float64"))
    add("--device", type=_device, default="cpu", help="default: %(default)s")
    add("--device-map", metavar="MAP", help="of accelerate, such as auto, in place of --device")
    add("--revision", metavar="R", help="a branch, tag or commit of the hub")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    add("--out", type=Path, metavar="FILE", help="write coloured text (.html) or numbers (.json)")


def _attribute(parsed: argparse.Namespace, say: Callable[[str], None]) -> str:
    from ikattn.cli.attribute import answer, table

    return table(*answer(parsed))


def _analyze(parsed: argparse.Namespace, say: Callable[[str], None]) -> str:
    from ikattn.cli.analyze import analyze, check_libraries

    parser = parsed.parser
    parsed.maps = _choices(parser, "--maps", parsed.maps, _KNOWN_MAPS)
    parsed.formats = _choices(parser, "--format", parsed.formats, FORMATS)
    parsed.layers = parsed.layers and _choices(parser, "--layers", parsed.layers, None)
    if {"html", "png"} & set(parsed.formats) and not drawable_maps(parsed.maps):
        parser.error("--format html and png need a map of queries and keys, for example summed")
    job = Job(**{name: getattr(parsed, name) for name in Job.__dataclass_fields__})
    check_libraries(job)
    count = analyze(job, *_sources(parsed), say)
    return f"{count} line{'' if count == 1 else 's'} in {job.out}"


def _sources(parsed: argparse.Namespace) -> tuple[Source, Source | None]:
    """The lines, and those that a decoder reads."""
    paths = (parsed.file, parsed.target_file)
    is_table, is_target_table = (path is not None and path.suffix == TABLE for path in paths)
    for option, fits in (("column", is_table or is_target_table), ("target_column", is_table)):
        if getattr(parsed, option) is not None and not fits:
            name = option.replace("_", "-")
            parsed.parser.error(f"--{name} is of a table: --file must end in {TABLE}")
    column, target = parsed.column or "text", parsed.target_text or parsed.target_file
    text = Source.of("--text", parsed.text or parsed.file, column)
    if parsed.target_column is not None:
        return text, Source.of("--target-column", parsed.file, parsed.target_column)
    return text, target and Source.of("--target-text", target, column)


def _choices(
    parser: argparse.ArgumentParser, option: str, text: str, known: Sequence[str] | None
) -> tuple[str, ...]:
    """Names with commas, each once and in the order given; known=None: any."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if known is not None and name not in known:
            parser.error(f"{option} must be any of {', '.join(known)}, got {name!r}")
    if not names:
        parser.error(f"{option} must name at least one of {', '.join(known or ['the layers'])}")
    return names


def _directory(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must name a directory, got ''")
    return Path(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return min(int(text), sys.maxsize)


def _device(text: str) -> str:
    try:
        torch.empty(0, device=torch.device(text))
    except (RuntimeError, AssertionError, NotImplementedError):
        raise argparse.ArgumentTypeError(f"torch cannot compute on {text!r} here") from None
    return text
