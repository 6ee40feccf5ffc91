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
from ikattn.analysis import AttentionParts, record
from ikattn.analysis._recorder import resolvers
from ikattn.analysis._recorder.making import Maker

B, L, D, H = 2, 5, 16, 4

pytestmark = pytest.mark.usefixtures("float64_by_default")


class Attention(nn.Module):
    """As people write it: one projection for q, k and v, and F.scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def heads(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.heads(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A block of a GPT, with something between the attention and the sum."""

    def __init__(self, between: nn.Module | None = None, post: bool = False) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = Attention()
        self.between = between or nn.Identity()
        self.mlp = nn.Sequential(nn.Linear(D, 32), nn.GELU(), nn.Linear(32, D))
        self.post = post

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.ln_1(x + self.between(self.attn(x)))
            return self.ln_2(x + self.mlp(x))  # type: ignore[no-any-return]
        x = x + self.between(self.attn(self.ln_1(x)))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class Parallel(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        return x + self.attn(y) + self.mlp(y)  # type: ignore[no-any-return]


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Functional(Block):
    """A multiplier that is no module."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.2 * self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


def vectors(attention: Attention, x: Tensor) -> Tensor:
    """What every pair adds to the output, [B, L, S, D]."""
    q, k, v = attention.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
    hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
    weights = (q @ k.mT / (D / H) ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    projection = attention.proj.weight.unflatten(1, (H, -1))
    return torch.einsum("bhts,bhsd,ehd->btse", weights, v, projection)


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


@pytest.mark.parametrize("kind", ["place", "same", "cache", "mask", "context", "normed context"])
@torch.no_grad()
def test_whose_keys_they_are_is_told_by_what_is_projected(kind: str) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(D)
            self.q, self.k, self.v, self.proj = (nn.Linear(D, D) for _ in range(4))

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
def test_heads_that_are_changed_before_the_out_projection_are_refused() -> None:
    class Gated(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return self.proj(self.heads(x) * x.sigmoid())  # type: ignore[no-any-return]

    class Squashed(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(D)

        def forward(self, x: Tensor) -> Tensor:
            return self.proj(self.norm(self.heads(x)))  # type: ignore[no-any-return]

    for attention, message in (
        (Gated(), "no module was called with the heads"),
        (Squashed(), r"0 does not add up: its out-projection, a torch.*RMSNorm"),
    ):
        model = nn.Sequential(attention)
        with record(model), pytest.raises(RuntimeError, match=message):
            model(torch.randn(B, L, D))


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
