"""Tiny random checkpoints of models that read images, with their processors' files as on the hub; images and videos."""

import io
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
import transformers
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tests.checkpoints import make_tokenizer
from tests.image_families import MORE_FAMILIES

_MEAN = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_TEXT = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
_QWEN_TOKENS = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}  # fmt: skip
_QWEN_SIZES = {"size": {"shortest_edge": 56 * 28, "longest_edge": 112 * 112}, **_MEAN}
_QWEN_VIDEOS = {"video_processor_type": "Qwen2VLVideoProcessor", **_QWEN_SIZES}
_QWEN3_VIDEOS = {
    "video_processor_type": "Qwen3VLVideoProcessor", "patch_size": 16,
    "size": {"shortest_edge": 64 * 32, "longest_edge": 8 * 128 * 128}, **_MEAN,
}  # fmt: skip
_QWEN_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
_SIGLIP = {**_VISION, "image_size": 32, "patch_size": 8}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

FAMILIES: dict[str, dict[str, Any]] = {
    "llava": {
        "tokens": {"image_token": "<image>"},
        "config": {
            "text_config": {"model_type": "llama"},
            "vision_config": {
                "model_type": "clip_vision_model", **_VISION, "image_size": 56, "patch_size": 14, "projection_dim": 32,
            },
            "vision_feature_layer": -2,
        },
        "image": {
            "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56}, "crop_size": 56, **_MEAN,
        },
        "processor": {
            "processor_class": "LlavaProcessor", "patch_size": 14, "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        "placeholder": "<image>",
    },
    "qwen2_vl": {
        "tokens": _QWEN_TOKENS,
        "config": {
            "text_config": {"rope_parameters": _ROPE},
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        },
        "image": {"image_processor_type": "Qwen2VLImageProcessor", **_QWEN_SIZES},
        "processor": {"processor_class": "Qwen2VLProcessor"},
        "placeholder": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": _QWEN_VIDEOS,
        "video_placeholder": _QWEN_VIDEO,
    },
    "qwen2_5_vl": {
        "tokens": _QWEN_TOKENS,
        "config": {
            "text_config": {"rope_parameters": _ROPE},
            "vision_config": {
                "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48,
                "fullatt_block_indexes": [1], "window_size": 56,
            },
        },
        "image": {"image_processor_type": "Qwen2VLImageProcessor", **_QWEN_SIZES},
        "processor": {"processor_class": "Qwen2_5_VLProcessor"},
        "placeholder": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": _QWEN_VIDEOS,
        "video_placeholder": _QWEN_VIDEO,
    },
    "qwen3_vl": {
        "tokens": _QWEN_TOKENS,
        "config": {
            "text_config": {"rope_parameters": {**_ROPE, "mrope_interleaved": True}},
            "vision_config": {
                "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48,
                "patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
            },
        },
        "image": {
            "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16,
            "size": {"shortest_edge": 64 * 32, "longest_edge": 128 * 128}, **_MEAN,
        },
        "processor": {"processor_class": "Qwen3VLProcessor"},
        "placeholder": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": _QWEN3_VIDEOS,
        "video_placeholder": _QWEN_VIDEO,
    },
    "qwen3_5": {
        "tokens": _QWEN_TOKENS,
        "config": {
            "text_config": {
                "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
                "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
                "rope_parameters": {
                    **_ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5,
                },
            },
            "vision_config": {
                "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48,
                "patch_size": 16, "num_position_embeddings": 16,
            },
        },
        "image": {
            "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16,
            "size": {"shortest_edge": 64 * 32, "longest_edge": 128 * 128}, **_MEAN,
        },
        "processor": {"processor_class": "Qwen3VLProcessor"},
        "placeholder": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": _QWEN3_VIDEOS,
        "video_placeholder": _QWEN_VIDEO,
    },
    "llava_onevision": {
        "tokens": {"image_token": "<image>", "video_token": "<video>"},
        "config": {
            "text_config": {"model_type": "qwen2"},
            "vision_config": {"model_type": "siglip_vision_model", **_SIGLIP},
            "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32]],
        },
        "image": {
            "image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 32, "width": 32},
            "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32]], **_MEAN,
        },
        "processor": {
            "processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 16,
            "vision_feature_select_strategy": "full", "patch_size": 8,
        },
        "placeholder": "<image>",
        "video": {
            "video_processor_type": "LlavaOnevisionVideoProcessor", "size": {"height": 32, "width": 32}, **_MEAN,
        },
        "video_placeholder": "<video>",
    },
    "gemma3": {
        "tokens": {
            "image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
        },
        "config": {
            "text_config": {
                "sliding_window": 24, "query_pre_attn_scalar": 16,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "vision_config": {"model_type": "siglip_vision_model", **_SIGLIP},
            "mm_tokens_per_image": 4,
        },
        "image": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}, **_MEAN},
        "processor": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        "placeholder": "<start_of_image>",
    },
    "idefics3": {
        "tokens": {"image_token": "<image>"},
        "more_tokens": ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>"],
        "config": {
            "text_config": {"model_type": "llama"},
            "vision_config": {**_SIGLIP, "image_size": 32},
            "scale_factor": 2,
        },
        "image": {
            "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32}, "do_image_splitting": True, **_MEAN,
        },
        "processor": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
        "placeholder": "<image>",
    },
    "internvl": {
        "tokens": {
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "config": {
            "text_config": {"model_type": "qwen2"},
            "vision_config": {**_VISION, "image_size": [32, 32], "patch_size": [8, 8]},
        },
        "image": {
            "image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 32, "width": 32},
            "crop_to_patches": True, "min_patches": 1, "max_patches": 4, **_MEAN,
        },
        "processor": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        "image_token": "context_image_token",
        "placeholder": "<IMG_CONTEXT>",
    },
    "mistral3": {
        "tokens": {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        "config": {
            "text_config": {"model_type": "mistral"},
            "vision_config": {"model_type": "pixtral", **_VISION, "image_size": 64, "patch_size": 8, "head_dim": 16},
            "spatial_merge_size": 2,
        },
        "image": {
            "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64}, "patch_size": 16, **_MEAN,
        },
        "processor": {"processor_class": "PixtralProcessor", "patch_size": 8, "spatial_merge_size": 2},
        "placeholder": "[IMG]",
    },
    "pixtral": {
        "model_type": "llava",
        "tokens": {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        "config": {
            "text_config": {"model_type": "mistral"},
            "vision_config": {"model_type": "pixtral", **_VISION, "image_size": 64, "patch_size": 16, "head_dim": 16},
            "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        },
        "image": {
            "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64}, "patch_size": 16, **_MEAN,
        },
        "processor": {"processor_class": "PixtralProcessor", "patch_size": 16},
        "placeholder": "[IMG]",
    },
    **MORE_FAMILIES,
}  # fmt: skip
"""By name: the tokens, what differs in config.json, the processor's files, and what stands for an image in a prompt."""

_TOKENS_OF_CONFIG = {
    *("video_token", "vision_start_token", "vision_end_token", "boi_token", "eoi_token"),
    *("image_start_token", "image_end_token", "video_start_token", "video_end_token"),
}

PARTS_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}PLACEHOLDER"
    "{% elif part['type'] == 'video' %}VIDEO"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that reads lists of parts."""


def write_checkpoint(folder: Path, family: str, seed: int = 0) -> Path:
    """Writes a checkpoint of random weights with its tokenizer and processor."""
    facts = FAMILIES[family]
    tokenizer = _tokenizer(facts)
    model_type = facts.get("model_type", family)
    own = {name: dict(value) if isinstance(value, dict) else value for name, value in facts["config"].items()}
    own["text_config"] = {**_TEXT, "vocab_size": len(tokenizer), **own["text_config"]}
    token = facts["tokens"][facts.get("image_token", "image_token")]
    own["image_token_id"] = tokenizer.convert_tokens_to_ids(token)
    for name in _TOKENS_OF_CONFIG & facts["tokens"].keys():
        key = f"{name}_index" if name in ("boi_token", "eoi_token") else f"{name}_id"
        own[key] = tokenizer.convert_tokens_to_ids(facts["tokens"][name])
    own |= {name: tokenizer.convert_tokens_to_ids(each) for name, each in facts.get("token_lists", {}).items()}
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[model_type](**own)
    model = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type])(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 1
            scale = 1.0 if "embed" in name else facts.get("gain", 1.4) * fan_in**-0.5
            parameter.copy_(noise * scale if parameter.dim() > 1 else parameter + noise * 0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({**facts["image"], **facts["processor"]}))
    if "video" in facts:
        (folder / "video_preprocessor_config.json").write_text(json.dumps({**facts["video"], **facts["processor"]}))
    (folder / "processor_config.json").write_text(json.dumps(facts["processor"]))
    return folder


def _tokenizer(facts: dict[str, Any]) -> PreTrainedTokenizerFast:
    plain = make_tokenizer()
    plain.add_special_tokens({"additional_special_tokens": [*facts["tokens"].values(), *facts.get("more_tokens", [])]})
    return PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        bos_token=facts.get("bos_token"),
        eos_token=plain.eos_token,
        pad_token=plain.pad_token,
        chat_template=PARTS_TEMPLATE.replace("PLACEHOLDER", facts["placeholder"]).replace(
            "VIDEO", facts.get("video_placeholder", "")
        ),
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=facts["tokens"],
    )


def make_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth image of colours."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.randint(0, 256, (4, 5, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(small.numpy(), "RGB").resize((width, height), Image.Resampling.BICUBIC)


def make_frames(count: int, width: int, height: int, seed: int = 0) -> np.ndarray:
    """Frames of colours that change smoothly, [count, height, width, 3] uint8."""
    first, last = (np.asarray(make_image(width, height, seed + each), np.float32) for each in (0, 1))
    shares = np.linspace(0, 1, count)[:, None, None, None]
    return (first + (last - first) * shares).round().astype(np.uint8)


def encode_video(frames: np.ndarray, form: str = "mp4", codec: str = "mpeg4", rate: int = 8, **options: str) -> bytes:
    """A video file of frames."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=rate, options=options)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return buffer.getvalue()
