"""Vectors of conversations and prompts with images: those of Transformers, from servers and from Python."""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import transformers
from PIL import Image

from quire import LLM
from quire.frontend.media.library_processor import load_processor
from tests.image_checkpoints import FAMILIES, make_image, write_checkpoint
from tests.servers import ServerProcess

torch.set_num_threads(1)

IMAGES = [make_image(70, 45), make_image(37, 91, 1)]
MARK = FAMILIES["qwen2_vl"]["placeholder"]
TEXTS = [f"The first: {MARK} and then more", f"{MARK}", "No image at all"]
SIZE = 24


def inputs_of(folder: Path, text: str, images: Sequence[Image.Image]) -> dict[str, Any]:
    """What the library's processor makes, of the model inside if there is one."""
    processor = load_processor(str(folder)).processor
    return dict(processor(images=list(images) or None, text=[text], return_tensors="pt"))


def write_retriever(folder: Path) -> Any:
    """Writes a model for retrieval, with a layer that makes vectors of tokens; returns the library's."""
    inner = write_checkpoint(folder, "qwen2_vl")
    torch.manual_seed(2)
    reader = transformers.AutoModel.from_pretrained(inner, dtype=torch.float32)
    config = transformers.ColQwen2Config(vlm_config=reader.config, embedding_dim=SIZE)
    model = transformers.ColQwen2ForRetrieval(config)
    model.vlm.load_state_dict(reader.state_dict())
    config.architectures = ["ColQwen2ForRetrieval"]
    for path in folder.glob("model*"):
        path.unlink()
    model.save_pretrained(folder)
    for name in ("preprocessor_config.json", "processor_config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, "processor_class": "ColQwen2Processor"}))
    return model.eval()


def test_a_server_embeds_conversations_with_images(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "qwen2_vl")
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    talks, expected = [], []
    for image in IMAGES:
        data = io.BytesIO()
        image.save(data, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
        talks.append([{"role": "user", "content": parts}])
        plain = [{"role": "user", "content": [{"type": "image"}, parts[1]]}]
        text = tokenizer.apply_chat_template(plain, tokenize=False)
        assert "<|image_pad|>" in text
        with torch.inference_mode():
            hidden = model.model(**inputs_of(folder, text, [image])).last_hidden_state[0].mean(dim=0)
        expected.append(torch.nn.functional.normalize(hidden, dim=-1).numpy())
    options = ("--runner", "pooling", "--max-model-len", "200", "--num-gpu-blocks-override", "30")
    chunked = json.dumps({"seq_pooling_type": "MEAN", "enable_chunked_processing": True, "max_embed_len": 4096})
    more = ("--max-num-batched-tokens", "24", "--dtype", "float32", "--device", "cpu", "--pooler-config", chunked)
    server = ServerProcess(tmp_path, str(folder), *options, *more)
    try:
        server.wait_until_ready()
        same = [talks[0], talks[1], talks[0]]
        reply = httpx.post(f"{server.base_url}/v1/embeddings", json={"messages": same}, timeout=60).json()
        assert "data" in reply, reply
        words = {"type": "text", "text": "word " * 300}
        long = [{"role": "user", "content": [talks[0][0]["content"][0], words]}]
        refused = httpx.post(f"{server.base_url}/v1/embeddings", json={"messages": [long]}, timeout=60)
        assert (refused.status_code, "200" in refused.text) == (400, True), refused.text  # a part would lack its image
    finally:
        server.stop()
    found = np.array([each["embedding"] for each in reply["data"]])
    np.testing.assert_allclose(found, np.stack([expected[0], expected[1], expected[0]]), atol=1e-4)


def test_token_vectors_of_a_retriever(tmp_path: Path) -> None:
    reference = write_retriever(tmp_path)
    cases = [(TEXTS[0], IMAGES[:1]), (TEXTS[1], IMAGES[1:]), (TEXTS[2], [])]
    prompts: Any = [
        {"prompt": text, "multi_modal_data": {"image": images}} if images else text for text, images in cases
    ]
    with LLM(
        str(tmp_path), dtype="float32", max_model_len=200, num_gpu_blocks_override=30, max_num_batched_tokens=24
    ) as llm:
        assert list(llm.supported_tasks) == ["token_embed"]
        outputs = llm.embed(prompts, use_tqdm=False)
    for (text, images), output in zip(cases, outputs, strict=True):
        inputs = inputs_of(tmp_path, text, images)
        inputs.pop("mm_token_type_ids", None)
        if images:  # the class unpads one image a text
            inputs["pixel_values"] = inputs["pixel_values"][None]
        with torch.inference_mode():
            expected = reference(**inputs).embeddings[0].numpy()
        assert expected.shape[1] == SIZE
        np.testing.assert_allclose(output.outputs.array, expected, atol=1e-4)
