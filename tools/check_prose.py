"""Tells where a page has a sentence of more than 40 words, or a paragraph of more than 120.

    python tools/check_prose.py README.md docs/guide/cuda.md     # default: all

Exits with 1 where there are any. Tables, code and headings are left out; a code span is a word.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SENTENCE, PARAGRAPH = 40, 120


def paragraphs(text: str) -> list[tuple[int, str]]:
    """Of prose, each with the line that it begins in; a point of a list is one."""
    found: list[tuple[int, str]] = []
    in_code = False
    begun = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("```"):
            in_code = not in_code
        is_table = line.lstrip().startswith("|")
        is_prose = not (in_code or is_table or line.startswith(("#", "    ", "```")))
        is_prose = is_prose and bool(line.strip())
        if not is_prose:
            begun = False
            continue
        if not begun or re.match(r"\s*([*-]|\d+\.) ", line):
            found.append((number, ""))
            begun = True
        found[-1] = (found[-1][0], f"{found[-1][1]} {line}".strip())
    return found


def words(text: str) -> int:
    plain = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", text))
    return len(re.findall(r"[^\s]*\w[^\s]*", plain))


def sentences(paragraph: str) -> list[str]:
    plain = re.sub(r"`[^`]*`", "Code", paragraph)
    return re.split(r"(?<=[.!?:;])[)\"*]*\s+(?=[A-Z*`\[(])", plain)


def long_passages(path: Path) -> list[str]:
    """What is too long on a page, with its line."""
    found = []
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    for line, paragraph in paragraphs(path.read_text()):
        if (count := words(paragraph)) > PARAGRAPH:
            found.append(f"{name}:{line}: a paragraph of {count} words")
        for sentence in sentences(paragraph):
            if (count := words(sentence)) > SENTENCE:
                begin = " ".join(sentence.split()[:8])
                found.append(f"{name}:{line}: a sentence of {count} words: {begin} ...")
    return found


def main() -> int:
    given = [Path(name).resolve() for name in sys.argv[1:]]
    pages = given or [
        *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    found = [passage for page in pages for passage in long_passages(page)]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
