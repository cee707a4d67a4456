"""Models whose decoder attends to an encoder of images: tokens and log-probabilities are those of Transformers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError, ParameterError
from quire.frontend.media.torchvision_parts import install
from tests.checkpoints import make_tokenizer
from tests.image_checkpoints import make_image
from tests.servers import ServerProcess
from tests.test_two_encoders import part_of, talk

torch.set_num_threads(1)
install()

NUM_TOKENS = 12
IMAGES = [make_image(70, 45), make_image(37, 91, 1), make_image(20, 20, 2)]
PROMPT = "The page says"
VIT = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32}
SWIN = {
    "image_size": [56, 96], "patch_size": 4, "embed_dim": 12, "depths": [2, 1, 1], "num_heads": [2, 2, 4],
    "window_size": 4,
}  # fmt: skip
MEAN = {"image_mean": [0.5, 0.4, 0.5], "image_std": [0.5, 0.5, 0.3], "do_convert_rgb": True}
SQUARE = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}, **MEAN}
DECODER = {
    "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64,
    "max_position_embeddings": 60,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "trocr": {
        "encoder": ("vit", {**VIT, "patch_size": 8}),
        "decoder": ("trocr", {**DECODER, "cross_attention_hidden_size": 48}),
        "processor": SQUARE,
    },
    "trocr_with_sinusoids": {
        "encoder": ("deit", {**VIT, "patch_size": 16}),
        "decoder": (
            "trocr",
            {
                **DECODER, "use_learned_position_embeddings": False, "layernorm_embedding": False,
                "scale_embedding": True,
            },
        ),
        "processor": SQUARE,
    },
    "donut": {
        "encoder": ("donut-swin", SWIN),
        "decoder": ("mbart", {**DECODER, "scale_embedding": True}),
        "processor": {
            "image_processor_type": "DonutImageProcessor", "size": {"height": 56, "width": 96},
            "do_align_long_axis": False, "do_pad": True, "do_thumbnail": True, **MEAN,
        },
    },
}  # fmt: skip


class Reference:
    """The class of Transformers with random weights, written to a folder.

    Args:
        family: of `FAMILIES`.
    """

    def __init__(self, folder: Path, family: str) -> None:
        facts = FAMILIES[family]
        self.folder, self.is_donut = folder, family == "donut"
        self.tokenizer = make_tokenizer()
        self.tokenizer.chat_template = None
        (kind, encoder), (other, decoder) = facts["encoder"], facts["decoder"]
        ids = {"vocab_size": len(self.tokenizer), "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
        known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
        config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
            known[kind](**encoder), known[other](**decoder, **ids)
        )
        config.decoder_start_token_id, config.eos_token_id, config.pad_token_id = 2, 2, 1
        torch.manual_seed(3)
        self.model: Any = transformers.VisionEncoderDecoderModel(config).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.15)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(facts["processor"]))
        self.processor: Any = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")

    def begin(self, text: str) -> list[int]:
        """The decoder's prompt."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
        return ids if self.is_donut and ids else [2, *ids]

    def logprobs(self, image: Image.Image, token_ids: list[int]) -> torch.Tensor:
        """Log-probabilities behind each token, [num_tokens, vocab_size]."""
        pixels = self.processor(images=[image], return_tensors="pt").pixel_values
        with torch.inference_mode():
            logits = self.model(pixel_values=pixels, decoder_input_ids=torch.tensor([token_ids])).logits
        return logits[0].float().log_softmax(-1)


def check(
    reference: Reference, image: Image.Image, prompt: list[int], token_ids: list[int], found: list[float]
) -> None:
    """Compares an output and its log-probabilities with the library's."""
    expected = reference.logprobs(image, [*prompt, *token_ids])[len(prompt) - 1 : -1]
    assert token_ids == expected.argmax(-1).tolist()
    np.testing.assert_allclose(found, expected.max(-1).values.numpy(), atol=1e-4)


@pytest.mark.turns(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    reference = Reference(tmp_path / "model", family)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True)
    prompts: list[Any] = [{"multi_modal_data": {"image": image}} for image in IMAGES]
    prompts += [{"prompt": PROMPT, "multi_modal_data": {"image": IMAGES[0]}}]
    prompts += [{"encoder_prompt": prompts[1], "decoder_prompt": {"prompt_token_ids": reference.begin(PROMPT)}}]
    with LLM(str(reference.folder), dtype="float32", num_gpu_blocks_override=60) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for wrong, name in [
            ("text alone", "has no image"),
            ({"prompt": "a", "multi_modal_data": {"image": IMAGES[:2]}}, "must be one image"),
            ({"prompt": "a", "multi_modal_data": {"audio": (np.zeros(800), 16000)}}, "has no image"),
            ({"encoder_prompt": {"prompt": "a", "multi_modal_data": {"image": IMAGES[0]}}}, "reads no text"),
        ]:
            with pytest.raises(ParameterError, match=name):
                llm.generate(wrong, params, use_tqdm=False)  # type: ignore[arg-type]
    images, texts = [*IMAGES, IMAGES[0], IMAGES[1]], ["", "", "", PROMPT, PROMPT]
    seen = set()
    for image, text, output in zip(images, texts, outputs, strict=True):
        own = output.outputs[0]
        assert output.prompt_token_ids == reference.begin(text)
        assert own.logprobs is not None
        found = [each[token].logprob for each, token in zip(own.logprobs, own.token_ids, strict=True)]
        check(reference, image, reference.begin(text), list(own.token_ids), found)
        seen.add(tuple(own.token_ids))
    assert len(seen) > 2, "outputs must depend on images to prove anything"


@pytest.fixture(scope="module")
def trocr(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("trocr") / "model", "trocr")


@pytest.fixture(scope="module")
def server(trocr: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(
        tmp_path_factory.mktemp("server"), str(trocr.folder), "--dtype", "float32", "--device", "cpu",
        "--num-gpu-blocks-override", "60", "--tensor-parallel-size", "2",
    )  # fmt: skip
    yield process.wait_until_ready()
    process.stop()


def test_conversations_with_images(trocr: Reference, server: ServerProcess) -> None:
    words = {"type": "text", "text": PROMPT}
    body = {"model": "", "temperature": 0, "max_tokens": NUM_TOKENS, "logprobs": True, "ignore_eos": True}
    body |= {"return_token_ids": True}
    for image, parts, text in [
        (IMAGES[0], [part_of(IMAGES[0])], ""),
        (IMAGES[1], [part_of(IMAGES[1]), words], PROMPT),
        (IMAGES[0], [part_of(IMAGES[0])], ""),
    ]:
        reply = httpx.post(
            f"{server.base_url}/v1/chat/completions", json={**body, "messages": talk(*parts)}, timeout=60
        )
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        found = [each["logprob"] for each in choice["logprobs"]["content"]]
        check(trocr, image, trocr.begin(text), choice["token_ids"], found)
    for wrong, name in [
        (talk(words), "has no image"),
        (talk(part_of(IMAGES[0]), part_of(IMAGES[1])), "sees one image"),
        (talk({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}), "content[0].image_url"),
        (talk({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}), "audio"),
    ]:
        reply = httpx.post(f"{server.base_url}/v1/chat/completions", json={**body, "messages": wrong}, timeout=60)
        assert (reply.status_code, name in reply.text) == (400, True), reply.text
    files = {"file": ("a.wav", b"RIFF", "audio/wav")}
    heard = httpx.post(f"{server.base_url}/v1/audio/transcriptions", files=files, data={"model": ""}, timeout=60)
    assert heard.status_code in (400, 404), heard.text


def test_what_is_not_served_is_refused(trocr: Reference, tmp_path: Path) -> None:
    config = json.loads((trocr.folder / "config.json").read_text())
    with pytest.raises(ConfigError, match="'resnet'"):
        LLM(str(trocr.folder), hf_overrides={"encoder": {**config["encoder"], "model_type": "resnet"}})
