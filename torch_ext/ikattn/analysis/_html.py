"""What pages of HTML need so that nothing in them runs or loads but their own script."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

__all__ = ["json_in_script", "policy_of"]


def policy_of(script: str, style: str) -> str:
    """The Content-Security-Policy of a page with one script and one style, and nothing else."""
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )


def json_in_script(contents: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(contents, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(source: str) -> str:
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return f"'sha256-{digest}'"
