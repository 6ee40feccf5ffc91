"""Makes this folder's arrays from the whole set: ``python tests/golden/trim.py WHOLE_SET``.

It copies, bit for bit, the arrays that tests read, of cases with small shapes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
CALL = r"query|key|value|g|w[12]|fc_\w+|H|p|eps|\w+_norm_divisor|(official|paper)_out"
TEXT = r"input_ids|attention_mask"
MIKAN = (
    r"query|key|value|g|H|M|d_head|p|eps|w[12]|KLD|draw_seed|prior_var|\w+_lambda|param\..*"
    r"|\w+_norm_divisor|\w+_out|(official|kld)_d(query|key)|(official|kld)_grad\.(attsharedw|fc_.\.bias).*"
)
# The files of each folder, and the names of the arrays that are kept.
KEPT = [
    ("ika_official", r"d04.*", rf"{CALL}|\w+_attn|official_d\w+"),
    ("ika_official", r"d07.*|d11.*", rf"{CALL}|\w+_attn|official_d(query|key)"),
    ("ika_official", r"d10.*", rf"{CALL}|official_(attn|norm|dquery|dkey)|scores|phi_."),
    ("ika_official", r"m00.*", rf"{CALL}|\w+_attn|(official|paper)_d\w+"),
    ("ika_official", r"x00.*", rf"{CALL}|official_d(query|key)"),
    ("ika_official", r"x01.*", rf"{CALL}|\w+_attn|official_d\w+"),
    ("ika_mikan_official", r"mk01.*", MIKAN),
    ("bert_inputs", r"tiny_model", r".*"),
    ("bert_inputs", r"tiny_t.|minilm_s0", rf"{TEXT}|attn_headmean"),
    ("kobayashi2020", r"tiny_t.|minilm_s0", r"f_norm|sum_af_norm|af_norm|af_layers"),
    ("kobayashi2020_fairseq", r"c0.*", r".*"),
    ("kobayashi2021", r"tiny_t.|minilm_s0", r"attn\w+"),
    ("globenc", r"tiny_t.|minilm_s0", r"n_enc|n_enc_ratio|globenc_aggregate|rollout_.*"),
    ("alti", r"tiny_t.*|minilm_s0_0", r"input_ids|map_ours|mix_ours"),
    ("decompx", r"tiny_t.|minilm_s0", rf"{TEXT}|(full|nobias)_vector_aggregated"),
]


def load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, **arrays)


def tiny_layer(whole: Path, case: str, layer: int) -> dict[str, np.ndarray]:
    """Returns one layer of the tiny model as a call of the operator, named as op_minilm*.npz."""
    names = ("bert_inputs", "kobayashi2020", "kobayashi2021", "globenc")
    inputs, *maps = (load(whole / name / f"{case}.npz") for name in names)
    state = load(whole / "bert_inputs" / "tiny_model.npz")
    prefix = f"state.encoder.layer.{layer}"
    eps = re.search(r'"layer_norm_eps": ([^,}]+)', str(state["config_json"]))
    assert eps is not None
    found = {
        "x": inputs["hidden_states"][layer],
        "v": inputs["value_layer"][layer],
        "attn": inputs["attn"][layer],
        "W_O": state[f"{prefix}.attention.output.dense.weight"],
        "ln1_weight": state[f"{prefix}.attention.output.LayerNorm.weight"],
        "ln2_weight": state[f"{prefix}.output.LayerNorm.weight"],
        "pre_ln1": inputs["pre_ln1"][layer],
        "pre_ln2": inputs["pre_ln2"][layer],
        "eps": np.float64(eps[1]),
    }
    kept = r"f_norm|af_norm|sum_af_norm|attn_n_ratio|(attnres|attnresln|n)_(n|enc)(_ratio)?"
    for arrays in maps:
        found |= {name: x[layer] for name, x in arrays.items() if re.fullmatch(kept, name)}
    return found


def main(whole: Path) -> None:
    for folder, files, names in KEPT:
        for path in sorted((whole / folder).glob("*.npz")):
            if re.fullmatch(files, path.stem):
                kept = {name: x for name, x in load(path).items() if re.fullmatch(names, name)}
                if "af_layers" in kept and path.stem.startswith("minilm"):
                    kept |= {name: kept[name][[0, -1]] for name in ("af_layers", "af_norm")}
                save(HERE / folder / path.name, kept)
    save(HERE / "bert_inputs" / "op_tiny_t0_layer1.npz", tiny_layer(whole, "tiny_t0", 1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
