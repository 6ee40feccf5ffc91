"""Fails where a room of the code knows one above it. A part of `make lint`.

Rooms are folders, and files that stand alone: those of csrc, those of csrc/attention and of its cpu
and cuda, as their README.md have them, and those of torch_ext/ikattn, as CONTRIBUTING.md has them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class House(NamedTuple):
    """A folder whose rooms may know those below them, and no others."""

    folder: str
    files: str  # pattern of names
    known: str  # what a file knows of the folder, as paths or names of modules
    levels: Sequence[set[str]]  # the highest first; those of one level do not know each other


HOUSES = (
    House(
        "csrc",
        r"\.(cu|h|cpp)$",
        # The words of CUDA are the interpreter's where it stands in for a GPU.
        r"(?<!#if defined\(IKATTN_INTERPRETER\)\n)"
        r'#include "((?:attention|contributions|edge_attention|interpreter|moments|nn'
        r'|packed_attention|support)/[^"]+)"',
        [
            {"nn"},
            {"contributions", "edge_attention", "moments", "packed_attention"},
            {"attention"},
            {"interpreter"},
            {"support"},
            {"include"},
        ],
    ),
    House(
        "csrc/attention",
        r"\.(cu|h|cpp)$",
        r'#include "attention/([^"]+)"',
        [{"cpu", "cuda"}, {"operator"}, {"calls"}],
    ),
    House(
        "csrc/attention/cuda",
        r"\.(cu|h|cpp)$",
        r'#include "attention/cuda/([^"]+)"',
        [
            {""},  # the drivers
            {"decoding", "linear"},
            {"hopper", "split"},
            {"tensor_cores"},
            {"features"},
            {"cuda_cores"},
            {"mma"},
            {"operands"},
        ],
    ),
    House(
        "csrc/attention/cpu",
        r"\.(h|cpp)$",
        r'#include "attention/cpu/(?!route\.h)([^"]+)"',  # every room may read the route
        [
            {""},  # the table of kernels
            {"backward", "decoding"},
            {"forward"},
            {"linear"},
            {"queries"},
            {"keys"},
            {"features"},
        ],
    ),
    House(
        "torch_ext/ikattn",
        r"\.py$",
        r"^\s*(?:from ikattn import |from ikattn\.|import ikattn\.)([\w.]+)",
        [
            {"", "__main__"},
            {"cli"},
            {"explain"},
            {"conversion"},
            {"recorder"},
            {"maps"},
            {"parallel"},
            {"integrations"},
            {"nn"},
            {"spectral"},
            {"reference"},
            {"ops"},
            {"_heads", "_info", "_memory", "_optional", "_precision", "_whole_files"},
            {"_library"},
        ],
    ),
    House(
        "torch_ext/ikattn/recorder",
        r"\.py$",
        r"^\s*(?:from ikattn\.recorder import |from ikattn\.recorder\.)([\w.]+)",
        [{""}, {"runs"}, {"plan"}, {"calls"}, {"sums"}],
    ),
)


def room_of(house: House, path: str) -> str:
    """The room of a path, or of a module, below the house's folder; "" where it has none."""
    if house.folder.startswith("csrc"):
        room, slash, _ = path.partition("/")
        return room if slash else ""
    room = re.split(r"[/.]", path)[0]
    return room if any(room in rooms for rooms in house.levels[1:]) else ""


def level_of(house: House, room: str) -> int:
    for level, rooms in enumerate(house.levels):
        if room in rooms:
            return level
    raise ValueError(f"tools/check_rooms.py does not know {house.folder}/{room}")


def arrows_upward(house: House, path: Path) -> list[str]:
    """Names the rooms that a file knows and may not, in words."""
    own = room_of(house, path.relative_to(ROOT / house.folder).as_posix())
    wrong = []
    for name in re.findall(house.known, path.read_text(), re.MULTILINE):
        room = room_of(house, name)
        if room != own and level_of(house, room) <= level_of(house, own):
            wrong.append(f"{path.relative_to(ROOT)} knows {name}: {own} may not know {room}")
    return wrong


def main() -> int:
    wrong = []
    for house in HOUSES:
        for path in sorted((ROOT / house.folder).rglob("*")):
            if path.is_file() and re.search(house.files, path.name):
                wrong += arrows_upward(house, path)
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
