"""The files of a page made one: its markup with the styles and scripts it names put in.

A page is NAME.html, NAME.css and NAME.js; base.css and base.js hold what all pages share.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from importlib.resources import files

__all__ = ["template"]

_PLACE = re.compile(r"\{\{(policy|title|style|script)\}\}")
_CONTENTS = re.compile(r"\{\{(?:arrays|contents|lines)\}\}")


def template(name: str, title: str, scripts: Sequence[str] = ()) -> list[bytes]:
    """The parts of a page between which its contents go.

    Args:
        name: Of the page.
        title: Taken literally.
        scripts: Names of further scripts, which run between base.js and the page's own.
    """
    page = _text(f"{name}.html")
    style = _text("base.css") + _text(f"{name}.css")
    script = "".join(_text(f"{part}.js") for part in ("base", *scripts, name))
    # Whatever should get into the page all the same: it may neither run nor load anything.
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    values = {"policy": policy, "title": html.escape(title), "style": style, "script": script}
    return [
        _PLACE.sub(lambda place: values[place[1]], part).encode() for part in _CONTENTS.split(page)
    ]


def _text(name: str) -> str:
    return (files("ikattn.analysis") / "page" / name).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return f"'sha256-{digest}'"
