"""Towers for images: log-probabilities within 1e-4 of the library's, with several images of odd sizes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from quire.core.wire.media import MediaItem, spans_of
from quire.executor.models.base import InputEmbeds
from quire.executor.models.transformers import TransformersModel
from quire.frontend.media.images.reader import ImageReader
from quire.frontend.media.messages import DescribeImages, ItemFacts, Pixels, ReadImage, ReadyItem
from quire.frontend.media.placing import expand, place
from quire.frontend.media.reader import ReadItem
from tests.executor.paged_driver import PagedDriver, load_model, transformers_spec
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


class Step:
    """One prompt's chunks as a worker computes them."""

    def __init__(self, model: TransformersModel, token_ids: list[int], items: Sequence[MediaItem], size: int) -> None:
        self.driver = PagedDriver(model, 1, size)
        self.model = model
        self.token_ids = token_ids
        self.items = items
        with torch.inference_mode():
            self.rows = [model.encode_media(item) for item in items]
            self.places = model.media_positions(token_ids, items)
        assert model.media is not None
        if model.media.sees_both_ways:
            self.driver.prefix_spans = {0: spans_of(items)}
        self.driver.prompt_lens = {0: len(token_ids)}

    def run(self, start: int, end: int) -> torch.Tensor:
        places, rows, deep = [], [], []
        for item, made in zip(self.items, self.rows, strict=True):
            positions = np.concatenate([np.arange(*run) for run in item.runs])
            own = np.flatnonzero((positions >= start) & (positions < end))
            places.append(torch.from_numpy(positions[own] - start))
            rows.append(made.rows[own])
            if made.deep is not None:
                deep.append(made.deep[:, own])
        embeds = InputEmbeds(torch.cat(places), torch.cat(rows), torch.cat(deep, 1) if deep else None) if rows else None
        self.driver.rotary_positions = None if self.places is None else self.places[:, start:end]
        return self.driver.step({0: self.token_ids[start:end]}, input_embeds=embeds)[0]


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
    assert (
        tokenizer.encode(expand(text, items, {"image": facts.placeholder}, ""), add_special_tokens=False) == token_ids
    )
    placed = place(token_ids, items, {"image": facts.token_id}, "")
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(**inputs).logits[0].log_softmax(dim=-1)

    model = load_model(msgspec.structs.replace(transformers_spec(folder)), reads_media=True)
    assert isinstance(model, TransformersModel)
    assert model.media is not None
    assert list(model.media.modalities) == ["image"]
    assert model.media.sees_both_ways == (family == "gemma3")
    spans = spans_of(placed) if model.media.sees_both_ways else []
    cuts = [0, *(cut for cut in (9, 20, 31, 50) if cut < len(token_ids) and not any(a < cut < b for a, b in spans))]
    step = Step(model, token_ids, placed, len(token_ids))
    parts = [step.run(start, end) for start, end in zip(cuts, [*cuts[1:], len(token_ids)], strict=True)]
    torch.testing.assert_close(torch.cat(parts).log_softmax(dim=-1), expected, atol=1e-4, rtol=0)
    if step.places is not None:  # what follows is as far from the images as the library says
        assert int(step.places.max()) < len(token_ids)
