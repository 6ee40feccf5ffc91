"""How fast the page of many lines opens, and finds and sorts them, in a headless Chromium.

Times are the browser's own, in milliseconds: of the load event, and from a choice to the frame
after it, the median over sorts and searches.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ikattn.cli.index import write_index

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/python/support"))
from chromium import browser_tab, find_chromium

WORDS = ("the", "animal", "did", "not", "cross", "a", "street", "because", "it", "was", "tired")
CHOICES = """(async () => {
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const times = [];
  const timed = async (choose) => {
    await frame();
    const begin = performance.now();
    choose();
    await frame();
    times.push(performance.now() - begin);
  };
  for (const at of [3, 2, 1, 0]) await timed(() => byId("sort").children[at].click());
  for (const text of ["w", "water", "no such text", "", "animal did"]) {
    await timed(() => {
      byId("search").value = text;
      byId("search").dispatchEvent(new Event("input"));
    });
  }
  return times;
})()"""


def line(number: int) -> dict[str, Any]:
    """An entry of lines.jsonl, with a small map of random bytes."""
    words = random.choices(WORDS, k=random.randint(1, 25))
    cells = torch.randint(256, (16 * 16,)).tolist()
    view = {"map": "summed", "entropy": random.random(), "mixing_ratio": random.random()}
    view["thumbnail"] = f"16 16 {base64.b64encode(bytes(cells)).decode()}"
    entry = {"line": number, "text": " ".join(words), "tokens": words, "target": None}
    return {**entry, "overview": view, "files": [f"line-{number:06d}.html"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=10000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    program = find_chromium()
    if program is None:
        sys.exit("index_page.py: no chromium is installed")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for number in range(1, given.lines + 1):
                file.write(json.dumps(line(number)) + "\n")
        job, ledger = SimpleNamespace(out=Path(folder), model="a model"), SimpleNamespace(path=path)
        write_index(job, ledger)  # type: ignore[arg-type]
        page = Path(folder) / "index.html"
        loads, choices = [], []
        with browser_tab(program) as tab:
            for _ in range(given.rounds):
                tab.open(page.as_uri())
                event = "performance.getEntriesByType('navigation')[0].loadEventEnd"
                loads.append(float(tab.evaluate(event)))
                choices += tab.evaluate(CHOICES)
        print(
            f"{given.lines} lines, {page.stat().st_size / 1e6:.1f} MB: load "
            f"{statistics.median(loads):.0f} ms, a choice {statistics.median(choices):.0f} ms"
        )


if __name__ == "__main__":
    main()
