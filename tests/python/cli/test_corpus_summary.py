"""The page of a corpus that ``python -m ikattn analyze --format sums`` writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ikattn.cli.summary import write_summary
from ikattn.explain import CorpusSums
from recordings import encoder_recording

LAYER = "encoder.layer.1.attention.self"


def tables_of(page: Path) -> dict[str, dict[str, list[str]]]:
    """The rows of each table by the names of their layers."""
    found = {}
    for section in re.findall(r"<section>.*?</section>", page.read_text(), re.DOTALL):
        rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>.*?</tr>", section)]
        title = re.findall(r"<h2>(.*?)</h2>", section)[0]
        found[title] = {cells[0]: cells[1:] for cells in rows if cells}
    return found


def test_a_page_tells_where_a_model_looks_and_what_makes_it_move(tmp_path: Path) -> None:
    sums, recording = CorpusSums(), encoder_recording()
    maps = recording.batches[0][LAYER]
    maps.weights[:, 1] = 0.01
    maps.weights[:, 1, :, 0] = 0.9
    maps.per_head[:, 1, :, 0] = 0.1  # head 1 looks at the first token and moves the others
    recording.batches[0].tokens = [["[CLS]", "it", "was", "he", "."], ["[CLS]", "it", "was"]]
    sums.add(recording)
    write_summary(tmp_path / "a.html", sums)
    found = tables_of(tmp_path / "a.html")
    rows = [row for row in sums.table() if row["layer"] == LAYER and row["map"] == "weights"]
    special = sum(row["special"] for row in rows) / 2
    assert found["Where attention looks / what it moves"][LAYER][0].startswith(
        f"{100 * special:.1f} % / "
    )
    factors = found["What makes contributions large"]
    assert sum(map(float, factors[LAYER][:4])) == pytest.approx(1, abs=0.02)
    assert list(factors)[-1] == "the model"
    ratio = sums[LAYER]["mixing_ratio.encoder"]
    mean = float((ratio.values.nan_to_num() * ratio.count).sum() / ratio.count.sum())
    assert found["Mixing ratios"][LAYER][-1] == f"{100 * mean:.1f} %"
    assert found["Sinks"][LAYER][:2] == ["1", "special"]


def test_sections_without_maps_are_left_out(tmp_path: Path) -> None:
    write_summary(tmp_path / "none.html", CorpusSums())
    assert tables_of(tmp_path / "none.html") == {}
    sums, recording = CorpusSums(), encoder_recording()
    for name, maps in recording.batches[0].items():
        recording.batches[0].layers[name] = type(maps)(
            weights=maps.weights, query_padding=maps.query_padding, key_padding=maps.key_padding
        )
    sums.add(recording)
    write_summary(tmp_path / "weights.html", sums)
    found = tables_of(tmp_path / "weights.html")
    assert list(found) == ["Where attention looks / what it moves"]
    assert found["Where attention looks / what it moves"][LAYER][1].endswith(" %")
