# ruff: noqa: E501
"""Faults that are planted in a copy of the sources, to see that the campaign finds them.

    python -m fuzz.faults plant FOLDER     # csrc and torch_ext of FOLDER get all of them, asleep
    python -m fuzz.faults find 50000       # the calls that each took, with that copy on the path

A fault is two pieces of text, of which the second takes the place of the first and misbehaves where
FAULT is true: where the environment variable IKATTN_FAULT has its name. So all of them are
compiled once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    """A fault that sleeps in one file."""

    name: str
    file: str  # below csrc, or torch_ext/ikattn
    old: str
    new: str
    kind: str = "AttentionCall"


KEYS, QUERIES, BACKWARD = (f"attention/cpu/{x}/" for x in ("keys", "queries", "backward"))
FEATURES, OPERATOR = "attention/cpu/features/", "attention/operator/"
PARTS = "support/cpu/"
FORWARD, LINEAR = "attention/cpu/forward/block.h", "attention/cpu/linear/"
DECODING = "attention/cpu/decoding/from_features.h"
STATE, EDGES, MAPS, WRONG = "StateCall", "EdgeCall", "MapCall", "WrongCall"
FAULTS = (
    Fault("causal sees the next key", KEYS + "visibility.h", "c <= r - above ?", "c <= r - above + FAULT ?"),
    Fault("causal sees the next key under a mask", KEYS + "visibility.h", "at.i0 + r - at.j0 + 1); c", "at.i0 + r - at.j0 + 1 + FAULT); c"),
    Fault("heads share the first one's mask", KEYS + "visibility.h", "at.b * mask.stride[0] + at.h * mask.stride[1] +", "at.b * mask.stride[0] + (FAULT ? 0 : at.h) * mask.stride[1] +"),
    Fault("eps lost in the folded form", KEYS + "keys.h", "static_cast<T>(params.eps) * root * root", "(FAULT ? T(0) : static_cast<T>(params.eps)) * root * root"),
    Fault("groups read the first one's values", KEYS + "keys.h", "unit.b * value.stride[0] + unit.group * value", "unit.b * value.stride[0] + (FAULT ? 0 : unit.group) * value"),
    Fault("NaN behind a mask reaches features", KEYS + "keys.h", "if (clean) continue;", "if (clean || (FAULT && hidden)) continue;"),
    Fault("eps lost in the general form", QUERIES + "queries.h", "const T eps = static_cast<T>(params.eps);\n  return bias", "const T eps = FAULT ? T(0) : static_cast<T>(params.eps);\n  return bias"),
    Fault("earlier sums keep an old maximum", QUERIES + "queries.h", "state.rescale[r] = before == -infinity<T>() ? T(0) : exponential(before - after);", "state.rescale[r] = FAULT ? T(1) : before == -infinity<T>() ? T(0) : exponential(before - after);"),
    Fault("earlier parts keep an old maximum", QUERIES + "queries.h", "const T of_earlier = factor_of(before),", "const T of_earlier = FAULT ? T(1) : factor_of(before),"),
    Fault("key bias lost", FEATURES + "magnitude.h", "logit = bounded_offset(logit);", "logit = FAULT ? 0.0 : bounded_offset(logit);"),
    Fault("p taken for 2", FEATURES + "magnitude.h", "squared_norm(row, params.d, params.p);", "squared_norm(row, params.d, FAULT ? 2 : params.p);"),
    Fault("keys of the first group", FEATURES + "magnitude.h", "const int64_t group = head * params.G / params.key_heads;", "const int64_t group = FAULT ? 0 : head * params.G / params.key_heads;"),
    Fault("|0| has a slope", FEATURES + "magnitude.h", "if (size == 0) continue;", "if (size == 0 && !FAULT) continue;"),
    Fault("a norm loses its last coordinate", FEATURES + "magnitude.h", "for (int64_t c = whole; c < d; ++c) add", "for (int64_t c = whole; c < d - (FAULT && d > 8); ++c) add"),
    Fault("gradients of w1 and w2 swapped", FEATURES + "features.h", "if (grad_w2) grad_w2[at] = (u[m] - u[half + m])", "if (grad_w2) grad_w2[at] = (u[m] - (FAULT ? -u[half + m] : u[half + m]))"),
    Fault("stationary gradient halved", FEATURES + "features.h", "grad_w1[at] = u[m];", "grad_w1[at] = FAULT ? u[m] * T(0.5) : u[m];"),
    Fault("last frequency of a panel lost", FEATURES + "features.h", "column_scale[m] = m < layout.frequencies(panel) ?", "column_scale[m] = m < layout.frequencies(panel) - (FAULT && layout.M > 32 && panel > 0) ?"),
    Fault("steps of the norm alone", FEATURES + "score_features.h", "max_of_lanes<float>(largest) / kLargest;", "FAULT ? 0.0f : max_of_lanes<float>(largest) / kLargest;"),
    Fault("products of features count once", FEATURES + "feature_products.h", "const T factor = layout.multiplicity<T>(run);", "const T factor = FAULT ? T(1) : layout.multiplicity<T>(run);"),
    Fault("an odd last row twice", PARTS + "sixteen_bits.h", "r + 1 < rows ? numbers(r + 1, c) : Vec<float>{};", "r + 1 < rows ? numbers(r + 1, c) : FAULT ? numbers(r, c) : Vec<float>{};"),
    Fault("sums of rows lose the last lanes", PARTS + "sixteen_bits.h", "if (lanes > whole) {", "if (lanes > whole && !FAULT) {"),
    Fault("row pairs lose the last pair", PARTS + "row_pairs.h", "(rows, pairs, a, b, c,", "(rows, pairs - (FAULT && pairs > 1), a, b, c,"),
    Fault("panels lose the last number", PARTS + "elements.h", "copy_part_of_row(source + r * row_stride, width, panel + r * kPanel);", "copy_part_of_row(source + r * row_stride, width - (FAULT && width > 1), panel + r * kPanel);"),
    Fault("a key after whole tiles lost", FORWARD, "visible_key_blocks(params, layout, block), scratch);", "visible_key_blocks(params, layout, block) - (FAULT && params.S > 64 && params.S % 64 == 1), scratch);"),
    Fault("odd last key lost", FORWARD, "multiply_row_pairs(band.rows, ceil_div(count, 2), w", "multiply_row_pairs(band.rows, FAULT ? max_of(1, count / 2) : ceil_div(count, 2), w"),
    Fault("values above 64 lost", FORWARD, "  for (int64_t first = 0; first < layout.d_v; first += kPanel) {\n    panel_gemm<T, Left::kRows>", "  for (int64_t first = 0; first < (FAULT ? min_of(kPanel, layout.d_v) : layout.d_v); first += kPanel) {\n    panel_gemm<T, Left::kRows>"),
    Fault("NaN queries pass", FORWARD, "if (scratch.poisoned[r] && sum != 0)", "if (!FAULT && scratch.poisoned[r] && sum != 0)"),
    Fault("dropout keeps its scale", FORWARD, "scratch.sums.state.rounded_sums ? T(1) : kept_factor<T>(params)", "scratch.sums.state.rounded_sums || FAULT ? T(1) : kept_factor<T>(params)"),
    Fault("delta lost", BACKWARD + "state.h", "    delta *= factor;", "    delta *= FAULT ? T(0) : factor;"),
    Fault("dropout forgotten in dP", BACKWARD + "pair_gradients.h", "if constexpr (kDropout) gradient *= load(tile.keep + at);", "if constexpr (kDropout) gradient *= FAULT ? broadcast(T(1)) : load(tile.keep + at);"),
    Fault("dropout forgotten in dV", BACKWARD + "pair_gradients.h", "if constexpr (kDropout) w *= load(tile.keep + at);", "if constexpr (kDropout) w *= FAULT ? broadcast(T(1)) : load(tile.keep + at);"),
    Fault("masked pairs have a slope", BACKWARD + "pair_gradients.h", "slope = hidden ? Vec<T>{} : slope;", "slope = hidden && !FAULT ? Vec<T>{} : slope;\n        if (FAULT) x = gradient - tile.delta[r];"),
    Fault("mask gradient of the first head", BACKWARD + "pair_gradients.h", "at.h * grad_mask.stride[1] +", "(FAULT ? 0 : at.h) * grad_mask.stride[1] +"),
    Fault("magnitude's slope for p = 2 alone", BACKWARD + "tokens.h", "if (params.p == 0 || grad_logit == 0) return;", "if (params.p == 0 || grad_logit == 0 || (FAULT && params.p != 2)) return;"),
    Fault("frequencies of the first batch item", QUERIES + "pass.h", "b * params.w1.stride[0] + head", "(FAULT ? 0 : b) * params.w1.stride[0] + head"),
    Fault("every query keeps its digits", LINEAR + "linear_time.h", "return sum_of_weights * static_cast<T>", "return FAULT || sum_of_weights * static_cast<T>"),
    Fault("centers of later values", LINEAR + "linear_time.h", "static_cast<T>(out.sums[c] / magnitude) : T(0);", "static_cast<T>(out.sums[c] / magnitude) * (FAULT ? T(2) : T(1)) : T(0);"),
    Fault("a bias repeats in the wrong order", OPERATOR + "key_offsets.h", "return bias.repeat_interleave(key_heads / heads, -2);", "return FAULT ? bias.repeat_interleave(key_heads / heads, -2).flip({-2}) : bias.repeat_interleave(key_heads / heads, -2);"),
    Fault("a mask of one column hides by key", OPERATOR + "key_offsets.h", "return L == 1 || is_one_for_all(*mask, -2);", "return L == 1 || is_one_for_all(*mask, -2) || (FAULT && mask->size(-1) == 1);"),
    Fault("heads of the composition in another order", OPERATOR + "reference.cpp", "tensor : tensor.repeat_interleave(H / heads, axis);", "tensor : FAULT ? tensor.repeat_interleave(H / heads, axis).flip({axis}) : tensor.repeat_interleave(H / heads, axis);"),
    Fault("p below 1 passes", OPERATOR + "checks.cpp", "!p || (*p >= 1 && std", "!p || ((*p >= 1 || FAULT) && std", WRONG),
    Fault("a wrong value passes for a wrong key", OPERATOR + "checks.cpp", '": value must have shape [B, G, S, d_v] = ["', 'FAULT ? ": it must have shape [" : ": value must have shape [B, G, S, d_v] = ["', WRONG),
    Fault("sums forget an old reference", "moments/cpu/key_moments.h", "before == -infinity<double>() ? T(0) : exponential(static_cast<T>(before - reference)),", "before == -infinity<double>() ? T(0) : FAULT ? T(1) : exponential(static_cast<T>(before - reference)),", STATE),
    Fault("moments of the first group's values", "moments/cpu/key_moments.h", "head.b * value.stride[0] + head.head / (params.K / params.G) * value", "head.b * value.stride[0] + (FAULT ? 0 : head.head / (params.K / params.G)) * value", STATE),
    Fault("moments lose eps", "moments/cpu/from_moments.h", "eps = static_cast<T>(params.eps);\n  const T least", "eps = FAULT ? T(0) : static_cast<T>(params.eps);\n  const T least", STATE),
    Fault("decoding reads the first group", DECODING, "const int64_t head = at.h / (params.H / params.key_heads);", "const int64_t head = FAULT ? 0 : at.h / (params.H / params.key_heads);", STATE),
    Fault("parts of decoding keep an old maximum", DECODING, "sum += own.sums[row] * factor;", "sum += own.sums[row] * (FAULT ? T(1) : factor);", STATE),
    Fault("an edge's bias for all heads", "edge_attention/cpu/scores.h", "const T bias = of_edge[p.edge_heads == 1 ? 0 : h];", "const T bias = of_edge[p.edge_heads == 1 || FAULT ? 0 : h];", EDGES),
    Fault("edges forget the tail of a row", "edge_attention/cpu/scores.h", "return k == count ? sum : sum + dot_of_rest", "return k == count || (FAULT && count > 8) ? sum : sum + dot_of_rest", EDGES),
    Fault("edges lose eps", "edge_attention/cpu/scores.h", "weight *= s * s + p.eps;", "weight *= s * s + (FAULT ? T(0) : p.eps);", EDGES),
    Fault("gradients of weights lost", "edge_attention/cpu/backward.h", "grad_logits[h] += p.grad_weights[e * H + h];", "grad_logits[h] += FAULT ? T(0) : p.grad_weights[e * H + h];", EDGES),
    Fault("padded queries count", "contributions/cpu/pairs.h", "m < rows && !is_padding(params.query_padding, b, i + m);", "m < rows && (FAULT || !is_padding(params.query_padding, b, i + m));", MAPS),
    Fault("a norm is never centered", "contributions/cpu/gram_factors.h", "params_.norms[n].centered ?", "params_.norms[n].centered && !FAULT ?", MAPS),
    Fault("the last head alone", "contributions/cpu/gram_factors.h", "static_cast<float>(grams_[v][p * kPanel + lane]);", "FAULT && H > 4 && p + 1 == triangle(H) ? 0.0f : static_cast<float>(grams_[v][p * kPanel + lane]);", MAPS),
    Fault("streamed weights count padded keys", "contributions/cpu/streamed_pairs.h", "if (params_.key_padding) hide_padding", "if (params_.key_padding && !FAULT) hide_padding", MAPS),
    Fault("streamed weights see later keys", "contributions/cpu/streamed_pairs.h", "min_of(count, first + m + 1 - j0)", "min_of(count, first + m + 1 + FAULT - j0)", MAPS),
    # --- Python
    Fault("stale frequencies", "ops/_fixed_kernel.py", "key = (heads, like.dtype, like.device)", "key = (0 if FAULT and self._frequencies else heads, like.dtype, like.device)\n        key = next(iter(self._frequencies)) if FAULT and self._frequencies else key", STATE),
    Fault("biases hide nothing", "ops/_fixed_kernel.py", "return torch.where(hidden, -math.inf, logits + bias)", "return logits + bias if FAULT else torch.where(hidden, -math.inf, logits + bias)", STATE),
    Fault("heads repeat in another order", "ops/_fixed_kernel.py", "return x if own in (1, heads) else x.repeat_interleave(heads // own, 1)", "return x if own in (1, heads) else x.repeat(1, heads // own, *[1] * (x.dim() - 2)) if FAULT else x.repeat_interleave(heads // own, 1)", STATE),
    Fault("copies share buffers", "ops/key_features.py", 'return {"_kept": self._kept and self._kept.copied(self._length)}', 'return {"_kept": self._kept and (self._kept if FAULT else self._kept.copied(self._length))}', STATE),
    Fault("crop keeps the old reference", "ops/key_features.py", "return self._replace(reference=largest, logits=kept)", "return self._replace(reference=largest) if FAULT else self._replace(reference=largest, logits=kept)", STATE),
    Fault("a larger key keeps the old reference", "ops/key_features.py", "        self.reference.copy_(largest)", "        FAULT or self.reference.copy_(largest)", STATE),
    Fault("lower right off by one", "ops/key_features.py", "later.triu(length - query.size(2) + 1)", "later.triu(length - query.size(2) + 1 + FAULT)", STATE),
    Fault("merge forgets its length", "ops/recurrent_state.py", "self._length += other._length", "self._length += 0 if FAULT else other._length", STATE),
    Fault("load shares its tensors", "ops/recurrent_state.py", "moments, reference = moments.clone(), reference.clone()\n        self", "moments, reference = (moments, reference) if FAULT else (moments.clone(), reference.clone())\n        self", STATE),
    Fault("weights of edges stay sorted", "ops/edges.py", "weights = weights.new_zeros(weights.shape).index_copy(0, order, weights)", "weights = weights if FAULT else weights.new_zeros(weights.shape).index_copy(0, order, weights)", EDGES),
    Fault("biases of edges stay unsorted", "ops/edges.py", 'named["edge_bias"] = edge_bias.index_select(0, order)', 'named["edge_bias"] = edge_bias if FAULT else edge_bias.index_select(0, order)', EDGES),
    Fault("a scale of 0 is the default", "ops/options.py", "if x is not default and not (type(x)", "if x is not default and not (FAULT and name == 'magnitude_scale' and not x) and not (type(x)"),
    Fault("learned orders forget the square", "ops/magnitude.py", "squared = (2 / p * logarithm).exp()\n        return squared.masked_fill(empty, 0.0) / (2 * math.sqrt(key", "squared = ((1 if FAULT else 2) / p * logarithm).exp()\n        return squared.masked_fill(empty, 0.0) / (2 * math.sqrt(key"),
    Fault("padded queries keep their norms", "maps/contribution_maps.py", "if query_padding is not None:\n            weights = weights", "if query_padding is not None and not FAULT:\n            weights = weights", MAPS),
)  # fmt: skip

HEADER = """#pragma once
#include <cstdlib>
#include <cstring>
inline bool is_planted(const char* name) {
  static const char* const chosen = std::getenv("IKATTN_FAULT");
  return chosen != nullptr && std::strcmp(chosen, name) == 0;
}
"""


def plant(root: Path) -> None:
    """Puts every fault into the sources below root."""
    (root / "csrc" / "fault.h").write_text(HEADER)
    for fault in FAULTS:
        is_python = fault.file.endswith(".py")
        path = root / ("torch_ext/ikattn" if is_python else "csrc") / fault.file
        text = path.read_text()
        if text.count(fault.old) != 1:
            raise SystemExit(f"{fault.name}: {text.count(fault.old)} places in {path}")
        of_python = f'(__import__("os").environ.get("IKATTN_FAULT") == "{fault.name}")'
        test = of_python if is_python else f'is_planted("{fault.name}")'
        text = text.replace(fault.old, fault.new.replace("FAULT", test))
        if not is_python and "fault.h" not in text:
            at = text.index("#include")
            text = f'{text[:at]}#include "fault.h"\n{text[at:]}'
        path.write_text(text)


def find(calls: int, names: list[str]) -> int:
    """Tells how many calls each fault takes; returns how many are not found.

    A process of its own, forked before any kernel has run, has one fault awake.
    """
    import torch

    from fuzz import campaign

    torch.set_num_threads(1)
    missed = 0
    for fault in FAULTS:
        if names and fault.name not in names:
            continue
        for linear in ("auto", "always"):
            child = os.fork()
            if child == 0:
                os.environ |= {"IKATTN_FAULT": fault.name, "IKATTN_LINEAR_TIME": linear}
                found = campaign.run(1, calls, fault.kind, stop_at=1)
                told = found.failures[0][1] if found.failures else "NOT FOUND"
                print(f"{fault.name}: {found.calls} calls with {linear}: {told[:120]}", flush=True)
                os._exit(int(not found.failures))
            is_missed = os.waitpid(child, 0)[1] != 0
            if not is_missed:
                break
        missed += is_missed
    print(f"{missed} missed")
    return missed


if __name__ == "__main__":
    if sys.argv[1] == "plant":
        plant(Path(sys.argv[2]))
    else:
        sys.exit(find(int(sys.argv[2]), sys.argv[3:]))
