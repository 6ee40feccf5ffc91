"""How many frequencies? Quality and seconds of M = 8, 16, 32 and 64 beside softmax, in all tasks.

Every model is trained for the same number of steps, and where that takes another time than with
softmax, once more for softmax's time. Seconds are those of the process's CPU. Tables are written
from the files in OUT; an experiment whose log is there is not run again.

--data DIR holds the files of all experiments that need any, in any folders; --help of each names
them.

    pip install 'ikattn[experiments]'
    python experiments/frequencies.py --data DIR --out OUT --quick
    python experiments/frequencies.py --data DIR --out OUT
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from command_line import run_program
from comparison import spread
from everything import Run, execute_all, parse_plan

SOFTMAX = "softmax"
ATTENTIONS = (SOFTMAX, "M = 8", "M = 16", "M = 32", "M = 64")
COMPARED = ("--attention", *ATTENTIONS)
RECALL = {SOFTMAX: SOFTMAX} | {f"implicit-{m}-none": f"M = {m}" for m in (8, 16, 32, 64)}
RATES = ("--rates", "1e-2", "--kernel-rates", "0.1")
SEEDS = ("--seeds", "3")
NUMBERS = ("--frequencies", "8", "16", "32", "64", "--calibrated")
SAME = 0.03  # the part by which times differ that count as equal

Row = dict[str, str]


class Point(NamedTuple):
    """One trained model."""

    attention: str
    quality: float
    seconds: float  # of its training


class Task(NamedTuple):
    """A row of the table."""

    name: str
    measure: str
    run: Run
    point: Callable[[Row], Point | None]  # of a row of the run's file, None where it is of no use
    length: tuple[str, int] | None = None  # the option of the length of training, and its number
    in_time: Callable[[Row], Point | None] | None = None  # where the run trains for the time too


def run_of(program: str, name: str, *arguments: str) -> Run:
    return Run(f"frequencies-{name}", program, arguments)


def of_sentences(row: Row) -> Point:
    return Point(row["attention"], 100 * float(row["test_accuracy"]), float(row["seconds"]))


def of_series(row: Row) -> Point:
    return Point(row["attention"], float(row["last_rmse"]), float(row["seconds"]))


def of_translation(row: Row) -> Point:
    seconds = float(row["seconds_per_epoch"]) * float(row["epochs"])
    return Point(row["attention"], float(row["test_bleu"]), seconds)


def of_nodes(row: Row) -> Point:
    attention = SOFTMAX if row["attention"] == "dot" else row["attention"]
    seconds = float(row["seconds_per_epoch"]) * float(row["epochs"])
    return Point(attention, float(row["accuracy"]), seconds)


def of_long(measure: str) -> Callable[[Row], Point | None]:
    def point(row: Row) -> Point | None:
        if (row["part"], row["measure"]) != ("test", measure):
            return None
        return Point(row["attention"], 100 * float(row["accuracy"]), float(row["seconds"]))

    return point


def of_recall(moment: str, length: int, pairs: int) -> Callable[[Row], Point | None]:
    def point(row: Row) -> Point | None:
        if (row["moment"], row["length"], row["pairs"]) != (moment, str(length), str(pairs)):
            return None
        seconds = float(row["seconds_per_step"]) * float(row["steps"])
        return Point(RECALL[row["attention"]], 100 * float(row["accuracy"]), seconds)

    return point


def of_pretrained(measure: str, step: str) -> Callable[[Row], Point | None]:
    def point(row: Row) -> Point | None:
        if row["step"] == step or row["frequencies"] == "0":
            if row["frequencies"] == "0":  # nothing was calibrated
                return Point(SOFTMAX, float(row[measure]), 0.0)
            return Point(f"M = {row['frequencies']}", float(row[measure]), float(row["seconds"]))
        return None

    return point


def sentences(name: str, epochs: int) -> Task:
    arguments = "--datasets", name, *COMPARED, *SEEDS
    run = run_of("sentences", name, *arguments)
    return Task(name.upper(), "accuracy, %", run, of_sentences, ("--epochs", epochs))


def series(name: str, epochs: int) -> Task:
    run = run_of("regression", name, "--datasets", name, *COMPARED)
    return Task(name, "error (RMSE)", run, of_series, ("--epochs", epochs))


def lists(heads: int) -> Task:
    arguments = "--tasks", "lists", "--heads", str(heads), *COMPARED, *SEEDS
    run = run_of("long_sequences", f"lists-{heads}", *arguments)
    name = f"lists, {heads} heads of {64 // heads}"
    return Task(name, "inner lists, %", run, of_long("inner lists"), ("--steps", 1500))


def recall(length: int, pairs: int) -> Task:
    arguments = "--sizes", "64", "--attention", *RECALL, *RATES, *SEEDS
    run = run_of("recall", "recall", *arguments)
    points = [of_recall(moment, length, pairs) for moment in ("equal steps", "equal time")]
    return Task(f"recall, {pairs} pairs in {length}", "right, %", run, points[0], None, points[1])


TASKS = (
    lists(2),
    recall(512, 32),
    recall(512, 64),
    series("co2", 300),
    series("housing", 300),
    series("airline", 1000),
    sentences("subj", 3),
    sentences("trec", 10),
    Task(
        "nodes (Cora)",
        "accuracy, %",
        run_of("nodes", "nodes", "--attention", "dot", *ATTENTIONS[1:], "--p", "2", *SEEDS),
        of_nodes,
    ),
    Task(
        "MiniLM, calibrated",
        "cosine",
        run_of("pretrained", "minilm", "--model", "minilm", *NUMBERS, *SEEDS),
        of_pretrained("cosine", "weights, outputs with projections"),
    ),
    Task(
        "texts as bytes",
        "accuracy, %",
        run_of("long_sequences", "texts", "--tasks", "texts", *COMPARED, *SEEDS),
        of_long("texts"),
        ("--steps", 240),
    ),
    lists(8),
    Task(
        "causal model, calibrated",
        "perplexity",
        run_of("pretrained", "causal", "--model", "causal", *NUMBERS, *SEEDS),
        of_pretrained("perplexity", "converted, calibrated"),
    ),
    Task(
        "translation",
        "BLEU",
        run_of("translation", "translation", *COMPARED, *SEEDS),
        of_translation,
        ("--epochs", 3),
    ),
)


def timed(run: Run, length: tuple[str, int]) -> Run:
    """The run with its length of training named."""
    option, number = length
    given = list(run.arguments)
    if option in given:
        del given[given.index(option) : given.index(option) + 2]
    return run._replace(arguments=(*given, option, str(number)))


def points_of(out: Path, run: Run, point: Callable[[Row], Point | None]) -> list[Point]:
    """Models of a run that has ended; none where it has not."""
    if not (out / f"{run.name}.log").is_file():
        return []
    with (out / f"{run.name}.csv").open(newline="") as file:
        found = [point(row) for row in csv.DictReader(file)]
    return [model for model in found if model is not None]


def seconds_of(points: Sequence[Point], attention: str) -> float:
    """Mean seconds of training of an attention."""
    found = [point.seconds for point in points if point.attention == attention]
    return float(np.mean(found)) if found else math.nan


def runs_in_time(out: Path, task: Task, quick: bool) -> Iterator[tuple[str, Run]]:
    """Runs of the attentions whose training took another time than softmax's, for that time."""
    points = points_of(out, task.run, task.point)
    if task.length is None or not points or quick:
        return
    option, number = task.length
    of_softmax = seconds_of(points, SOFTMAX)
    for attention in ATTENTIONS[1:]:
        times = of_softmax / seconds_of(points, attention)
        fitting = round(number * times)
        if fitting == number or abs(times - 1) < SAME:
            continue
        given = list(task.run.arguments)
        first = given.index("--attention") + 1
        given[first : first + len(ATTENTIONS)] = [attention]
        named = Run(f"{task.run.name}-{attention[4:]}", task.run.program, tuple(given))
        yield attention, timed(named, (option, max(1, fitting)))


def cell(points: Sequence[Point], attention: str) -> str:
    """Mean and deviation of an attention's quality."""
    found = [point.quality for point in points if point.attention == attention]
    small = max(map(abs, found), default=1.0) < 1
    return spread(found, 3 if small else 1) if found else ""


def print_tables(out: Path, quick: bool) -> None:
    """Prints quality after equal steps and equal time, and their seconds, as Markdown."""
    equal_steps, equal_time, seconds = [], [], []
    for task in TASKS:
        points = points_of(out, task.run, task.point)
        if not points:
            continue
        label = f"| {task.name} | {task.measure} | "
        equal_steps.append(label + " | ".join(cell(points, name) for name in ATTENTIONS) + " |")
        times = [seconds_of(points, name) for name in ATTENTIONS]
        seconds.append(f"| {task.name} | " + " | ".join(f"{time:.0f}" for time in times) + " |")
        in_time = dict.fromkeys(ATTENTIONS, points)
        if task.in_time is not None:
            in_time = dict.fromkeys(ATTENTIONS, points_of(out, task.run, task.in_time))
        for name, run in runs_in_time(out, task, quick):
            in_time[name] = points_of(out, run, task.point)
        if task.length or task.in_time:
            cells = [cell(in_time[name], name) for name in ATTENTIONS]
            equal_time.append(label + " | ".join(cells) + " |")
    head = "|".join(f" {name} " for name in ATTENTIONS)
    print(f"\nAfter equal steps:\n\n| | |{head}|\n" + "|---" * 7 + "|", *equal_steps, sep="\n")
    print(f"\nAfter equal time:\n\n| | |{head}|\n" + "|---" * 7 + "|", *equal_time, sep="\n")
    print(f"\nSeconds of equal steps:\n\n| |{head}|\n" + "|---" * 6 + "|", *seconds, sep="\n")


def main() -> None:
    whole = list(dict.fromkeys(timed_run(task) for task in TASKS))
    quick = [run._replace(arguments=(*run.arguments, "--quick")) for run in whole]
    plan, options = parse_plan(__doc__, whole, quick)
    ended = execute_all(plan, options)
    chosen = [task for task in TASKS if task.run.name in {run.name for run in plan}]
    again = [run for task in chosen for _, run in runs_in_time(options.out, task, options.quick)]
    if again:
        ended = execute_all(again, options) and ended
    print_tables(options.out, options.quick)
    sys.exit(0 if ended else 1)


def timed_run(task: Task) -> Run:
    """The run of equal steps."""
    return task.run if task.length is None else timed(task.run, task.length)


if __name__ == "__main__":
    run_program(main, "experiments that had ended have their logs in --out and are not run again")
