"""Towers for sounds: log-probabilities within 1e-4 of the library's, with sounds of different lengths."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from quire.core.config.model import ModelConfig
from quire.core.wire.media import MediaItem
from quire.executor.models.transformers import TransformersModel
from quire.frontend.checkpoint.model_spec import read_model_spec
from quire.frontend.media.library_processor import load_processor
from quire.frontend.media.messages import DescribeAudio, ItemFacts, ReadAudio, ReadyItem
from quire.frontend.media.placing import expand, place
from quire.frontend.media.reader import ReadItem
from quire.frontend.media.sounds.items import AudioReader
from tests.audio_checkpoints import FAMILIES, RATE, make_sound, write_checkpoint
from tests.executor.media_steps import MediaPrompt
from tests.executor.paged_driver import load_model

torch.set_num_threads(1)

SOUNDS = [make_sound(2.3), make_sound(0.61, 1)]
PADS = ("granite_speech", "phi4_multimodal", "qwen3_omni_moe")
"""Models whose rows of a sound change if it is padded to the length of another one."""


def read(reader: AudioReader, sound: np.ndarray) -> ReadItem:
    made = reader.read(ReadAudio(sound.tobytes(), RATE, 60.0))
    assert isinstance(made, ReadyItem)
    return ReadItem("audio", "audio", made.digest, made.text, made.num_rows, made.facts, made.arrays)


def arrays_of(item: ReadItem) -> dict[str, Tensor]:
    found = {**item.facts, **item.arrays}
    return {
        name: torch.from_numpy(np.frombuffer(each.data, each.dtype).reshape(each.shape).copy())
        for name, each in found.items()
    }


def library_logits(family: str, folder: Path, text: str, items: list[MediaItem], token_ids: list[int]) -> Tensor:
    """What the library computes of the text and `SOUNDS`."""
    model: Any = getattr(transformers, FAMILIES[family]["class"]).from_pretrained(folder, dtype=torch.float32).eval()
    inputs: dict[str, Any] = {"input_ids": torch.tensor([token_ids])}
    if family in PADS:
        embeds = model.get_input_embeddings()(inputs["input_ids"])
        for item, sound in zip(items, SOUNDS, strict=True):
            rows = rows_alone(family, model, folder, sound)
            embeds[0, item.start : item.end] = rows
        return model(inputs_embeds=embeds).logits[0]
    if family == "voxtral":
        inputs["input_features"] = voxtral_features(folder)
    elif family == "audioflamingo3":  # its processor takes one sound a text
        processor = load_processor(str(folder)).processor
        each = [processor(text=[FAMILIES[family]["placeholder"]], audio=[sound]) for sound in SOUNDS]
        for name in ("input_features", "input_features_mask"):
            inputs[name] = torch.cat([one[name] for one in each])
    else:
        processor = load_processor(str(folder)).processor
        inputs = dict(processor(text=[text], audio=SOUNDS, return_tensors="pt", padding=True))
        assert inputs["input_ids"][0].tolist() == token_ids
    return model(**inputs).logits[0]


def rows_alone(family: str, model: Any, folder: Path, sound: np.ndarray) -> Tensor:
    """The rows of one sound, as the library's processor and class make them."""
    processor = load_processor(str(folder)).processor
    inputs = processor(text=[FAMILIES[family]["placeholder"]], audio=[sound], return_tensors="pt")
    if family == "granite_speech":
        made = model.model.get_audio_features(inputs["input_features"]).pooler_output
        return made[inputs["input_features_mask"]]
    if family == "qwen3_omni_moe":
        return model.get_audio_features(inputs["input_features"], inputs["feature_attention_mask"]).last_hidden_state
    embed, sizes = model.model.embed_tokens_extend.audio_embed, inputs["audio_embed_sizes"]
    blank = torch.zeros(1, int(sizes[0]), model.config.hidden_size)
    return embed(inputs["input_ids"], blank, inputs["audio_input_features"], audio_embed_sizes=sizes)[0]


def voxtral_features(folder: Path) -> Tensor:
    """As the library's processor makes them of a conversation, which needs another tokenizer."""
    processor: Any = transformers.VoxtralProcessor.__new__(transformers.VoxtralProcessor)
    processor.feature_extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    options = {**processor.audio_kwargs, "pad_to_multiple_of": processor.feature_extractor.n_samples}
    options["max_source_positions"] = processor.feature_extractor.nb_max_frames
    features: Tensor = processor._retrieve_input_features(SOUNDS, **options)
    return features


@pytest.mark.turns(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    if family == "granite_speech" and importlib.util.find_spec("torchaudio") is None:
        pytest.skip("the library's processor needs torchaudio")
    folder = write_checkpoint(tmp_path, family)
    reader = AudioReader(str(folder))
    facts = reader.read(DescribeAudio())
    assert isinstance(facts, ItemFacts)
    assert not facts.fault
    text = FAMILIES[family]["placeholder"].join(["The first: ", " and then ", " which is more."])
    items = [read(reader, sound) for sound in SOUNDS]
    assert items[0].num_rows > items[1].num_rows
    expanded = expand(text, items, {"audio": facts.placeholder}, "")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    token_ids = tokenizer.encode(expanded, add_special_tokens=False)
    placed = place(token_ids, items, {"audio": {facts.token_id}}, "")
    with torch.inference_mode():
        expected = library_logits(family, folder, text, placed, token_ids).log_softmax(dim=-1)

    spec = read_model_spec(folder, ModelConfig(model=str(folder), model_impl="transformers"))
    model = load_model(spec, reads_media=True)
    assert isinstance(model, TransformersModel)
    assert model.media is not None
    assert "audio" in model.media.modalities
    inside = placed[0].start + placed[0].num_rows // 2
    logits = MediaPrompt(model, token_ids, placed).logits((5, inside, placed[1].start + 1))
    torch.testing.assert_close(logits.log_softmax(dim=-1), expected, atol=1e-4, rtol=0)
