"""The files of a page made one: markup with its styles and scripts, besides which nothing runs.

page.html is one page of three modes, index.html the command's overview of lines, and summary.html
that of a corpus. All share head.html and base.css, and the first two base.js; scripts by subject
are those of ``_SCRIPTS``. In page.html a comment such as ``<!-- maps comparison -->`` says which
modes have what follows, until the next such comment.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, BinaryIO, Literal, TypeAlias

from ikattn.maps.page.arrays import Arrays

Mode: TypeAlias = Literal["maps", "attribution", "comparison"]

_SCRIPTS: dict[str, tuple[str, ...]] = {
    "maps": ("heatmaps", "flow", "maps"),
    "attribution": ("attribution",),
    "comparison": ("heatmaps", "comparison"),
}
_MODES = re.compile(r"[ \n]*<!-- ([a-z ]+) -->\n")
_CONTENTS = re.compile(r"\{\{(?:arrays|contents|lines)\}\}")
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def write_mode(
    file: BinaryIO,
    mode: Mode,
    title: str,
    contents: Callable[[Arrays], dict[str, Any]],
    *,
    kind: str = "",
) -> None:
    """Writes a page in one of its modes, which decides on its parts and scripts.

    title: Taken literally.
    contents: Writes arrays into the page, and gives all else that its script knows, for JSON.
    kind: "small" for a notebook.
    """
    before, between, after = template(
        "maps/page/page.html",
        title,
        styles=("maps/page/base.css", "maps/page/page.css"),
        scripts=tuple(f"maps/page/{name}.js" for name in ("base", *_SCRIPTS[mode])),
        mode=f"{mode} {kind}".strip(),
    )
    file.write(before)
    text = json.dumps(contents(Arrays(file)), allow_nan=False)
    for letter in "<>&":  # nothing in it can end the script element that it stands in
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    file.write(between + text.encode() + after)


def frame(page: bytes, title: str, height: int) -> str:
    """Returns HTML for a notebook: a page in a frame that its script cannot leave."""
    return (
        f'<iframe sandbox="allow-scripts" title="{title}" width="100%" height="{height}" '
        f'style="border: 0; resize: vertical" srcdoc="{html.escape(page.decode())}"></iframe>'
    )


def template(
    markup: str, title: str, *, styles: Sequence[str], scripts: Sequence[str], mode: str = ""
) -> list[bytes]:
    """Returns the parts of a page between which its contents go.

    markup, styles, scripts: Files, as paths in ``ikattn``, in the order in which they count.
    title: Taken literally.
    mode: Classes of the page, the first of them its mode.
    """
    style, script = ("".join(map(_text, paths)) for paths in (styles, scripts))
    # Whatever should get into the page all the same: it may neither run nor load anything.
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    own = {"policy": policy, "title": html.escape(title), "style": style, "script": script}
    own["mode"] = mode
    first, *rest = _MODES.split(_text("maps/page/head.html") + _text(markup))
    wanted = {"all", mode.partition(" ")[0]}
    pairs = zip(rest[::2], rest[1::2], strict=True)
    kept = [part for modes, part in pairs if wanted & set(modes.split())]
    parts = _CONTENTS.split("\n".join((first, *kept)))
    return [_PLACE.sub(lambda place: own[place[1]], part).encode() for part in parts]


def _text(path: str) -> str:
    return (files("ikattn") / path).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return f"'sha256-{digest}'"
