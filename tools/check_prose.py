"""Tells where a page is long-winded or unclear, and where a comment cannot be read alone.

    python tools/check_prose.py README.md csrc/interpreter torch_ext/ikattn/nn/heads.py

checks these files and folders; without arguments all pages, and the folders of CLEAN. Exits with 1
where it finds

* on a page (.md) a sentence of more than 30 words, a paragraph of more than 90, or one of UNCLEAR:
  "so", "what" or "those" where a noun would be clear. A point of a list is a paragraph. Tables,
  code and headings are left out; a code span is a word. More than one passive without an agent in
  a paragraph is a warning, which leaves the exit code at 0.
* in code (.py, .h, .cpp, .cu) a comment or docstring that begins with a word of FRAGMENT, or is one
  line that has no subject: it begins with a word of REST, or with one of PREPOSITION and has no
  verb. A comment on a function begins with a verb ("Loads", "Returns"), on a field or type with a
  noun. First lines count, of comments that have a line of their own.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SENTENCE, PARAGRAPH = 30, 90
CLEAN = ("benchmarks", "csrc", "examples", "experiments", "tests", "tools", "torch_ext")
CODE = (".py", ".h", ".cpp", ".cu")
UNCLEAR = {
    r"\b[Ee]rr(?:s|ed)?\b": "have an error",
    r"\b(?:is|are|was|were|do|does|did|holds?) so(?=[.,;:]| (?:for|in|on|to|where)\b)": "repeat",
    r"^So (?:are|did|do|does|is|was|were)\b": "repeat the verb",
    r"\b[Tt]hose (?:for|in|of|on|that|where|which|who|whose|with)\b": "repeat the noun",
    r"\b(?:by|for|from|of|than|to|with) what\b(?! extent)": "name it",
    r"^(?:For |In |Of |With )?[Ww]hat\b(?!.*\?)": "name it",
    r"^Of (?!course)": "begin with the subject",
    r"\bbe had\b": "be available",
}
PASSIVE = re.compile(
    r"\b(?:is|are|was|were|be|been)(?: (?:not|never|also|only|then|\w+ly))* (?:\w\w+ed|built|"
    r"chosen|drawn|found|given|held|hidden|kept|known|left|made|put|seen|shown|taken|told|written)\b"
    r"(?![^.:;]*\b(?:by|with)\b)"
)
FRAGMENT = re.compile(r"(?:Of|The same|Those|As|By|From|So|What|Which)\b(?!-)")
REST = re.compile(r"(?:Also|And|But|Else|Likewise|Not|Ones|Or|Theirs|Them|They|To|Until|Whose)\b")
PREPOSITION = re.compile(
    r"(?:After|At|Before|Behind|Beside|Between|Beyond|For|In|Into|On|Over|Per|With|Without)\b"
)
VERB = re.compile(r"[,:;]|\b(?:is|are|was|were|has|have|do|does|can|may|must|would|will)\b")


def paragraphs(text: str) -> list[tuple[int, str]]:
    """Splits prose; each paragraph has the line that it begins in. A point of a list is one."""
    found: list[tuple[int, str]] = []
    in_code = False
    begun = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("```"):
            in_code = not in_code
        is_table = line.lstrip().startswith("|")
        is_prose = not (in_code or is_table or line.startswith(("#", "    ", "```", ":")))
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
    return re.split(r"(?<=[.!?:;])[)\"*]*\s+(?=[A-Z0-9*`\"\[(])", plain)


def poor_passages(path: Path) -> list[str]:
    """Names the passages of a page that are too long or unclear, with their lines."""
    found = []
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    for line, paragraph in paragraphs(path.read_text()):
        if (count := words(paragraph)) > PARAGRAPH:
            found.append(f"{name}:{line}: a paragraph of {count} words")
        if len(passive := PASSIVE.findall(re.sub(r"`[^`]*`", "Code", paragraph))) > 1:
            print(f"{name}:{line}: warning: passive: {', '.join(passive)}")
        for sentence in sentences(paragraph):
            if (count := words(sentence)) > SENTENCE:
                begin = " ".join(sentence.split()[:8])
                found.append(f"{name}:{line}: a sentence of {count} words: {begin} ...")
            plain = re.sub(r"^(?:[*-]|\d+\.) |[*_(]", "", sentence)
            for pattern, better in UNCLEAR.items():
                if match := re.search(pattern, plain):
                    found.append(f"{name}:{line}: '{match[0]}': {better}")
    return found


def comments(path: Path) -> list[tuple[int, str, bool]]:
    """Comments and docstrings: the first line's number, its text, and whether it is all."""
    text = path.read_text()
    is_python = path.suffix == ".py"
    mark = re.compile(r"\s*#(?!!) ?(.*)" if is_python else r"\s*// ?(.*)")
    found: list[tuple[int, str, bool]] = []
    goes_on = False
    for number, line in enumerate(text.splitlines(), start=1):
        match = mark.match(line)
        if match and goes_on:
            found[-1] = (*found[-1][:2], False)
        elif match:
            found.append((number, match[1], True))
        goes_on = match is not None
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)) if is_python else ():
        if isinstance(node, holders) and (docstring := ast.get_docstring(node)):
            first, _, rest = docstring.partition("\n")
            found.append((node.body[0].lineno, first, not rest))
    return found


def fragments(path: Path) -> list[str]:
    """Names the comments of a file of code that cannot be read alone, with their lines."""
    found = []
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    for line, text, is_all in comments(path):
        no_subject = REST.match(text) or (PREPOSITION.match(text) and not VERB.search(text))
        if FRAGMENT.match(text) or (is_all and no_subject):
            found.append(f"{name}:{line}: a comment that is a fragment: {text}")
    return found


def files(path: Path) -> list[Path]:
    """Returns the pages and code of a folder, without headers that a build has copied."""
    inner = sorted(path.rglob("*")) if path.is_dir() else [path]
    copied = ROOT / "torch_ext" / "ikattn" / "include"
    return [x for x in inner if x.suffix in (".md", *CODE) and not x.is_relative_to(copied)]


def main() -> int:
    given = [Path(name).resolve() for name in sys.argv[1:]]
    if not given:
        given = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")]
        given += [ROOT / name for name in ("docs", *CLEAN)]
    found = []
    for path in (file for name in given for file in files(name)):
        found += poor_passages(path) if path.suffix == ".md" else fragments(path)
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
