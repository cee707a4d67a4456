"""Models with an encoder of texts and one of images: vectors of either are those of Transformers."""

import base64
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers.processors import TemplateProcessing

from quire import LLM
from quire.core.errors import ConfigError, ParameterError
from tests.checkpoints import make_tokenizer
from tests.image_checkpoints import make_image
from tests.servers import ServerProcess

torch.set_num_threads(1)

VISION = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
MEAN = {"image_mean": [0.5, 0.4, 0.5], "image_std": [0.5, 0.5, 0.3], "do_convert_rgb": True}
GRID = {"image_size": 30, "patch_size": 8}  # the last pixels are no whole patch
SIGLIP_PROCESSOR = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 30, "width": 30}, **MEAN}
CLIP_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 30}, "crop_size": 30, **MEAN
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "clip": {
        "class": "CLIPModel",
        "text": {"max_position_embeddings": 40, "eos_token_id": "end"},
        "vision": GRID,
        "whole": {"projection_dim": 24},
        "processor": CLIP_PROCESSOR,
    },
    "clip_of_openai": {
        "class": "CLIPModel",
        "text": {"max_position_embeddings": 40, "eos_token_id": 2},
        "vision": GRID,
        "whole": {"projection_dim": 24},
        "processor": CLIP_PROCESSOR,
    },
    "siglip": {
        "class": "SiglipModel",
        "text": {"max_position_embeddings": 32, "projection_size": 48},
        "vision": GRID,
        "processor": SIGLIP_PROCESSOR,
    },
    "siglip2": {
        "class": "Siglip2Model",
        "text": {"max_position_embeddings": 32, "projection_size": 48},
        "vision": {"patch_size": 8, "num_patches": 16},
        "processor": {
            "image_processor_type": "Siglip2ImageProcessor", "patch_size": 8, "max_num_patches": 20, **MEAN
        },
    },
}  # fmt: skip
TEXTS = ["A gathering of pages", "no", "two quires of paper, and one of vellum"]
IMAGES = [make_image(70, 45), make_image(37, 91, 1)]


class Reference:
    """The class of Transformers with random weights, written to a folder.

    Args:
        family: of `FAMILIES`.
    """

    def __init__(self, folder: Path, family: str) -> None:
        facts = FAMILIES[family]
        self.folder = folder
        tokenizer = make_tokenizer()
        tokenizer.add_special_tokens({"eos_token": "<|end|>"})  # the greatest id
        self.end_id = int(tokenizer.convert_tokens_to_ids("<|end|>"))
        begin_id = int(tokenizer.convert_tokens_to_ids("<|endoftext|>"))
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A <|end|>",
            special_tokens=[("<|endoftext|>", begin_id), ("<|end|>", self.end_id)],
        )
        self.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|end|>", pad_token="<|endoftext|>",
            clean_up_tokenization_spaces=False,
        )  # fmt: skip
        own = {name: self.end_id if value == "end" else value for name, value in facts["text"].items()}
        text = {**TEXT, **own, "vocab_size": len(tokenizer)}
        kind = getattr(transformers, facts["class"].replace("Model", "Config"))
        config = kind(text_config=text, vision_config={**VISION, **facts["vision"]}, **facts.get("whole", {}))
        torch.manual_seed(1)
        self.model: Any = getattr(transformers, facts["class"])(config).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.1)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(facts["processor"]))
        self.length = text["max_position_embeddings"] if "siglip" in family else 0
        self.processor: Any = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")

    def of_ids(self, token_ids: list[int]) -> np.ndarray:
        """The vector of a text."""
        pad = [int(self.tokenizer.pad_token_id)] * (self.length - len(token_ids))  # type: ignore[arg-type]
        return _vector(self.model.get_text_features, input_ids=torch.tensor([token_ids + pad]))

    def of_text(self, text: str) -> np.ndarray:
        """The vector of a text."""
        return self.of_ids(self.tokenizer(text)["input_ids"])  # type: ignore[arg-type]

    def of_image(self, image: Image.Image) -> np.ndarray:
        """The vector of an image."""
        return _vector(self.model.get_image_features, **self.processor(images=[image], return_tensors="pt"))


def _vector(function: Callable[..., Any], **arguments: Any) -> np.ndarray:
    with torch.inference_mode():
        features = function(**arguments)
    found = features if isinstance(features, torch.Tensor) else features.pooler_output
    return torch.nn.functional.normalize(found[0], dim=-1).numpy()


def part_of(image: Image.Image) -> dict[str, Any]:
    data = io.BytesIO()
    image.save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def talk(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("clip") / "model", "clip")


@pytest.fixture(scope="module")
def server(clip: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(
        tmp_path_factory.mktemp("server"), str(clip.folder), "--dtype", "float32", "--device", "cpu"
    )  # fmt: skip
    yield process.wait_until_ready()
    process.stop()


def ask(server: ServerProcess, route: str = "/v1/embeddings", **body: Any) -> httpx.Response:
    return httpx.post(f"{server.base_url}{route}", json=body, timeout=60)


def vectors(server: ServerProcess, **body: Any) -> np.ndarray:
    reply = ask(server, **body)
    assert reply.status_code == 200, reply.text
    return np.array([each["embedding"] for each in reply.json()["data"]])


def test_a_server_embeds_texts_and_images(clip: Reference, server: ServerProcess) -> None:
    np.testing.assert_allclose(vectors(server, input=TEXTS), [clip.of_text(text) for text in TEXTS], atol=1e-5)
    words = {"type": "text", "text": TEXTS[0]}
    talks = [talk(part_of(IMAGES[0])), talk(words), talk(part_of(IMAGES[1])), talk(part_of(IMAGES[0]))]
    expected = [clip.of_image(IMAGES[0]), clip.of_text(TEXTS[0]), clip.of_image(IMAGES[1]), clip.of_image(IMAGES[0])]
    np.testing.assert_allclose(vectors(server, messages=talks), expected, atol=1e-5)
    plain = [{"role": "user", "content": TEXTS[0]}]
    np.testing.assert_allclose(vectors(server, messages=plain), expected[1:2], atol=1e-5)
    pooled = ask(server, "/pooling", messages=talk(part_of(IMAGES[1]))).json()
    np.testing.assert_allclose(pooled["data"][0]["data"], expected[2], atol=1e-5)


def test_a_text_ends_at_its_first_end_token(clip: Reference, server: ServerProcess) -> None:
    ids = clip.tokenizer(TEXTS[0])["input_ids"]
    more = [[*ids, 7, 8, clip.end_id, 9], [clip.end_id, 5], [5, 6, clip.end_id]]  # type: ignore[misc]
    np.testing.assert_allclose(vectors(server, input=more), [clip.of_ids(each) for each in more], atol=1e-5)
    [padded] = vectors(server, input=TEXTS[0], padding="max_length")
    np.testing.assert_allclose(padded, clip.of_text(TEXTS[0]), atol=1e-5)


def test_what_is_neither_text_nor_image_is_refused(clip: Reference, server: ServerProcess) -> None:
    image, words = part_of(IMAGES[0]), {"type": "text", "text": "beside"}
    for messages, name in [
        (talk(image, words), "a text beside an image"),
        (talk(image, image), "2 images"),
        (talk({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}), "content[0].image_url"),
        (talk({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}), "audio"),
    ]:
        reply = ask(server, messages=messages)
        assert (reply.status_code, name in reply.text) == (400, True), reply.text
    long = ask(server, input="word " * 60)
    assert (long.status_code, "40" in long.text) == (400, True), long.text
    assert ask(server, "/v1/completions", prompt="a", model="").status_code == 400
    np.testing.assert_allclose(vectors(server, input=TEXTS[1]), [clip.of_text(TEXTS[1])], atol=1e-5)


@pytest.mark.turns(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_in_a_program(family: str, tmp_path: Path) -> None:
    reference = Reference(tmp_path / "model", family)
    prompts: list[Any] = [*TEXTS, *({"multi_modal_data": {"image": image}} for image in IMAGES)]
    expected = [*map(reference.of_text, TEXTS), *map(reference.of_image, IMAGES)]
    with LLM(str(reference.folder), dtype="float32") as llm:
        assert llm.supported_tasks[0] == "embed"
        outputs = llm.embed(prompts, use_tqdm=False)
        [empty] = llm.embed({"prompt": "", "multi_modal_data": {"image": [IMAGES[0]]}}, use_tqdm=False)
        with pytest.raises(ParameterError, match="beside an image"):
            llm.embed({"prompt": "and a text", "multi_modal_data": {"image": IMAGES[0]}}, use_tqdm=False)
    np.testing.assert_allclose([each.outputs.embedding for each in outputs], expected, atol=1e-5)
    np.testing.assert_allclose(empty.outputs.embedding, expected[len(TEXTS)], atol=1e-5)


def test_ranks_divide_both_encoders(clip: Reference) -> None:
    with LLM(str(clip.folder), dtype="float32", tensor_parallel_size=2) as llm:
        outputs = llm.embed([TEXTS[0], {"multi_modal_data": {"image": IMAGES[1]}}], use_tqdm=False)
    expected = [clip.of_text(TEXTS[0]), clip.of_image(IMAGES[1])]
    np.testing.assert_allclose([each.outputs.embedding for each in outputs], expected, atol=1e-5)


def test_options_that_such_models_cannot_heed(clip: Reference, tmp_path: Path) -> None:
    for options in (
        {"convert": "classify"},
        {"enable_prompt_embeds": True},
        {"pooler_config": {"pooling_type": "CLS"}},
    ):
        with pytest.raises(ConfigError):
            LLM(str(clip.folder), **options)  # type: ignore[arg-type]
    siglip = Reference(tmp_path / "model", "siglip")
    with pytest.raises(ConfigError, match="filled up to 32 tokens"):
        LLM(str(siglip.folder), max_model_len=12)
