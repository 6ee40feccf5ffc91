"""Recordings that keep sums of columns beside recordings of whole maps, in fresh processes.

python benchmarks/reduced_maps.py                                    # a BERT, 2048 tokens
python benchmarks/reduced_maps.py --length 4096 --layers 3
python benchmarks/reduced_maps.py --size 2048 --heads 32 --layers 1 --rows 256  # many blocks

Time is that of one thread on the processor; memory is the peak above a forward pass.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

WAYS = {
    "whole maps": {},
    "columns": {"reduce": "columns"},
    "columns, vectors in D dimensions": {"reduce": "columns"},
}


def peak() -> float:
    """In MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(way: str, length: int, size: int, heads: int, layers: int, rows: int, maps: str) -> str:
    import torch
    import transformers

    import ikattn
    from ikattn.recorder.runs import rows as made_rows

    torch.set_num_threads(1)
    if rows:
        made_rows.MOST_HELD = rows * length
    if way.endswith("dimensions"):
        made_rows.pays = lambda *_: False
    sizes = {"hidden_size": size, "num_attention_heads": heads, "num_hidden_layers": layers}
    config = transformers.BertConfig(
        **sizes, intermediate_size=size, vocab_size=100, max_position_embeddings=length
    )
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    ids = torch.randint(3, 100, (1, length))
    with torch.no_grad():
        model(ids)
        with ikattn.record(model, maps, queries=[0]):
            model(ids[:, :64])
        before, begin = peak(), time.thread_time()
        model(ids)
        forward, begin = time.thread_time() - begin, time.thread_time()
        with ikattn.record(model, maps, **WAYS[way]):
            model(ids)
        recorded = time.thread_time() - begin
    return f"{recorded - forward:8.2f} s {peak() - before:8.0f} MiB   (forward {forward:.2f} s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--size", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=0, help="of a block; 0: as record does")
    parser.add_argument("--maps", default="summed")
    parser.add_argument("--way", choices=WAYS, help="measures this one, in this process")
    options = parser.parse_args()
    if options.way:
        print(measure(**vars(options)))
        return
    for way in WAYS:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        print(f"{way:34}", done.stdout.strip("\n"), flush=True)


if __name__ == "__main__":
    main()
