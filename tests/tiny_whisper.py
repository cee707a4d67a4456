"""A tiny random Whisper with a tokenizer and a feature extractor, and what Transformers computes with it.

It hears a second at once, in place of thirty.
"""

import hashlib
import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationMixin,
    PreTrainedModel,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from quire.core.wire.encoder_input import EncoderInput, Features

RATE = 16_000
NUM_ROWS = 50
LONGEST = 64
LANGUAGES = ("en", "de", "ja")
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_SPECIAL = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
_STAMPS = tuple(f"<|{number * 0.02:.2f}|>" for number in range(NUM_ROWS + 1))
ID = {name: number for number, name in enumerate((*_BYTES, *_SPECIAL, *_STAMPS))}
END, START, NO_TIMESTAMPS = ID["<|endoftext|>"], ID["<|startoftranscript|>"], ID["<|notimestamps|>"]
FIRST_STAMP = ID["<|0.00|>"]
SUPPRESSED = [ID["!"], ID["<|translate|>"], ID["<|transcribe|>"], ID["<|startoflm|>"], ID["<|startofprev|>"], START]
GENERATION = {
    "decoder_start_token_id": START,
    "bos_token_id": END,
    "eos_token_id": END,
    "pad_token_id": END,
    "is_multilingual": True,
    "lang_to_id": {f"<|{code}|>": ID[f"<|{code}|>"] for code in LANGUAGES},
    "task_to_id": {task: ID[f"<|{task}|>"] for task in ("translate", "transcribe")},
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "prev_sot_token_id": ID["<|startofprev|>"],
    "max_initial_timestamp_index": 20,
    "suppress_tokens": SUPPRESSED,
    "begin_suppress_tokens": [ID["Ġ"], END],
    "return_timestamps": False,
    "alignment_heads": [[0, 1], [1, 0], [1, 3]],
}


def prompt_ids(*names: str) -> list[int]:
    """The decoder's prompt of special tokens by their names, such as "en" and "transcribe"."""
    return [START, *(ID[f"<|{name}|>"] for name in names)]


def write_whisper(folder: Path, *, generation: dict[str, Any] | None = None, **settings: Any) -> PreTrainedModel:
    """Writes a checkpoint of random weights; returns the library's model of it.

    Args:
        generation: changed fields of generation_config.json; None leaves one out.
    """
    torch.manual_seed(0)
    config = WhisperConfig(
        **{
            "vocab_size": len(ID), "num_mel_bins": 80, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2,
            "encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 72, "decoder_ffn_dim": 60,
            "max_source_positions": NUM_ROWS, "max_target_positions": LONGEST, "pad_token_id": END, "bos_token_id": END,
            "eos_token_id": END, "decoder_start_token_id": START, "suppress_tokens": None,
            "begin_suppress_tokens": None, **settings,
        }
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "encoder.embed_positions" in name:
                continue
            if "embed_tokens" in name:
                parameter.normal_(std=0.4)
            elif "embed_positions" in name:
                parameter.normal_(std=1.0)
            elif parameter.dim() > 1:
                is_score = "q_proj" in name or "k_proj" in name
                parameter.normal_(std=(1.0 if is_score else 2.0) * parameter[0].numel() ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    fields = {**GENERATION, **(generation or {})}
    for name, value in fields.items():
        if value is not None:
            setattr(model.generation_config, name, value)
    model.config.architectures = ["WhisperForConditionalGeneration"]
    model.save_pretrained(folder)
    extractor(config.num_mel_bins).save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}')
    return model.eval().float()


def tokenizer() -> Tokenizer:
    """One token a byte, and Whisper's special tokens. Timestamps are not special, as in its own files."""
    made = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(_BYTES)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, normalized=False) for name in _SPECIAL])
    made.add_tokens([AddedToken(name, normalized=False) for name in _STAMPS])
    return made


def extractor(num_channels: int = 80) -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=num_channels, chunk_length=1)


def sound(number: int = 0, seconds: float = 0.7, rate: int = RATE) -> np.ndarray:
    """Two tones that change, and some noise, [num_samples] float32."""
    time = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(number).standard_normal(len(time))
    tones = np.sin(2 * np.pi * (200 + 90 * number) * time) * np.sin(2 * np.pi * (3 + number) * time)
    return (0.4 * tones + 0.02 * noise).astype(np.float32)


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    """A WAV file of 16 bits; [num_samples] or [num_samples, num_channels]."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def as_read(samples: np.ndarray) -> np.ndarray:
    """The samples of `wav`, as they are read back."""
    return ((samples * 32767).astype("<i2") / 32768).astype(np.float32)


def features_of(samples: np.ndarray, num_channels: int = 80) -> np.ndarray:
    """The library's features, [num_channels, num_frames] float32."""
    found = extractor(num_channels)(samples, sampling_rate=RATE, return_tensors="np")
    return np.ascontiguousarray(found["input_features"][0], "<f4")


def encoder_input(samples: np.ndarray, num_channels: int = 80) -> EncoderInput:
    """What a request of the engine brings of a sound."""
    values = features_of(samples, num_channels).tobytes()
    return EncoderInput([], Features(values, num_channels, NUM_ROWS, hashlib.sha256(values).digest()))


@torch.inference_mode()
def reference_logprobs(model: PreTrainedModel, samples: np.ndarray, decoder: list[int]) -> torch.Tensor:
    """The library's log-probabilities of the token after each of the decoder's: [num_tokens, vocab_size]."""
    features = torch.from_numpy(features_of(samples, model.config.num_mel_bins))[None]
    output = model(input_features=features, decoder_input_ids=torch.tensor([decoder]))
    return output.logits[0].log_softmax(-1)


@torch.inference_mode()
def reference_tokens(
    model: PreTrainedModel, samples: np.ndarray, num_tokens: int, *, timestamps: bool = False, **asked: str
) -> list[int]:
    """The library's greedy output for a `language` and a `task`, without its prompt and its end.

    Where an output ends with a timestamp, Whisper's own `generate` begins another there, and joins them: this is the
    first. Without timestamps, it does so too, if a random model writes some, and then returns the last.
    """
    features = torch.from_numpy(features_of(samples, model.config.num_mel_bins))[None]
    greedy: dict[str, Any] = {"do_sample": False, "num_beams": 1, "max_new_tokens": num_tokens}
    if timestamps:
        parts = {"return_segments": True, "return_dict_in_generate": True}
        output = model.generate(features, return_timestamps=True, **greedy, **parts, **asked)
        sequence = output["segments"][0][0]["result"]["sequences"].flatten().tolist()
        prompt = prompt_ids(asked["language"], asked["task"])
    else:
        prompt = prompt_ids(asked["language"], asked["task"], "notimestamps")
        whole = GenerationMixin.generate(model, features, decoder_input_ids=torch.tensor([prompt]), **greedy)
        sequence = whole[0].tolist()
    assert sequence[: len(prompt)] == prompt
    output = sequence[len(prompt) :]
    return output[: output.index(END)] if END in output else output


@torch.inference_mode()
def reference_times(
    model: PreTrainedModel, samples: np.ndarray, num_tokens: int, **asked: str
) -> tuple[list[int], list[float]]:
    """The library's greedy output with timestamps, its end included, and the time of each token.

    `model` must have eager attention, whose weights can be read.
    """
    found = extractor(model.config.num_mel_bins)(
        samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True
    )
    output = model.generate(
        found["input_features"], attention_mask=found["attention_mask"], return_timestamps=True,
        return_token_timestamps=True, return_segments=True, return_dict_in_generate=True, do_sample=False, num_beams=1,
        max_new_tokens=num_tokens, **asked,
    )  # fmt: skip
    result, prompt = output["segments"][0][0]["result"], prompt_ids(asked["language"], asked["task"])
    sequence = result["sequences"].flatten().tolist()
    return sequence[len(prompt) :], result["token_timestamps"].flatten().tolist()[len(prompt) :]
