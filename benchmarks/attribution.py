"""Attribution against the model's forward pass: time and memory, random weights.

    python benchmarks/attribution.py [--model bert|qwen] [--length 512] [--span 64] [--threads 1]

BERT-base to a class's logit, or a decoder of Qwen2.5-0.5B's shape to a span of text.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers

import ikattn


def build(kind: str, length: int) -> Any:
    torch.manual_seed(0)
    if kind == "bert":
        config: Any = transformers.BertConfig(max_position_embeddings=max(512, length))
        return transformers.BertForSequenceClassification(config).eval()
    config = transformers.Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return transformers.Qwen2ForCausalLM(config).eval()


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@torch.no_grad()
def alti_maps(config: Any, length: int) -> None:
    """ALTI's maps of as many layers of the model's shape, from their weights and values."""
    H, D = config.num_attention_heads, config.hidden_size
    weights = torch.randn(1, H, length, length).softmax(-1)
    value, residual = torch.randn(1, H, length, D // H), torch.randn(1, length, D)
    projection, norm = torch.randn(D, D) / D**0.5, torch.nn.LayerNorm(D)
    total = residual + (weights @ value).transpose(1, 2).flatten(2) @ projection.mT
    stats = ikattn.maps.NormStats.of(norm, total)
    output = norm(total)
    for _ in range(config.num_hidden_layers):
        ikattn.maps.alti(weights, value, projection, output, residual=residual, norm=stats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("bert", "qwen"), default="bert")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--span", type=int, default=64, help="tokens of the answer, of a decoder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    methods = "alti,decompx,alti_logit,rollout:alti"
    parser.add_argument(
        "--methods", default=methods, help="alti: the maps of all layers, once they are recorded"
    )
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = build(given.model, given.length)
    ids = torch.randint(5, 1000, (1, given.length))
    target = slice(-given.span, None) if given.model == "qwen" else 1
    options = {"logits_to_keep": given.span} if given.model == "qwen" else {}

    @torch.no_grad()
    def forward() -> None:
        model(ids, **options)

    forward()
    for method in given.methods.split(","):
        if method == ("alti_logit" if given.model == "bert" else "alti"):
            continue
        call = partial(ikattn.attribute, model, ids, target, method=method)
        if method == "alti":
            call = partial(alti_maps, model.config, given.length)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ratios = []
        for _ in range(given.rounds):
            base = seconds(forward)
            ratios.append(seconds(call) / base)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(
            f"{method}: {sorted(ratios)[len(ratios) // 2]:.2f} of a forward pass of {base:.2f} s, "
            f"peak {after / 2**20:.2f} GiB, {max(0, after - before) / 2**20:.2f} more than before"
        )


if __name__ == "__main__":
    main()
