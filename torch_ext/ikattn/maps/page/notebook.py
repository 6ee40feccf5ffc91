"""A recording as a notebook shows it: its page in a frame, or a table of what it holds."""

from __future__ import annotations

import html
from io import BytesIO

from ikattn.maps.layers import RecordedMaps
from ikattn.maps.page import describe, page_bytes, write_page
from ikattn.maps.page.template import frame
from ikattn.maps.sequences import AXES, tensors_of

_LARGEST = 2_000_000  # bytes of a page: a notebook keeps every one that it shows in its file
_ROWS = 12
_HEIGHT = 720


def notebook_view(recording: RecordedMaps, graphs: int = 0) -> str:
    """Returns HTML for a cell's output.

    It is the page in a frame that may run its script, and has neither an origin nor the notebook's
    document. A table stands in place of a page of more than 2 MB, or of one that cannot be made.

    graphs: The number of calls over a graph recorded beside them, which pages do not hold.
    """
    try:
        recording.check_recorded()
    except LookupError as error:
        said = f"{graphs} calls over a graph: see recording.graphs" if graphs else str(error)
        return f"<p>{html.escape(said)}</p>"
    if page_bytes(recording) > _LARGEST:
        return _table(
            recording,
            "The page would take too much room here; recording.to_html(path) writes it to a file.",
        )
    page = BytesIO()
    try:
        write_page(page, recording)
    except ValueError as error:  # to_html says the same, where it can be mended
        return _table(recording, str(error))
    return frame(page.getvalue(), "Attention maps", _HEIGHT)


def _table(recording: RecordedMaps, reason: str) -> str:
    layers, rows = list(recording.layers.values()), list[str]()
    for layer in layers[:_ROWS]:  # shapes of maps are those in the first call that it ran in
        maps = next((batch[layer.name] for batch in recording.batches if layer.name in batch), None)
        found = [] if maps is None else list(tensors_of(maps))
        shapes = [f"{name} {list(x.shape)}" for name, _, x in found if name in AXES]
        if len(found) > len(shapes):
            shapes.append("mixing_ratio")
        cells = (layer.name, f"{layer.side}, {layer.kind}", layer.heads, ", ".join(shapes))
        rows.append(f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in cells)}</tr>")
    if len(layers) > _ROWS:
        rows.append(f"<tr><td colspan=4>and {len(layers) - _ROWS} more</td></tr>")
    return (
        f"<p>{html.escape(describe(recording))} · {len(recording.batches)} forward calls</p>"
        f"<p>{html.escape(reason)}</p>"
        "<table><thead><tr><th>layer</th><th>kind</th><th>heads</th><th>maps</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
