"""What a recording does not look for again, and on a GPU does not wait for, imitated on the CPU.

Sums that were found before, numbers that are looked at when a call has ended, and batches.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ikattn.maps import Recording
from ikattn.recorder import record
from ikattn.recorder.runs import following, residual_sum, transfers
from ikattn.recorder.sums.known_sums import known_sum

B, L, D, H = 2, 5, 16, 4
MAPS = ("summed", "with_norm", "encoder")


class OnItsWay(transfers.Arrival):
    """Copies that are there once somebody waits for them."""

    def __init__(self) -> None:
        self.is_there = False

    def is_over(self) -> bool:
        return self.is_there

    def wait(self) -> None:
        self.is_there = True


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_sum, "takes_waiting", lambda x: True)
    monkeypatch.setattr(transfers.Transfers, "arrival", lambda self: OnItsWay())


class Encoder(nn.Module):
    """Blocks of torch, the second of which may add something more to its sum."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, H, 32, 0.0, batch_first=True, norm_first=norm_first)
        self.blocks = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        self.more = 0.0
        attention = self.blocks[1].self_attn
        self.blocks[1].norm1.register_forward_pre_hook(lambda norm, args: (args[0] + self.more,))
        assert isinstance(attention, nn.MultiheadAttention)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts searches for sums, which look at numbers."""
    count = [0]
    find_sum = residual_sum.find_sum

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return find_sum(*args, **kwargs)

    monkeypatch.setattr(residual_sum, "find_sum", counted)
    return count


def maps_of(recording: Recording, call: int) -> list[Tensor]:
    return [getattr(maps, name) for maps in recording.batches[call].values() for name in MAPS]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_sums_are_found_once_and_maps_stay_the_same(
    monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    model, x, count = Encoder().eval(), torch.randn(B, L, D), looks(monkeypatch)
    with mode(), record(model, maps=MAPS) as recording:
        model(x)
        first = count[0]
        model(x)
        assert first >= 2
        assert count[0] == first
    for found, expected in zip(maps_of(recording, 1), maps_of(recording, 0), strict=True):
        assert torch.equal(found, expected)
    with record(model, maps=MAPS):  # of the model, not of the recording
        model(x)
    assert count[0] == first


def test_what_was_known_is_held_to_the_numbers_and_forgotten_where_it_is_wrong() -> None:
    model, x = Encoder().eval(), torch.randn(B, L, D)
    attention = model.blocks[1].self_attn
    with record(model, maps=MAPS) as recording:
        model(x)
        model.more = 0.1
        model(x)
        with pytest.raises(RuntimeError, match=r"blocks\.1\.self_attn does not add up: its output"):
            len(recording.batches)
        assert known_sum(attention, model.blocks[1].norm1, is_input=True) is None
        model.more = 0.0
        model(x)
        assert len(recording.batches) == 2
    for found, expected in zip(maps_of(recording, 1), maps_of(recording, 0), strict=True):
        assert torch.equal(found, expected)


def test_a_wrong_call_is_told_when_the_recording_ends_and_the_others_are_kept() -> None:
    model, x = Encoder().eval(), torch.randn(B, L, D)
    wrong = pytest.raises(RuntimeError, match=r"blocks\.1\.self_attn does not add up")
    with wrong, record(model, maps=MAPS) as recording:
        for model.more in (0.0, 0.1, 0.0):
            model(x)
    assert len(recording.batches) == 2


def test_an_error_of_the_callers_is_not_hidden_by_one_of_the_maps() -> None:
    model, x = Encoder().eval(), torch.randn(B, L, D)

    def fail() -> None:
        for model.more in (0.0, 0.1):
            model(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), record(model, maps=MAPS) as recording:
        fail()
    assert len(recording.batches) == 1


def test_an_inference_tensor_that_changes_is_found_out() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Encoder(norm_first=True).blocks[0]
            self.in_place = False

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.block(x)
            return made

    model, x = Adds().eval(), torch.randn(B, L, D)
    attention = model.block.self_attn
    assert isinstance(attention, nn.MultiheadAttention)

    def spoil(module: nn.Module, args: Any, output: Any) -> None:
        if model.in_place:  # what the block adds its output to
            spoilt[0].mul_(2)

    with torch.inference_mode(), record(model, maps=("summed", "with_residual")) as recording:
        spoilt = [x.clone()]
        attention.register_forward_hook(spoil)
        model(spoilt[0])
        model.in_place = True
        model(spoilt[0])
        with pytest.raises(RuntimeError, match="does not add up: its"):
            len(recording.batches)


def test_batches_are_awaited_where_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Encoder().eval(), torch.randn(B, L, D)
    with record(model) as recording:
        model(x)
        assert not vars(recording)["batches"]
        assert not vars(recording)["layers"]
        assert recording.names == ["blocks.0.self_attn", "blocks.1.self_attn"]
        assert len(vars(recording)["batches"]) == 1
        again = pickle.loads(pickle.dumps(recording))
        assert len(again.batches) == len(recording.batches) == 1
        model(x)
        assert len(pickle.loads(pickle.dumps(recording)).batches) == 2
    assert len(vars(recording)["batches"]) == 2
    assert len(copy.deepcopy(recording).batches) == 2
    with record(model) as recording:
        model(x)
        assert recording["blocks.0.self_attn"].summed is not None


def test_on_layer_gets_layers_once_they_have_been_looked_at() -> None:
    model, x, seen = Encoder().eval(), torch.randn(B, L, D), []
    with record(model, maps=MAPS, on_layer=lambda n, layer, maps: seen.append((n, layer.name))):
        model(x)
        assert seen == [(0, "blocks.0.self_attn"), (0, "blocks.1.self_attn")]
        model.more = 0.1
        with pytest.raises(RuntimeError, match=r"blocks\.1\.self_attn does not add up"):
            model(x)
    assert seen[2:] == [(1, "blocks.0.self_attn")]


def test_a_call_that_was_refused_leaves_no_layers() -> None:
    model, x = Encoder().eval(), torch.randn(B, L, D)
    with record(model, maps=MAPS) as recording:
        model(x)
        vars(recording)["batches"].clear()
        model.more = 0.1
        model(x)
        with pytest.raises(RuntimeError, match="does not add up"):
            recording["blocks.1.self_attn"]


def test_one_call_that_is_wrong_is_all_that_is_lost() -> None:
    """Of all its layers how their sums were found is forgotten at once."""

    class Shifted(Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[0].norm1.register_forward_pre_hook(lambda n, a: (a[0] + self.more,))

    model, x = Shifted().eval(), torch.randn(B, L, D)
    with record(model, maps=MAPS) as recording:
        model(x)
        model.more = 0.1
        model(x)
        with pytest.raises(RuntimeError, match=r"blocks\.0\.self_attn does not add up"):
            len(recording.batches)
        model.more = 0.0
        for block in model.blocks:
            assert known_sum(block.self_attn, block.norm1, is_input=True) is None
        model(x)
        assert len(recording.batches) == 2


def test_what_was_known_is_not_taken_in_training() -> None:
    """There dropout may hide a sum, and that is no error."""

    class Block(nn.TransformerEncoderLayer):
        def _sa_block(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            made = self.self_attn(x, x, x, need_weights=False)[0]
            return nn.functional.dropout(made, 0.5, self.training)

    model, x = Block(D, H, 32, 0.0, batch_first=True), torch.randn(B, L, D)
    model.eval()
    with record(model, maps=("summed",)) as recording:
        model(x)
        model.train()
        for _ in range(3):
            model(x)
        assert len(recording.batches) == 4


def test_on_the_cpu_a_sum_whose_scale_changes_is_found_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a hook takes away a part of an attention, in every second call."""
    monkeypatch.setattr(residual_sum, "takes_waiting", lambda x: False)
    count = looks(monkeypatch)
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=H, n_embd=D, vocab_size=11, n_positions=L)
    model, scale = transformers.GPT2Model(config).eval(), [1.0]
    model.h[0].attn.register_forward_hook(lambda m, a, out: (scale[0] * out[0], *out[1:]))
    with torch.no_grad(), record(model) as recording:
        for scale[0], looked in ((1.0, 2), (1.0, 2), (0.5, 3), (1.0, 3), (0.5, 4)):
            model(torch.arange(L)[None])
            assert count == [looked]
        assert len(recording.batches) == 5


@pytest.mark.parametrize("check", ["rows", "all"])
def test_what_a_model_writes_over_later_was_right(check: str) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, H, -1).permute(2, 0, 3, 1, 4)
            heads = nn.functional.scaled_dot_product_attention(q, k, v)
            heads = heads.transpose(1, 2).flatten(2)
            made: Tensor = self.proj(heads)
            heads.zero_()
            return made

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.norm = Attention(), nn.LayerNorm(D)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.norm(x + self.attn(x))
            self.norm.weight.zero_()  # as where the next layer's are loaded
            return made

    model = Model().eval()
    with torch.no_grad(), record(model, check=check) as recording:
        model(torch.randn(1, 1, D))
        assert recording.batches[0]["attn"].summed is not None


def test_a_sum_that_may_be_another_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two residuals fit, and the next call may tell them apart."""

    model, x, count = Encoder().eval(), torch.randn(B, L, D), looks(monkeypatch)
    block = model.blocks[0]
    block.other_norm = nn.LayerNorm(D)
    block.self_attn.register_forward_pre_hook(
        lambda attention, args: (block.other_norm(args[0] * (1 + 1e-7)), args)[1]
    )
    with record(model, maps=("summed", "with_norm")) as recording:
        for looked in (2, 3):  # of both blocks, then of the first alone
            model(x)
            assert count == [looked]
        assert len(recording.batches) == 2


@pytest.mark.parametrize("waits", [False, True])
def test_a_norm_that_changes_is_followed_as_before(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Maps through it that were not asked for by name are left out, where nothing waits."""
    monkeypatch.setattr(following, "takes_waiting", lambda x: waits)
    model, x = Encoder(norm_first=True).eval(), torch.randn(B, L, D)
    norm = model.blocks[0].norm2
    with record(model, maps=None) as recording:
        model(x)
        forward = norm.forward
        norm.forward = lambda x: forward(x) + 1
        model(x)
        if waits:
            with pytest.raises(RuntimeError, match=r"blocks\.0\.self_attn does not add up"):
                len(recording.batches)
            model(x)
        name = "blocks.0.self_attn"
        assert recording.batches[0][name].encoder is not None
        assert recording.batches[-1][name].encoder is None
