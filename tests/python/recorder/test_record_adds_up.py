"""Recording holds every layer to what it computed, and finds blocks that nobody described."""

from __future__ import annotations

import copy
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ikattn
from agreement import assert_close
from hand_written_blocks import (
    Attention,
    B,
    Block,
    D,
    Functional,
    H,
    L,
    LayerScale,
    Parallel,
    vectors,
)
from ikattn.recorder import AttentionParts, record
from ikattn.recorder.plan import resolvers
from ikattn.recorder.runs.making import Maker

pytestmark = pytest.mark.usefixtures("float64_by_default")


BLOCKS: dict[str, tuple[Any, Any]] = {
    "pre": (lambda: Block(), None),
    "dropout": (lambda: Block(nn.Dropout(0.5)), None),
    "layer scale": (lambda: Block(LayerScale()), lambda block, y, out: y * block.between.gamma),
    "functional": (lambda: Functional(), lambda block, y, out: 0.2 * y),
    "parallel": (lambda: Parallel(), None),
    "norm": (
        lambda: Block(nn.RMSNorm(D, eps=1e-6)),
        lambda block, y, out: y / (out.square().mean(-1) + 1e-6).sqrt()[..., None, None],
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", BLOCKS)
def test_a_hand_written_block_is_found(name: str) -> None:
    make, between = BLOCKS[name]
    block = make().eval()
    x = torch.randn(B, L, D)
    model = nn.Sequential(block)
    with record(model, maps="all", check="all") as recording:
        model(x)
    assert recording.names == ["0.attn"]
    maps, y = recording["0.attn"], vectors(block.attn, block.ln_1(x))
    assert_close(maps.summed, y.norm(dim=-1), 1e-12, "summed")
    if between is not None:
        y = between(block, y, block.attn(block.ln_1(x)))
    y[:, range(L), range(L)] += x
    assert_close(maps.with_residual, y.norm(dim=-1), 1e-9, "with_residual")
    assert recording.layers["0.attn"].block == "pre"


@torch.no_grad()
def test_a_block_that_normalises_its_sum_is_found() -> None:
    model, x = nn.Sequential(Block(post=True)).eval(), torch.randn(B, L, D)
    block: Any = model[0]
    with record(model, maps="all") as recording:
        model(x)
    assert recording.layers["0.attn"].block == "post"
    y = vectors(block.attn, x)
    y[:, range(L), range(L)] += x
    total = x + block.attn(x)
    y = y - y.mean(-1, keepdim=True)
    y = y * block.ln_1.weight / (total.var(-1, correction=0) + 1e-5).sqrt()[..., None, None]
    assert_close(recording["0.attn"].with_norm, y.norm(dim=-1), 1e-9)
    second = block.ln_1(total) + block.mlp(block.ln_1(total))
    y = y - y.mean(-1, keepdim=True)
    y = y * block.ln_2.weight / (second.var(-1, correction=0) + 1e-5).sqrt()[..., None, None]
    assert_close(recording["0.attn"].encoder, y.norm(dim=-1), 1e-9)


@torch.no_grad()
def test_what_is_no_multiplication_leaves_the_residual_out() -> None:
    model, x = nn.Sequential(Block(nn.Tanh())).eval(), torch.randn(B, L, D)
    with record(model, maps="all") as recording:
        model(x)
    assert recording.layers["0.attn"].block == "none"
    assert recording["0.attn"].with_residual is None
    with (
        record(model, maps=["with_residual"]),
        pytest.raises(ValueError, match=r"0.attn has no map 'with_residual': Tanh stands between"),
    ):
        model(x)


@torch.no_grad()
def registered(monkeypatch: pytest.MonkeyPatch, block: str, norm: str | None) -> None:
    """A resolver that takes any block of this file for one of that form."""

    def resolve(module: nn.Module, ancestors: Any) -> AttentionParts | None:
        if not isinstance(module, Attention):
            return None
        own = getattr(ancestors[0], norm) if norm else None
        if block == "pre":
            return AttentionParts("mine", module.proj, "pre", "self", pre_norm=own)
        return AttentionParts("mine", module.proj, "post", "self", norm=own)

    monkeypatch.setattr(resolvers, "_registered", {"mine": resolve})


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "block", "norm"),
    [
        (lambda: Block(nn.Tanh()), "pre", "ln_1"),
        (lambda: Block(), "post", "ln_2"),
        (lambda: Block(nn.Tanh(), post=True), "post", "ln_1"),
    ],
)
def test_parts_that_do_not_add_up_are_an_error(
    make: Any, block: str, norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered(monkeypatch, block, norm)
    model = nn.Sequential(make()).eval()
    if norm == "ln_2":  # the sum that it was given is that of another residual
        model[0].ln_1.register_forward_hook(lambda module, args, output: output.add_(1.0))
    with record(model, maps=("summed",)) as recording:
        if norm == "ln_2":
            model(torch.randn(B, L, D))
            assert recording.layers  # the sum is right, whatever it is called
            return
        with pytest.raises(RuntimeError, match=r"0.attn does not add up"):
            model(torch.randn(B, L, D))


@torch.no_grad()
def test_a_residual_that_is_written_into_is_recovered() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attn = nn.LayerNorm(D), Attention()

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x.add_(self.attn(x))
            return self.norm(x)  # type: ignore[no-any-return]

    model, x = InPlace().eval(), torch.randn(B, L, D)
    with record(model, maps="all") as recording:
        model(x)
    y = vectors(model.attn, x)
    y[:, range(L), range(L)] += x
    assert_close(recording["attn"].with_residual, y.norm(dim=-1), 1e-9)


@torch.no_grad()
def test_what_replaces_sdpa_while_a_model_is_recorded_is_told_and_put_back() -> None:
    before, model = F.scaled_dot_product_attention, nn.Sequential(Block()).eval()
    with record(model), record(model) as inner:
        assert F.scaled_dot_product_attention is not before
        model(torch.randn(B, L, D))
    assert F.scaled_dot_product_attention is before
    assert inner.names == ["0.attn"]


@torch.no_grad()
def test_attention_that_stays_silent_is_named() -> None:
    class Sometimes(Attention):
        fused = False

        def heads(self, x: Tensor) -> Tensor:
            if self.fused:
                return super().heads(x)
            return x

    model = nn.Sequential(Sometimes(), Attention())
    with pytest.warns(UserWarning, match="record: 0 ran without calling"), record(model):
        model(torch.randn(B, L, D))

    class OwnAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(D, D)

    model = nn.Sequential(Attention(), OwnAttention())
    with pytest.warns(UserWarning, match="1 look like attention, and are not"), record(model):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with record(model, layers="0"):
            pass


def test_a_call_that_ctrl_c_ends_is_forgotten() -> None:
    model, stop = nn.Sequential(Block(), Block()).eval(), [True]

    def interrupt(module: nn.Module, args: Any) -> None:
        if stop.pop() if stop else False:
            raise KeyboardInterrupt

    model[1].mlp.register_forward_pre_hook(interrupt)
    x = torch.randn(B, L, D)
    with torch.no_grad(), record(model) as recording:
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model(x)
        model[1](x)  # a part, called directly
    assert [list(batch) for batch in recording.batches] == [["0.attn", "1.attn"], ["1.attn"]]


def test_copies_within_the_block_are_copies_without_hooks() -> None:
    model, x = nn.Sequential(Block()).eval(), torch.randn(B, L, D)
    with torch.no_grad(), record(model) as recording:
        copied = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        assert torch.equal(copied(x), loaded(x))
        assert recording.batches == []
        model(x)
    assert len(recording.batches) == 1


@torch.no_grad()
def test_an_out_projection_is_what_it_computes_not_its_weight() -> None:
    class Triple(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 3 * super().forward(x)

    x, found = torch.randn(B, L, D), []
    torch.manual_seed(0)
    model = nn.Sequential(Block()).eval()
    proj = model[0].attn.proj
    for change in (
        lambda: None,
        lambda: setattr(proj, "__class__", Triple),
        lambda: proj.register_forward_hook(lambda module, args, output: 2 * output),
    ):
        change()
        with record(model, maps=("summed", "with_residual"), check="all") as recording:
            model(x)
        found.append(recording["0.attn"])
    assert_close(found[1].summed, 3 * found[0].summed, 1e-12)
    assert_close(found[2].summed, 6 * found[0].summed, 1e-12)


def test_several_calls_of_one_module_are_one_map() -> None:
    class Images(Attention):
        """Each image's tokens by themselves, as vision towers of language models do."""

        def heads(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
            parts = zip(*(y.split([2, 3], 2) for y in (q, k, v)), strict=True)
            return torch.cat(
                [F.scaled_dot_product_attention(*part).transpose(1, 2) for part in parts], 1
            ).flatten(2)

    model, x = nn.Sequential(Images()).eval(), torch.randn(1, L, D)
    with record(model, maps=("weights", "summed"), check="all") as recording:
        model(x)
    weights = recording["0"].weights
    assert weights is not None
    assert weights.shape == (1, H, L, L)
    assert (weights[..., :2, 2:] == 0).all()
    assert (weights[..., 2:, :2] == 0).all()


def test_training_records_what_went_into_the_norm() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, H, 32, dropout=0.5, batch_first=True).train()
    with record(layer, maps="all") as recording:
        layer(torch.randn(B, L, D))
    assert recording["self_attn"].with_norm is not None


@torch.no_grad()
def test_a_changed_attention_is_no_map() -> None:
    layer = nn.TransformerEncoderLayer(D, H, 32, batch_first=True).eval()

    class Scaled(nn.TransformerEncoderLayer):
        def _sa_block(self, *args: Any, **kwargs: Any) -> Tensor:
            return super()._sa_block(*args, **kwargs).tanh()

    layer.__class__ = Scaled
    with record(layer), pytest.raises(RuntimeError, match="self_attn does not add up"):
        layer(torch.randn(B, L, D))
    with pytest.raises(ValueError, match="check must be"), record(layer, check="none"):  # type: ignore[arg-type]
        pass


def test_ours_are_recorded_with_every_kernel() -> None:
    for kernel in ("dot", "rbf", "implicit"):
        layer = nn.TransformerEncoderLayer(D, H, 32, batch_first=True).eval()
        ikattn.convert(layer, kernel, seed=0)
        with torch.no_grad(), record(layer, maps="all", check="all") as recording:
            layer(torch.randn(B, L, D))
        assert recording["self_attn"].with_norm is not None


@torch.no_grad()
@pytest.mark.parametrize("shape", [(0, L), (B, 0), (1, 1)])
def test_empty_and_single_tokens(shape: tuple[int, int]) -> None:
    model = nn.Sequential(Block(), Block()).eval()
    with record(model, maps="all", check="all") as recording:
        model(torch.randn(*shape, D))
    summed = recording["0.attn"].summed
    assert summed is not None
    assert summed.shape == (*shape, shape[1])


@torch.no_grad()
@pytest.mark.parametrize("size", [float("nan"), 0.0, 1e-30])
def test_tokens_that_tell_nothing_of_the_block_claim_nothing(size: float) -> None:
    model = nn.Sequential(Block()).eval()
    with record(model, maps="all") as recording:
        model(size * torch.ones(B, L, D))
    assert recording.layers["0.attn"].block in ("pre", "none")
    assert recording["0.attn"].with_norm is None


def test_maps_of_found_blocks_have_gradients() -> None:
    for post in (False, True):
        model, x = nn.Sequential(Block(LayerScale(), post=post)).eval(), torch.randn(B, L, D)
        with record(model, maps="with_residual", detach=False) as recording:
            model(x)
        map_ = recording["0.attn"].with_residual
        assert map_ is not None
        map_.sum().backward()
        assert model[0].attn.proj.weight.grad is not None
    with record(model, maps="with_residual") as recording:
        model(x)
    assert not recording["0.attn"].with_residual.requires_grad  # type: ignore[union-attr]


@torch.no_grad()
def test_weights_of_eight_bits_and_other_parametrisations() -> None:
    import torch.nn.utils.prune

    x = torch.randn(B, L, D)
    model = nn.Sequential(Block()).eval()
    nn.utils.parametrizations.weight_norm(model[0].attn.proj)
    pruned = nn.Sequential(Block()).eval()
    torch.nn.utils.prune.l1_unstructured(pruned[0].attn.proj, "weight", 0.5)
    for changed in (model, pruned):
        with record(changed, maps="summed", check="all") as recording:
            changed(x)
        expected = vectors(changed[0].attn, changed[0].ln_1(x)).norm(dim=-1)
        assert_close(recording["0.attn"].summed, expected, 1e-12)
    plain = nn.Sequential(Block()).float().eval()
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(plain), {nn.Linear})
    maps = []
    for one in (plain, quantised):
        with record(one, maps="summed") as recording:
            one(x.float())
        maps.append(recording["0.attn"].summed)
    assert_close(maps[1], maps[0], 0.05)


def test_what_is_looked_at_when_a_call_ends_holds_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    finish, runs, alive = Maker.finish, [], []

    def noting(maker: Maker, call: Any, run: Any, parts: Any) -> None:
        finish(maker, call, run, parts)
        runs.append(weakref.ref(run))
        alive.append(sum(each() is not None for each in runs))

    monkeypatch.setattr(Maker, "finish", noting)
    layer = nn.TransformerEncoderLayer(D, H, batch_first=True)
    model = nn.TransformerEncoder(layer, 3).eval()
    with torch.no_grad(), record(model, maps=None):
        model(torch.randn(B, L, D))
    assert alive == [1, 1, 1]  # the one that has just ended
