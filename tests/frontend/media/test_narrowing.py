"""What a tower reads in 16 bits travels in 16 bits: the numbers are those that the tower would round to."""

import asyncio
from pathlib import Path

import torch

from quire.executor.layers.media_arrays import tensor_of
from quire.frontend.media.decoder import MediaDecoder
from quire.frontend.media.messages import FloatType, Pixels, ReadImage, ReadyItem
from tests.image_checkpoints import make_image, write_checkpoint


def test_pixels_are_rounded_to_the_models_dtype(tmp_path: Path) -> None:
    folder, image = write_checkpoint(tmp_path, "qwen2_vl"), make_image(70, 45)

    async def read(dtype: FloatType) -> ReadyItem:
        decoder = MediaDecoder(str(folder), dtype=dtype)
        try:
            question = ReadImage(image.tobytes(), Pixels("RGB", *image.size), 10**6)
            return await decoder.ask(question, ReadyItem, num_bytes=10**4, param="image")
        finally:
            decoder.close()

    whole = asyncio.run(read("float32"))
    expected = tensor_of(whole.arrays["pixel_values"])
    assert expected.dtype == torch.float32
    dtypes: tuple[FloatType, ...] = ("bfloat16", "float16")
    for dtype in dtypes:
        item = asyncio.run(read(dtype))
        made = tensor_of(item.arrays["pixel_values"])
        assert torch.equal(made, expected.to(getattr(torch, dtype)))
        assert made.dtype == getattr(torch, dtype)
        assert item.facts == whole.facts
