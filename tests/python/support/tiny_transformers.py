"""Any model of Hugging Face transformers, tiny and with random weights, by the name of its type."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from drawing import moved

# Sizes by the names of configs. Names that a config does not know are left out.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("ffn_dim", "d_ff", "hidden_dim"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "v_head_dim"), 4),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 8),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 16),
    **dict.fromkeys(("embedding_size", "encoder_hidden_size", "image_size"), 16),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **{"vocab_size": 40, "num_key_value_heads": 2, "type_vocab_size": 2, "num_mel_bins": 4},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **{"patch_size": 8, "sliding_window": 4, "mlp_ratio": 2},
}
# Some want heads of their own size, or as many for keys as for queries.
LEFT_OUT = ((), ("head_dim",), ("num_key_value_heads",), ("head_dim", "num_key_value_heads"))
TEXT = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 0, 0]])


def build_tiny(kind: str, **chosen: Any) -> Any:
    """A model of the type in float64, whose parameters are far from zero, with sizes of its own."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    config_class = getattr(transformers, CONFIG_MAPPING_NAMES[kind])
    names = MODEL_MAPPING_NAMES[kind]
    model_class = getattr(transformers, names if isinstance(names, str) else names[0])
    known = set(inspect.signature(config_class.__init__).parameters)
    for base in config_class.__mro__:
        known |= set(getattr(base, "__annotations__", {}))
    error: Exception | None = None
    for left_out in LEFT_OUT:
        sizes = {
            name: size for name, size in SIZES.items() if name in known and name not in left_out
        }
        sizes |= chosen
        try:
            torch.manual_seed(0)
            model = model_class(config_class(**sizes)).double().eval()
        except Exception as failed:
            error = failed
            continue
        return moved(model, 0.1)
    raise error


def tiny_inputs(model: Any) -> dict[str, Tensor]:
    """A batch of two, with padding where the model reads text."""
    config, kind = model.config, model.main_input_name
    if kind == "pixel_values":
        size = getattr(config, "image_size", 16)
        size = size if isinstance(size, int) else 16
        shape = (2, getattr(config, "num_channels", 3), size, size)
        inputs = {kind: torch.randn(shape, dtype=torch.float64)}
    elif kind == "input_values":
        inputs = {kind: torch.randn(2, 2000, dtype=torch.float64)}
    elif kind == "input_features":
        shape = (2, getattr(config, "num_mel_bins", 4), 32)
        inputs = {kind: torch.randn(shape, dtype=torch.float64)}
    else:
        inputs = {"input_ids": TEXT, "attention_mask": (TEXT != 0).long()}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor([[1, 4, 3], [1, 7, 9]])
    return inputs
