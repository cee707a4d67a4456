"""Tiny random checkpoints of models of Transformers that hear, and how ours differ from them.

Each sound is given as the arrays that the class's tower reads: the class tells their forms by the names of its
arguments. What a class computes of several sounds is compared with the rows of each alone.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from quire.core.config.model import ModelConfig
from quire.core.errors import ModelLoadError
from quire.core.wire.media import Array, MediaItem
from quire.core.wire.protocol import EngineRequest, SequenceStart
from quire.core.wire.sampling_params import SamplingParams
from quire.executor.models.base import ReadsMedia
from quire.frontend.checkpoint.model_spec import read_model_spec
from tests import tiny_whisper
from tests.audio_checkpoints import FAMILIES, TEXT
from tests.executor.media_steps import MediaPrompt
from tests.executor.models.coverage import Agreement, difference
from tests.executor.models.test_encoder_decoders import Engine, config_of
from tests.executor.paged_driver import load_model

_NAMES = {
    **MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    **MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
}
_FLAMINGOS = ("audioflamingo3", "musicflamingo")
MODEL_TYPES = sorted(
    {
        *MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        *(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()),
        *_FLAMINGOS,
    }
    - {"phi4_multimodal"}
)
"""All such models but those that read images, too, of which the table of images has one more result."""

_ENCODES = "an encoder of its own reads the sound, and the decoder attends to it; of such models, Whisper is served"
_SPEAKS = "its output is sound"
OTHER_KINDS = {
    **dict.fromkeys(
        (
            *("canary", "cohere_asr", "moonshine", "moonshine_streaming", "seamless_m4t", "seamless_m4t_v2"),
            *("speech-encoder-decoder", "speech_to_text", "speecht5"),
        ),
        _ENCODES,
    ),
    **dict.fromkeys(("dia", "vibevoice"), _SPEAKS),
    "pop2piano": "its output is notes",
    "kyutai_speech_to_text": "codes of the sound stand beside the tokens of the text, one frame for each",
    "voxtral_realtime": "rows of the sound are added to the embeddings of the tokens, one frame for each",
}
"""Models of this list that are of another kind: model type → what they are."""

_VOCAB_SIZE, _AUDIO_TOKEN = 320, 300
_TEXT_SIZES = (9, 6, 12)
_FRAMES = (90, 50)
_WHISPER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
_OWN: dict[str, dict[str, Any]] = {
    "musicflamingo": {
        "text_config": {"model_type": "qwen2"},
        "audio_config": {"model_type": "audioflamingo3_encoder", **_WHISPER, "num_mel_bins": 16},
        "audio_bos_token_id": 301, "audio_eos_token_id": 302,
    },
    "glmasr": {
        "text_config": {"model_type": "llama"},
        "audio_config": {"model_type": "glmasr_encoder", **_WHISPER, "num_mel_bins": 16},
    },
    "qwen3_asr": {
        "text_config": {"model_type": "qwen3"},
        "audio_config": {
            "model_type": "qwen3_asr_encoder", "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2,
            "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "output_dim": 64, "downsample_hidden_size": 8,
            "n_window": 50, "n_window_infer": 100,
        },
    },
    "fun_asr_nano": {
        "text_config": {"model_type": "qwen3"},
        "audio_config": {
            "model_type": "fun_asr_nano_encoder", **_WHISPER, "num_mel_bins": 16, "num_stacked_frames": 1,
            "num_timestamp_prediction_layers": 1,
        },
        "adaptor_config": {
            "hidden_size": 64, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
        },
    },
    "moss_transcribe_diarize": {
        "text_config": {"model_type": "qwen3"},
        "audio_config": {"model_type": "moss_transcribe_diarize_audio", **_WHISPER, "num_mel_bins": 16},
    },
    "omniasr": {
        "text_config": {"model_type": "llama"},
        "audio_config": {
            **_WHISPER, "conv_dim": [16] * 7, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
        },
    },
}  # fmt: skip
"""By model type: config.json, where tests of prompts have none. Sizes of the text are the same in all."""


def architecture_of(model_type: str) -> str:
    """The library's class that generates text."""
    return FAMILIES.get(model_type, {}).get("class") or _NAMES.get(model_type) or _FLAMINGO_CLASSES[model_type]


_FLAMINGO_CLASSES = {
    "audioflamingo3": "AudioFlamingo3ForConditionalGeneration",
    "musicflamingo": "MusicFlamingoForConditionalGeneration",
}


def write_checkpoint(folder: Path, model_type: str) -> Any:
    """Writes a checkpoint of random weights; returns the library's model of it.

    Raises:
        KeyError: no config of this type is known here.
    """
    own = _OWN.get(model_type) or FAMILIES[model_type.removesuffix("_plus")]["config"]
    fields = {name: dict(value) if isinstance(value, dict) else value for name, value in own.items()}
    fields["text_config"] = {**TEXT, "vocab_size": _VOCAB_SIZE, **fields["text_config"]}
    fields["audio_token_id"] = _AUDIO_TOKEN
    if "vision_config" in fields:
        fields |= {"audio_start_token_id": 301, "vision_start_token_id": 302}
    name = f"{model_type}_thinker" if f"{model_type}_thinker" in CONFIG_MAPPING else model_type
    config = CONFIG_MAPPING[name](**fields)
    torch.manual_seed(0)
    model: Any = getattr(transformers, architecture_of(model_type))(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.config.architectures = [architecture_of(model_type)]
    model.save_pretrained(folder)
    return model.eval().float()


class Prompt:
    """A prompt with two sounds of different lengths, and what the library computes of it.

    Attributes:
        expected: log-probabilities behind each token, [num_tokens, vocab_size].

    Raises:
        ValueError: the class's arguments tell no form of sounds.
    """

    def __init__(self, reference: Any) -> None:
        sounds = _sounds(reference)
        generator = torch.Generator().manual_seed(1)
        self.token_ids: list[int] = []
        self.items: list[MediaItem] = []
        rows: list[Tensor] = []
        for index, size in enumerate(_TEXT_SIZES):
            self.token_ids += torch.randint(3, _AUDIO_TOKEN, (size,), generator=generator).tolist()
            if index < len(sounds):
                made, start = _rows(reference, sounds[index]), len(self.token_ids)
                if "granite" in reference.config.model_type:  # whose mask is of rows
                    sounds[index]["input_features_mask"] = torch.ones(1, len(made), dtype=torch.bool)
                self.token_ids += [_AUDIO_TOKEN] * len(made)
                self.items.append(_item(sounds[index], start, len(self.token_ids)))
                rows.append(made)
        with torch.inference_mode():
            embeds = reference.get_input_embeddings()(torch.tensor([self.token_ids])).clone()
            for item, made in zip(self.items, rows, strict=True):
                embeds[0, item.start : item.end] = made
            self.expected = reference(inputs_embeds=embeds).logits[0].log_softmax(-1)


def _item(arrays: dict[str, Tensor], start: int, end: int) -> MediaItem:
    made = {
        name: Array(str(value.numpy().dtype), tuple(value.shape), value.numpy().tobytes())
        for name, value in arrays.items()
    }
    return MediaItem("audio", str(start).encode(), [(start, end)], arrays=made)


def _reader(reference: Any) -> Any:
    return getattr(reference, "model", reference).get_audio_features


def _counted_rows(reference: Any, arrays: dict[str, Tensor]) -> Tensor:
    """The rows of a class that shows none: of its tower, which reads a mask of frames."""
    base, frames = getattr(reference, "model", reference), arrays["feature_attention_mask"].sum(-1)
    tower = base.audio_tower
    _, [count] = tower._get_feat_extract_output_lengths(frames)
    most = (arrays["input_features"].shape[-1] - 1) // 2 + 1
    seen = torch.arange(most) < (frames - 1) // 2 + 1
    mask = torch.zeros(1, 1, most, most).masked_fill(~seen, float("-inf"))
    with torch.inference_mode():
        states = tower(arrays["input_features"], attention_mask=mask).last_hidden_state
        return base.multi_modal_projector(states)[0, : int(count)]


def _rows(reference: Any, arrays: dict[str, Tensor]) -> Tensor:
    """The rows that the tower makes of a sound, [num_rows, hidden]."""
    if not hasattr(getattr(reference, "model", reference), "get_audio_features"):
        return _counted_rows(reference, arrays)
    reader = _reader(reference)
    known = inspect.signature(reader).parameters
    with torch.inference_mode():
        features = reader(**{name: value for name, value in arrays.items() if name in known})
    rows = getattr(features, "pooler_output", None)
    rows = getattr(features, "last_hidden_state", features) if rows is None else rows
    rows = rows if isinstance(rows, Tensor) else torch.cat(list(rows))
    return rows.reshape(-1, rows.shape[-1])


def _sounds(reference: Any) -> list[dict[str, Tensor]]:
    errors = []
    for forms in _forms(reference):
        try:
            for arrays in forms:
                _rows(reference, arrays)
        except Exception as error:  # whatever the library raises for arrays of another form
            errors.append(str(error))
            continue
        return forms
    raise ValueError(f"its arguments tell no form of sounds: {'; '.join(errors)[:200]}")


def _forms(reference: Any) -> Iterator[list[dict[str, Tensor]]]:
    """The forms of sounds that the arguments of a class may mean."""
    taken = {*inspect.signature(reference.forward).parameters}
    generator = torch.Generator().manual_seed(2)
    if "input_values" in taken:  # samples
        for shape in ((1,), (1, 1)):
            yield [_of_samples(torch.randn(*shape, 320 * frames, generator=generator), taken) for frames in _FRAMES]
        return
    for whole in (0, 100, 200, 300, 3000):  # a spectrogram of the sound's length, or of one length for all
        for is_turned in (False, True):
            for size in (16, 32):
                yield [
                    _of_frames(torch.randn(1, size, whole or frames, generator=generator), frames, taken, is_turned)
                    for frames in _FRAMES
                ]


def _of_samples(samples: Tensor, taken: set[str]) -> dict[str, Tensor]:
    mask = torch.ones(1, samples.shape[-1], dtype=torch.int64)
    return {"input_values": samples, **({"padding_mask": mask} if "padding_mask" in taken else {})}


def _of_frames(features: Tensor, frames: int, taken: set[str], is_turned: bool) -> dict[str, Tensor]:
    arrays = {"input_features": features.transpose(1, 2).contiguous() if is_turned else features}
    mask = (torch.arange(features.shape[-1]) < frames).long().unsqueeze(0)
    arrays |= {name: mask for name in ("input_features_mask", "feature_attention_mask") if name in taken}
    if "padding_mask" in taken:
        arrays["padding_mask"] = torch.ones(1, 160 * frames, dtype=torch.int64)
    return arrays


def measure_whisper(folder: Path) -> Agreement:
    """Greedy outputs for three sounds, computed together by a decoder that attends to an encoder.

    Raises:
        ConfigError: the checkpoint is refused.
    """
    reference = tiny_whisper.write_whisper(folder)
    engine, prompt = Engine(config_of(folder)), tiny_whisper.prompt_ids("en", "transcribe", "notimestamps")
    sounds = [tiny_whisper.sound(0), tiny_whisper.sound(1, 0.2), tiny_whisper.sound(2, 0.05)]
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, ignore_eos=True)
    deltas = engine.run(
        [
            EngineRequest([SequenceStart(str(index), 0)], prompt, params, encoder=tiny_whisper.encoder_input(sound))
            for index, sound in enumerate(sounds)
        ]
    )
    found, are_same = [], True
    for number, sound in enumerate(sounds):
        output = [token for delta in deltas[str(number)] for token in delta.token_ids]
        expected = tiny_whisper.reference_logprobs(reference, sound, [*prompt, *output[:-1]])[len(prompt) - 1 :]
        are_same &= output == expected.argmax(-1).tolist()
        for place, delta in enumerate(deltas[str(number)]):
            assert delta.logprobs is not None
            found.append(abs(delta.logprobs[0].logprobs[0] - expected[place, output[place]].item()))
    return Agreement(max(found), are_same)


def measure(folder: Path, prompt: Prompt) -> Agreement:
    """Feeds a prompt with sounds in chunks, which end inside of a sound.

    Raises:
        ModelLoadError: the class is not taken, or hears nothing here.
    """
    spec = read_model_spec(folder, ModelConfig(model=str(folder), model_impl="transformers", dtype="float32"))
    model = load_model(spec, reads_media=True)
    if not isinstance(model, ReadsMedia) or model.media is None or "audio" not in model.media.modalities:
        raise ModelLoadError("it reads text alone")
    got = MediaPrompt(model, prompt.token_ids, prompt.items).logits(
        [5, prompt.items[0].start + 2, len(prompt.token_ids) - 4]
    )
    likeliest = got[:, : prompt.expected.shape[1]].argmax(-1) == prompt.expected.argmax(-1)
    return Agreement(difference(got, prompt.expected), bool(likeliest.all()))
