"""Pages in tests: how a tab opens one, what it holds, and tokens that mean harm."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from chromium import Tab

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">"


def contents_of(path: Path) -> dict[str, Any]:
    """Returns what the script of a page reads."""
    text = path.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="contents">(.*?)</script>', text, re.S)
    assert found is not None
    return dict(json.loads(found[1]))


def open_page(tab: Tab, path: Path) -> None:
    """Opens a page, which must complain of nothing and ask nobody for anything."""
    tab.complaints.clear()
    tab.requests.clear()
    tab.open(path.as_uri())
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith("file:")] == []


def assert_markup_does_nothing(tab: Tab) -> None:
    """That the page's own policy stops markup that gets in all the same."""
    title = tab.evaluate("document.title")
    tab.evaluate(f"document.body.insertAdjacentHTML('beforeend', {HOSTILE!r}); 1")
    tab.evaluate("new Promise(done => setTimeout(done, 300))")
    assert tab.evaluate("document.title") == title
