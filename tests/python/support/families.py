"""Families of transformers that no table knows, by the blocks that they are found to have."""

from __future__ import annotations

# Blocks that normalise before the attention, or whose residual is the attention's input.
PRE = (
    "aimv2_vision_model", "apertus", "apertus1p5_text", "arcee", "beit", "bigbird_pegasus",
    "biogpt", "blenderbot", "chinese_clip_vision_model", "cohere", "cohere2", "cosmos3_edge_text",
    "ctrl", "cwm", "data2vec-vision", "deit", "dinov2", "dinov2_with_registers", "dinov3_vit",
    "dpt", "embedding_gemma2_text", "ernie4_5", "esm", "esmc", "eurobert", "exaone", "exaone4",
    "falcon", "flint", "gemma2", "gemma3_text", "gemma4_unified_text", "glm", "glm4",
    "glmasr_encoder", "gpt-sw3", "gpt_bigcode", "granite", "granite_docling_text", "granite_swa",
    "helium", "hunyuan_v1_dense", "hyperclovax", "ijepa", "internlm3", "internvl_vision",
    "iquestcoder", "jais2", "jetmoe", "lfm2", "llama4_text", "longt5", "m2m_100", "ministral",
    "ministral3", "mlcd", "mlcd_vision_model", "molmo2_text", "moonshine", "moshi",
    "moss_transcribe_diarize_audio", "mt5", "nanochat", "nemotron", "nllb-moe", "olmo", "olmo2",
    "olmo3", "olmo_hybrid", "openai_privacy_filter", "pegasus_x", "persimmon", "phi", "phi3",
    "pixio", "pixtral", "qianfan_ocr_vision", "qwen2_audio_encoder", "qwen3_vl_text",
    "roberta-prelayernorm", "sapiens2", "seed_oss", "smollm3", "stablelm", "starcoder2",
    "switch_transformers", "tipsv2_text_model", "tipsv2_vision_model", "ultrabert", "umt5",
    "vaultgemma", "vit_msn", "voxtral_encoder", "voxtral_realtime_encoder", "wav2vec2-conformer",
    "xlm-roberta-xl"
)  # fmt: skip
POST = (
    "bert-generation", "blenderbot-small", "data2vec-audio", "data2vec-text", "dpr", "ernie", "gte",
    "hubert", "jina_embeddings_v3", "layoutlm", "markuplm", "modernbert-decoder", "nomic_bert",
    "plbart", "roc_bert", "sew", "splinter", "unispeech", "unispeech-sat", "wav2vec2"
)  # fmt: skip
# The block of these is not found: windows, branches that scale each other.
ALONE = ("doge", "falcon_h1", "mobilebert", "sam3_vit_model")
# These write out their attention: a softmax, and a product with values.
WRITTEN_OUT = {
    **dict.fromkeys(("bloom", "cpmant", "mpt"), "pre"),
    **dict.fromkeys(("big_bird", "deberta", "deberta-v2"), "post"),
    "prophetnet": "none",
}
