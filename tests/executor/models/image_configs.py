"""Configs of few small layers of any model of Transformers that reads images beside text."""

import re
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.executor.models import tiny_models
from tests.executor.models.tiny_models import VOCAB_SIZE

_TOWER_SIZES: dict[tuple[str, ...], Any] = {
    ("hidden_size", "embed_dim", "d_model", "width", "dim", "encoder_hidden_size", "mm_hidden_size"): 32,
    ("num_hidden_layers", "depth", "num_layers", "layers", "encoder_layers", "num_local_layers"): 2,
    ("num_attention_heads", "num_heads", "attention_heads", "num_key_value_heads", "num_head_channels"): 2,
    ("head_dim",): 16,
    ("intermediate_size", "mlp_dim"): 48,
    ("out_hidden_size", "text_hidden_size", "projection_dim", "output_dim", "projector_hidden_size"): 64,
    ("num_position_embeddings", "max_position_embeddings"): 64,
    ("pos_emb_height", "pos_emb_width"): 8,
    ("fullatt_block_indexes", "global_attn_indexes"): [1],
    ("deepstack_visual_indexes",): [0, 1],
    ("vocab_size",): VOCAB_SIZE,
}  # fmt: skip
_OUTER_SIZES = {
    "hidden_size": 64, "vocab_size": VOCAB_SIZE, "projector_hidden_size": 64, "projection_dim": 64,
    "mm_hidden_size": 32, "vision_feature_layer": -1, "mm_tokens_per_image": 4, "insert_layer_id": 0,
}  # fmt: skip
_TEXTS = ("text_config", "language_config", "llm_config", "decoder")

_TOKENS = re.compile(r"((image|img|vision|video|audio|speech).*|boi|eoi|boa|eoa)_(token|patch)_(id|index)")
FIRST_TOKEN = 300
"""The tokens for images and around them; the texts of a prompt have none of them."""


def _rope(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}


_EARS = {"encoder_attention_heads": 2, "encoder_layers": 2, "encoder_ffn_dim": 48}

SPECIAL: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {"16": 4}},
    "gemma4": {
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64,
        },
        "text_config": {"use_bidirectional_attention": "vision"},
    },
    "llama4": {
        "vision_config": {
            "intermediate_size": 128, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64,
        },
    },
    "qwen2_vl": {"vision_config": {"hidden_size": 64}, "text_config": {"rope_parameters": _rope(2, 3, 3)}},
    "mistral_large4": {"text_config": {"num_key_value_heads": 4}},
    **{
        name: {"text_config": {"rope_parameters": _rope(2, 3, 3)}}
        for name in ("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_vl")
    },
    "kimi_k25": {"projection_hidden_size": 32},
    "glm4v_moe": {"text_config": {"rope_parameters": {**_rope(2, 1, 1), "partial_rotary_factor": 0.5}}},
    "glm5_next": {"text_config": {"num_key_value_heads": 4, "index_topk": 32, "qk_rope_head_dim": 0}},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [48, 48], "rope_parameters": _rope(3, 3, 2)}},
    "ovis2": {"visual_indicator_token_ids": [310, 311, 312, 313, 314]},
    "phi4_multimodal": {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 0,
        "eos_token_id": 2, "original_max_position_embeddings": 256, "rope_parameters": {"rope_type": "default"},
        "vision_config": {"crop_size": 56, "feature_layer": -2},
        "audio_config": {
            "num_blocks": 2, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "input_size": 16,
            "nemo_conv_channels": 16,
        },
    },
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_experts_per_tok": 2},
        "vision_config": {"sam_config": {"downsample_channels": [32, 32]}},
    },
    "unlimited_ocr": {
        "text_config": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
        "vision_config": {"sam_config": {"downsample_channels": [32, 32]}},
    },
    "nemotron_h_omni": {"vision_hidden_size": 32, "image_token_id": 300},
    "dots3_note": {
        "vision_config": {"mlp_layer_types": ["dense", "dense"], "adapter_in_dim": 32, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 32},
    },
    "fuyu": {"patch_size": 14},
    "fast_vlm": {"vision_config": {"hidden_size": 3072}},
    "gemma3n": {"vision_config": {"hidden_size": 2048}},
    "granite4_vision": {
        "vision_config": {"hidden_size": 64, "num_hidden_layers": 3}, "deepstack_layer_map": [[0, 1], [1, 2]],
        "downsample_rate": "1/2", "spatial_target_layers": [0, 1, 2, 3],
    },
    "granite_docling": {"vision_config": {"deepstack_visual_indexes": [0, 1], "out_hidden_size": 64}},
    "hunyuan_vl": {"text_config": {"head_dim": 16, "rope_parameters": _rope(2, 2, 2, 2)}},
    "molmo2": {
        "vision_config": {"image_size": [56, 56], "num_position_embeddings": 16, "num_key_value_heads": 2},
        "adapter_config": {
            "vision_feature_layer": [1, 0], "num_key_value_heads": 2, "num_attention_heads": 2, "head_dim": 16,
        },
    },
    "muse_glimmer": {"out_hidden_size": 128},
    "muse_spark": {"out_hidden_size": 128, "audio_config": {"num_hidden_layers": 4}},
    "qwen2_5_omni_thinker": {
        "audio_config": _EARS, "text_config": {"rope_parameters": _rope(2, 3, 3)}, "vision_start_token_id": 310,
        "vision_end_token_id": 311,
    },
    "qwen3_omni_moe_thinker": {"audio_config": _EARS, "vision_start_token_id": 310, "vision_end_token_id": 311},
    "gemma4_unified": {
        "vision_config": {
            "model_type": "gemma4_unified_vision", "mm_embed_dim": 64, "mm_posemb_size": 64, "output_proj_dims": 64,
        },
        "text_config": {"use_bidirectional_attention": "vision"},
    },
    "chameleon": {
        "vq_config": {
            "embed_dim": 8, "latent_channels": 8, "resolution": 64, "base_channels": 32, "channel_multiplier": [1] * 5,
            "num_res_blocks": 1, "num_embeddings": 10,
        },
        "vocabulary_map": {"<image>": 300, **{f"IMGIMG{chr(65 + index)}Z": 310 + index for index in range(10)}},
    },
    "emu3": {
        "vq_config": {
            "codebook_size": 10, "base_channels": 32, "channel_multiplier": [1] * 4, "num_res_blocks": 1,
            "hidden_size": 32, "attn_resolutions": [],
        },
        "vocabulary_map": {
            "<image>": 300, "<|extra_200|>": 301,
            **{f"<|visual token {index:06d}|>": 310 + index for index in range(10)},
        },
    },
    "step3p7": {"text_config": {"sliding_window": 24}},
}  # fmt: skip
"""By model type: what does not follow from the sizes above, by the names of inner configs."""


def tiny_config(model_type: str) -> PretrainedConfig:
    """A config of few small layers."""
    kind = CONFIG_MAPPING[model_type]
    values = _merged(_shrunk(kind(), ""), SPECIAL.get(model_type, {}))
    size = (values.get("vision_config") or {}).get("image_size")
    if values.get("image_grid_pinpoints"):
        values["image_grid_pinpoints"] = [[size, 2 * size], [2 * size, size]]
    _name_tokens(values, {"image_token_id": FIRST_TOKEN})
    return kind(**values)


def _name_tokens(values: dict[str, Any], known: dict[str, int]) -> None:
    """Gives the tokens for images, and around them, ids within the vocabulary: in all configs the same."""
    for name, value in values.items():
        if isinstance(value, dict) and name.endswith("_config"):
            _name_tokens(value, known)
        elif _TOKENS.fullmatch(name) and isinstance(value, int | None):
            same = name.replace("_index", "_id")
            values[name] = known.setdefault(same, FIRST_TOKEN + len(known))


def _shrunk(config: PretrainedConfig, name: str) -> dict[str, Any]:
    """The fields of a config with other sizes, and of those in it."""
    if name in _TEXTS and config.model_type in tiny_models.MODEL_TYPES:
        inner = tiny_models.tiny_config(config.model_type).to_dict()
    else:
        inner = {field: value for field, value in config.to_dict().items() if not _is_by_layer(config, value)}
        for left in ("transformers_version", "per_layer_config"):
            inner.pop(left, None)
        sizes = tiny_models.SIZES if name in _TEXTS else _TOWER_SIZES
        has_parts = any(isinstance(getattr(config, field, None), PretrainedConfig) for field in config.sub_configs)
        if not name and not has_parts:
            sizes = tiny_models.SIZES
        if name or not has_parts:
            inner |= {field: size for fields, size in sizes.items() for field in fields if _is_given(inner, field)}
        else:
            inner |= {field: size for field, size in _OUTER_SIZES.items() if _is_given(inner, field)}
        if _is_given(inner, "image_size") and isinstance(patch := inner.get("patch_size"), int):
            size = 4 * patch
            inner["image_size"] = [size, size] if isinstance(inner["image_size"], list | tuple) else size
    for field in config.sub_configs:
        part = getattr(config, field, None)
        if isinstance(part, PretrainedConfig):
            inner[field] = {"model_type": part.model_type, **_shrunk(part, field)}
    _fit_sections(inner)
    return inner


def _is_by_layer(config: PretrainedConfig, value: Any) -> bool:
    """Returns True for a list with a value for each layer."""
    count = getattr(config, "num_hidden_layers", getattr(config, "depth", None))
    return isinstance(value, list | tuple) and len(value) == count and count > 3


def _is_given(values: Mapping[str, Any], name: str) -> bool:
    return values.get(name) is not None


def _fit_sections(values: dict[str, Any]) -> None:
    """Makes the sections of rotations in time, height and width as small as the heads are."""
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    for each in (rope, *rope.values()):
        if isinstance(each, dict) and each.get("mrope_section"):
            share = each.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1
            size = int((values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]) * share) // 2
            most = sum(each["mrope_section"])
            rest = [max(1, part * size // most) for part in each["mrope_section"][1:]]
            each["mrope_section"] = [size - sum(rest), *rest]


def _merged(values: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    inner = {name: _merged(values[name], own) for name, own in others.items() if isinstance(values.get(name), dict)}
    return {**values, **others, **inner}
