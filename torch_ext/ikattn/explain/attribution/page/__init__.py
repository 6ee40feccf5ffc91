"""Attributions as people see them: the text coloured by its scores, on a page or in a notebook.

page/ holds the page's parts: page.html, page.css and page.js, and what makes texts of tokens.
Sizes: B sequences, n targets, S tokens.
"""

from __future__ import annotations

import base64
import html
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ikattn._library import version
from ikattn._whole_files import whole_file
from ikattn.maps.files._common import raw_bytes
from ikattn.maps.page.template import json_in_script, template
from ikattn.maps.tokens import is_special
from ikattn.maps.words import text_span, texts_of

if TYPE_CHECKING:
    from ikattn.explain.attribution.attribution import Attribution

__all__ = ["frame", "write_page"]

_LARGEST_FRAME = 2_000_000  # bytes; a notebook keeps one for every cell that shows one


def write_page(found: Attribution, path: str | os.PathLike[str], title: str | None) -> int:
    """Writes the page of :meth:`Attribution.to_html` and returns its size in bytes."""
    page = _page(_contents(found), title or "Attribution", "page")
    with whole_file(path) as file:
        return file.write(page)


def frame(found: Attribution) -> str:
    """The page in a frame that its script cannot leave, or the text alone if it is too large."""
    both = (found.scores, found.prefix_scores)
    if 16 / 3 * sum(x.numel() for x in both if x is not None) < _LARGEST_FRAME:  # base64, float32
        contents = _contents(found)
        page = html.escape(_page(contents, "Attribution", "small").decode())
        if len(page) < _LARGEST_FRAME:
            shown = contents["sequences"]
            longest = max(sum(len(text["texts"]) for text in own["texts"]) for own in shown)
            height = min(560, 260 + 2 * longest)
            return (
                f'<iframe sandbox="allow-scripts" title="Attribution" srcdoc="{page}" style="'
                f'width: 100%; height: {height}px; border: 0; resize: vertical"></iframe>'
            )
    return _static_text(found)


def _page(contents: dict[str, Any], title: str, kind: str) -> bytes:
    before, after = template(
        "explain/attribution/page/page.html",
        title,
        styles=("explain/attribution/page/page.css",),
        scripts=("maps/page/base.js", "explain/attribution/page/page.js"),
        values={"kind": kind},
    )
    return before + json_in_script(contents) + after


# --- What the page knows


def _contents(found: Attribution) -> dict[str, Any]:
    """All that the page shows, for JSON."""
    _check(found)
    return {
        "about": f"{found.method or 'attribution'} · ikattn {version()}",
        "apart": found.scores.dim() == 3,
        "sequences": [_sequence(found, b) for b in range(found.scores.size(0))],
    }


def _check(found: Attribution) -> None:
    """Raises ValueError where there is no sequence, or shapes and lists do not fit."""
    scores = found.scores
    if scores.dim() not in (2, 3) or scores.size(0) == 0:
        raise ValueError(
            "to_html: scores must be [B, S] or [B, n, S] with B of 1 or more, "
            f"got {list(scores.shape)}"
        )
    shapes = {"value": found.value.shape, "bias": found.bias.shape}
    if found.prefix_scores is not None:
        shapes["prefix_scores"] = found.prefix_scores.shape[:-1]
    for name, shape in shapes.items():
        if shape != scores.shape[:-1]:
            raise ValueError(
                f"to_html: {name} must be of {list(scores.shape[:-1])} targets as scores are, "
                f"got {list(shape)}"
            )
    for name in ("tokens", "prefix_tokens", "target_tokens"):
        lists = getattr(found, name)
        if lists is not None and len(lists) != scores.size(0):
            raise ValueError(
                f"to_html: {name} must hold {scores.size(0)} lists, one a sequence, "
                f"got {len(lists)}"
            )


def _sequence(found: Attribution, b: int) -> dict[str, Any]:
    """One sequence: its texts, and what was attributed."""
    names = (found.target_tokens[b] or None) if found.target_tokens else None
    rows = _rows(found.scores, b)  # [n, S]
    n = rows.size(0)
    if found.scores.dim() == 3 and names is not None:
        if len(names) > n:
            raise ValueError(
                f"to_html: target_tokens[{b}] must be {n} at most, as scores has rows, "
                f"got {len(names)}"
            )
        n = len(names)  # of a sequence with fewer targets than others, the rest is 0
    has_two = found.prefix_scores is not None
    kind = found.byte_level
    parts = [_text("Encoder" if has_two else "Text", found.tokens, rows[:n], b, "tokens", kind)]
    if found.prefix_scores is not None:
        prefix = _rows(found.prefix_scores, b)[:n]
        parts.append(_text("Decoder", found.prefix_tokens, prefix, b, "prefix_tokens", kind))
    opening = "".join(parts[0]["texts"]).strip()
    return {
        "title": " ".join(opening[:400].split())[:100],
        "targets": None if names is None else texts_of(names, byte_level=found.byte_level),
        "value": _numbers(found.value[b])[:n],
        "bias": _numbers(found.bias[b])[:n],
        "texts": parts,
    }


def _text(
    title: str,
    tokens: list[list[str]] | None,
    rows: Tensor,
    b: int,
    argument: str,
    byte_level: bool,
) -> dict[str, Any]:
    """A text without its padding, and ``[n, S]`` of its tokens."""
    S = rows.size(1)
    names = [str(j) for j in range(S)] if tokens is None else tokens[b]
    if len(names) != S:
        raise ValueError(
            f"to_html: {argument}[{b}] must hold the {S} tokens that have scores, got {len(names)}"
        )
    has_part = (rows != 0).any(0).tolist()  # NaN, too
    span = text_span(names, has_part)
    shown = rows[:, span].contiguous()
    return {
        "title": title,
        "texts": texts_of(names[span], byte_level=byte_level),
        "special": [j for j, name in enumerate(names[span]) if is_special(name)],
        "first": span.start,
        "padding": S - shown.size(1),
        "scores": base64.b64encode(raw_bytes(shown)).decode(),
    }


def _rows(scores: Tensor, b: int) -> Tensor:
    """Of one sequence, float32 ``[n, S]``; n is 1 where targets are summed."""
    own = scores[b].detach().to("cpu", torch.float32)
    return own if own.dim() == 2 else own.unsqueeze(0)


def _numbers(x: Tensor) -> list[float | None]:
    numbers = x.detach().cpu().double().reshape(-1).tolist()
    return [number if math.isfinite(number) else None for number in numbers]


# --- Where there is no room for a page


def _static_text(found: Attribution) -> str:
    shown = []
    for b in range(found.scores.size(0)):
        texts = [_coloured(found.tokens, found.scores, b, found.byte_level)]
        if found.prefix_scores is not None:
            texts.append(_coloured(found.prefix_tokens, found.prefix_scores, b, found.byte_level))
        target = (
            "".join(texts_of(found.target_tokens[b], byte_level=found.byte_level))
            if found.target_tokens
            else ""
        )
        value = float(found.value[b].sum())
        title = html.escape(f"{found.method}: {target} ({value:.4g})")
        shown.append(f"<p><small>{title}</small></p>{''.join(texts)}")
    return (
        '<div style="font-family: sans-serif; line-height: 1.8; color: #111; background: #fff; '
        f'padding: 4px 8px">{"".join(shown)}</div>'
    )


def _coloured(tokens: list[list[str]] | None, scores: Tensor, b: int, byte_level: bool) -> str:
    """A text, each token coloured by its score: orange for, blue against."""
    sums = _rows(scores, b).sum(0)  # [S]
    names: Sequence[str] = [str(j) for j in range(len(sums))] if tokens is None else tokens[b]
    span = text_span(names, (sums != 0).tolist())
    sums = sums[span]
    finite = sums[sums.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    spans = []
    for text, score in zip(
        texts_of(names[span], byte_level=byte_level), sums.tolist(), strict=True
    ):
        share = abs(score) / largest if largest > 0 and math.isfinite(score) else 0.0
        colour = "230, 120, 0" if score >= 0 else "0, 110, 200"
        style = f"background: rgba({colour}, {0.75 * share:.2f})"
        spans.append(f'<span title="{score:.4g}" style="{style}">{html.escape(text)}</span>')
    return f'<div style="white-space: pre-wrap">{"".join(spans)}</div>'
