"""Records a tiny model of every family of Hugging Face transformers, and writes a table of them.

    python tools/catalogue.py [--kinds bert llama ...] [--out docs/reference/families.md] [--jobs 2]

A family is a model type of this release of transformers that has a model class. It is built with
random weights in float64, sizes of the names in SIZES made small, in nested configurations too, and
runs on a batch of two. The exit status is 1 where a family that the page has as recorded is not.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import multiprocessing
import re
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/python/support"))

from tiny_transformers import LEFT_OUT, SIZES, tiny_inputs  # noqa: E402

SECONDS = 60  # of a family
BYTES = 6 << 30


def kinds() -> dict[str, str]:
    """Returns the name of a model class for each type: the bare model, else the first with a head."""
    from transformers.models.auto import modeling_auto

    mappings = [getattr(modeling_auto, x) for x in sorted(dir(modeling_auto)) if "MAPPING_NAMES" in x]
    found: dict[str, str] = {}
    for mapping in (modeling_auto.MODEL_MAPPING_NAMES, *mappings):
        for kind, names in mapping.items():
            name = names if isinstance(names, str) else names[0]
            if not name.endswith("Config"):
                found.setdefault(kind, name)
    return dict(sorted(found.items()))


def tiny_config(config_class: type, left_out: tuple[str, ...], depth: int = 0) -> Any:
    """Returns a configuration whose known sizes are small, and those of its parts."""
    known = set(inspect.signature(config_class.__init__).parameters)
    for base in config_class.__mro__:
        known |= set(getattr(base, "__annotations__", {}))
    sizes = {name: size for name, size in SIZES.items() if name in known and name not in left_out}
    parts = getattr(config_class, "sub_configs", {})
    if parts and depth < 3:
        usual = config_class()
        for name in parts:
            part = getattr(usual, name, None)
            if part is not None:
                sizes[name] = tiny_config(type(part), left_out, depth + 1)
    return config_class(**sizes)


def tiny_model(kind: str, class_name: str) -> nn.Module:
    """Builds a model in float64 whose parameters are far from zero."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    config_class = getattr(transformers, CONFIG_MAPPING_NAMES[kind])
    model_class = getattr(transformers, class_name)
    error: Exception = RuntimeError("no sizes")
    for left_out in LEFT_OUT:
        try:
            torch.manual_seed(0)
            config = tiny_config(config_class, left_out)
            with torch.device("meta"):
                numbers = sum(x.numel() for x in model_class(config).parameters())
            if numbers > 40_000_000:
                raise ValueError(f"its tiny model has {numbers} numbers")
            model = model_class(config).double().eval()
        except Exception as failed:
            error = failed
            continue
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model
    raise error


def first_that_runs(model: nn.Module) -> dict[str, Tensor]:
    """Returns inputs on which the model runs: what its forward names, then fewer.

    Raises:
        Exception: The error of the usual inputs.
    """
    names = set(inspect.signature(model.forward).parameters)
    usual = tiny_inputs(model)
    text = {"input_ids": torch.arange(5, 17).view(2, 6)}
    image = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    target = {"decoder_input_ids": torch.tensor([[1, 4, 3], [1, 7, 9]])}
    tried = [
        usual,
        {name: x for name, x in usual.items() if name in names},
        text,
        text | target,
        text | {"pixel_values": image},
        {"pixel_values": image},
        {"pixel_values": torch.randn(2, 3, 32, 32, dtype=torch.float64)},
        {"pixel_values": torch.randn(2, 3, 64, 64, dtype=torch.float64)},
        {"pixel_values": torch.randn(2, 3, 224, 224, dtype=torch.float64)},
        {"pixel_values": torch.randn(2, 4, 3, 16, 16, dtype=torch.float64)},
        {"input_values": torch.randn(2, 2000, dtype=torch.float64)},
        {"input_features": torch.randn(2, 4, 32, dtype=torch.float64)},
        {"input_features": torch.randn(2, 32, 4, dtype=torch.float64)},
    ]
    errors: list[Exception] = []
    for inputs in tried:
        try:
            with torch.no_grad():
                model(**inputs)
            return inputs
        except Exception as failed:
            errors.append(failed)
    raise errors[0]


def tensors_of(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output
    if not isinstance(values, (list, tuple, type({}.values()))):
        return []
    return [x for each in values if each is not None for x in tensors_of(each)]


def tried(kind: str, class_name: str) -> dict[str, Any]:
    """Returns what became of a family: ``state``, and the words or numbers of its row."""
    import ikattn

    row: dict[str, Any] = {"kind": kind, "class": class_name}
    try:
        model = tiny_model(kind, class_name)
        inputs = first_that_runs(model)
    except Exception as error:
        return row | {"state": "not built", "why": f"{type(error).__name__}: {error}"}
    with torch.no_grad():
        began = time.perf_counter()
        torch.manual_seed(0)
        before = tensors_of(model(**inputs))
        plain = time.perf_counter() - began
        torch.manual_seed(0)
        again = tensors_of(model(**inputs))
        try:
            torch.manual_seed(0)
            began = time.perf_counter()
            with ikattn.record(model, None, check="all") as recording:
                during = tensors_of(model(**inputs))
            row["time"] = (time.perf_counter() - began) / plain
        except NotImplementedError as error:
            state = "refused" if attends(model) else "no attention"
            return row | {"state": state, "why": str(error)}
        except Exception as error:
            state = "refused" if attends(model) else "no attention"
            return row | {"state": state, "why": f"{type(error).__name__}: {error}"}
    if not recording.batches:
        return row | {"state": "refused", "why": "no layer ran on these inputs"}
    same = all(torch.equal(a, b) for a, b in zip(before, again, strict=True))
    if same and not all(torch.equal(a, b) for a, b in zip(before, during, strict=True)):
        return row | {"state": "refused", "why": "recording changed its outputs"}
    found = recording.batches[0]
    maps = Counter(
        name
        for layer in found.values()
        for name in ("summed", "with_residual", "with_norm", "encoder")
        if getattr(layer, name) is not None
    )
    return row | {
        "state": "recorded", "layers": len(found), "maps": dict(maps),
        "left out": len(recording.left_out),
    }  # fmt: skip


def attends(model: nn.Module) -> bool:
    """Tells whether the name of a module speaks of attention or of a mixer of tokens."""
    return any(
        re.search("Attention|Mixer|Mamba|DeltaNet|Rwkv|SSM", type(module).__name__)
        for module in model.modules()
    )


def worker(kind: str, class_name: str, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    signal.alarm(SECONDS)
    with contextlib.redirect_stderr(None), contextlib.redirect_stdout(None):
        pipe.send(tried(kind, class_name))


def all_tried(named: dict[str, str], jobs: int) -> list[dict[str, Any]]:
    """Tries each family in a process of its own, forked where transformers is imported."""
    import transformers  # noqa: F401

    context = multiprocessing.get_context("fork")
    waiting, running, rows = list(named.items()), [], []
    while waiting or running:
        while waiting and len(running) < jobs:
            kind, class_name = waiting.pop(0)
            ours, theirs = context.Pipe()
            process = context.Process(target=worker, args=(kind, class_name, theirs))
            process.start()
            theirs.close()
            running.append((kind, class_name, process, ours))
        for entry in list(running):
            kind, class_name, process, ours = entry
            if not ours.poll(0.02):
                continue
            try:
                rows.append(ours.recv())
            except EOFError:
                why = f"took more than {SECONDS} s or {BYTES >> 30} GiB"
                rows.append({"kind": kind, "class": class_name, "state": "not built", "why": why})
            process.join()
            running.remove(entry)
            print(json.dumps(rows[-1]), flush=True)
    return sorted(rows, key=lambda row: row["kind"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", help="model types; all where none is named")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    named = kinds()
    if asked.kinds:
        named = {kind: named[kind] for kind in asked.kinds if kind in named}
    rows = all_tried(named, asked.jobs)
    print(Counter(row["state"] for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
