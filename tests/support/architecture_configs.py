"""Configurations of tiny models: the sizes that most types share, and further settings of single types.

There are two sizes: one in which every mistake of a few numbers shows, and one that is wide enough for the kernels.
"""

from __future__ import annotations

from typing import Any

WIDTH, FFN, LAYERS, HEADS, HEAD_DIM, POSITIONS, WINDOW = 32, 64, 3, 4, 8, 256, 16
ORIGINAL = 32  # positions before rotations are stretched

# fields of configurations
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "emb_dim", "word_embed_proj_dim")
FFNS = ("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "dff")
HEAD_COUNTS = ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads")

# by their names in configurations; a type gets the fields it has
SIZES: dict[str, Any] = {
    **dict.fromkeys(WIDTHS, WIDTH),
    **dict.fromkeys(FFNS, FFN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys((*HEAD_COUNTS, "num_heads"), HEADS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), POSITIONS),
    "vocab_size": 97,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "rotary_dim": 4,
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), WINDOW),
    "no_rope_layer_interval": 2,
    "encoder_layers": LAYERS,  # also the length of the cache of a decoder that belongs to an encoder
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size"), 24),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "index_topk"), 8),
    "index_n_heads": 16,  # with fewer, many scores are exactly 0, and ties among them depend on the shape
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 4),
    **dict.fromkeys(("use_mamba_kernels", "tie_word_embeddings"), False),
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# the same for the kernels, which take heads of 64 numbers
WIDE: dict[str, Any] = {
    **dict.fromkeys((*WIDTHS, "hidden_size_global", "lru_width"), 128),
    **dict.fromkeys((*FFNS, "intermediate_size_mlp", "dense_intermediate_size", "feed_forward_size", "d_inner"), 256),
    **dict.fromkeys((*HEAD_COUNTS, "num_heads", "swa_num_attention_heads", "num_decoder_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "kv_n_heads"), 1),
    **dict.fromkeys(("head_dim", "swa_head_dim", "dim_head", "attention_head_size", "d_head"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size"), 96),
    "global_head_dim": 128,
    "rotary_dim": 32,
}


QWEN = {
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [6, 5, 5],
    },
}
LATENT = {
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 64),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 32),
}
# what some types need further in the wide size: half of a head rotated, latents and other parts for the kernels
ONLY_WIDE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "axk1", "sarvam_mla"), LATENT),
    "longcat_flash": LATENT | {"qk_head_dim": 64},
    **{key: {"swa_head_dim": 16} for key in ("dots3_note", "dots3_note_text")},
    **{key: {"indexer_head_dim": 64} for key in ("qwen4_exp", "qwen4_exp_text")},
    "diffllama": {"num_attention_heads": 4, "num_key_value_heads": 2},
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), QWEN),
    "qwen3_next": dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32)
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    **{key: {"hidden_size_per_layer_input": 32} for key in ("gemma4", "gemma4_text")},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 32},
    "mamba2": {"num_heads": 4},
}


def widened(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a type in the wide size. Key heads that are as many as query heads stay so."""
    wide = dict[str, Any]()
    for name, value in settings.items():
        if isinstance(value, dict):
            wide[name] = widened(value)
        elif name in ("short_factor", "long_factor"):
            wide[name] = [factor for factor in value for _ in range(WIDE["head_dim"] // HEAD_DIM)]
        elif name in WIDE and not isinstance(value, list):
            wide[name] = WIDE[HEAD_COUNTS[0]] if value == HEADS else WIDE[name]
        else:
            wide[name] = [WIDE[name]] * len(value) if name in WIDE else value
    return wide


# latent attention: as many key heads as query heads
MLA: dict[str, Any] = {"num_key_value_heads": HEADS}
INDEXED = MLA | {"index_topk": 8, "mlp_layer_types": ["dense", "sparse", "sparse"]}
GEMMA3N: dict[str, Any] = {
    "num_hidden_layers": 6,
    "intermediate_size": [FFN] * 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
}
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 16,
}
GEMMA4_LAYERS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
DOTS3 = (
    INDEXED
    | {"layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"]}
    | {f"swa_{name}": SIZES[name] for name in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")}
    | {"swa_head_dim": 16, "swa_v_head_dim": 8, "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": HEADS}
)
LLAMA4 = {"layer_types": ["chunked_attention", "full_attention", "chunked_attention"], "intermediate_size_mlp": FFN}
INKLING: dict[str, Any] = {
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": HEAD_DIM,
    "d_rel": 4,
    "rel_extent": 16,
}
ZAMBA = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": HEADS}
KIMI = MLA | {"num_experts_per_token": 2, "num_expert_group": 1}
QWEN4: dict[str, Any] = {
    "hc_lowrank": 4,
    "ple_layer_ids": [1],
    "ple_embed_dim": WIDTH,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_DIM,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
# parts of a model that cuts bytes into patches and predicts the bytes of the next patch
PART = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": FFN}

LONG_ROPE: dict[str, Any] = {
    "max_position_embeddings": POSITIONS,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 4.0, 6.0, 9.0],
        "partial_rotary_factor": 1.0,
    },
}
PHI3 = LONG_ROPE | {"original_max_position_embeddings": ORIGINAL}
PHIMOE = {"rope_parameters": LONG_ROPE["rope_parameters"] | {"short_mscale": 1.2, "long_mscale": 1.4}}
# factors that are 1 by default
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.6, "attention_multiplier": 0.25}

CONFIGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared"), GRANITE),
    "hyperclovax": GRANITE,
    "gemma3_text": {"final_logit_softcapping": 5.0},
    "phi3": PHI3,
    "phimoe": PHIMOE,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu", "axk1", "sarvam_mla"), MLA),
    **dict.fromkeys(("deepseek_v32", "axk2"), INDEXED),
    "glm_moe_dsa": INDEXED | {"indexer_types": ["full", "shared", "full"]},
    "hy_v4": {"indexer_types": ["full", "shared", "full"]} | INDEXED,
    **dict.fromkeys(("dots3_note", "dots3_note_text"), DOTS3),
    "longcat_flash": MLA | {"num_layers": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 32},
    "deepseek_v4": {
        "num_hidden_layers": 4,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "num_key_value_heads": 1,
        "head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "hc_mult": 2,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_topk": 2,
    },
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "dense_intermediate_size": FFN,
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": WIDTH},
    },
    "bailing_hybrid": KIMI | {"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    "kimi_linear": KIMI | {"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": GRANITE | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "n_groups": 1,
        "moe_shared_expert_intermediate_size": 32,
    },
    "zamba": ZAMBA,
    "zamba2": ZAMBA | {"adapter_rank": 4},
    "recurrent_gemma": {"lru_width": WIDTH, "attention_window_size": WINDOW},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "inkling_text": INKLING,
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), INKLING | {"unpadded_vocab_size": 97}),
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), QWEN4),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), GEMMA3N),
    **dict.fromkeys(("gemma4", "gemma4_text"), GEMMA4 | GEMMA4_LAYERS),
    **dict.fromkeys(("gemma4_unified", "gemma4_unified_text"), GEMMA4),
    **dict.fromkeys(("llama4", "llama4_text"), LLAMA4),
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "blt": {
        "encoder_config": PART | {"hidden_size_global": WIDTH, "vocab_size": 97},
        "decoder_config": PART | {"hidden_size_global": WIDTH, "vocab_size": 97},
        "global_config": PART,
        "patcher_config": PART | {"vocab_size": 97},
        "encoder_hash_byte_group_size": [2, 3],
        "encoder_hash_byte_group_vocab": 64,
    },
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "cpmant": {"dim_head": HEAD_DIM, "dim_ff": FFN},
    "mllama": {"cross_attention_layers": [1]},
    "git": {
        "vision_config": {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
    },
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        "audio_config": {"hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2},
    },
    "reformer": {
        "attention_head_size": HEAD_DIM,
        "attn_layers": ["local", "lsh", "local"],
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [16, 16],
        "feed_forward_size": FFN,
        "num_buckets": 4,
        "hash_seed": 0,
        "local_attn_chunk_length": 64,
        "lsh_attn_chunk_length": 64,
    },
    "roc_bert": {
        "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": 97,
        "shape_embed_dim": 16,
        "shape_vocab_size": 97,
    },
    "prophetnet": {
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": HEADS,
        "num_decoder_attention_heads": HEADS,
    },
    "xlm": {"causal": True},
    "xlnet": {"d_inner": FFN, "d_head": HEAD_DIM},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_blocks": 2, "num_hidden_layers": 2, "chunk_size": 8},
    "xmod": {"default_language": "en_XX"},
}

SCALES: dict[str, float] = {"xlnet": 8.0}  # of the initial weights, where the usual scale makes texts of one token

NOT_CAUSAL: dict[str, str] = {
    "gemma4_assistant": "it drafts from the hidden states and the cache of a Gemma 4 target",
    "gemma4_unified_assistant": "it drafts from the hidden states and the cache of a Gemma 4 target",
    "musicgen": "it generates audio codes, several at a time, not text",
    "musicgen_melody": "it generates audio codes, several at a time, not text",
}
