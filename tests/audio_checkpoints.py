"""Tiny random checkpoints of models that hear, with their processors' files as on the hub, and sounds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.checkpoints import make_tokenizer

RATE = 16_000
TEXT = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_WHISPER = {
    "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "hop_length": 160, "n_fft": 400,
    "sampling_rate": RATE, "padding_value": 0.0, "return_attention_mask": True,
}  # fmt: skip
_ENCODER = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": 16}
_ENCODER_5 = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128, "num_mel_bins": 16,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_OMNI_TOKENS = {
    "image_token": "<|IMAGE|>", "audio_token": "<|AUDIO|>", "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
}  # fmt: skip
_OMNI_IMAGES = {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 784, "longest_edge": 12544}}
_OMNI = "<|audio_bos|><|AUDIO|><|audio_eos|>"

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_audio": {
        "class": "Qwen2AudioForConditionalGeneration",
        "tokens": {"audio_token": "<|AUDIO|>"},
        "more_tokens": ["<|audio_bos|>", "<|audio_eos|>"],
        "config": {
            "text_config": {"model_type": "qwen2"},
            "audio_config": {"model_type": "qwen2_audio_encoder", **_ENCODER, "max_source_positions": 150},
        },
        "extractor": {**_WHISPER, "chunk_length": 3},
        "processor": "Qwen2AudioProcessor",
        "placeholder": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    },
    "audioflamingo3": {
        "class": "AudioFlamingo3ForConditionalGeneration",
        "tokens": {"audio_token": "<sound>"},
        "config": {
            "text_config": {"model_type": "qwen2"},
            "audio_config": {"model_type": "audioflamingo3_encoder", **_ENCODER_5, "max_source_positions": 50},
        },
        "extractor": {**_WHISPER, "chunk_length": 1},
        "processor": "AudioFlamingo3Processor",
        "placeholder": "<sound>",
    },
    "voxtral": {
        "class": "VoxtralForConditionalGeneration",
        "tokens": {"audio_token": "[AUDIO]"},
        "more_tokens": ["[BEGIN_AUDIO]", "[INST]", "[/INST]", "[TRANSCRIBE]"],
        "config": {
            "text_config": {"model_type": "llama"},
            "audio_config": {"model_type": "voxtral_encoder", **_ENCODER_5, "max_source_positions": 100},
        },
        "extractor": {**_WHISPER, "chunk_length": 2},
        "processor": "VoxtralProcessor",
        "placeholder": "[BEGIN_AUDIO][AUDIO]",
    },
    "granite_speech": {
        "class": "GraniteSpeechForConditionalGeneration",
        "tokens": {"audio_token": "<|audio|>"},
        "config": {
            "text_config": {"model_type": "granite"}, "tie_word_embeddings": False,
            "encoder_config": {
                "model_type": "granite_speech_encoder", "input_dim": 32, "num_layers": 2, "hidden_dim": 32,
                "num_heads": 2, "output_dim": 12, "context_size": 20, "max_pos_emb": 24, "conv_kernel_size": 5,
                "feedforward_mult": 2,
            },
            "projector_config": {
                "model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                "intermediate_size": 48, "encoder_hidden_size": 32, "vocab_size": 8, "cross_attention_frequency": 1,
            },
            "has_lora_adapter": False,
        },
        "extractor": {
            "feature_extractor_type": "GraniteSpeechFeatureExtractor", "sampling_rate": RATE, "n_mels": 16,
            "melspec_kwargs": {},
        },
        "processor": "GraniteSpeechProcessor",
        "placeholder": "<|audio|>",
    },
    "qwen2_5_omni": {
        "class": "Qwen2_5OmniThinkerForConditionalGeneration",
        "architecture": "Qwen2_5OmniModel",
        "tokens": _OMNI_TOKENS,
        "config": {
            "text_config": {"rope_parameters": _ROPE},
            "audio_config": {**_ENCODER, "output_dim": 64, "n_window": 20, "max_source_positions": 100},
            "vision_config": {
                "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48,
                "fullatt_block_indexes": [1], "window_size": 56,
            },
        },
        "extractor": {**_WHISPER, "chunk_length": 3, **_OMNI_IMAGES},
        "processor": "Qwen2_5OmniProcessor",
        "placeholder": _OMNI,
    },
    "qwen3_omni_moe": {
        "class": "Qwen3OmniMoeThinkerForConditionalGeneration",
        "architecture": "Qwen3OmniMoeForConditionalGeneration",
        "tokens": _OMNI_TOKENS,
        "config": {
            "text_config": {
                "rope_parameters": {**_ROPE, "mrope_interleaved": True}, "num_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
            },
            "audio_config": {
                **_ENCODER, "output_dim": 64, "n_window": 50, "n_window_infer": 100, "max_source_positions": 100,
                "downsample_hidden_size": 8,
            },
            "vision_config": {
                "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48,
                "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
            },
        },
        "extractor": {**_WHISPER, "chunk_length": 3, **_OMNI_IMAGES, "patch_size": 16},
        "processor": "Qwen3OmniMoeProcessor",
        "placeholder": _OMNI,
    },
    "phi4_multimodal": {
        "class": "Phi4MultimodalForCausalLM",
        "tokens": {"image_token": "<|endoftext10|>", "audio_token": "<|endoftext11|>"},
        "config": {
            "audio_config": {
                "hidden_size": 32, "intermediate_size": 48, "num_blocks": 3, "num_attention_heads": 2,
                "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "input_size": 16,
                "nemo_conv_channels": 16,
            },
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
                "image_size": 56, "crop_size": 56,
            },
        },
        "extractor": {
            "image_processor_type": "Phi4MultimodalImageProcessor", "size": {"height": 56, "width": 56},
            "feature_extractor_type": "Phi4MultimodalFeatureExtractor", "feature_size": 16, "sampling_rate": RATE,
        },
        "processor": "Phi4MultimodalProcessor",
        "placeholder": "<|endoftext11|>",
    },
}  # fmt: skip
"""By model type: the class, tokens, what differs in config.json, and what stands for a sound in a prompt."""

PARTS_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'audio' %}PLACEHOLDER"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that reads lists of parts."""


def write_checkpoint(folder: Path, family: str, seed: int = 0) -> Path:
    """Writes a checkpoint of random weights with its tokenizer and processor."""
    facts = FAMILIES[family]
    tokenizer = _tokenizer(facts)
    is_part = "architecture" in facts
    config = CONFIG_MAPPING[f"{family}_thinker" if is_part else family](**_config_fields(facts, tokenizer))
    torch.manual_seed(seed)
    model = getattr(transformers, facts["class"])(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 1
            scale = 1.0 if "embed_tokens.weight" in name else 1.4 * fan_in**-0.5
            parameter.copy_(noise * scale if parameter.dim() > 1 else parameter + noise * 0.1)
    model.save_pretrained(folder)
    if is_part:
        _make_whole(folder, family, facts["architecture"])
    tokenizer.save_pretrained(folder)
    own = {"processor_class": facts["processor"]}
    (folder / "preprocessor_config.json").write_text(json.dumps({**facts["extractor"], **own}))
    return folder


def _config_fields(facts: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    own = {name: dict(value) if isinstance(value, dict) else value for name, value in facts["config"].items()}
    text = {**TEXT, "vocab_size": len(tokenizer)}
    if "text_config" in own:
        own["text_config"] = {**text, **own["text_config"]}
    else:
        own |= text
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in facts["tokens"].items()}
    if "text_config" in own:
        for name in ("audio_token", "image_token", "video_token"):
            if name in ids:
                own[f"{name}_id"] = ids[name]
        if "audio_bos_token" in ids:
            own |= {"audio_start_token_id": ids["audio_bos_token"], "vision_start_token_id": ids["vision_bos_token"]}
    else:
        own["audio_config"]["audio_token_id"] = ids["audio_token"]
        own["vision_config"]["image_token_id"] = ids["image_token"]
    return own


def _make_whole(folder: Path, model_type: str, architecture: str) -> None:
    """Makes the thinker one part of a model that speaks, as on the hub."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    names = {name: name if name.startswith("thinker.") else f"thinker.{name}" for name in stored}
    save_file({names[name]: tensor for name, tensor in stored.items()}, path, metadata={"format": "pt"})
    inner = json.loads((folder / "config.json").read_text())
    inner.pop("architectures")
    whole = {"model_type": model_type, "architectures": [architecture], "thinker_config": inner}
    (folder / "config.json").write_text(json.dumps({**whole, "enable_audio_output": False}))


def _tokenizer(facts: dict[str, Any]) -> PreTrainedTokenizerFast:
    plain = make_tokenizer()
    plain.add_special_tokens({"additional_special_tokens": [*facts["tokens"].values(), *facts.get("more_tokens", [])]})
    return PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        eos_token=plain.eos_token,
        pad_token=plain.pad_token,
        chat_template=PARTS_TEMPLATE.replace("PLACEHOLDER", facts["placeholder"]),
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=facts["tokens"],
    )


def make_sound(num_seconds: float, seed: int = 0) -> np.ndarray:
    """Tones that rise, with a little noise: [num_samples] float32 at `RATE`."""
    random = np.random.default_rng(seed)
    time = np.arange(int(num_seconds * RATE)) / RATE
    pitch = 180 + 90 * seed
    sound = 0.4 * np.sin(2 * np.pi * pitch * time * (1 + time)) + 0.2 * np.sin(2 * np.pi * 3.1 * pitch * time)
    return (sound + 0.01 * random.standard_normal(len(time))).astype(np.float32)
