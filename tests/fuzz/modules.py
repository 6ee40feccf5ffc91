"""The module in the place of torch's, and recordings of small encoders."""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ikattn
import varied_models
from attention_cases import explicit
from fuzz.draws import Draws, numbers, uniform
from fuzz.holding import Wrong, assert_bits, assert_bounded
from ikattn.maps import NormStats
from transformers_models import FAMILIES


def _filled(module: nn.Module, seed: int) -> None:
    """Gives every parameter numbers of its own, large enough that faults show."""
    for i, x in enumerate(module.parameters()):
        x.data = (numbers("normal", "bias", seed + 32 * i, *x.shape) * 0.4).to(x.dtype)


def _close(what: str, found: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    size = 1e-30 + float(truth.detach().abs().max()) if truth.numel() else 1.0
    bound = torch.full(truth.shape, 30000 * torch.finfo(dtype).eps * (1 + size))
    assert_bounded(what, found, (truth.detach().double(), bound.double()))


@dataclass(frozen=True)
class ModuleCall:
    """A call of MultiheadAttention: against torch's, or step by step where the kernel is ours."""

    seed: int
    kernel: str = "dot"
    N: int = 1
    L: int = 1
    S: int = 1
    E: int = 2
    H: int = 1
    kdim: int | None = None
    vdim: int | None = None
    bias: bool = True
    bias_kv: bool = False
    zero_attn: bool = False
    batch_first: bool = True
    batched: bool = True
    stationary: bool = False
    dtype: str = "float64"
    padding: str = ""  # "bool" or "float"
    mask: str = ""  # "bool", "float", "heads" or "causal"
    need_weights: bool = True
    average: bool = True
    training: bool = True
    converted: bool = False
    p: float | None = 2.0  # of kernels other than "dot"
    shared: bool = False  # one tensor is query, key and value

    @staticmethod
    def draw(seed: int) -> ModuleCall:
        r = Draws(seed)
        H = r.choice([1, 2, 3, 4])
        L = r.size(1, 40)
        mask = r.choice(["", "", "bool", "float", "heads", "causal"])
        kernel = r.weighted({"dot": 3, "rbf": 1, "implicit": 2})
        E, H = (H * r.size(1, 9), H) if kernel == "dot" else (12, 4)  # sizes of the formula
        return ModuleCall(
            seed, kernel, r.size(1, 3), L, L if mask == "causal" or r.chance(2) else r.size(1, 70),
            E, H, r.choice([None, None, 5]), r.choice([None, None, 7]), r.chance(2),
            r.chance(4), r.chance(4), r.chance(2), r.chance(1.3), r.chance(3),
            r.weighted({"float64": 2, "float32": 1}) if kernel == "dot" else "float64",
            r.choice(["", "", "bool", "float"]), mask, r.chance(2), r.chance(2), r.chance(2),
            kernel == "dot" and r.chance(2), r.choice([None, 1.0, 1.5, 2.0, 4.0]), r.chance(3),
        )  # fmt: skip

    def cell(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "dtype": self.dtype, "mask": self.mask or "none"}

    def check(self) -> None:
        dtype, seed = getattr(torch, self.dtype), self.seed
        options: dict[str, Any] = {
            "bias": self.bias, "add_bias_kv": self.bias_kv, "add_zero_attn": self.zero_attn,
            "kdim": self.kdim, "vdim": self.vdim, "batch_first": self.batch_first, "dtype": dtype,
        }  # fmt: skip
        stock = nn.MultiheadAttention(self.E, self.H, **options)
        _filled(stock, seed)
        if self.converted:
            ours = ikattn.convert(copy.deepcopy(stock), kernel="dot")
        else:
            extra: dict[str, Any] = {} if self.kernel == "dot" else {"p": self.p}
            if self.kernel == "implicit":
                extra |= {"num_frequencies": 3, "stationary": self.stationary}
            ours = ikattn.MultiheadAttention(self.E, self.H, **options, kernel=self.kernel, **extra)
            missing = ours.load_state_dict(stock.state_dict(), strict=False)
            if missing.unexpected_keys:
                raise Wrong(f"a checkpoint's {missing.unexpected_keys} are not known")
        for module in (stock, ours):
            module.train(self.training)
        sizes = ((self.L, self.E), (self.S, self.kdim or self.E), (self.S, self.vdim or self.E))
        tokens = []
        for i, (length, width) in enumerate(sizes):
            x = numbers("normal", "token", seed + 1000 + 16 * i, self.N, length, width).to(dtype)
            x = x if self.batch_first or not self.batched else x.transpose(0, 1)
            tokens.append(x if self.batched else x[0])
        arguments: dict[str, Any] = {
            "need_weights": self.need_weights,
            "average_attn_weights": self.average,
        }
        if self.padding:
            hidden = uniform(seed + 2000, self.N, self.S) < 0.4
            hidden[:, 0] = False
            hidden = hidden if self.batched else hidden[0]
            as_bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -torch.inf)
            arguments["key_padding_mask"] = hidden if self.padding == "bool" else as_bias
        if self.mask:
            heads = self.N * self.H if self.batched else self.H
            shape = (self.L, self.S) if self.mask != "heads" else (heads, self.L, self.S)
            hidden = uniform(seed + 3000, *shape) < 0.3
            hidden[..., 0] = False
            if self.mask == "causal":
                hidden = ~torch.ones(self.L, self.S, dtype=torch.bool).tril()
            arguments["attn_mask"] = hidden
            if self.mask == "float" or self.padding == "float":
                mask = torch.zeros(shape, dtype=dtype)
                if self.padding != "float":
                    mask = numbers("exact", "bias", seed + 4000, *shape).to(dtype)
                arguments["attn_mask"] = mask.masked_fill(hidden, -torch.inf)
            # torch hides the learned and the zero key, which stand last, where is_causal is true.
            hint = self.kernel == "dot" or not (self.bias_kv or self.zero_attn)
            arguments["is_causal"] = self.mask == "causal" and hint
        results = []
        for module in (ours, stock):
            leaves = [x.detach().clone().requires_grad_() for x in tokens]
            if self.shared and len({x.shape for x in tokens}) == 1:
                leaves = leaves[:1] * 3
            if module is stock and self.kernel != "dot":
                output, weights = explicit(ours, *leaves, **arguments)
                module = ours
            else:
                output, weights = module(*leaves, **arguments)
            made = [output] + ([] if weights is None else [weights])
            total = sum((x * uniform(seed + 9 + i, *x.shape)).sum() for i, x in enumerate(made))
            named = module.named_parameters()
            used = (x for n, x in named if "spectral" not in n or self.kernel == "implicit")
            wanted = {"allow_unused": True, "materialize_grads": True}
            gradients = torch.autograd.grad(total, [*leaves, *used], **wanted)
            results.append([*made, *gradients])
        if len(results[0]) != len(results[1]):
            raise Wrong(f"{len(results[0])} results, not {len(results[1])}")
        for i, (found, truth) in enumerate(zip(*results, strict=True)):
            _close(f"result {i} of the module", found, truth, dtype)


@dataclass(frozen=True)
class RecordCall:
    """An encoder of torch's layers, recorded: its maps against its parts."""

    seed: int
    B: int = 1
    L: int = 1
    E: int = 2
    H: int = 1
    layers: int = 1
    norm_first: bool = False
    batch_first: bool = True
    bias: bool = True
    gelu: bool = False
    padding: bool = False
    causal: bool = False
    training: bool = False
    check_all: bool = False
    queries: tuple[int, ...] = ()
    reduce: str = ""
    family: str = ""  # of transformers, in the place of the encoder
    way: str = ""  # in which it is recorded

    @staticmethod
    def draw(seed: int) -> RecordCall:
        r = Draws(seed)
        H, L = r.choice([1, 2, 3, 4]), r.size(1, 33)
        padding = r.chance(3)
        queries = (
            tuple(sorted({r.below(L) for _ in range(3)})) if r.chance(3) and not padding else ()
        )
        call = RecordCall(
            seed, r.size(1, 4), L, H * (1 + r.size(1, 8)), H, 1 + r.below(3), r.chance(2),
            r.chance(2), r.chance(1.5), r.chance(2), padding, r.chance(3), r.chance(3), r.chance(2),
            queries,
            r.choice(["", "", "columns", "diagonal"]) if not queries else "",
        )  # fmt: skip
        if not r.chance(4) or importlib.util.find_spec("transformers") is None:
            return call
        ways = {x: 4 if x == "compiled" else 8 for x in varied_models.WAYS}
        return RecordCall(seed, family=r.choice(list(FAMILIES)), way=r.weighted(ways))

    def cell(self) -> dict[str, Any]:
        if self.family:
            return {"model": "of transformers", "way": self.way}
        norms = "before" if self.norm_first else "after"
        padding = "padded" if self.padding else "none"
        return {"norms": norms, "maps": self.reduce or "whole", "padding": padding}

    def check(self) -> None:
        if self.family:
            return varied_models.check(self.family, self.way, self.seed)
        seed = self.seed
        layer = nn.TransformerEncoderLayer(
            self.E, self.H, 2 * self.E, dropout=0.0, norm_first=self.norm_first, bias=self.bias,
            batch_first=self.batch_first, activation="gelu" if self.gelu else "relu",
            dtype=torch.float64,
        )  # fmt: skip
        model = nn.TransformerEncoder(layer, self.layers, enable_nested_tensor=False).train(
            self.training
        )
        _filled(model, seed)
        x = numbers("normal", "token", seed + 5000, self.B, self.L, self.E)
        given: dict[str, Any] = {}
        if self.padding:
            hidden = uniform(seed + 6000, self.B, self.L) < 0.3
            hidden[:, 0] = False
            given["src_key_padding_mask"] = hidden
        if self.causal:
            given["mask"] = ~torch.ones(self.L, self.L, dtype=torch.bool).tril()
        inputs = x if self.batch_first else x.transpose(0, 1)
        before = model(inputs, **given)
        options: dict[str, Any] = {"maps": ("summed", "with_residual") if self.reduce else "all"}
        options |= {"reduce": self.reduce or None, "queries": list(self.queries) or None}
        options["check"] = "all" if self.check_all else "rows"
        with ikattn.record(model, **options) as recording:
            inside = model(inputs, **given)
        _close("the output inside a recording", inside, before, torch.float64)
        assert_bits("the output after a recording", [before], [model(inputs, **given)])
        y = x
        for number in range(self.layers):
            y = self.check_layer(
                model.layers[number], recording[f"layers.{number}.self_attn"], y, given
            )
        return None

    @torch.no_grad()
    def check_layer(
        self, layer: Any, maps: ikattn.Contributions, x: Tensor, given: dict[str, Any]
    ) -> Tensor:
        """Holds the maps of one layer to its parts; returns its output, batch first."""
        attention, padding = layer.self_attn, given.get("src_key_padding_mask")
        turned = (lambda t: t) if self.batch_first else (lambda t: t.transpose(0, 1))
        read = layer.norm1(x) if self.norm_first else x
        masks = {"key_padding_mask": padding, "attn_mask": given.get("mask")}
        made, weights = attention(*[turned(read)] * 3, average_attn_weights=False, **masks)
        bias = attention.in_proj_bias[2 * self.E :] if self.bias else None
        value = nn.functional.linear(read, attention.in_proj_weight[2 * self.E :], bias)
        value = value.unflatten(-1, (self.H, -1)).transpose(1, 2)
        total = x + turned(made)
        block: dict[str, Any] = {"residual": x}
        if not self.norm_first:
            block["norm"] = NormStats.of(layer.norm1, total)
            middle = layer.norm1(total)
            fed = layer.linear2(layer.activation(layer.linear1(middle)))
            block["second_norm"] = NormStats.of(layer.norm2, middle + fed)
        if self.padding:
            block |= {"query_padding": padding, "key_padding": padding}
        truth = ikattn.contributions(weights, value, attention.out_proj.weight, **block)
        rows = list(self.queries) or slice(None)
        of_block = () if self.norm_first or self.reduce else ("with_norm", "encoder")
        for name in ("summed", "with_residual", *of_block):
            expected = getattr(truth, name)[:, rows]
            if self.reduce:
                columns, diagonal = expected.sum(1), expected.diagonal(dim1=1, dim2=2)
                expected = diagonal if self.reduce == "diagonal" else columns
                _close(f"{self.reduce} of {name}", maps.reduced[name], expected, torch.float64)
                continue
            _close(f"recorded {name}", getattr(maps, name), expected, torch.float64)
        if not self.reduce and maps.weights is not None:
            shown = weights
            if self.padding:
                hidden = padding[:, None, :, None] | padding[:, None, None, :]
                shown = shown.masked_fill(hidden, 0.0)
            _close("recorded weights", maps.weights, shown[:, :, rows], torch.float64)
        return turned(layer(turned(x), src_mask=given.get("mask"), src_key_padding_mask=padding))
