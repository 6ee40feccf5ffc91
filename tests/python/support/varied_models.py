"""Recordings of tiny models of transformers in other circumstances, held to the plain one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ikattn
from ikattn.maps import Recording
from transformers_models import build, inputs_of, keyword_of_cache

TOLERANCE = 1e-6  # some families compute their softmax in float32
MAPS = ("summed", "with_residual", "with_norm", "encoder", "value_norms")
WITH_CACHES = ("gpt2", "gpt_neox", "opt", "llama", "mixtral", "qwen2", "qwen3", "gemma")
Inputs = dict[str, Tensor]


def _recorded(model: Any, inputs: Inputs, called: Any = None, **options: Any) -> Recording:
    """Records a call, which must give what it gives outside."""
    called = model if called is None else called
    with torch.no_grad():
        torch.manual_seed(0)
        before = called(**inputs)[0]
        with ikattn.record(model, maps=None, **options) as recording:
            torch.manual_seed(0)
            inside = called(**inputs)[0]
    _assert_close("the output inside a recording", inside, before)
    return recording


def _assert_close(what: str, found: Tensor, expected: Tensor) -> None:
    size = 1.0 + (float(expected.abs().max()) if expected.numel() else 0.0)
    assert found.shape == expected.shape, f"{what} has shape {list(found.shape)}"
    off = float((found.double() - expected.double()).abs().max()) if found.numel() else 0.0
    assert off <= TOLERANCE * size, f"{what} is off by {off:.1e} of {size:.1e}"


def _compiled(model: Any, inputs: Inputs) -> Recording:
    torch._dynamo.reset()
    return _recorded(model, inputs, torch.compile(model, backend="eager"))


def _checkpointed(model: Any, inputs: Inputs) -> Recording | None:
    """Records forward and backward; each block runs twice, and counts once."""
    if not model.supports_gradient_checkpointing:
        return None
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with ikattn.record(model, maps=None) as recording:
        model(**inputs)[0].square().sum().backward()
    return recording


def _saved(model: Any, inputs: Inputs) -> Recording:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return _recorded(torch.load(file, weights_only=False), inputs)


def _eager(model: Any, inputs: Inputs) -> Recording:
    model.set_attn_implementation("eager")
    return _recorded(model, inputs)


def _lowered(model: Any, inputs: Inputs) -> Recording | None:
    """Records under autocast, where numbers are other ones."""
    lower = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
    with torch.autocast("cpu", torch.bfloat16):
        _recorded(model.float(), lower)
    return None


def _in_steps(model: Any, inputs: Inputs) -> Recording | None:
    """Records the last tokens of one text beside a cache of the first, where the model has one."""
    if model.config.model_type not in WITH_CACHES:
        return None
    tokens = inputs["input_ids"][:1]
    whole = _recorded(model, {"input_ids": tokens})
    with torch.no_grad():
        cache = {keyword_of_cache(): model(tokens[:, :4], use_cache=True)[keyword_of_cache()]}
        with ikattn.record(model, maps=None) as recording:
            model(tokens[:, 4:], **cache)
    for layer, maps in recording.batches[0].items():
        for name in ("summed", "with_residual"):
            expected = getattr(whole[layer], name)[:, 4:]
            _assert_close(f"{name} of {layer}", getattr(maps, name), expected)
    return None


WAYS: dict[str, Callable[[Any, Inputs], Recording | None]] = {
    "again": _recorded,
    "all rows checked": lambda model, inputs: _recorded(model, inputs, check="all"),
    "copied": lambda model, inputs: _recorded(copy.deepcopy(model), inputs),
    "saved": _saved,
    "eager": _eager,
    "checkpointed": _checkpointed,
    "compiled": _compiled,
    "autocast": _lowered,
    "in steps": _in_steps,
    "first alone": lambda model, inputs: _recorded(
        model, {name: x[:1] for name, x in inputs.items()}
    ),
}


def check(family: str, way: str, seed: int) -> None:
    """Raises AssertionError where a recording of a model is not that of its plain call."""
    torch.manual_seed(seed)
    model, drawn = build(family), inputs_of(family)
    inputs = {x: y.double() if y.is_floating_point() else y for x, y in drawn.items()}
    plain = _recorded(model, inputs)
    other = WAYS[way](model, inputs)
    if other is None:
        return
    (first,), (second,) = plain.batches, other.batches
    assert list(first) == list(second), f"{list(second)} are recorded, not {list(first)}"
    for layer, maps in first.items():
        for name in MAPS:
            expected, found = getattr(maps, name), getattr(second[layer], name)
            assert (expected is None) == (found is None), f"{name} of {layer} is there or not"
            if expected is not None:
                _assert_close(f"{name} of {layer}", found, expected[: len(found)])
