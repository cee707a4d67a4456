"""Towers for images: log-probabilities within 1e-4 of the library's, with several images of odd sizes."""

import functools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from quire.executor.models.transformers import TransformersModel
from quire.frontend.media.images.reader import ImageReader
from quire.frontend.media.messages import DescribeImages, ItemFacts, Pixels, ReadImage, ReadyItem
from quire.frontend.media.placing import expand, expand_ids, place, with_added_ids, with_additions
from quire.frontend.media.reader import ReadItem
from tests.executor.media_steps import MediaPrompt
from tests.executor.paged_driver import load_model, transformers_spec
from tests.image_checkpoints import FAMILIES, make_image, write_checkpoint

torch.set_num_threads(1)

IMAGES = [make_image(70, 45), make_image(37, 91, 1), make_image(120, 33, 2)]
WITHOUT_TORCHVISION = [
    name for name in FAMILIES if FAMILIES[name]["processor"]["processor_class"] != "PixtralProcessor"
]


def process(reader: ImageReader, image: Image.Image) -> ReadItem:
    made = reader.read(ReadImage(image.tobytes(), Pixels("RGB", *image.size), 0))
    assert isinstance(made, ReadyItem)
    digest = image.tobytes()[:32]
    return ReadItem("image", "image", digest, made.text, made.num_rows, made.facts, made.arrays)


@pytest.mark.turns(4)
@pytest.mark.parametrize("family", WITHOUT_TORCHVISION)
def test_logprobs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, family)
    reader = ImageReader(str(folder))
    facts = reader.read(DescribeImages())
    assert isinstance(facts, ItemFacts)
    assert not facts.fault
    text = FAMILIES[family]["placeholder"].join(["The first: ", " and then ", ", a third ", " which is more."])
    inputs: Any = reader.processor(images=IMAGES, text=[text], return_tensors="pt")
    token_ids = inputs["input_ids"][0].tolist()
    items = [process(reader, image) for image in IMAGES]
    tokenizer = reader.processor.tokenizer
    whole = with_additions(text, facts.placeholder, facts.additions)
    assert (
        tokenizer.encode(expand(whole, items, {"image": facts.placeholder}, ""), add_special_tokens=False) == token_ids
    )
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    ids = with_added_ids(encode(text), encode, facts.placeholder, facts.additions)
    expanded = expand_ids(ids, items, encode, {"image": facts.placeholder}, "")
    assert tokenizer.decode(expanded) == tokenizer.decode(token_ids)
    placed = place(token_ids, items, {"image": {facts.token_id, *facts.border_ids}}, "")
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(**inputs).logits[0].log_softmax(dim=-1)

    model = load_model(msgspec.structs.replace(transformers_spec(folder)), reads_media=True)
    assert isinstance(model, TransformersModel)
    assert model.media is not None
    assert "image" in model.media.modalities
    assert model.media.sees_both_ways == (family == "gemma3")
    prompt = MediaPrompt(model, token_ids, placed)
    logits = prompt.logits((9, 20, 31, 50))
    torch.testing.assert_close(logits.log_softmax(dim=-1), expected, atol=1e-4, rtol=0)
    if prompt.places is not None:  # what follows is as far from the images as the library says
        assert int(prompt.places.max()) < len(token_ids)
