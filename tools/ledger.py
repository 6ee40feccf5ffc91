"""Writes the ledger of CUDA kernels (csrc/support/proven.h) into docs/guide/cuda.md, as its State.

python tools/ledger.py           # writes it
python tools/ledger.py --check   # fails where the page has another; a part of `make lint`
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER, PAGE = ROOT / "csrc/support/proven.h", ROOT / "docs/guide/cuda.md"
BEGIN, END = "<!-- tools/ledger.py writes this -->\n", "<!-- to here -->"


def rows() -> list[list[str | None]]:
    """The fields of each family, None where the header has nullptr."""
    text = HEADER.read_text()
    constants = dict(re.findall(r'constexpr const char\* (k\w+) =\s*"([^"]*)"', text))
    body = text[text.index("kLedger[] = {") : text.index("};", text.index("kLedger[] = {"))]
    found = []
    for family in re.findall(r"\{(\".*?)\}", body, re.DOTALL):
        fields = re.findall(r'"([^"]*)"|(nullptr)|(k\w+)', family)
        found.append([constants[k] if k else None if null else word for word, null, k in fields])
    return found


def table() -> str:
    lines = [
        "| family | what it computes | last passed its tests on | since then | off: |",
        "|---|---|---|---|---|",
    ]
    for name, does, instead, gpu, commit, since, counts_on in rows():
        proof = f"one {gpu} at {commit}; counts for {counts_on}" if gpu else "no GPU"
        lines.append(f"| `{name}` | {does} | {proof} | {since or '-'} | {instead} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    page = PAGE.read_text()
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    written = before + BEGIN + "\n" + table() + "\n" + END + after
    if "--check" in sys.argv:
        if page != written:
            print("docs/guide/cuda.md has not the ledger of proven.h: run tools/ledger.py")
        return int(page != written)
    PAGE.write_text(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
