"""All experiments, a few at a time: by their parts, some 4 hours on two cores.

What that budget leaves: every attention and order, of two epochs in translation (one seed) and of
three on SUBJ, MR and SST-2; order 2 of translation longer, for its models; three orders and seeds
on nodes of a graph; parkinsons for its cost alone. An experiment whose log is in OUT is not run
again.

--data DIR holds the files of all experiments that need any, in any folders; --help of each names
them.

    pip install 'ikattn[experiments]'
    python experiments/everything.py --data DIR --out OUT --quick
    python experiments/everything.py --data DIR --out OUT
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from command_line import parser_of, run_program

ALL = ("--attention", "softmax", "rbf", "direct", "ikan", "mikan")
LEARNED = ("--attention", "softmax", "direct", "ikan", "mikan")
ORDERS = ("--p", "1", "1.5", "2", "3", "none")
NOT_2 = ("--p", "1", "1.5", "3", "none")  # with order 2 rbf is softmax
TWO_EPOCHS, THREE_EPOCHS = ("--epochs", "2"), ("--epochs", "3")
# a part of recall's attentions, and of their candidates of rates
WIDE = ("--attention", "softmax", "implicit-8", "implicit-16", "implicit-32", "implicit-64", "elu")
WIDE += ("taylor", "taylor-31", "--rates", "3e-3", "1e-2", "--kernel-rates", "1e-2")
UP_TO_32 = ("--attention", "softmax", "M = 16", "M = 32")  # of lists with eight heads
# program -> a file or folder beside which its data lie; None: it makes its own
MARKERS: dict[str, str | None] = {
    "regression": "airline_passengers",
    "sentences": "TREC.train.all",
    "translation": "train.lc.norm.tok.de",
    "nodes": "cora.npz",
    "recall": None,
    "pretrained": "subj.all",
    "long_sequences": "subj.all",
    "norms": "subj.all",
}


class Run(NamedTuple):
    """One call of an experiment; ``name`` is that of its files."""

    name: str
    program: str
    arguments: tuple[str, ...]


# The longest first, so that no process is left with one of them.
PLAN = (
    Run("translation", "translation", LEARNED),
    Run("pretrained", "pretrained", ()),
    Run("generated-orders", "translation", ("--attention", "ikan", "mikan", *ORDERS, *TWO_EPOCHS)),
    Run("direct-orders", "translation", ("--attention", "softmax", "direct", *ORDERS, *TWO_EPOCHS)),
    Run("long-eight", "long_sequences", ("--tasks", "lists", "--heads", "8", *UP_TO_32)),
    Run("subj", "sentences", ("--datasets", "subj", *ALL, *ORDERS, *THREE_EPOCHS)),
    Run("trec", "sentences", ("--datasets", "trec", *ALL, *ORDERS)),
    Run("long", "long_sequences", ()),
    Run("recall", "recall", ("--sizes", "64")),
    Run("mr", "sentences", ("--datasets", "mr", *ALL, *ORDERS, *THREE_EPOCHS)),
    Run("sst2", "sentences", ("--datasets", "sst2", *ALL, *ORDERS, *THREE_EPOCHS)),
    Run("recall-wide", "recall", ("--sizes", "128", *WIDE)),
    Run("nodes", "nodes", ("--p", "1", "2", "none", "--seeds", "3")),
    Run("norms", "norms", ("--calibrate", "500")),
    Run("rbf-orders", "translation", ("--attention", "rbf", *NOT_2, *TWO_EPOCHS)),
    Run("housing", "regression", ("--datasets", "housing", "--epochs", "300", *ALL, *ORDERS)),
    Run("co2", "regression", ("--datasets", "co2", "--repeats", "2", *ALL, *ORDERS)),
    Run("airline", "regression", ("--datasets", "airline", *ALL, *ORDERS)),
    Run("long-tuned", "long_sequences", ("--tune",)),
    Run("cost", "regression", ("--datasets", "parkinsons", "--cost")),
    Run("long-cost", "long_sequences", ("--cost",)),
)
QUICK = tuple(Run(f"{program}-quick", program, ("--quick",)) for program in MARKERS)


def folder_of(data: Path, marker: str) -> Path:
    """The folder under ``data`` that holds ``marker``."""
    for folder, folders, files in os.walk(data, followlinks=True):
        folders.sort()
        if marker in files or marker in folders:
            return Path(folder)
    raise FileNotFoundError(f"{data} holds no {marker}, in no folder")


def command_of(run: Run, data: Path, out: Path) -> list[str]:
    """The command to execute."""
    marker = MARKERS[run.program]
    given = [] if marker is None else ["--data", str(folder_of(data, marker))]
    options = ["--csv", str(out / f"{run.name}.csv")]
    if not {"--cost", "--tune"} & set(run.arguments):
        options += ["--plot", str(out / f"{run.name}.png")]
    if run.program == "pretrained":
        given += ["--captions", str(folder_of(data, MARKERS["translation"] or ""))]
    if run.program == "norms":
        given += ["--translations", str(folder_of(data, MARKERS["translation"] or ""))]
    if run.name == "translation":
        options += ["--models", str(out / "models")]
        aligned = folder_of(data, "alignment.talp")
        options += ["--align", str(aligned), "--align-csv", str(out / "alignment.csv")]
    program = Path(__file__).parent / f"{run.program}.py"
    return [sys.executable, str(program), *given, *run.arguments, *options]


def execute(run: Run, data: Path, out: Path) -> bool:
    """Runs one experiment, or tells that its log is there; returns whether it is in the end."""
    log, growing = out / f"{run.name}.log", out / f"{run.name}.log.partial"
    if log.is_file():
        print(f"{run.name:18s} kept: {log}", flush=True)
        return True
    start = time.monotonic()
    with growing.open("w") as text:
        process = subprocess.Popen(
            command_of(run, data, out),
            stdout=text,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        minutes = (time.monotonic() - start) / 60
        core_minutes = (usage.ru_utime + usage.ru_stime) / 60
        took = f"{minutes:6.1f} min, {core_minutes:6.1f} of a core"
        print(took, file=text)
    if process.returncode != 0:
        print(f"{run.name:18s} failed after {took}: {growing}", flush=True)
        return False
    growing.rename(log)
    print(f"{run.name:18s} {took}: {log}", flush=True)
    return True


def attempt(run: Run, data: Path, out: Path) -> bool:
    """``execute``, or says why it could not."""
    try:
        return execute(run, data, out)
    except OSError as problem:
        print(f"{run.name:18s} failed: {problem}", flush=True)
        return False


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of all data")
    parser.add_argument("--out", type=Path, required=True, help="folder of tables, plots and logs")
    parser.add_argument("--jobs", type=int, default=2, help="at a time, of a core each; default: 2")
    parser.add_argument("--quick", action="store_true", help="a few steps of each experiment")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these experiments alone")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    whole = QUICK if options.quick else PLAN
    names = [run.name for run in whole]
    for name in options.only or ():
        if name not in names:
            parser.error(f"--only: expected some of {', '.join(names)}; got {name}")
    plan = [run for run in whole if run.name in (options.only or names)]
    try:  # before anything is computed
        for run in plan:
            command_of(run, options.data, options.out)
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()
    except OSError as problem:
        parser.error(str(problem))
    start = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        done = list(pool.map(lambda run: attempt(run, options.data, options.out), plan))
    print(f"{sum(done)} of {len(plan)} in {(time.monotonic() - start) / 60:.1f} min")
    sys.exit(0 if all(done) else 1)


if __name__ == "__main__":
    run_program(main, "experiments that had ended have their logs in --out and are not run again")
