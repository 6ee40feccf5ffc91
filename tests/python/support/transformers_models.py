"""Models of Hugging Face transformers, tiny and with random weights, that tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drawing import moved

TEXT = {"vocab_size": 30, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT = TEXT | {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT |= {"intermediate_size": 32, "max_position_embeddings": 32, "type_vocab_size": 2}
GROUPED = BERT | {"num_key_value_heads": 2}
BART = TEXT | {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "decoder_start_token_id": 1}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "max_position_embeddings": 32}
BART |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "forced_eos_token_id": None}
IMAGE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE |= {"intermediate_size": 32, "image_size": 8, "patch_size": 4}
T5 = TEXT | {"d_model": 16, "d_kv": 6, "d_ff": 32, "num_layers": 2, "num_heads": 4}
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
WHISPER = BART | {"num_mel_bins": 4, "max_source_positions": 6, "max_target_positions": 8}

# class, its config, what the blocks are, and what is fed to it
FAMILIES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "bert": ("Bert", BERT, "post", "text"),
    "roberta": ("Roberta", BERT, "post", "text"),
    "xlm-roberta": ("XLMRoberta", BERT, "post", "text"),
    "camembert": ("Camembert", BERT, "post", "text"),
    "electra": ("Electra", BERT | {"embedding_size": 8}, "post", "text"),
    "distilbert": (
        "DistilBert",
        TEXT | {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 32},
        "post",
        "text",
    ),
    "albert": ("Albert", BERT | {"embedding_size": 8}, "post", "text"),
    "modernbert": (
        "ModernBert",
        BERT | {"local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1},
        "pre",
        "text",
    ),
    "gpt2": ("GPT2", TEXT | {"n_embd": 16, "n_layer": 2, "n_head": 4}, "pre", "text"),
    "gpt-neox": ("GPTNeoX", BERT, "parallel", "text"),
    "opt": ("OPT", BERT | {"ffn_dim": 32, "word_embed_proj_dim": 16}, "pre", "text"),
    "opt, post-norm": (
        "OPT",
        BERT | {"ffn_dim": 32, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
        "post",
        "text",
    ),
    "llama": ("Llama", GROUPED, "pre", "text"),
    "mistral": ("Mistral", GROUPED | {"sliding_window": 3}, "pre", "text"),
    "mixtral": ("Mixtral", GROUPED | MOE, "pre", "text"),
    "qwen2": ("Qwen2", GROUPED, "pre", "text"),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 6}, "pre", "text"),
    "gemma": ("Gemma", GROUPED | {"head_dim": 6}, "pre", "text"),
    "vit": ("ViT", IMAGE, "pre", "image"),
    "clip text": ("CLIPText", BERT, "pre", "text"),
    "clip vision": ("CLIPVision", IMAGE, "pre", "image"),
    "siglip vision": ("SiglipVision", IMAGE, "pre", "image"),
    "t5": ("T5", T5, "pre", "pair"),
    "bart": ("Bart", BART, "post", "pair"),
    "marian": ("Marian", BART, "post", "pair"),
    "mbart": ("MBart", BART, "pre", "pair"),
    "pegasus": ("Pegasus", BART, "pre", "pair"),
    "whisper": ("Whisper", WHISPER, "pre", "sound"),
}


def build(family: str, implementation: str = "sdpa", head: str = "Model", **changes: Any) -> Any:
    """A model in float64 whose parameters are far from zero."""
    import transformers  # the tests that need it skip where it is missing

    name, options, _, _ = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**options | changes)
    config._attn_implementation = implementation
    config._experts_implementation = "eager"  # the other one knows no float64
    return moved(getattr(transformers, f"{name}{head}")(config).double().eval(), 0.2)


def inputs_of(family: str) -> dict[str, Tensor]:
    """A batch of two with padding, where the model has such."""
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 0, 0]])
    text = {"input_ids": tokens, "attention_mask": (tokens != 0).long()}
    target = torch.tensor([[1, 4, 3, 5], [1, 7, 9, 0]])
    kind = FAMILIES[family][3]
    if kind == "image":
        return {"pixel_values": torch.randn(2, 3, 8, 8)}
    if kind == "sound":
        return {"input_features": torch.randn(2, 4, 12), "decoder_input_ids": target}
    if kind == "pair":
        mask = (target != 0).long()
        return text | {"decoder_input_ids": target, "decoder_attention_mask": mask}
    return text


# --- With implicit-kernel attention

IMPLICIT_TOLERANCE = 1e-11  # all of it in float64
FREQUENCIES = 5
GENERATORS = {
    "gpt2": "LMHeadModel",
    "llama": "ForCausalLM",
    "mistral": "ForCausalLM",
    "t5": "ForConditionalGeneration",
    "bart": "ForConditionalGeneration",
}


def keyword_of_cache() -> str:
    """The argument of generate and forward that takes a cache; transformers renamed it in 5.24."""
    from transformers.utils import versions

    try:
        versions.require_version("transformers>=5.24")
    except ImportError:
        return "past_key_values"
    return "cache"


def convert(model: Any, **options: Any) -> Any:
    """The model with kernels in it, of frequencies so large that they are far from flat."""
    import ikattn

    ikattn.convert(model, **{"num_frequencies": FREQUENCIES, "seed": 1, **options})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".spectral." in name:
                parameter.mul_(0.5)
    return model
