"""Fails where a room of csrc/attention/cuda includes from one above it. A part of `make lint`.

The rooms, the highest first, are those of csrc/attention/cuda/README.md; the drivers are above all.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "csrc/attention/cuda"
# Rooms of one line do not include each other.
LEVELS = [
    {""},
    {"hopper", "linear"},
    {"tensor_cores"},
    {"features"},
    {"cuda_cores"},
    {"mma"},
    {"operands"},
]


def room_of(path: str) -> str:
    """Of a path below csrc/attention/cuda; "" of the drivers."""
    room, slash, _ = path.rpartition("/")
    return room if slash else ""


def level_of(room: str) -> int:
    for level, rooms in enumerate(LEVELS):
        if room in rooms:
            return level
    raise ValueError(f"tools/check_rooms.py does not know csrc/attention/cuda/{room}")


def arrows_upward(path: Path) -> list[str]:
    """What a file includes that it may not, in words."""
    own = room_of(path.relative_to(CUDA).as_posix())
    wrong = []
    for name in re.findall(r'#include "attention/cuda/([^"]+)"', path.read_text()):
        room = room_of(name)
        if room != own and level_of(room) <= level_of(own):
            wrong.append(f"{path.relative_to(ROOT)} includes {name}: {own} may not know {room}")
    return wrong


def main() -> int:
    files = sorted([*CUDA.rglob("*.cu"), *CUDA.rglob("*.h"), *CUDA.rglob("*.cpp")])
    wrong = [text for path in files for text in arrows_upward(path)]
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
