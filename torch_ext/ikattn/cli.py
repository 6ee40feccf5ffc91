"""The command line: python -m ikattn info | selftest | analyze | attribute | cmake-prefix-path."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ikattn._command.tables import Table, is_table
from ikattn._info import info
from ikattn._library import cmake_prefix_path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status: 0, 1 failed, 2 usage, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m ikattn", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="print versions, instruction set and threads")
    _add_selftest(commands)
    analyze = _add_analyze(commands)
    _add_attribute(commands)
    commands.add_parser("cmake-prefix-path", help="print where CMake finds ikattn and its torch")
    parsed = parser.parse_args(arguments)
    if parsed.command == "info":
        print(info())
        return 0
    if parsed.command == "selftest":
        return _selftest(parsed)
    if parsed.command == "cmake-prefix-path":
        print(cmake_prefix_path(), torch.utils.cmake_prefix_path, sep=";")
        return 0
    if parsed.command == "attribute":
        return _attribute(parsed)
    return _analyze(analyze, parsed)


def _add_selftest(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "selftest",
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


def _selftest(parsed: argparse.Namespace) -> int:
    from ikattn._command import selftest

    return selftest.main(
        parsed.device,
        unproven=parsed.unproven,
        asks_enable=parsed.enable,
        asks_forget=parsed.forget,
        file=parsed.json,
    )


def _add_analyze(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    from ikattn._command.job import FORMATS

    parser = commands.add_parser(
        "analyze",
        help="write the attention maps of a model for each line of a text",
        description="Runs a model of Hugging Face transformers over lines of text and writes the "
        "maps of each line. The same command goes on where an earlier one stopped.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR_OR_ID", help="its directory, or name on the hub")
    _add_sources(parser)
    add(
        "--maps",
        default="usual",
        help=f"any of {', '.join(_known_maps())}, with commas; each layer gives those that it has; "
        "usual: all but similarity, magnitude and per_head (default: %(default)s)",
    )
    add(
        "--format",
        default="html",
        metavar="FORMATS",
        help=f"any of {', '.join(FORMATS)}, with commas (default: %(default)s); sums: means over "
        "all lines, by layer, head and type of token",
    )
    add(
        "--out",
        required=True,
        type=_directory,
        metavar="DIR",
        help="receives a file for each line",
    )
    add("--batch-size", type=_positive, default=8, metavar="N", help="default: %(default)s")
    add("--max-length", type=_positive, metavar="N", help="in tokens; longer lines are cut")
    add("--device", type=_device, default="cpu", help="default: %(default)s")
    add("--restart", action="store_true", help="replace the results of an earlier run")
    add(
        "--shards",
        metavar="K/N",
        help="do the K-th of N shares of the lines, K from 1; N processes may share a DIR. "
        "torchrun does so by itself",
    )
    add(
        "--part-lines",
        type=_positive,
        metavar="N",
        help="lines in a file of parquet, arrow or sums (default: as many as make a thousand "
        "files, and 16 at least)",
    )
    return parser


def _add_sources(parser: argparse.ArgumentParser) -> None:
    """Where lines come from."""
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", action="append", metavar="T", help="a line; may be repeated")
    text.add_argument(
        "--file",
        type=Path,
        metavar="F",
        help="UTF-8, one sequence a line; or a table: .parquet, .arrow, or a directory of them",
    )
    text.add_argument(
        "--dataset",
        metavar="NAME[:CONFIG]",
        help="of Hugging Face datasets, by its name on the hub",
    )
    add = parser.add_argument
    add("--split", metavar="S", help="of the dataset (default: train)")
    add("--column", metavar="C", help="of the table or dataset (default: text)")
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--target-text",
        action="append",
        metavar="T",
        help="what the decoder reads; may be repeated",
    )
    target.add_argument("--target-file", type=Path, metavar="F", help="likewise, by lines")
    target.add_argument(
        "--target-column", metavar="C", help="likewise, of the same table or dataset"
    )


def _add_attribute(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "attribute",
        help="tell which tokens of a prompt made a model's answer",
        description="Runs a model of Hugging Face transformers on a prompt and prints what each "
        "token adds to the logits of the target: a text that continues the prompt, a translation, "
        "or a class. Without a target it is what the model answers itself.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR_OR_ID", help="its directory, or name on the hub")
    add("--prompt", required=True, metavar="T", help="what the model reads")
    add("--pair", metavar="T", help="the second sentence, of a classifier of two")
    add("--chat", action="store_true", help="the prompt is a user's turn in the chat template")
    add("--target", metavar="T", help="the answer, or a class by number or label")
    add("--against", metavar="T", help="a token, or class, whose logit is taken off")
    add("--method", default="decompx", help="decompx, alti_logit, rollout:MAP (%(default)s)")
    add("--new-tokens", type=_positive, default=20, metavar="N", help="default: %(default)s")
    add("--dtype", default="auto", choices=("auto", "float32", "float16", "bfloat16", "float64"))
    add("--device", type=_device, default="cpu", help="default: %(default)s")
    add("--device-map", metavar="MAP", help="of accelerate, such as auto, in place of --device")
    add("--revision", metavar="R", help="a branch, tag or commit of the hub")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="write coloured text (.html) or numbers (.json)",
    )


def _attribute(parsed: argparse.Namespace) -> int:
    from ikattn._command.attribute import Question, answer, table
    from ikattn._command.errors import AnalyzeError

    options = {name: value for name, value in vars(parsed).items() if name != "command"}
    try:
        print(table(answer(Question(**options))))
    except AnalyzeError as error:
        print(f"ikattn attribute: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _analyze(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    from ikattn._command.analyze import analyze
    from ikattn._command.errors import AnalyzeError
    from ikattn._command.job import FORMATS, LINE_FORMATS, Job, drawable_maps
    from ikattn._command.shards import Shard

    maps = _choices(parser, "--maps", parsed.maps, _known_maps())
    formats = _choices(parser, "--format", parsed.format, FORMATS)
    if {"html", "png"} & set(formats) and not drawable_maps(maps):
        parser.error("--format html and png need a map of queries and keys, for example summed")
    try:
        shard = Shard.of(parsed.shards)
    except ValueError as error:
        parser.error(f"--shards {error}")
    if parsed.restart and shard.count > shard.ranks:
        parser.error("--restart would remove what other shards have done: remove DIR, and begin")
    if parsed.part_lines is not None and set(formats) <= set(LINE_FORMATS):
        parser.error("--part-lines is of the formats parquet, arrow and sums")
    file, target_file = _sources(parser, parsed)
    job = Job(
        model=parsed.model,
        texts=parsed.text and tuple(parsed.text),
        file=file,
        target_texts=parsed.target_text and tuple(parsed.target_text),
        target_file=target_file,
        maps=maps,
        formats=formats,
        out=parsed.out,
        batch_size=parsed.batch_size,
        max_length=parsed.max_length,
        device=parsed.device,
        restart=parsed.restart,
        shard=shard,
        part_lines=parsed.part_lines,
    )

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    try:
        count = analyze(job, say)
    except AnalyzeError as error:
        say(f"ikattn analyze: {error}")
        return 1
    except KeyboardInterrupt as stopped:
        say(
            f"\ninterrupted after {str(stopped) or 'no'} lines; the same command goes on from there"
        )
        return 130
    if shard.speaks:
        print(f"{count} lines in {job.out}")
    return 0


def _sources(
    parser: argparse.ArgumentParser, parsed: argparse.Namespace
) -> tuple[Path | Table | None, Path | Table | None]:
    """Where lines are, and those that a decoder reads: texts, or columns of tables."""
    column, split = parsed.column or "text", parsed.split or "train"

    def source(path: Path | None, column: str) -> Path | Table | None:
        if path is None or not is_table(path):
            return path
        return Table(path, column)

    text, target = source(parsed.file, column), source(parsed.target_file, column)
    if parsed.dataset is not None:
        text = Table(parsed.dataset, column, split)
    elif parsed.split is not None:
        parser.error("--split is of a --dataset")
    if parsed.target_column is not None:
        if not isinstance(text, Table):
            parser.error("--target-column is of a table: --file must be one, or take --dataset")
        target = replace(text, column=parsed.target_column)
    if parsed.column is not None and not (isinstance(text, Table) or isinstance(target, Table)):
        parser.error("--column is of a table: --file must be one, or take --dataset")
    return text, target


def _known_maps() -> tuple[str, ...]:
    from ikattn._command.job import GROUPS
    from ikattn.analysis._recorder.run_maps import ALL_MAPS

    return (*ALL_MAPS, *GROUPS)


def _choices(
    parser: argparse.ArgumentParser, option: str, text: str, known: Sequence[str]
) -> tuple[str, ...]:
    """Names with commas, each once and in the order given."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            parser.error(f"{option} must be any of {', '.join(known)}, got {name!r}")
    if not names:
        parser.error(f"{option} must name at least one of {', '.join(known)}")
    return names


def _directory(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must name a directory, got ''")
    return Path(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _device(text: str) -> str:
    from ikattn._command.shards import Shard

    try:
        name = Shard.of(None).device(text)
        torch.empty(0, device=torch.device(name))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    except (RuntimeError, AssertionError, NotImplementedError):
        raise argparse.ArgumentTypeError(f"torch cannot compute on {text!r} here") from None
    return name
