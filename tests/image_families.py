"""Further families of `tests.image_checkpoints`, in the same form."""

from typing import Any

_MEAN = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
_PINPOINTS = {"image_grid_pinpoints": [[56, 56], [56, 112], [112, 56]]}
_GLM_SIZES = {"size": {"shortest_edge": 56 * 28, "longest_edge": 2 * 112 * 112}, **_MEAN}
_OVIS_INDICATORS = {
    "start_token": "<IMG_START>", "grid_token": "<IMG_GRID>", "column_token": "<IMG_COL>", "row_token": "<IMG_ROW>",
    "end_token": "<IMG_END>",
}  # fmt: skip

MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "llava_next": {
        "tokens": {"image_token": "<image>"},
        "config": {
            "text_config": {"model_type": "mistral"},
            "vision_config": {
                "model_type": "clip_vision_model", **_VISION, "image_size": 56, "patch_size": 14, "projection_dim": 32,
            },
            **_PINPOINTS,
        },
        "image": {
            "image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 56}, "crop_size": 56,
            **_PINPOINTS, **_MEAN,
        },
        "processor": {
            "processor_class": "LlavaNextProcessor", "patch_size": 14, "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        "placeholder": "<image>",
    },
    "paligemma": {
        "tokens": {"image_token": "<image>"},
        "bos_token": "<|im_start|>",
        "config": {
            "text_config": {"model_type": "gemma"},
            "vision_config": {"model_type": "siglip_vision_model", **_VISION, "image_size": 32, "patch_size": 8},
            "projection_dim": 64, "hidden_size": 64,
        },
        "image": {
            "image_processor_type": "SiglipImageProcessor", "size": {"height": 32, "width": 32},
            "image_seq_length": 16, **_MEAN,
        },
        "processor": {"processor_class": "PaliGemmaProcessor"},
        "placeholder": "<image>",
    },
    "aria": {
        "tokens": {"image_token": "<|img|>"},
        "config": {
            "text_config": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
            "vision_config": {"model_type": "idefics3_vision", **_VISION, "image_size": 980, "patch_size": 70},
            "projector_patch_to_query_dict": {"196": 6},
        },
        "image": {
            "image_processor_type": "AriaImageProcessor", "max_image_size": 980, "min_image_size": 336, **_MEAN,
        },
        "processor": {"processor_class": "AriaProcessor", "size_conversion": {"980": 6}},
        "placeholder": "<|img|>",
        "gain": 1.0,
    },
    "ovis2": {
        "tokens": {"image_token": "<IMG_ATOM>", "image_mark": "<image>", **_OVIS_INDICATORS},
        "token_lists": {"visual_indicator_token_ids": list(_OVIS_INDICATORS.values())},
        "config": {
            "text_config": {"model_type": "qwen2"},
            "vision_config": {
                **_VISION, "image_size": 32, "patch_size": 8, "hidden_stride": 2, "vocab_size": 100,
            },
            "hidden_size": 64,
        },
        "image": {
            "image_processor_type": "Ovis2ImageProcessor", "size": {"height": 32, "width": 32},
            "crop_to_patches": True, "max_patches": 4, **_MEAN,
        },
        "processor": {"processor_class": "Ovis2Processor", "image_seq_length": 4},
        "placeholder": "<image>",
        "gain": 1.0,
    },
    "glm4v": {
        "tokens": {
            "image_token": "<|image|>", "image_start_token": "<|begin_of_image|>",
            "image_end_token": "<|end_of_image|>", "video_token": "<|video|>",
            "video_start_token": "<|begin_of_video|>", "video_end_token": "<|end_of_video|>",
        },
        "config": {
            "text_config": {
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            },
            "vision_config": {
                "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48,
                "image_size": 56,
            },
        },
        "image": {"image_processor_type": "Glm4vImageProcessor", **_GLM_SIZES},
        "processor": {"processor_class": "Glm4vProcessor"},
        "placeholder": "<|begin_of_image|><|image|><|end_of_image|>",
        "video": {"video_processor_type": "Glm4vVideoProcessor", **_GLM_SIZES},
    },
}  # fmt: skip
"""By name, as `tests.image_checkpoints.FAMILIES`; `token_lists` are fields of config.json with ids of tokens, and
`gain` is how much weights amplify. At 1.4, as elsewhere, Ovis 2 and Aria differ by up to 2.1e-4."""
