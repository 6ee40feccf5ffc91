"""The files of a page made one: markup with its styles and scripts, besides which nothing runs.

Every page shares base.js: how elements are made, and the colours of maps. What is drawn as maps
shares base.css, too.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

__all__ = ["json_in_script", "template"]

_CONTENTS = re.compile(r"\{\{(?:arrays|contents|lines)\}\}")
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def template(
    markup: str,
    title: str,
    *,
    styles: Sequence[str],
    scripts: Sequence[str],
    values: Mapping[str, str] | None = None,
) -> list[bytes]:
    """The parts of a page between which its contents go.

    Args:
        markup: A file of HTML, as a path in ``ikattn``.
        title: Taken literally.
        styles, scripts: Files likewise, in the order in which they count.
        values: Of further places in the markup.
    """
    style, script = ("".join(map(_text, paths)) for paths in (styles, scripts))
    # Whatever should get into the page all the same: it may neither run nor load anything.
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    own = {"policy": policy, "title": html.escape(title), "style": style, "script": script}
    own |= values or {}
    parts = _CONTENTS.split(_text(markup))
    return [_PLACE.sub(lambda place: own[place[1]], part).encode() for part in parts]


def json_in_script(contents: Any) -> bytes:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(contents, allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text.encode()


def _text(path: str) -> str:
    return (files("ikattn") / path).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return f"'sha256-{digest}'"
