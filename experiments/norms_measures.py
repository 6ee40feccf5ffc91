"""Measures of where attention looks and how much it moves, of one draw of sentences.

Sizes: B sentences, H heads, L queries, S keys (L = S), n tokens of one sentence.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ikattn
from ikattn.explain import CorpusSums
from ikattn.maps import Recording, rollout
from ikattn.maps.ledger import FACTORS, Shares
from pretrained_sentences import MiniLm, embedding

KINDS = ("[CLS]", "[SEP]", "stops", "words")  # stops: full stop and comma
STOPS = (".", ",")
# maps -> options of their rollout; those of weights and of summed vectors lack the residual
ROLLOUTS: dict[str, dict[str, Any]] = {
    "weights": {"residual": 0.5},
    "summed": {"residual": 0.5},
    "with_residual": {},
    "with_norm": {},
    "encoder": {},
    "alti": {},
}
RATIOS = ("summed", "with_residual", "with_norm", "encoder")
RECORDED = ("ledger", "summed", "with_residual", "with_norm", "encoder", "alti", "mixing_ratio")
LONGEST_SHOWN = 16  # tokens of a sentence in the picture


class Key(NamedTuple):
    """A number's name; layer and head are -1 where it is of all of them."""

    table: str
    layer: int
    head: int
    name: str


class Telling(NamedTuple):
    """A sentence, with the shares of its tokens by weight and by contribution."""

    difference: float
    tokens: list[str]
    weights: Tensor  # [n]
    contributions: Tensor  # [n]


class Measured(NamedTuple):
    """One draw's numbers, and its sentence in which weight and contribution differ most."""

    numbers: dict[Key, float]
    telling: Telling | None


def ranks(x: Tensor) -> Tensor:
    """Ranks along the last axis; equal numbers share the mean of theirs."""
    above = x.unsqueeze(-1) - x.unsqueeze(-2)
    return (above > 0).double().sum(-1) + (above == 0).double().sum(-1) / 2


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's, along the last axis; NaN where one of the two does not vary."""
    first, second = (x - x.mean(-1, keepdim=True) for x in (ranks(a), ranks(b)))
    return (first * second).sum(-1) / (first.square().sum(-1) * second.square().sum(-1)).sqrt()


def kinds_of(tokenizer: Any) -> Callable[[Sequence[str]], list[str]]:
    """Returns a function that names the kind of each token."""
    named = {str(tokenizer.cls_token): "[CLS]", str(tokenizer.sep_token): "[SEP]"}
    named |= dict.fromkeys(STOPS, "stops")
    return lambda tokens: [named.get(token, "words") for token in tokens]


def token_counts(minilm: MiniLm, texts: Sequence[str]) -> Tensor:
    """How often each token of the vocabulary occurs in texts."""
    ids = [torch.tensor(row) for row in minilm.tokenizer(list(texts)).input_ids]
    return torch.bincount(torch.cat(ids), minlength=len(minilm.tokenizer)).double()


@torch.no_grad()
def measure(
    minilm: MiniLm, model: Any, texts: Sequence[str], counts: Tensor, masked: int
) -> Measured:
    """All numbers of one draw.

    Args:
        minilm: Its tokenizer is used.
        model: The original, or one that was made of it.
        texts: The sentences.
        counts: How often each token occurs in the corpus.
        masked: In how many of the sentences tokens are masked one by one.
    """
    kinds = kinds_of(minilm.tokenizer)
    corpus = CorpusSums(KINDS)
    means: dict[Key, list[float]] = defaultdict(list)
    by_token: dict[tuple[int, str], list[Tensor]] = defaultdict(list)
    telling: Telling | None = None
    for numbers, batch in minilm.batches(texts):
        with ikattn.record(model, maps=RECORDED) as recording:
            model(**batch)
        corpus.add(recording, minilm.tokenizer, types_of=kinds)
        for sentence in _sentences(recording, batch, minilm.tokenizer):
            for key, value in _of_sentence(sentence, kinds):
                means[key].append(value)
            for (layer, name), values in _by_token(sentence, kinds, counts):
                by_token[layer, name].append(values)
            telling = _more_telling(telling, sentence)
        chosen = [b for b, number in enumerate(numbers) if number < masked]
        for key, value in _of_masked_tokens(model, recording, batch, chosen, minilm.tokenizer):
            means[key].append(value)
    found = {key: float(torch.tensor(own).nanmean()) for key, own in means.items()}
    found |= dict(_of_corpus(corpus)) | dict(of_split(corpus.shares))
    for layer, name in by_token:
        if name != "count":
            values, often = (torch.cat(by_token[layer, x]) for x in (name, "count"))
            found[Key("frequency", layer, -1, name)] = float(rank_correlation(values, often))
    return Measured(found, telling)


class _Sentence(NamedTuple):
    tokens: list[str]
    ids: Tensor  # [n]
    layers: list[Any]  # maps without padding and batch


def _sentences(recording: Recording, batch: Any, tokenizer: Any) -> Iterator[_Sentence]:
    names = ("weights", "per_head", "value_norms", "summed")
    for b, there in enumerate(batch["attention_mask"].bool()):
        n = int(there.sum())
        layers = []
        for name in recording:
            maps = recording[name]
            cut = [getattr(maps, x)[b].double() for x in names]
            cut = [x[..., :n, :n] if x.size(-2) == x.size(-1) else x[..., :n] for x in cut]
            layers.append(dict(zip(names, cut, strict=True)))
        ids = batch["input_ids"][b, :n]
        yield _Sentence(tokenizer.convert_ids_to_tokens(ids), ids, layers)


def _of_sentence(
    sentence: _Sentence, kinds: Callable[[Sequence[str]], list[str]]
) -> Iterator[tuple[Key, float]]:
    words = torch.tensor([kind == "words" for kind in kinds(sentence.tokens)])
    for layer, maps in enumerate(sentence.layers):
        weights, per_head, norms = maps["weights"], maps["per_head"], maps["value_norms"]
        seen = weights.mean(1)  # [H, n]
        parts = per_head / per_head.sum(-1, keepdim=True)
        apart = (weights - parts).abs().sum(-1).mean(-1) / 2
        moved = per_head.sum((1, 2)) / per_head.sum() * len(per_head)
        with_special = rank_correlation(seen, norms)
        columns = {"all tokens": with_special, "apart": apart, "moved": moved}
        if int(words.sum()) > 2:
            columns["words"] = rank_correlation(seen[:, words], norms[:, words])
        for name, values in columns.items():
            table = "heads" if name in ("apart", "moved") else "weight and norm"
            for head, value in enumerate(values.tolist()):
                yield Key(table, layer, head, name), value
        own = weights.mean(0).diagonal()
        yield Key("mixing ratio", layer, -1, "weights"), float(1 - own.mean())


def _by_token(
    sentence: _Sentence, kinds: Callable[[Sequence[str]], list[str]], counts: Tensor
) -> Iterator[tuple[tuple[int, str], Tensor]]:
    """Weight, norm and contribution of words, relative to an even share; the words' counts."""
    words = torch.tensor([kind == "words" for kind in kinds(sentence.tokens)])
    n = len(sentence.tokens)
    for layer, maps in enumerate(sentence.layers):
        moved = maps["summed"] / maps["summed"].sum(-1, keepdim=True)
        yield (layer, "weight"), maps["weights"].mean((0, 1))[words] * n
        yield (layer, "norm"), maps["value_norms"].mean(0)[words]
        yield (layer, "contribution"), moved.mean(0)[words] * n
        yield (layer, "count"), counts[sentence.ids][words]


def _more_telling(best: Telling | None, sentence: _Sentence) -> Telling | None:
    if len(sentence.tokens) > LONGEST_SHOWN:
        return best
    seen, moved = [], []
    for maps in sentence.layers:
        seen.append(maps["weights"].mean((0, 1)))
        moved.append((maps["summed"] / maps["summed"].sum(-1, keepdim=True)).mean(0))
    weights, contributions = torch.stack(seen).mean(0), torch.stack(moved).mean(0)
    difference = float((weights - contributions).abs().sum() / 2)
    if best is not None and best.difference >= difference:
        return best
    return Telling(difference, sentence.tokens, weights, contributions)


def _of_masked_tokens(
    model: Any, recording: Recording, batch: Any, chosen: list[int], tokenizer: Any
) -> Iterator[tuple[Key, float]]:
    """Rank correlations of maps with how far the sentence's vector turns without a token."""
    if not chosen:
        return
    drawn: dict[str, Tensor] = {}
    there = batch["attention_mask"].bool()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of with_norm, which misleads
        for name, options in ROLLOUTS.items():
            flow = rollout(recording, map=name, **options)
            drawn[f"rollout of {name}"] = flow.sum(1) / there.sum(1, keepdim=True)
    for name in ("weights", "summed"):
        each = [getattr(recording[layer], name) for layer in recording]
        rows = torch.stack([x.mean(1) if x.dim() == 4 else x for x in each])
        rows = rows / rows.sum(-1, keepdim=True).clamp_min(1e-30)
        drawn[f"mean of {name}"] = rows.mean(0).sum(1)
    for b in chosen:
        n = int(there[b].sum())
        if n < 5:
            continue
        ids = batch["input_ids"][b, :n]
        variants = ids.repeat(n - 1, 1)
        places = torch.arange(1, n - 1)
        variants[places, places] = tokenizer.mask_token_id  # row 0 stays whole
        inputs = {"input_ids": variants, "attention_mask": torch.ones_like(variants)}
        vectors = embedding(model, inputs)
        turned = 1 - vectors[1:] @ vectors[0]
        for name, scores in drawn.items():
            yield (
                Key("masked", -1, -1, name),
                float(rank_correlation(scores[b, 1 : n - 1].double(), turned.double())),
            )


def _of_corpus(corpus: CorpusSums) -> Iterator[tuple[Key, float]]:
    """Shares and norms by kind of token, and mixing ratios."""
    places = {name: layer for layer, name in enumerate(corpus.layers)}
    of_heads: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    for row in corpus.table():
        if row["map"] not in ("weights", "per_head", "summed", "encoder", "alti"):
            continue
        layer, head = places[row["layer"]], row["head"]
        for kind in KINDS:
            of_heads[layer, row["map"], kind].append(row[kind])
            if head is not None:
                yield Key(f"{row['map']} by head", layer, head, kind), row[kind]
    for (layer, name, kind), values in of_heads.items():
        yield Key(f"share by {name}", layer, -1, kind), sum(values) / len(values)
    for name, layer in places.items():
        means = corpus[name]
        for kind, norm in zip(KINDS, means["value_norms"].values.mean(0).tolist(), strict=True):
            yield Key("norm", layer, -1, kind), norm
        for ratio in RATIOS:
            found = means.get(f"mixing_ratio.{ratio}")
            if found is not None:
                count = found.count.double()
                total = (found.values.nan_to_num() * count).sum() / count.sum()
                yield Key("mixing ratio", layer, -1, ratio), float(total)


def of_split(split: Shares) -> Iterator[tuple[Key, float]]:
    """Who makes contributions large: shares of the variance of their logarithm."""
    places = {name: layer for layer, name in enumerate(split.layers)}
    for row in split.table():
        layer = -1 if row["layer"] is None else places[row["layer"]]
        head = -1 if row["head"] is None else row["head"]
        for name in (*FACTORS, "magnitude and norm", "variance"):
            yield Key("variance", layer, head, name), row[name]
        yield Key("variance", layer, head, "left out"), float(row["left_out"])
