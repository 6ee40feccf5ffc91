"""Tiny models of transformers with a tokenizer, saved as the command line reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WORDS = [
    "the", "animal", "did", "not", "cross", "street", "because", "it", "was", "too", "tired", "she",
    "poured", "water", ".", "ein", "Tier"
]  # fmt: skip
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 32, "max_position_embeddings": 16}
BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "decoder_start_token_id": 2}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "encoder_ffn_dim": 32}
BART |= {"decoder_ffn_dim": 32, "max_position_embeddings": 32}


def save_model(folder: Path, family: str, **options: Any) -> Path:
    """A tiny model with random weights and a tokenizer of a few words."""
    import tokenizers
    import transformers

    vocabulary = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS]
    places = {word: place for place, word in enumerate(vocabulary)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(places, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    padding = {} if family == "GPT2" else {"pad_token": "[PAD]"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[SEP]", **padding
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(vocabulary), pad_token_id=0, bos_token_id=1, eos_token_id=2, **options
    )
    getattr(transformers, f"{family}Model")(config).save_pretrained(folder)
    return folder
