"""One query after the other: features made in every call, features kept, and softmax attention.

export OMP_WAIT_POLICY=passive
python benchmarks/decoding.py              # the operators, by number of keys
python benchmarks/decoding.py --generate   # a transformers model that generates text
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.nn.functional as F
from timing import interleaved, processor
from torch import Tensor

import ikattn


def compare_operators(threads: int, dtype: torch.dtype, seconds: float) -> None:
    """One query, H = 8, d = 64, values of the same type."""
    print(f"{processor()}, {threads} threads, {dtype}, B = 1, H = 8, L = 1, d = d_v = 64; best, us")
    print("| M | S | kept | operator / kept | softmax / kept | bytes read, GB/s |")
    print("|" + "---|" * 6)
    for frequencies in (16, 32, 64):
        for length in (128, 512, 2048, 8192, 32768):
            torch.manual_seed(0)
            query = torch.randn(1, 8, 1, 64).to(dtype)
            key, value = torch.randn(2, 1, 8, length, 64).to(dtype)
            w1, w2 = (0.02 * torch.randn(2, 8, 64, frequencies)).to(dtype)
            features = ikattn.KeyFeatures(w1, w2)
            features.append(key)

            def kept(features: Any = features, q: Tensor = query, v: Tensor = value) -> Tensor:
                return features.attend(q, v)  # type: ignore[no-any-return]

            def operator(
                q: Tensor = query, k: Tensor = key, v: Tensor = value, w: Any = (w1, w2)
            ) -> Tensor:
                return ikattn.implicit_kernel_attention(q, k, v, *w)

            def softmax(q: Tensor = query, k: Tensor = key, v: Tensor = value) -> Tensor:
                return F.scaled_dot_product_attention(q, k, v)

            ways = {"kept": kept, "operator": operator, "softmax": softmax}
            best = {name: min(x) for name, x in interleaved(ways, seconds).items()}
            read = 8 * length * (4 * 2 * frequencies + value.element_size() * 64)
            print(
                f"| {frequencies} | {length} | {1e6 * best['kept']:.0f} "
                f"| {best['operator'] / best['kept']:.1f} "
                f"| {best['softmax'] / best['kept']:.2f} | {1e-9 * read / best['kept']:.0f} |",
                flush=True,
            )


def compare_generation(threads: int) -> None:
    """A small Llama with grouped heads."""
    import transformers

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000}
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=8192)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ikattn.convert(model, num_frequencies=32)
    print(f"{processor()}, {threads} threads, Llama of 4 layers, E = 512, H = 8, G = 4, M = 32")
    print("| prompt | softmax, ms a token | features kept | made in every call |")
    print("|" + "---|" * 4)
    for length in (128, 1024, 4096):
        prompt = torch.randint(3, 1000, (1, length))
        found: dict[str, list[float]] = {"softmax": [], "kept": [], "made": []}
        for _ in range(3):
            for name in found:
                model.set_attn_implementation("sdpa" if name == "softmax" else "ikattn_implicit")
                found[name].append(seconds_per_token(model, prompt, name == "kept"))
        print(f"| {length} | " + " | ".join(f"{1e3 * min(x):.2f}" for x in found.values()) + " |")


def seconds_per_token(model: Any, prompt: Tensor, kept: bool) -> float:
    """Times tokens after the first of them, which makes the features of the prompt."""
    import transformers

    plain = transformers.DynamicCache(config=model.config)
    cache = ikattn.decoding_cache(model) if kept else plain
    with torch.no_grad():
        for token in (prompt, prompt[:, :1]):
            model(input_ids=token, past_key_values=cache)
        start = time.perf_counter()
        for _ in range(20):
            model(input_ids=prompt[:, :1], past_key_values=cache)
    return (time.perf_counter() - start) / 20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each size")
    parser.add_argument("--generate", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.generate:
        compare_generation(options.threads)
    else:
        compare_operators(options.threads, getattr(torch, options.dtype), options.seconds)


if __name__ == "__main__":
    main()
