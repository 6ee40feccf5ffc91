"""Blocks around nn.MultiheadAttention in hand-written layers, against the explicit sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from agreement import assert_close
from hand_written_blocks import B, D, H, L
from ikattn.recorder import record
from recorded_models import randomize
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


KINDS = [ViT, Clip, Functional, Parallel, Sandwich, Detr, Wrapped]
HOW = [(True, False), (False, False), (True, True), (False, True)]


@torch.no_grad()
@pytest.mark.parametrize("tokens", [B, L])
@pytest.mark.parametrize(("batch_first", "turns"), HOW)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_maps_of_a_hand_written_block(
    kind: Any, batch_first: bool, turns: bool, tokens: int
) -> None:
    torch.manual_seed(0)
    layer, x = kind(batch_first, turns).eval(), torch.randn(B, tokens, D)
    with record(nn.Sequential(layer), maps="all", check="all") as recording:
        layer(x if batch_first != turns else x.transpose(0, 1))
    assert_maps(recording, layer, x)


class InPlace(Written):
    sums = ViT.sums


class Post(Written):
    sums = Wrapped.sums


def blocks_of(layer: nn.Module, *args: Tensor, **options: Any) -> list[str]:
    """The kinds of block that a call's layers have; those of none have the maps of attention."""
    with torch.no_grad(), record(layer, **{"maps": "all", **options}) as recording:
        layer(*args)
    for name, known in recording.layers.items():
        assert recording[name].summed is not None
        if known.block == "none":
            assert recording[name].with_residual is None
            assert recording[name].encoder is None
    return [known.block for known in recording.layers.values()]


def why(layer: nn.Module, map_: str, *args: Tensor) -> str:
    """What the error says where a map is asked for that a layer turns out not to have."""
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
    with record(layer, maps="all") as recording:
        layer(given)
    assert_maps(recording, layer, x)  # of what the layer was called with, which is the same
    layer = InPlace(lambda self, x: pre(self, x, Tensor.add_), *how).eval()
    with record(layer, maps="all") as recording:
        layer(given.clone())
    assert_maps(recording, layer, x)  # what the norm made of it tells

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
    with record(layer, maps="all") as recording:
        layer(x if how[0] != how[1] else x.transpose(0, 1))
    assert_maps(recording, layer, x)


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
        with torch.no_grad(), record(layer, maps="all") as recording:
            layer(given)
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
        with record(layer, maps="all") as recording:
            layer(x)
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

    def clamped(self: Any, x: Tensor) -> Tensor:
        def add(x: Tensor, y: Tensor) -> Tensor:
            y[1:-1].clamp_(-0.01, 0.01)
            return x + y

        return pre(self, x, add)

    layer = Written(clamped).eval()
    assert blocks_of(layer, x) == ["none"]
    with torch.inference_mode():
        assert blocks_of(layer, x.clone()) == ["none"]
    assert "was written into" in why(layer, "with_residual", x)

    def clamped_into(self: Any, x: Tensor) -> Tensor:
        def add(x: Tensor, y: Tensor) -> Tensor:
            y[1:-1].clamp_(-0.01, 0.01)
            return x.add_(y)

        return pre(self, x, add)

    assert blocks_of(Written(clamped_into).eval(), x.clone()) == ["none"]

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

    with record(layer := Written(unread).eval(), maps="all") as recording:
        layer(x)
    assert recording["attn"].with_residual is not None
    assert recording["attn"].alti is None  # for all that was seen a norm may follow


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
    with record(layer, maps="all") as recording:
        layer(x)
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
    with record(layer, maps="all") as recording:
        layer(x := torch.randn(B, L, D))
    assert_maps(recording, layer, x)


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
    with record(layer, maps="all") as recording:
        layer(torch.randn(L, L, D))
    assert recording.layers["attn"].block == "pre"
    assert recording["attn"].with_residual is not None
    assert (recording["attn"].encoder is not None) == (kind == "as it is")


def test_maps_around_torchs_attention_have_gradients() -> None:
    for kind in (Clip, Detr, Sandwich):
        layer = kind().eval()
        with record(nn.Sequential(layer), maps="encoder", detach=False) as recording:
            layer(torch.randn(B, L, D))
        map_ = recording["0.attn"].encoder
        assert map_ is not None
        map_.sum().backward()
        assert layer.attn.out_proj.weight.grad is not None


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

    with record(layer := Written(second, odd=OddNorm()).eval(), maps="all") as recording:
        layer(x)
    assert recording["attn"].with_norm is not None
    assert recording["attn"].encoder is None
