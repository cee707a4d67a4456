"""Tiny random checkpoints of any model of Transformers with an encoder and a decoder for text, and how ours differ."""

from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from quire.core.wire.row_outputs import PromptLogprobs
from tests.executor.models.coverage import Agreement
from tests.executor.models.test_encoder_decoders import INPUTS, NUM_TOKENS, Engine, config_of, request
from tests.executor.models.tiny_encoder_decoders import (
    FAMILIES,
    START,
    reference_logprobs,
    reference_tokens,
    write_encoder_decoder,
)
from tests.executor.models.tiny_models import SIZES

_OF_SPEECH = frozenset({
    "audioflamingo3", "glmasr", "granite_speech", "granite_speech_plus", "moss_transcribe_diarize", "musicflamingo",
    "nemo_speechlm", "omniasr", "qwen2_audio", "qwen3_asr", "seamless_m4t", "seamless_m4t_v2", "vibevoice_asr",
    "voxtral", "voxtral_realtime",
})  # fmt: skip
"""Types of the library's mapping that hear, or are part of a model that does."""

MODEL_TYPES = sorted({*MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES} - _OF_SPEECH - {"encoder-decoder"})
"""All such models but `encoder-decoder`, which is two checkpoints of other types."""

_FAMILIES = {kind: name for name, (kind, _, _) in reversed(FAMILIES.items())}
"""The first of the tests' families of each type."""

_TINY = {
    "bigbird_pegasus": {"block_size": 4, "num_random_blocks": 1},
    "nllb-moe": {"num_experts": 4},
    "pegasus_x": {"block_size": 8, "num_global_tokens": 4},
    "switch_transformers": {"num_experts": 4, "d_kv": 16},
}


def architecture_of(model_type: str) -> str:
    """The library's class that generates text."""
    return MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES[model_type]


def write_checkpoint(folder: Path, model_type: str) -> PreTrainedModel:
    """Writes a checkpoint of random weights; returns the library's model of it."""
    if model_type in _FAMILIES:
        return write_encoder_decoder(folder, _FAMILIES[model_type])
    kind = CONFIG_MAPPING[model_type]
    default = kind().to_dict()
    sizes = {name: value for keys, value in SIZES.items() for name in keys if not isinstance(value, bool)}
    values = {name: value for name, value in sizes.items() if isinstance(default.get(name), type(value))}
    torch.manual_seed(0)
    config = kind(**{**values, **_TINY.get(model_type, {}), "decoder_start_token_id": START})
    model: PreTrainedModel = getattr(transformers, architecture_of(model_type))(config)
    model.config.architectures = [architecture_of(model_type)]
    model.save_pretrained(folder)
    return model.eval().float()


def measure(folder: Path, reference: PreTrainedModel) -> Agreement:
    """Greedy outputs of five inputs and one scored prompt, computed together.

    Raises:
        ConfigError: the checkpoint is refused.
    """
    engine = Engine(config_of(folder))
    decoder = [START, *INPUTS[0][:30]]
    scored = request("scored", INPUTS[4], decoder, prompt_logprobs=0, max_tokens=1)
    deltas = engine.run([*(request(str(i), each, logprobs=0) for i, each in enumerate(INPUTS)), scored])
    found, are_same = [], True
    for number, encoder in enumerate(INPUTS):
        output = [token for delta in deltas[str(number)] for token in delta.token_ids]
        are_same &= output == reference_tokens(reference, encoder, NUM_TOKENS)
        expected = reference_logprobs(reference, encoder, [START, *output[:-1]])
        for place, delta in enumerate(deltas[str(number)]):
            assert delta.logprobs is not None
            found.append(abs(delta.logprobs[0].logprobs[0] - expected[place, output[place]].item()))
    expected = reference_logprobs(reference, INPUTS[4], decoder)
    parts = [delta.output for delta in deltas["scored"] if isinstance(delta.output, PromptLogprobs)]
    for part in parts:
        for position, row in enumerate(part.positions, part.start):
            found.append(abs(row.logprobs[0] - expected[position - 1, decoder[position]].item()))
    return Agreement(max(found), are_same)
