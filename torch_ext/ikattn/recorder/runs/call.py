"""A call of a model that is being recorded: what runs in it, and what is known of it so far."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.edges import EdgeMaps
from ikattn.maps.layers import Batch, Layer
from ikattn.recorder.calls.heads import FollowedHeads
from ikattn.recorder.runs.run import Run
from ikattn.recorder.runs.transfers import Arrival
from ikattn.recorder.sums.claims import Claim, Settlement
from ikattn.recorder.sums.tensors import Seen, see


@dataclass
class Entered:
    """A module that is running."""

    module: nn.Module
    given: Seen | None  # its first input
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mask: Any  # its attention_mask; ... where it has no such argument
    reports: int = 0  # of its attention, before it began
    following: FollowedHeads | None = None  # of an attention module, while it runs
    normed: list[Seen] = field(default_factory=list)  # inputs of norms that it has called
    # Inputs of linear modules since its last attention, by address, which is kept from
    # others as long, and how many outputs they have made of it
    projected: dict[int, tuple[Tensor, int]] = field(default_factory=dict)

    @property
    def was_called_with_tokens(self) -> bool:
        """Whether its first input is ``[B, L, D]``."""
        return self.given is not None and self.given.tensor.dim() == 3


class MadeLayer(NamedTuple):
    """Maps of a layer on their way to who asked for them."""

    layer: Layer
    maps: Contributions
    settlement: Settlement  # of all that was claimed until then
    arrival: Arrival


@dataclass
class Call:
    """A call of the model, or of a part of it, in the thread that made it."""

    index: int
    frame: FrameType | None  # of the outermost module's call
    running: list[Entered] = field(default_factory=list)  # outermost first
    norms: deque[tuple[nn.Module, Seen]] = field(default_factory=lambda: deque(maxlen=3))
    frequencies: dict[nn.Module, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    times_run: dict[nn.Module, int] = field(default_factory=dict)
    reports: dict[nn.Module, int] = field(default_factory=dict)
    pending: list[Run] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)  # not looked at yet
    query_padding: dict[str, Tensor | None] = field(default_factory=dict)  # by side
    # Padding of the queries of self-attention, by the module around it and by itself
    self_attention: dict[nn.Module | None, dict[nn.Module, Tensor | None]] = field(
        default_factory=dict
    )
    padded_length: int | None = None  # of what nn.TransformerEncoder has nested
    layers: dict[str, Layer] = field(default_factory=dict)
    edges: dict[str, EdgeMaps] = field(default_factory=dict)  # of layers over graphs
    batch: Batch = field(default_factory=Batch)
    made: deque[MadeLayer] = field(default_factory=deque)
    last_seen: tuple[Tensor, Seen] | None = None
    has_room: set[tuple[str, str]] = field(default_factory=set)  # sides and kinds of layers

    @property
    def is_alive(self) -> bool:
        """False: it was left by an exception that hooks are not told of, such as Ctrl-C."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.frame:  # those that this thread runs
            frame = frame.f_back
        return frame is not None

    def claim(self, claim: Claim | None) -> None:
        """Keeps a claim until it is looked at."""
        if claim is not None:
            self.claims.append(claim)

    def see(self, x: Tensor) -> Seen:
        """``see``, once for modules that hand on the same tensor."""
        if self.last_seen is not None and self.last_seen[0] is x:
            seen = self.last_seen[1]
            if seen.version >= 0 and seen.is_as_it_was:
                return seen
        seen = see(x)
        self.last_seen = (x, seen)
        return seen


def note_ids(
    batch: Batch,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mask: Any,
    to_cpu: Callable[[Tensor], Tensor],
) -> None:
    """Keeps the ids that a model was called with, by the names that transformers gives them."""

    def is_ids(x: Any) -> bool:
        return isinstance(x, Tensor) and x.dim() == 2 and not x.is_floating_point()

    def kept(x: Any) -> Tensor | None:
        # A copy made now: the caller may fill the tensor again before to_cpu is through.
        return to_cpu(x.detach().clone()) if isinstance(x, Tensor) and x.dim() == 2 else None

    ids = kwargs.get("input_ids", args[0] if args else None)
    # where the targets are known and no source was given, a decoder is called with the targets
    if is_ids(ids) and batch.input_ids is None and batch.target_ids is None:
        batch.input_ids, batch.input_mask = kept(ids), kept(mask)
    targets = kwargs.get("decoder_input_ids")
    if is_ids(targets) and batch.target_ids is None:
        batch.target_ids = kept(targets)
        batch.target_mask = kept(kwargs.get("decoder_attention_mask"))


def tokens_before(kwargs: dict[str, Any]) -> int | None:
    """How many tokens the cache holds that a model is called with; None: it is called without."""
    for name in ("past_key_values", "cache"):
        length = getattr(kwargs.get(name), "get_seq_length", None)
        if callable(length):
            with contextlib.suppress(ValueError):  # a cache of other layers than attention
                return int(length())
    return None
