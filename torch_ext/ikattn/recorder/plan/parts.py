"""The modules that a layer of attention and the block around it consist of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import nn

Side: TypeAlias = Literal["encoder", "decoder"]


@dataclass(frozen=True)
class AttentionParts:
    """The modules that a layer of attention and the block around it consist of.

    Attributes:
        family: A name for the kind of model, for example "bert".
        out_proj: The projection after the heads are merged, any linear module. None: the first
            module that is called with the merged heads.
        block: "post": a norm follows the sum of residual and attention; "pre": the attention reads
            normed input, and its output is added to what was there before; "none": nothing of the
            kind is known; "found": each run tells, by what its tensors add up to.
        kind: "self" or "cross"; None: each call tells (self if query and key are one tensor).
        side: The part of the model it belongs to.
        pre_norm: In a "pre" block, the module whose first input is the residual: the norm before
            the attention. A "post" block's residual is the first input of the attention itself.
        norm: In a "post" block, the norm whose input is the sum.
        second_norm: In a "post" block, the norm at the block's end, if nothing but the feed-forward
            part stands between it and ``norm``. In a "pre" block, the norm that reads the sum of
            residual and attention, which each run finds.
    """

    family: str
    out_proj: nn.Module | None
    block: Literal["post", "pre", "none", "found"] = "none"
    kind: Literal["self", "cross"] | None = None
    side: Side = "encoder"
    pre_norm: nn.Module | None = None
    norm: nn.Module | None = None
    second_norm: nn.Module | None = None
