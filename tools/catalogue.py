"""Records a tiny model of every family of Hugging Face transformers, and writes a table of them.

    python tools/catalogue.py [--kinds bert llama ...] [--out docs/reference/families.md] [--jobs 2]

A family is a model type of this release of transformers that has a model class. It is built with
random weights in float64, sizes of the names in SIZES made small, in nested configurations too, and
runs on a batch of two. Each takes a process of its own, a minute and 6 GiB at most.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/python/support"))

from tiny_transformers import LEFT_OUT, SIZES, tiny_inputs  # noqa: E402

SECONDS = 60  # of a family
BYTES = 6 << 30
STATES = ("recorded", "refused", "no attention", "not built")
LATER = ("with_residual", "with_norm", "encoder")


def kinds() -> dict[str, str]:
    """Returns a model class for each type, by name: the bare model, else the first with a head."""
    from transformers.models.auto import modeling_auto

    mappings = [
        getattr(modeling_auto, x) for x in sorted(dir(modeling_auto)) if "MAPPING_NAMES" in x
    ]
    found: dict[str, str] = {}
    for mapping in (modeling_auto.MODEL_MAPPING_NAMES, *mappings):
        for kind, classes in mapping.items():
            name = classes if isinstance(classes, str) else classes[0]
            if not name.endswith("Config"):
                found.setdefault(kind, name)
    return dict(sorted(found.items()))


MORE_SIZES = {
    "vocab_size_per_layer_input": 40,
    "hidden_size_per_layer_input": 4,
    "top_k_experts": 1,
}
# Ways to make a family small, tried in turn: names that keep their usual size, and other sizes.
RECIPES: tuple[tuple[tuple[str, ...], dict[str, int]], ...] = (
    *((left_out, {}) for left_out in LEFT_OUT),
    (("head_dim",), {"num_hidden_layers": 8, "num_layers": 8, "n_layer": 8}),
    (
        ("head_dim", "attention_head_dim", "v_head_dim", "num_layers"),
        dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim"), 256),
    ),
    (
        ("head_dim",),
        dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads"), 8),
    ),
    # Sections of rotary angles, one for each axis of an image: all of a head is turned, or half.
    *(
        ((), {"hidden_size": 48, "head_dim": 12, "num_key_value_heads": heads, "section": size})
        for size in (2, 1)
        for heads in (2, 4)
    ),
    # Sizes that must be those of another part.
    ((), dict.fromkeys(("out_hidden_size", "text_hidden_size", "output_dim", "codebook_dim"), 16)),
    (tuple(set(SIZES) - {"num_hidden_layers", "n_layer", "vocab_size", "pad_token_id"}), {}),
)
MOST_NUMBERS = 60_000_000


def tiny_config(
    config_class: type, left_out: tuple[str, ...], other: dict[str, int], depth: int = 0
) -> Any:
    """Returns a configuration whose known sizes are small, and those of its parts."""
    known = set(inspect.signature(config_class.__init__).parameters)
    for base in config_class.__mro__:
        known |= set(getattr(base, "__annotations__", {}))
    usual = config_class()

    def usual_of(name: str) -> Any:
        try:
            return getattr(usual, name, None)
        except Exception:  # which differs between layers
            return None

    sizes: dict[str, Any] = {
        name: size
        for name, size in (SIZES | MORE_SIZES | other).items()
        if name in known and name not in left_out
        if not isinstance(usual_of(name), (list, tuple, float, str))
    }
    for name in ("rope_parameters", "rope_scaling"):
        angles = usual_of(name)
        if "section" in other and isinstance(angles, dict):
            sizes[name] = angles | {"mrope_section": 3 * [other["section"]]}
    if depth < 3:
        for name in getattr(config_class, "sub_configs", {}):
            part = usual_of(name)
            if part is not None:
                sizes[name] = tiny_config(type(part), left_out, other, depth + 1)
    config = config_class(**sizes)
    config._experts_implementation = "eager"  # the other one knows no float64
    return config


def tiny_models(kind: str, class_name: str) -> Iterator[nn.Module | Exception]:
    """Yields models in float64 with parameters far from zero, and why others cannot be built."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    config_class = getattr(transformers, CONFIG_MAPPING_NAMES[kind])
    model_class = getattr(transformers, class_name)
    for left_out, other in RECIPES:
        try:
            torch.manual_seed(0)
            config = tiny_config(config_class, left_out, other)
            with torch.device("meta"):
                numbers = sum(x.numel() for x in model_class(config).parameters())
            if numbers > MOST_NUMBERS:
                raise ValueError(f"its tiny model has {numbers} numbers")
            model = model_class(config).double().eval()
        except Exception as failed:
            yield failed
            continue
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        yield model


def inputs_to_try(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yields inputs by what a model's forward names, the usual ones first."""
    names = set(inspect.signature(model.forward).parameters)
    text = {"input_ids": torch.arange(5, 17).view(2, 6)}
    target = {"decoder_input_ids": torch.tensor([[1, 4, 3], [1, 7, 9]])}

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    if "grid_thw" in names:
        config: Any = model.config
        size = getattr(config, "in_channels", getattr(config, "in_chans", 3)) * config.patch_size**2
        grid = torch.tensor([[1, 4, 4]])
        for frames in (getattr(config, "temporal_patch_size", 1), 1):
            first = next(iter(inspect.signature(model.forward).parameters))
            yield {first: numbers(16, size * frames), "grid_thw": grid}
    usual = tiny_inputs(model)
    yield usual
    yield {name: x for name, x in usual.items() if name in names}
    if "bbox" in names:
        yield text | {"bbox": torch.zeros(2, 6, 4, dtype=torch.long)}
        yield text | {"bbox": torch.rand(2, 6, 8, dtype=torch.float64)}
    yield text
    yield text | target
    yield text | {"pixel_values": numbers(2, 3, 16, 16)}
    for side in (16, 32, 64, 224):
        yield {"pixel_values": numbers(2, 3, side, side)}
    yield {"pixel_values": numbers(2, 4, 3, 16, 16)}
    yield {"pixel_values_videos": numbers(2, 4, 3, 16, 16)}
    for name in ("input_values", "input_features"):
        for shape in ((2, 2000), (2, 4, 32), (2, 32, 4), (2, 80, 64), (2, 128, 64)):
            yield {name: numbers(*shape)} | (target if "decoder_input_ids" in names else {})
    yield {"past_values": numbers(2, 64)}
    yield {"past_values": numbers(2, 64, 1)}


def first_that_runs(kind: str, class_name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns a model that attends, and inputs on which it runs.

    Raises:
        Exception: The first of the errors.
    """
    error: Exception | None = None
    for model in tiny_models(kind, class_name):
        if isinstance(model, Exception):
            error = error or model
            continue
        for inputs in inputs_to_try(model):
            for dtype in (torch.float64, torch.float32):  # which some compute a part in
                cast = {name: _in(x, dtype) for name, x in inputs.items()}
                try:
                    with torch.no_grad():
                        model.to(dtype)(**cast)
                    return model, cast
                except Exception as failed:
                    error = error or failed
    assert error is not None
    raise error


def _in(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


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
        model, inputs = first_that_runs(kind, class_name)
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
        except Exception as error:
            state = "refused" if attends(model) else "no attention"
            return row | {"state": state, "why": f"{type(error).__name__}: {error}"}
    if not recording.batches or not recording.batches[0]:
        return row | {"state": "refused", "why": "no layer ran on these inputs"}
    same = all(torch.equal(a, b) for a, b in zip(before, again, strict=True))
    if same and not all(torch.equal(a, b) for a, b in zip(before, during, strict=True)):
        return row | {"state": "refused", "why": "recording changed its outputs"}
    found = recording.batches[0]
    maps = Counter(
        name for layer in found.values() for name in LATER if getattr(layer, name) is not None
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


def page_of(rows: list[dict[str, Any]]) -> str:
    """Returns the page: what is recorded, what is not and why, and what could not be built."""
    import transformers

    by_state: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_state.setdefault(row["state"], []).append(row)
    found = {state: by_state.get(state, []) for state in STATES}
    recorded, refused = found["recorded"], found["refused"]
    share = 100 * len(recorded) / max(1, len(recorded) + len(refused))
    text = [
        "# Families of transformers",
        "",
        f"`tools/catalogue.py` builds a tiny model with random weights for each model type of "
        f"transformers {transformers.__version__} and records it, every row checked. It "
        f"can build {len(recorded) + len(refused)} types with attention or a linear mixer, and "
        f"`record` takes {len(recorded)} of them ({share:.1f} %). "
        f"{len(found['no attention'])} have none. "
        f"{len(found['not built'])} need sizes or inputs that the tool does not know; `record` may "
        "take them all the same.",
        "",
        "Each recorded layer has the maps of the attention alone. The rows say which further maps "
        "some of its layers have: with the residual, after the norm, and after the norm of the "
        "second half of the block (`encoder`).",
        "",
        "## Recorded",
        "",
        "| further maps | types |",
        "|---|---|",
    ]
    groups: dict[str, list[str]] = {}
    for row in recorded:
        further = [f"`{name}`" for name in LATER if row["maps"].get(name)]
        groups.setdefault(", ".join(further) or "none", []).append(row["kind"])
    for further, members in sorted(groups.items(), key=lambda x: -len(x[1])):
        text.append(f"| {further} | {', '.join(members)} |")
    text += ["", "## Refused", "", "| type | class | reason |", "|---|---|---|"]
    for row in refused:
        why = row["why"].replace("|", "/").replace("\n", " ")
        why = re.sub(r"^\w+Error: (record: )?", "", why).partition(", and ")[0]
        if why.startswith("model must hold attention"):
            why = "no module is attention of a kind that `record` knows"
        text.append(f"| {row['kind']} | {row['class']} | {why[:160]} |")
    others = {title: found[title.lower()] for title in ("No attention", "Not built")}
    text += ["", "## Others", "", "| | types |", "|---|---|"]
    text += [f"| {title} | {', '.join(x['kind'] for x in of)} |" for title, of in others.items()]
    return "\n".join([*text, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", help="model types; all where none is named")
    parser.add_argument("--out", type=Path, help="the page to write")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    named = kinds()
    if asked.kinds:
        named = {kind: named[kind] for kind in asked.kinds}
    rows = all_tried(named, asked.jobs)
    if asked.out:
        asked.out.write_text(page_of(rows))
    counts = Counter(row["state"] for row in rows)
    print(", ".join(f"{counts[state]} {state}" for state in STATES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
