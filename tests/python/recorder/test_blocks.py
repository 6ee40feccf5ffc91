"""Residuals and norms around an attention: found by their sums, told by a resolver, or neither."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from agreement import assert_close
from hand_written_blocks import Attention, B, Block, D, H, L, LayerScale, vectors
from hand_written_blocks import Functional as FunctionalBlock
from hand_written_blocks import Parallel as ParallelBlock
from ikattn.recorder import AttentionParts, record, register_resolver
from recorded_models import randomize, recorded, through_norm
from torch_blocks import (
    Clip,
    Detr,
    Functional,
    Parallel,
    Sandwich,
    ViT,
    Wrapped,
    Written,
    assert_maps,
    pairs,
    places_like,
)

pytestmark = pytest.mark.usefixtures("float64_by_default")


# --- Around F.scaled_dot_product_attention

BLOCKS: dict[str, tuple[Any, Any]] = {
    "pre": (lambda: Block(), None),
    "dropout": (lambda: Block(nn.Dropout(0.5)), None),
    "layer scale": (lambda: Block(LayerScale()), lambda block, y, out: y * block.between.gamma),
    "functional": (lambda: FunctionalBlock(), lambda block, y, out: 0.2 * y),
    "parallel": (lambda: ParallelBlock(), None),
    "norm": (
        lambda: Block(nn.RMSNorm(D, eps=1e-6)),
        lambda block, y, out: y / (out.square().mean(-1) + 1e-6).sqrt()[..., None, None],
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", BLOCKS)
def test_a_hand_written_block_is_found(name: str) -> None:
    make, between = BLOCKS[name]
    block, x = make().eval(), torch.randn(B, L, D)
    recording = recorded(nn.Sequential(block), x, check="all")
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
    recording = recorded(model, x)
    assert recording.layers["0.attn"].block == "post"
    y = vectors(block.attn, x)
    y[:, range(L), range(L)] += x
    total = x + block.attn(x)
    y = through_norm(y, block.ln_1, total)
    assert_close(recording["0.attn"].with_norm, y.norm(dim=-1), 1e-9)
    y = through_norm(y, block.ln_2, block.ln_1(total) + block.mlp(block.ln_1(total)))
    assert_close(recording["0.attn"].encoder, y.norm(dim=-1), 1e-9)


@torch.no_grad()
def test_what_is_no_multiplication_leaves_the_residual_out() -> None:
    model, x = nn.Sequential(Block(nn.Tanh())).eval(), torch.randn(B, L, D)
    recording = recorded(model, x)
    assert recording.layers["0.attn"].block == "none"
    assert recording["0.attn"].with_residual is None
    with (
        record(model, maps=["with_residual"]),
        pytest.raises(ValueError, match=r"0.attn has no map 'with_residual': Tanh stands between"),
    ):
        model(x)


@torch.no_grad()
@pytest.mark.parametrize("size", [float("nan"), 0.0, 1e-30])
def test_tokens_that_tell_nothing_of_the_block_claim_nothing(size: float) -> None:
    recording = recorded(nn.Sequential(Block()).eval(), size * torch.ones(B, L, D))
    assert recording.layers["0.attn"].block in ("pre", "none")
    assert recording["0.attn"].with_norm is None


def test_maps_of_found_blocks_have_gradients() -> None:
    for post in (False, True):
        model, x = nn.Sequential(Block(LayerScale(), post=post)).eval(), torch.randn(B, L, D)
        with record(model, maps="with_residual", detach=False) as recording:
            model(x)
        map_ = recording["0.attn"].with_residual
        map_.sum().backward()
        assert model[0].attn.proj.weight.grad is not None
    with record(model, maps="with_residual") as recording:
        model(x)
    assert not recording["0.attn"].with_residual.requires_grad  # type: ignore[union-attr]


def test_training_records_what_went_into_the_norm() -> None:
    layer = nn.TransformerEncoderLayer(D, H, 32, dropout=0.5, batch_first=True).train()
    assert recorded(layer, torch.randn(B, L, D))["self_attn"].with_norm is not None


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


@torch.no_grad()
def test_attention_that_stays_silent_is_named() -> None:
    class Sometimes(Attention):
        fused = False

        def heads(self, x: Tensor) -> Tensor:
            if self.fused:
                return super().heads(x)
            return x

    model = nn.Sequential(Sometimes(), Attention())
    with pytest.warns(UserWarning, match="record: 0 ran as none of"), record(model):
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


@torch.no_grad()
def test_a_softmax_over_features_is_no_attention_over_tokens() -> None:
    class LinearAttention(Attention):
        def heads(self, x: Tensor) -> Tensor:
            q = k = v = x.unflatten(-1, (2, -1)).transpose(1, 2)
            return (q.softmax(-1) @ (k.softmax(-2).mT @ v)).transpose(1, 2).flatten(2)

    model = LinearAttention()
    with pytest.warns(UserWarning, match="ran as none of"), record(model) as recording:
        model(torch.randn(B, L, D))
    assert not recording.batches[0]


@pytest.mark.parametrize("tokens", [B, L])
@pytest.mark.parametrize("projects", ["tokens first", "items first"])
@torch.no_grad()
def test_a_block_of_tokens_first_has_its_residual(projects: str, tokens: int) -> None:
    class TokensFirst(Attention):
        def forward(self, x: Tensor) -> Tensor:
            heads = self.heads(x.transpose(0, 1))
            if projects == "items first":
                return self.proj(heads).transpose(0, 1)  # type: ignore[no-any-return]
            return self.proj(heads.transpose(0, 1).contiguous())  # type: ignore[no-any-return]

    block, x = Block().eval(), torch.randn(B, tokens, D)
    own = recorded(nn.Sequential(block), x)["0.attn"]
    attention = TokensFirst()
    attention.load_state_dict(block.attn.state_dict())
    block.attn = attention
    maps = recorded(nn.Sequential(block), x.transpose(0, 1))["0.attn"]
    assert_close(maps.summed, own.summed, 1e-12)
    if tokens == B and projects == "tokens first":
        return  # sizes do not tell
    assert_close(maps.with_residual, own.with_residual, 1e-12)
    assert_close(maps.encoder, own.encoder, 1e-12)


@torch.no_grad()
def test_sums_that_only_sizes_or_rough_scales_tell_are_found() -> None:
    class InPlace(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.between(self.attn(self.ln_1(x)))
            y += x
            return y + self.mlp(self.ln_2(y))  # type: ignore[no-any-return]

    x = torch.randn(B, L, D)
    assert blocks_of(nn.Sequential(InPlace(LayerScale())).eval(), x) == ["pre"]
    x = x.float()
    x[0, 0, 3] *= 1e4
    assert blocks_of(nn.Sequential(FunctionalBlock()).float().eval(), x) == ["pre"]


@torch.no_grad()
@pytest.mark.parametrize("tokens", ["neighbours", "shifted", "every third"])
def test_windows_are_items_of_a_batch(tokens: str) -> None:
    order = torch.arange(3 * L)
    if tokens == "shifted":
        order = order.roll(1)
    elif tokens == "every third":  # whose first and last token are those of the block
        order = order.view(L, 3).mT.flatten()

    class Windowed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attn = nn.LayerNorm(D), Attention()

        def forward(self, x: Tensor) -> Tensor:
            windows = self.norm(x)[:, order].unflatten(1, (-1, L)).flatten(0, 1)
            y = self.attn(windows).unflatten(0, (x.size(0), -1)).flatten(1, 2)
            return x + y[:, order.argsort()]

    model, x = Windowed().eval(), torch.randn(B, 3 * L, D)
    maps = recorded(model, x)["attn"]
    windows = x[:, order].unflatten(1, (-1, L)).flatten(0, 1)
    y = vectors(model.attn, model.norm(windows))
    assert_close(maps.summed, y.norm(dim=-1), 1e-12)
    if tokens == "neighbours":
        y[:, range(L), range(L)] += windows
        assert_close(maps.with_residual, y.norm(dim=-1), 1e-12)
    else:
        assert maps.with_residual is None


@torch.no_grad()
def test_attention_that_runs_again_before_its_sum_has_no_block() -> None:
    class Twice(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.attn(self.attn(self.ln_1(x)))  # type: ignore[no-any-return]

    recording = recorded(nn.Sequential(Twice()).eval(), torch.randn(B, L, D))
    blocks = {name: layer.block for name, layer in recording.layers.items()}
    assert blocks == {"0.attn": "none", "0.attn#2": "pre"}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["module", "function"])
def test_rounding_beside_large_numbers_hides_no_scale(dtype: torch.dtype, kind: str) -> None:
    scale = LayerScale()
    scale.gamma.mul_(0.1)
    block = Block(scale) if kind == "module" else FunctionalBlock()
    model, x = nn.Sequential(block).eval(), torch.randn(B, L, D)
    x[..., 3] *= 20  # in whose rounding the attention's output would be lost
    expected, found = (
        recorded(model.to(each), x.to(each))["0.attn"].with_residual
        for each in (torch.float64, dtype)
    )
    assert expected is not None
    if kind == "function" and dtype != torch.float32:
        assert found is None  # 16 bits do not tell what is no module
        return
    limit = 0.1 if dtype != torch.float32 else 1e-4
    others = expected - expected.diagonal(dim1=-2, dim2=-1).diag_embed()
    off = (found - expected).abs() - (found - expected).abs().diagonal(
        dim1=-2, dim2=-1
    ).diag_embed()
    assert off.max() <= limit * others.max()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("change", ["faint", "large"])
def test_channels_of_any_size_have_their_scale(change: str, dtype: torch.dtype) -> None:
    block = Block(LayerScale())
    proj = block.attn.proj
    if change == "faint":  # as weight decay leaves it
        proj.weight[3] *= 1e-30
        proj.bias[3] *= 1e-30
    else:
        proj.bias[3] += 30
    model = nn.Sequential(block).eval().to(dtype)
    assert blocks_of(model, torch.randn(B, L, D, dtype=dtype)) == ["pre"]


# --- Calls without tokens, and maps that are missing


def torch_layer(kind: type[nn.Module], **how: Any) -> nn.Module:
    return kind(D, H, 32, batch_first=True, **how)


MADE_OF_MODULES = {
    "post": lambda: Block(post=True),
    "pre": Block,
    "parallel": ParallelBlock,
    "a multiple": FunctionalBlock,
    "a scale": lambda: Block(LayerScale()),
    "torch's encoder": lambda: torch_layer(nn.TransformerEncoderLayer),
    "torch's encoder, pre": lambda: torch_layer(nn.TransformerEncoderLayer, norm_first=True),
    "torch's decoder": lambda: torch_layer(nn.TransformerDecoderLayer),
    "torch's decoder, pre": lambda: torch_layer(nn.TransformerDecoderLayer, norm_first=True),
}


class Chain(nn.Module):
    """Two layers, the second of which reads the first."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make(), make()])

    def forward(self, x: Tensor, *memory: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *memory)
        return x


def sizes_of(maps: Any) -> dict[str, tuple[int, ...]]:
    found = {name: x.shape for name, x in vars(maps).items() if isinstance(x, Tensor)}
    return found | {f"ratio of {name}": x.shape for name, x in maps.mixing_ratio.items()}


@torch.no_grad()
@pytest.mark.parametrize("make", MADE_OF_MODULES.values(), ids=MADE_OF_MODULES)
@pytest.mark.parametrize("asked", [{}, {"maps": "all"}, {"maps": "all", "queries": slice(0, 9)}])
def test_calls_without_tokens_have_every_map_of_their_layers(make: Any, asked: Any) -> None:
    model = Chain(make).eval()
    is_decoder = isinstance(model.layers[0], nn.TransformerDecoderLayer)

    def inputs(B: int, L: int) -> list[Tensor]:
        return [torch.randn(B, L, D), torch.randn(B, 3, D)][: 1 + is_decoder]

    with record(model, **asked) as recording:
        for sizes in ((0, 7), (11, 0), (0, 0), (11, 7)):
            model(*inputs(*sizes))
        model(torch.randn(0, 7, D), *inputs(0, 7)[1:])
    *empty, full, again = recording.batches
    for sizes, batch in zip(((0, 7), (11, 0), (0, 0), (0, 7)), (*empty, again), strict=True):
        for name, maps in full.items():
            # D, H and 3 are sizes of the model, 11 and 7 those of the call
            expected = {
                map: tuple(dict(zip((11, 7), sizes, strict=True)).get(size, size) for size in shape)
                for map, shape in sizes_of(maps).items()
            }
            assert sizes_of(batch[name]) == expected


@torch.no_grad()
@pytest.mark.parametrize("reduce", ["columns", "top_k", "diagonal"])
def test_reduced_maps_of_calls_without_tokens_are_empty(reduce: str) -> None:
    model = Chain(lambda: torch_layer(nn.TransformerEncoderLayer)).eval()
    with record(model, maps="all", reduce=reduce) as recording:
        for sizes in ((0, 4), (2, 0), (2, 4)):
            model(torch.randn(*sizes, D))
    *empty, full = recording.batches
    for batch in empty:
        assert all(batch[name].reduced.keys() == full[name].reduced.keys() for name in full)


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "map", "reason"),
    [
        (
            lambda: ParallelBlock(),
            "encoder",
            "no norm was seen to read the sum of residual and attention",
        ),
        (lambda: Attention(), "with_residual", "the sum of a residual and its output"),
        (lambda: torch_layer(nn.TransformerDecoderLayer), "encoder", "not another attention"),
    ],
)
def test_a_map_that_is_missing_is_told_by_what_was_seen(make: Any, map: str, reason: str) -> None:
    for training in (False, True):
        model = nn.Sequential(make()).train(training)
        message = f"0.* has no map '{map}': .*{reason}"
        with pytest.raises(ValueError, match=message) as error, record(model, maps=map):
            model(torch.randn(B, L, D))
        is_seen_in_call = not isinstance(model[0], nn.TransformerDecoderLayer)
        assert ("model.eval()" in str(error.value)) == (training and is_seen_in_call)


# --- Around nn.MultiheadAttention

KINDS = [ViT, Clip, Functional, Parallel, Sandwich, Detr, Wrapped]


HOW = [(True, False), (False, False), (True, True), (False, True)]


@torch.no_grad()
@pytest.mark.parametrize("tokens", [B, L])
@pytest.mark.parametrize(("batch_first", "turns"), HOW)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_maps_of_a_hand_written_block(kind, batch_first, turns, tokens):
    torch.manual_seed(0)
    layer, x = kind(batch_first, turns).eval(), torch.randn(B, tokens, D)
    given = x if batch_first != turns else x.transpose(0, 1)
    assert_maps(recorded(nn.Sequential(layer), given, check="all"), layer, x)


class InPlace(Written):
    sums = ViT.sums


class Post(Written):
    sums = Wrapped.sums


def blocks_of(layer: nn.Module, *args: Tensor, **options: Any) -> list[str]:
    """The kinds of block that a call's layers have; those of none have the maps of attention."""
    recording = recorded(layer, args, **options)
    for name, known in recording.layers.items():
        assert recording[name].summed is not None
        if known.block == "none":
            assert recording[name].with_residual is None
            assert recording[name].encoder is None
    return [known.block for known in recording.layers.values()]


def why(layer: nn.Module, map_: str, *args: Tensor) -> str:
    """Returns the error where a map is asked for that a layer turns out not to have."""
    no_map = pytest.raises(ValueError, match=f"has no map '{map_}'")
    with torch.no_grad(), record(layer, maps=[map_]), no_map as error:
        layer(*args)
    return str(error.value)


def pre(self: Any, x: Tensor, add: Callable[[Tensor, Tensor], Tensor] = torch.add) -> Tensor:
    y = self.ln_1(x)
    x = add(x, self.attend(y, y, y))
    return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


@torch.no_grad()
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("tokens", [B, L])
def test_a_residual_that_was_written_into_is_not_guessed(how: Any, tokens: int) -> None:
    x = torch.randn(B, tokens, D)
    given = x if how[0] != how[1] else x.transpose(0, 1)
    layer = InPlace(lambda self, x: pre(self, x.clone(), Tensor.add_), *how).eval()
    # of what the layer was called with, which is the same
    assert_maps(recorded(layer, given), layer, x)
    layer = InPlace(lambda self, x: pre(self, x, Tensor.add_), *how).eval()
    assert_maps(recorded(layer, given.clone()), layer, x)  # what the norm made of it tells

    def post(self: Any, x: Tensor) -> Tensor:
        return self.ln_1(x.add_(self.attend(x, x, x)))  # type: ignore[no-any-return]

    layer = InPlace(post, *how).eval()
    assert blocks_of(layer, given.clone()) == ["none"]
    assert "its residual was written into" in why(layer, "with_residual", given.clone())


@torch.no_grad()
@pytest.mark.parametrize("tokens", [B, L])
@pytest.mark.parametrize("how", HOW)
def test_a_second_norm_in_the_other_order(how: Any, tokens: int) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.ln_1(x + self.attend(x, x, x)).transpose(0, 1)
        return self.ln_2(x + self.mlp(x))  # type: ignore[no-any-return]

    layer = Post(forward, *how).eval()
    x = torch.randn(B, tokens, D)
    assert_maps(recorded(layer, x if how[0] != how[1] else x.transpose(0, 1)), layer, x)


def test_a_module_or_a_layer_that_is_called_twice() -> None:
    def both(self: Any, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.ln_1(u + self.attend(u, v, v)), self.ln_1(v + self.attend(v, u, u))

    u, v = torch.randn(2, B, L, D)
    assert blocks_of(Written(both).eval(), u, v) == ["post", "post"]

    def post(self: Any, x: Tensor) -> Tensor:
        x = self.ln_1(x + self.attend(x, x, x))
        return x + self.mlp(x)  # type: ignore[no-any-return]

    for forward, block in ((post, "post"), (pre, "pre")):
        layer = Written(forward).eval()
        twice = Written(lambda self, x: self.layer(self.layer(x)), layer=layer)
        del twice.attn
        assert blocks_of(twice, u, maps=None) == [block, block]


def test_axes_that_are_split_or_missing_are_found() -> None:
    def folded(first: int) -> Callable[..., Tensor]:
        def forward(self: Any, x: Tensor) -> Tensor:
            y = self.ln_1(x).flatten(first, first + 1)
            return self.ln_2(x + self.attend(y, y, y).view(x.shape))  # type: ignore[no-any-return]

        return forward

    def unbatched(self: Any, x: Tensor) -> Tensor:
        y = self.ln_1(x)[0]
        return self.ln_2(x + self.attend(y, y, y))  # type: ignore[no-any-return]

    def asked(self: Any, x: Tensor) -> Tensor:
        q = self.ln_1(self.places.weight)
        y = self.attend(q.expand(x.size(0), -1, -1), x, x)
        return self.ln_2(self.places.weight + y)  # type: ignore[no-any-return]

    x = torch.randn(2, 3, 5, D)
    for forward, how, given in (
        (folded(0), (True, False), x),
        (folded(1), (True, False), x),
        (unbatched, (False, False), x[:1, 0]),
        (unbatched, (True, False), x[:1, 0]),
        (asked, (True, False), x[0]),
    ):
        layer = Written(forward, *how, places=nn.Embedding(7, D)).eval()
        recording = recorded(layer, given)
        assert recording.layers["attn"].block == "pre"
        assert recording["attn"].encoder is not None
        if forward is asked:
            continue
        rows = given.flatten(0, 1) if given.dim() == 4 else given
        rows = given.flatten(1, 2) if recording["attn"].summed.size(-1) == 15 else rows  # type: ignore[union-attr]
        y = pairs(layer.attn, layer.ln_1(rows), layer.ln_1(rows))
        own = range(rows.size(1))
        y[:, own, own] += rows
        assert_close(recording["attn"].with_residual, y.norm(dim=-1), 1e-9)


@torch.no_grad()
def test_what_worked_without_a_block_still_does() -> None:
    def plain(self: Any, x: Tensor) -> Tensor:
        return self.mlp(x + self.attn(x, x, x, need_weights=False)[0])  # type: ignore[no-any-return]

    lengths = torch.nested.nested_tensor([torch.randn(3, D), torch.randn(5, D)])
    assert blocks_of(Written(plain).eval(), lengths, maps=None) == ["none"]
    assert blocks_of(nn.MultiheadAttention(D, H), *torch.randn(3, L, B, D)) == ["none"]
    x = torch.randn(B, L, D)
    squashed = Written(lambda self, x: pre(self, x, lambda x, y: x + y.tanh())).eval()
    assert blocks_of(squashed, x) == ["none"]
    assert blocks_of(Written(pre).eval(), x, maps="summed") == ["none"]  # nothing was asked of it
    alone = Written(lambda self, x: self.mlp(self.attend(x, x, x))).eval()
    assert blocks_of(alone, x) == ["none"]


@torch.no_grad()
def test_dropout_in_training_is_followed() -> None:
    def dropping(self: Any, x: Tensor) -> Tensor:
        return pre(self, x, lambda x, y: x + self.drop(y))

    for tokens in (B, L):
        layer = Written(dropping, False, True, drop=nn.Dropout(0.3)).train()
        x = torch.randn(B, tokens, D)
        recording = recorded(layer, x)
        assert recording.layers["attn"].block == "pre"
        y = pairs(layer.attn, layer.ln_1(x), layer.ln_1(x))
        y[:, range(tokens), range(tokens)] += x
        assert_close(recording["attn"].with_residual, y.norm(dim=-1), 1e-9)
        assert recording["attn"].encoder is not None


class PreNorm(nn.Module):
    """No norm, whatever its name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.norm(x))  # type: ignore[no-any-return]


class DropSecond(nn.Module):
    """Stochastic depth that has met the second of three items."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([2.0, 0.0, 2.0])[:, None, None]


@torch.no_grad()
def test_rows_between_the_first_and_last_are_compared() -> None:
    x = torch.randn(3, 3, D)

    def some(self: Any, x: Tensor) -> Tensor:
        return pre(self, x, lambda x, y: x + self.between(y))

    assert blocks_of(Written(some, between=DropSecond()).eval(), x) == ["none"]

    def clamped(add: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
        def forward(self: Any, x: Tensor) -> Tensor:
            return pre(self, x, lambda x, y: add(x, clamp(y)))

        def clamp(y: Tensor) -> Tensor:
            y[1:-1].clamp_(-0.01, 0.01)
            return y

        return Written(forward).eval()

    layer = clamped(lambda x, y: x + y)
    assert blocks_of(layer, x) == ["none"]
    with torch.inference_mode():
        assert blocks_of(layer, x.clone()) == ["none"]
    assert "was written into" in why(layer, "with_residual", x)

    assert blocks_of(clamped(lambda x, y: x.add_(y)), x.clone()) == ["none"]

    def shuffled(self: Any, x: Tensor) -> Tensor:
        return pre(self, x, lambda x, y: x + y[torch.tensor([0, 2, 1, 3])])

    assert blocks_of(Written(shuffled).eval(), torch.randn(4, 3, D)) == ["none"]

    def rolled(self: Any, x: Tensor) -> Tensor:  # read in another order than it was added
        y = self.ln_1(x)[:, torch.tensor([0, 2, 1, 3])]
        return self.ln_2(x + self.attend(y, y, y))  # type: ignore[no-any-return]

    assert blocks_of(Written(rolled).eval(), torch.randn(2, 4, D)) == ["none"]


@torch.no_grad()
def test_what_a_norm_was_given_tells_where_it_stands() -> None:
    x = torch.randn(B, L, D)

    def all_placed(self: Any, x: Tensor) -> Tensor:  # nothing that it read is the residual
        q = x + places_like(x)
        return self.ln_1(x + self.attend(q, q, q))  # type: ignore[no-any-return]

    assert blocks_of(Written(all_placed).eval(), x) == ["none"]
    assert "whether a norm stands before" in why(Written(all_placed).eval(), "encoder", x)

    def normed_and_placed(self: Any, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        q = y + places_like(x)
        return self.ln_2(x + self.attend(q, q, y))  # type: ignore[no-any-return]

    assert blocks_of(Written(normed_and_placed).eval(), x) == ["pre"]

    def made_and_placed(self: Any, x: Tensor) -> Tensor:
        x = self.mlp(x)  # which no module around was called with
        q = x + places_like(x)
        return self.ln_1(x + self.attend(q, q, x))  # type: ignore[no-any-return]

    assert blocks_of(Written(made_and_placed).eval(), x) == ["post"]

    def wrapped(self: Any, x: Tensor) -> Tensor:
        x = x + self.attend(x, x, x)
        return x + self.ff(x)  # type: ignore[no-any-return]

    assert blocks_of(Written(wrapped, ff=PreNorm()).eval(), x) == ["post"]

    def unread(self: Any, x: Tensor) -> Tensor:
        x = x + self.attend(x, x, x)
        return x + self.mlp(x)  # type: ignore[no-any-return]

    maps = recorded(Written(unread).eval(), x)["attn"]
    assert maps.with_residual is not None
    assert maps.alti is None  # for all that was seen a norm may follow


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_orders_that_numbers_do_not_tell_are_not_guessed(dtype: torch.dtype) -> None:
    layer = Written(pre, False, True).eval().to(dtype)
    x = torch.randn(L, L, D, dtype=dtype)
    assert blocks_of(layer, x) == ["pre"]
    layer.attn.out_proj.weight.zero_()
    layer.attn.out_proj.bias.zero_()
    assert blocks_of(layer, x) == ["none"]
    assert "neither numbers nor sizes" in why(layer, "with_residual", x)
    assert blocks_of(layer, torch.randn(B, L, D, dtype=dtype)) == ["pre"]


@torch.no_grad()
def test_outputs_that_are_all_alike_do_not_tell_what_was_made_of_them() -> None:
    def mixed(self: Any, x: Tensor) -> Tensor:
        return pre(self, x, lambda x, y: x + self.between(y))

    layer = Written(mixed, between=nn.Linear(D, D)).eval()
    layer.attn.in_proj_weight[:D].mul_(1e-14)  # the same weights for all, so that a scale fits
    assert blocks_of(layer, x := torch.randn(1, L, D)) == ["none"]
    assert "is no multiplication" in why(layer, "with_residual", x)


@torch.no_grad()
def test_a_small_output_of_16_bits_is_not_lost_in_the_residual() -> None:
    def looked_at(self: Any, x: Tensor) -> Tensor:
        def add(x: Tensor, y: Tensor) -> Tensor:
            self.look(x)  # two rows of it are the sum, too, within rounding
            return x + y

        return pre(self, x, add)

    layer = Written(looked_at, look=nn.Identity()).eval().bfloat16()
    layer.attn.out_proj.weight.mul_(0.03)
    layer.attn.out_proj.bias.zero_()
    nn.init.ones_(layer.ln_1.weight)
    nn.init.zeros_(layer.ln_1.bias)
    x = 1.04 * F.layer_norm(torch.randn(B, L, D), (D,))  # by two rows what the norm makes of it
    x = x.bfloat16()
    recording = recorded(layer, x)
    assert recording.layers["attn"].block == "pre"
    rows = x.float(), layer.ln_1(x).float()
    y = pairs(layer.float().attn, rows[1], rows[1])
    y[:, range(L), range(L)] += rows[0]
    assert_close(recording["attn"].with_residual, y.norm(dim=-1), 0.02)


@torch.no_grad()
def test_of_two_residuals_that_add_up_none_is_taken() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = x.clone()
        x[0, 0] = torch.nextafter(x[0, 0], torch.tensor(9.0))
        return pre(self, x)

    layer, x = Written(forward).eval(), torch.randn(B, L, D)
    assert blocks_of(layer, x) == ["none"]
    assert "more than one residual" in why(layer, "with_residual", x)


@torch.no_grad()
def test_a_norm_whose_output_the_residual_is_written_into() -> None:
    def written(self: Any, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        y = self.after(self.attend(y, y, y)).add_(x)
        return y + self.mlp(self.ln_2(y))  # type: ignore[no-any-return]

    class Into(Written):
        sums = Sandwich.sums

    layer = Into(written, after=randomize(nn.LayerNorm(D))).eval()
    x = torch.randn(B, L, D)
    assert_maps(recorded(layer, x), layer, x)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["turned", "written into", "as it is"])
def test_a_norm_reads_the_sum_as_it_was(kind: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attend(y, y, y)
        self.look(x)
        if kind == "turned":
            return self.ln_2(x.transpose(0, 1))  # type: ignore[no-any-return]
        return self.ln_2(x.mul_(2.0) if kind == "written into" else x)  # type: ignore[no-any-return]

    layer = Written(forward, look=nn.Identity()).eval()
    recording = recorded(layer, torch.randn(L, L, D))
    assert recording.layers["attn"].block == "pre"
    assert recording["attn"].with_residual is not None
    assert (recording["attn"].encoder is not None) == (kind == "as it is")


@torch.no_grad()
def test_norms_that_are_not_known_leave_the_block_out() -> None:
    class OddNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.abs().amax(-1, keepdim=True)

    def post(self: Any, x: Tensor) -> Tensor:
        return self.odd(x + self.attend(x, x, x))  # type: ignore[no-any-return]

    x = torch.randn(B, L, D)
    assert blocks_of(Written(post, odd=OddNorm()).eval(), x) == ["none"]
    assert "OddNorm" in why(Written(post, odd=OddNorm()).eval(), "with_norm", x)

    def between(self: Any, x: Tensor) -> Tensor:
        return pre(self, x, lambda x, y: x + self.odd(y))

    assert blocks_of(Written(between, odd=OddNorm()).eval(), x) == ["none"]

    def dropped(self: Any, x: Tensor) -> Tensor:
        return pre(self, x, lambda x, y: x + self.after(self.drop(y)))

    layer = Written(dropped, after=nn.LayerNorm(D), drop=nn.Dropout(0.5))
    assert blocks_of(layer.train(), x) == ["none"]
    assert blocks_of(layer.eval(), x) == ["pre"]

    def second(self: Any, x: Tensor) -> Tensor:
        x = self.ln_1(x + self.attend(x, x, x))
        return self.odd(x + self.mlp(x))  # type: ignore[no-any-return]

    maps = recorded(Written(second, odd=OddNorm()).eval(), x)["attn"]
    assert maps.with_norm is not None
    assert maps.encoder is None


# --- Resolvers


def registered(model: nn.Module, family: str, block: str, **norms: nn.Module | None) -> None:
    """Registers what a block of ``model`` is said to be; no other model is meant."""
    own = set(model.modules())

    def resolve(module: nn.Module, ancestors: Sequence[nn.Module]) -> AttentionParts | None:
        if module not in own or not isinstance(module, Attention | nn.MultiheadAttention):
            return None
        projection = module.proj if isinstance(module, Attention) else module.out_proj
        return AttentionParts(family, projection, block, "self", **norms)  # type: ignore[arg-type]

    register_resolver(family, resolve)


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "block", "norm"),
    [
        (lambda: Block(nn.Tanh()), "pre", "ln_1"),
        (lambda: Block(), "post", "ln_2"),
        (lambda: Block(nn.Tanh(), post=True), "post", "ln_1"),
    ],
)
def test_parts_that_do_not_add_up_are_an_error(make: Any, block: str, norm: str) -> None:
    model = nn.Sequential(make()).eval()
    kind = "pre_norm" if block == "pre" else "norm"
    registered(model, "mine", block, **{kind: getattr(model[0], norm)})
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
def test_the_resolver_that_was_registered_last_is_asked_first() -> None:
    layer = nn.TransformerEncoderLayer(D, H, 32, batch_first=True).eval()
    model = Written(lambda self, x: self.ln_1(x + self.attend(x, x, x))).eval()
    layer.self_attn.load_state_dict(model.attn.state_dict())
    layer.norm1.load_state_dict(model.ln_1.state_dict())
    x = torch.randn(B, L, D)

    def found() -> Any:
        recording = recorded(model, x, None)
        return recording.layers["attn"].family, recording["attn"]

    assert found()[0] == "torch"
    for family in ("first", "second", "first"):
        registered(model, family, "post", norm=model.ln_1)
        name, maps = found()
        assert name == family
    expected = recorded(layer, x, "with_norm")
    assert_close(maps.with_norm, expected["self_attn"].with_norm, 1e-9)
    assert maps.encoder is None


def test_a_resolver_may_refuse_with_a_reason_and_must_be_callable() -> None:
    class Refused(nn.MultiheadAttention):
        pass

    def resolve(module: nn.Module, ancestors: Sequence[nn.Module]) -> None:
        if isinstance(module, Refused):
            raise NotImplementedError("it is Tuesday")

    register_resolver("refusing", resolve)
    with pytest.raises(NotImplementedError, match="it is Tuesday"), record(Refused(D, H)):
        pass
    with pytest.raises(TypeError, match="callable"):
        register_resolver("mine", 3)  # type: ignore[arg-type]


@torch.no_grad()
def test_who_named_a_norm_that_did_not_run_is_told() -> None:
    model = Block()
    registered(model, "ours, by name", "post", norm=nn.LayerNorm(D))
    reason = r"attn \(Attention\) ran, .* did not run .* registered for 'ours, by name' names it"
    with pytest.raises(RuntimeError, match=reason), record(model.train(), maps="all") as recording:
        model(torch.randn(B, L, D))
    assert recording.batches == []


def test_a_layer_with_a_forward_of_its_own_is_not_taken_for_torchs() -> None:
    class Own(nn.TransformerEncoderLayer):
        def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return src + self.self_attn(src, src, src)[0]

    layer = Own(D, H, batch_first=True).eval()
    assert blocks_of(layer, torch.randn(B, L, D)) == ["pre"]  # torch's own is "post"
