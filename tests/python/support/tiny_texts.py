"""Tiny models of text in float64, and a tokenizer whose words are w0 to w35."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from drawing import moved


def tiny_tokenizer(padding_side: str = "right") -> Any:
    """Returns a tokenizer of words; 0 to 3 are <pad>, <s>, </s>, <unk>, and wi is i + 4."""
    import tokenizers
    import transformers

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = {word: i for i, word in enumerate(special + [f"w{i}" for i in range(36)])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, padding_side=padding_side, **names
    )


def save_tiny(folder: Path, model: Any, tokenizer: Any = None) -> Path:
    """Saves a model with a tokenizer, as the command line reads them."""
    model.save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder


def tiny_model(kind: str, **options: Any) -> Any:
    """A model of transformers with 40 words, by the name of its class, the same at every call."""
    import transformers

    config_class = getattr(transformers, kind).config_class
    sizes: dict[str, Any] = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1}
    sizes |= {"eos_token_id": 2, "decoder_start_token_id": 1}
    if kind.startswith("GPT2"):
        sizes |= {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 32}
    elif kind.startswith("T5"):
        sizes |= {"d_model": 16, "d_kv": 8, "num_heads": 2, "num_layers": 2, "d_ff": 32}
    else:
        sizes |= {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
        sizes |= {"intermediate_size": 32, "max_position_embeddings": 32}
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config_class(**{**sizes, **options})).double().eval()
    return moved(model, 0.1)
