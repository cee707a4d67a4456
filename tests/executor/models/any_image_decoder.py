"""Tiny random checkpoints of models whose decoder attends to an encoder of images, and how ours differ from them."""

import hashlib
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quire.core.wire.encoder_input import EncoderInput, Features
from quire.core.wire.protocol import EngineRequest, SequenceStart
from quire.core.wire.sampling_params import SamplingParams
from tests.executor.models.coverage import Agreement
from tests.executor.models.test_encoder_decoders import Engine, config_of

MODEL_TYPES = ("vision-encoder-decoder",)

START, _VOCAB_SIZE, _NUM_TOKENS, _SIZE, _NUM_ROWS = 2, 199, 12, 32, 17
_PROMPTS = ([START], [START, *range(5, 40)], [START, 7])


def architecture_of(model_type: str) -> str:
    """The library's class that generates text."""
    return transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type]


def write_checkpoint(folder: Path, model_type: str) -> Any:
    """Writes a checkpoint of random weights; returns the library's model of it."""
    encoder = CONFIG_MAPPING["vit"](
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=_SIZE, patch_size=8
    )
    decoder = CONFIG_MAPPING["trocr"](
        d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64, max_position_embeddings=60,
        cross_attention_hidden_size=48, vocab_size=_VOCAB_SIZE, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id = START
    torch.manual_seed(0)
    model = getattr(transformers, architecture_of(model_type))(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.15)
    model.save_pretrained(folder)
    return model.eval()


def measure(folder: Path, reference: Any) -> Agreement:
    """Greedy outputs for three images and prompts of the decoder, computed together.

    Raises:
        ConfigError: the checkpoint is refused.
    """
    engine = Engine(config_of(folder))
    images = torch.randn(len(_PROMPTS), 3, _SIZE, _SIZE, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, logprobs=0, ignore_eos=True)
    requests = []
    for number, (image, prompt) in enumerate(zip(images, _PROMPTS, strict=True)):
        values = image.numpy().tobytes()
        encoder = EncoderInput([], Features(values, 3, _NUM_ROWS, hashlib.sha256(values).digest()))
        requests.append(EngineRequest([SequenceStart(str(number), 0)], prompt, params, encoder=encoder))
    deltas = engine.run(requests)
    found, are_same = [], True
    for number, (image, prompt) in enumerate(zip(images, _PROMPTS, strict=True)):
        output = [token for delta in deltas[str(number)] for token in delta.token_ids]
        ids = torch.tensor([[*prompt, *output[:-1]]])
        with torch.inference_mode():
            logits = reference(pixel_values=image.unsqueeze(0), decoder_input_ids=ids).logits
        expected = logits[0, len(prompt) - 1 :].log_softmax(-1)
        are_same &= output == expected.argmax(-1).tolist()
        for place, delta in enumerate(deltas[str(number)]):
            assert delta.logprobs is not None
            found.append(abs(delta.logprobs[0].logprobs[0] - expected[place, output[place]].item()))
    return Agreement(max(found), are_same)
