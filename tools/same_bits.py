"""Tells whether two builds compute the same bits: outputs and gradients of the tests' samples.

    python tools/same_bits.py before.json                     # with the one installed
    python tools/same_bits.py before.json --compare           # with the other; 1 where bits differ
    IKATTN_TEST_DEVICE=cuda python tools/same_bits.py ...     # on a GPU; or =interpreter

For a change that only moves code. Each result is kept as a hash of its bytes, by sample and type.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/python/support"))

import devices  # noqa: F401  loads the interpreter's device where it is asked for
import ikattn
from agreement import gradients
from samples import DTYPES, SAMPLES, Arguments

DEVICE = os.environ.get("IKATTN_TEST_DEVICE", "cpu")


def hash_of(tensor: Tensor) -> str:
    there = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(there.numpy().tobytes()).hexdigest()[:16]


def placed(arguments: Arguments) -> Arguments:
    return {
        name: value.to(DEVICE) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }


def results() -> dict[str, str]:
    """Hashes the output and each gradient of every sample in every type."""
    found: dict[str, str] = {}
    for sample in SAMPLES:
        for dtype in DTYPES:
            arguments = placed(sample.arguments(dtype))
            key = f"{sample.name}, {dtype}"
            output = ikattn.implicit_kernel_attention(**arguments)
            found[f"{key}: output"] = hash_of(output)
            torch.manual_seed(0)
            incoming = torch.randn(output.shape, dtype=torch.float32).to(output)
            got = gradients(ikattn.implicit_kernel_attention, arguments, grad_output=incoming)
            found |= {f"{key}: {name}": hash_of(gradient) for name, gradient in got.items()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--compare", action="store_true", help="with the file, not write it")
    options = parser.parse_args()
    found = results()
    if not options.compare:
        options.file.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} results of {ikattn.__version__} on {DEVICE} in {options.file}")
        return 0
    before = json.loads(options.file.read_text())
    differ = sorted(
        key for key in before.keys() | found.keys() if before.get(key) != found.get(key)
    )
    print(*differ, sep="\n", end="\n" if differ else "")
    print(f"{len(differ)} of {len(found)} results differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
