"""timm and diffusers, also where torchvision was built for another torch."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch

__all__ = ["import_vision"]

_declared: list[torch.library.Library] = []


def import_vision(name: str) -> Any:
    """A module of timm or diffusers; skips the tests where either is not installed.

    torchvision declares its operators from a library that may not load beside this torch, and then
    cannot be imported. Nothing here calls them, so that their names will do.
    """
    if importlib.util.find_spec(name.split(".")[0]) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
    return importlib.import_module(name)
