"""What a recording finds of models that nobody described: projections, keys, orders of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
from ikattn.recorder import AttentionParts, record, register_resolver
from ikattn.recorder.plan import resolvers

pytestmark = pytest.mark.usefixtures("float64_by_default")


class Prepared(Attention):
    """What is between its heads and its out-projection changes nothing, or multiplies."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.between(self.heads(x)))  # type: ignore[no-any-return]


class Copied(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


@torch.no_grad()
@pytest.mark.parametrize("check", ["rows", "all"])
@pytest.mark.parametrize(
    "between",
    [
        nn.Identity(),
        nn.Dropout(0.5),
        nn.Sequential(nn.Identity(), nn.Dropout(0.1)),
        Copied(),
        LayerScale(),
        nn.Sequential(LayerScale(), LayerScale()),
    ],
    ids=lambda between: type(between).__name__,
)
def test_what_mixes_no_heads_is_not_their_out_projection(between: nn.Module, check: Any) -> None:
    block = Block()
    block.attn = Prepared(between)
    model, x = nn.Sequential(block).eval(), torch.randn(B, L, D)
    with record(model, maps="all", check=check) as recording:
        for _ in range(2):
            model(x)
    factor = between(torch.ones(D))
    block.attn.proj.weight.mul_(factor)
    y = vectors(block.attn, block.ln_1(x))
    for batch in recording.batches:
        maps = batch.layers["0.attn"]
        assert_close(maps.summed, y.norm(dim=-1), 1e-12, "summed")
    y[:, range(L), range(L)] += x
    assert_close(recording.batches[1].layers["0.attn"].with_residual, y.norm(dim=-1), 1e-9)


class Given(Attention):
    """Queries of its first input, or of its first tokens, and keys of the second, or of all."""

    def __init__(self, first: int | None = None) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        q = self.qkv(x[:, : self.first]).unflatten(-1, (3, H, -1))[:, :, 0]
        k, v = self.qkv(memory).unflatten(-1, (3, H, -1))[:, :, 1:].unbind(2)
        y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)))
        return self.proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@torch.no_grad()
@pytest.mark.parametrize(
    ("first", "L_", "S"), [(1, 5, None), (3, 5, None), (None, 5, 5), (None, 5, 8), (None, 8, 5)]
)
def test_queries_that_are_not_among_their_keys_have_no_part_of_their_own(
    first: int | None, L_: int, S: int | None
) -> None:
    attention = Given(first).eval()
    x, memory = torch.randn(B, L_, D), None if S is None else torch.randn(B, S, D)
    with record(attention, maps="all") as recording:
        attention(x, memory)
    (layer,) = recording.layers.values()
    (maps,) = recording.batches[0].layers.values()
    assert layer.kind == "cross"
    assert maps.with_residual is None
    assert not maps.mixing_ratio
    assert maps.summed is not None
    assert maps.summed.shape == (B, first or L_, L_ if S is None else S)
    with record(attention, maps=["summed"]) as recording:
        attention(x, x)  # the same tensor twice
    (layer,) = recording.layers.values()
    assert layer.kind == ("cross" if first else "self")


@torch.no_grad()
def test_a_module_that_is_called_with_heads_has_the_keys_of_the_one_around_it() -> None:
    class Attend(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv, self.proj = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
            self.attend = Attend()

        def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
            q, (k, v) = self.q(x), self.kv(x if context is None else context).chunk(2, -1)
            heads = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in (q, k, v))
            return self.proj(self.attend(*heads).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    model, x, context = Outer().eval(), torch.randn(B, L, D), torch.randn(B, L + 3, D)
    with record(model, maps="all") as recording:
        model(x, context=context)
    assert recording.layers["attend"].kind == "cross"
    with record(model, maps="all") as recording:
        model(x)
    assert recording.layers["attend"].kind == "self"


@pytest.mark.parametrize(
    "kind", ["place", "same", "cache", "mask", "context", "normed context", "nested context"]
)
@torch.no_grad()
def test_whose_keys_they_are_is_told_by_what_is_projected(kind: str) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(D)
            self.q, self.k, self.v, self.proj = (nn.Linear(D, D) for _ in range(4))
            if kind == "nested context":
                for name in ("q", "k", "v", "proj"):
                    setattr(self, name, nn.Sequential(getattr(self, name)))

        def forward(self, x: Tensor, other: Tensor, value: Tensor | None = None) -> Tensor:
            if kind in ("place", "mask"):
                parts = self.q(x), self.k(x), self.v(x)
            elif kind == "same":  # with places in queries and keys, as DETR has it
                assert value is not None
                parts = self.q(x), self.k(other), self.v(value)
            else:
                other = self.norm(other) if kind == "normed context" else other
                parts = self.q(self.norm(x)), self.k(other), self.v(other)
            heads = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in parts)
            return self.proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    model, x, other = Own().eval(), torch.randn(B, L, D), torch.randn(B, L, D)
    if kind == "mask":
        x, other = torch.randn(B, D, D), torch.zeros(B, D, D)
    elif kind == "cache":
        other = torch.cat([torch.randn(B, 3, D), x], 1)
    given = (x, x, other) if kind == "same" else (x, other)
    with record(model, maps="all") as recording:
        model(*given)
    (layer,) = recording.layers.values()
    assert layer.kind == ("cross" if "context" in kind else "self")


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
    with record(nn.Sequential(block), maps="all") as expected:
        block(x)
    attention = TokensFirst()
    attention.load_state_dict(block.attn.state_dict())
    block.attn = attention
    with record(nn.Sequential(block), maps="all") as recording:
        block(x.transpose(0, 1))
    maps, own = recording["0.attn"], expected["0.attn"]
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
    with record(nn.Sequential(block := InPlace(LayerScale()).eval()), maps="all") as recording:
        block(x)
    assert recording.layers["0.attn"].block == "pre"
    x = x.float()
    x[0, 0, 3] *= 1e4
    block = Functional().float().eval()
    with record(nn.Sequential(block), maps="all") as recording:
        block(x)
    assert recording.layers["0.attn"].block == "pre"


@torch.no_grad()
def test_an_out_projection_of_zeros_is_one() -> None:
    class Cast(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.to(x.dtype))

    block = Block()
    block.attn.proj = Cast(D, D)
    nn.init.zeros_(block.attn.proj.weight)
    with record(nn.Sequential(block.eval()), maps=["summed"]) as recording:
        block(torch.randn(B, L, D))
    assert not recording["0.attn"].summed.any()


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
    with record(model, maps="all") as recording:
        model(x)
    maps = recording["attn"]
    windows = x[:, order].unflatten(1, (-1, L)).flatten(0, 1)
    y = vectors(model.attn, model.norm(windows))
    assert_close(maps.summed, y.norm(dim=-1), 1e-12)
    if tokens == "neighbours":
        y[:, range(L), range(L)] += windows
        assert_close(maps.with_residual, y.norm(dim=-1), 1e-12)
    else:
        assert maps.with_residual is None


@torch.no_grad()
def test_an_out_projection_may_change_between_calls() -> None:
    model = nn.Sequential(Block())
    x = torch.randn(B, L, D)
    with torch.no_grad(), record(model, maps=["summed"]) as recording:
        for call in range(6):
            model(x)
            if call % 3 == 2:  # in two ways, after calls in which it was known
                model[0].attn.proj.weight.data.mul_(1.5)
            elif call % 3 == 1:
                model[0].attn.proj.weight.mul_(2.0)
    maps = [next(iter(batch.layers.values())).summed for batch in recording.batches]
    for found, factor in zip(maps, (1, 1, 2, 3, 3, 6), strict=True):
        assert found is not None
        assert maps[0] is not None
        assert_close(found, factor * maps[0], 1e-9)


@torch.no_grad()
def test_attention_that_runs_again_before_its_sum_has_no_block() -> None:
    class Twice(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.attn(self.attn(self.ln_1(x)))  # type: ignore[no-any-return]

    with record(nn.Sequential(block := Twice().eval()), maps="all") as recording:
        block(torch.randn(B, L, D))
    blocks = {name: layer.block for name, layer in recording.layers.items()}
    assert blocks == {"0.attn": "none", "0.attn#2": "pre"}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["module", "function"])
def test_rounding_beside_large_numbers_hides_no_scale(dtype: torch.dtype, kind: str) -> None:
    scale = LayerScale()
    scale.gamma.mul_(0.1)
    block = Block(scale) if kind == "module" else Functional()
    model, x = nn.Sequential(block).eval(), torch.randn(B, L, D)
    x[..., 3] *= 20  # in whose rounding the attention's output would be lost
    own = []
    for each in (torch.float64, dtype):
        with record(model.to(each), maps="all") as recording:
            model(x.to(each))
        own.append(recording["0.attn"].with_residual)
    expected, found = own
    assert expected is not None
    if kind == "function" and dtype != torch.float32:
        assert found is None  # 16 bits do not tell what is no module
        return
    assert found is not None
    limit = 0.1 if dtype != torch.float32 else 1e-4
    others = expected - expected.diagonal(dim1=-2, dim2=-1).diag_embed()
    off = (found - expected).abs() - (found - expected).abs().diagonal(
        dim1=-2, dim2=-1
    ).diag_embed()
    assert off.max() <= limit * others.max()


class Depth(nn.Module):
    """Leaves out the output of some items, as stochastic depth does."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([2.0, 0.0, 2.0]).view(3, 1, 1)


class Into(Block):
    """Adds the residual into what was multiplied."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.attn(self.ln_1(x))).add_(x)
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


@torch.no_grad()
@pytest.mark.parametrize("kind", [Block, Into])
def test_a_scale_of_first_and_last_items_alone_is_none(kind: type[Block]) -> None:
    model = nn.Sequential(kind(Depth())).eval()
    with record(model, maps="all") as recording:
        model(torch.randn(3, L, D))
    maps = recording["0.attn"]
    assert maps.summed is not None
    assert maps.with_residual is None


@torch.no_grad()
def test_a_norm_that_reads_a_changed_sum_is_not_the_block_s() -> None:
    class Changed(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attn(self.ln_1(x))
            self.between(x)  # sees the sum
            x += 1
            return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]

    block = Changed().eval()
    with record(nn.Sequential(block), maps="all") as recording:
        block(torch.randn(B, L, D))
    maps = recording["0.attn"]
    assert maps.with_residual is not None
    assert maps.encoder is None


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
    with record(model, maps="all") as recording:
        model(torch.randn(B, L, D, dtype=dtype))
    assert recording.layers["0.attn"].block == "pre"


@torch.no_grad()
def test_attention_over_no_keys_has_empty_maps() -> None:
    attention = Given().eval()
    with record(attention, maps=["summed"]) as recording:
        attention(torch.randn(B, L, D), torch.randn(B, 0, D))
    (maps,) = recording.batches[0].layers.values()
    assert maps.summed is not None
    assert maps.summed.shape == (B, L, 0)


def torch_layer(kind: type[nn.Module], **how: Any) -> nn.Module:
    return kind(D, H, 32, batch_first=True, **how)


MADE_OF_MODULES = {
    "post": lambda: Block(post=True),
    "pre": Block,
    "parallel": Parallel,
    "a multiple": Functional,
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
            lambda: Parallel(),
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


@torch.no_grad()
def test_who_named_a_norm_that_did_not_run_is_told() -> None:
    def resolve(module: nn.Module, ancestors: Any) -> AttentionParts | None:
        if not isinstance(module, Attention):
            return None
        return AttentionParts("ours", module.proj, "post", "self", norm=ancestors[0].unused)

    model = Block()
    model.unused = nn.LayerNorm(D)
    register_resolver("ours, by name", resolve)
    try:
        reason = (
            r"attn \(Attention\) ran, .* did not run .* registered for 'ours, by name' names it"
        )
        with pytest.raises(RuntimeError, match=reason), record(model.train(), maps="all"):
            model(torch.randn(B, L, D))
    finally:
        resolvers._registered.pop("ours, by name")
