"""Command line: ``python -m fuzz --calls 2000 --seed 7``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from fuzz import campaign, holding
from fuzz.record import Cells, read


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(6), "little"))
    parser.add_argument("--kind", help="calls of one kind alone")
    parser.add_argument("--replay", metavar="LINE", nargs="+", help="calls as failures print them")
    parser.add_argument("--failures", type=int, default=5, help="stop after so many")
    parser.add_argument("--whole", action="store_true", help="print failures as they were drawn")
    parser.add_argument("--record", type=Path, help="a file that gets the calls, or goes on")
    parser.add_argument(
        "--cells", type=Path, nargs="*", help="print what was covered, or what records have"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.replay:
        told = [campaign.failure_of(campaign.replayed(line)) for line in given.replay]
        print(*(x or "passed" for x in told), sep="\n")
        return int(any(told))
    if given.cells:
        print(*Cells(line for path in given.cells for line in read(path)).table(), sep="\n")
        return 0
    print(f"seed {given.seed}", flush=True)
    found = campaign.run(given.seed, given.calls, given.kind, given.failures, given.record)
    for call, told in found.failures:
        print(f"{told}\n    {call if given.whole else campaign.smallest(call)}")
    if given.cells is not None:
        print(*found.cells.table(), sep="\n")
        for what, largest in sorted(holding.worst.items(), key=lambda x: -x[1])[:40]:
            print(f"{largest:9.3g} of its bound: {what}")
    failed = len(found.failures)
    print(f"{found.calls - failed} passed, {failed} failed, in {found.seconds:.1f} s")
    return int(bool(found.failures))


if __name__ == "__main__":
    sys.exit(main())
