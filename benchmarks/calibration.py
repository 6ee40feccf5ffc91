"""How near a calibrated implicit kernel comes to the softmax attention that it replaces.

Trains the vision transformer of examples/digits.py with softmax attention, then converts it with
frequencies as they are drawn, and with calibration on 100 training images.

export OMP_WAIT_POLICY=passive
python benchmarks/calibration.py
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path

import torch
from timing import processor

import ikattn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import digits


def main() -> None:
    torch.set_num_threads(1)
    print(f"{processor()}, torch {torch.__version__}, ikattn {ikattn.__version__}, one thread")
    train, _, test = digits.load_splits()
    torch.manual_seed(0)
    stock = digits.VisionTransformer()
    optimiser = torch.optim.AdamW(stock.parameters(), digits.LEARNING_RATE)
    for _ in range(15):
        for rows in torch.randperm(len(train.labels)).split(digits.BATCH):
            optimiser.zero_grad()
            loss = torch.nn.functional.cross_entropy(stock(train.images[rows]), train.labels[rows])
            loss.backward()
            optimiser.step()

    def accuracy(model: torch.nn.Module) -> float:
        with torch.no_grad():
            right = model.eval()(test.images).argmax(-1) == test.labels
        return 100 * right.double().mean().item()

    print(f"softmax                      test accuracy {accuracy(stock):5.1f} %")
    for p in (2.0, None):
        drawn = ikattn.convert(copy.deepcopy(stock), p=p, seed=0)
        print(f"p = {p}, frequencies as drawn  test accuracy {accuracy(drawn):5.1f} %")
        start = time.perf_counter()
        report = ikattn.calibrate(drawn, [train.images[:100]])
        seconds = time.perf_counter() - start
        print(f"p = {p}, calibrated            test accuracy {accuracy(drawn):5.1f} %", end="")
        print(f"   in {seconds:.0f} s")
        print("\n".join(f"    {line}" for line in report))


if __name__ == "__main__":
    main()
