"""Models that read images, in real engines: log-probabilities are those of Transformers, whatever happens beside."""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from quire import LLM, AsyncLLM, SamplingParams
from quire.core.errors import ParameterError
from quire.frontend.media.images.reader import ImageReader
from tests.image_checkpoints import FAMILIES, make_image, write_checkpoint

pytestmark = pytest.mark.turns(4, among="whole systems")

torch.set_num_threads(1)

TOLERANCE = 1e-4
IMAGES = [make_image(70, 45), make_image(37, 91, 1), make_image(120, 33, 2)]
"""Of odd sizes."""


class Reference:
    """The library's processor and model of a checkpoint."""

    def __init__(self, folder: Path, family: str) -> None:
        self._family = family
        self._reader = ImageReader(str(folder))
        self._model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    def inputs(self, text: str, images: Sequence[Image.Image]) -> Any:
        return self._reader.processor(images=list(images) or None, text=[text], return_tensors="pt")

    @torch.inference_mode()
    def rows(self, image: Image.Image) -> Any:
        """What the tower makes of an image, as programs give it."""
        inputs = self.inputs(FAMILIES[self._family]["placeholder"], [image])
        names = ("pixel_values", "image_grid_thw", "image_sizes")
        made = self._model.model.get_image_features(**{name: inputs[name] for name in names if name in inputs})
        parts = made.pooler_output
        while isinstance(parts, list | tuple):
            [parts] = parts
        rows = parts.flatten(0, -2)
        if "image_grid_thw" not in inputs:
            return rows
        features = getattr(made, "deepstack_features", None) or []
        deep = [each if isinstance(each, torch.Tensor) else torch.cat(list(each)) for each in features]
        return {"image_embeds": torch.cat([rows, *deep], dim=1), "image_grid_thw": inputs["image_grid_thw"][0]}

    @torch.inference_mode()
    def logprobs(self, text: str, images: Sequence[Image.Image], output: Sequence[int] = ()) -> tuple[list[int], Any]:
        """(token ids of the prompt, log-probabilities [num_tokens, vocab] of it and `output`)."""
        inputs = dict(self.inputs(text, images))
        token_ids = inputs["input_ids"][0].tolist()
        for name, filler in (
            ("input_ids", list(output)),
            ("attention_mask", [1] * len(output)),
            ("token_type_ids", [0] * len(output)),
            ("mm_token_type_ids", [0] * len(output)),
        ):
            if name in inputs:
                inputs[name] = torch.cat((inputs[name], torch.tensor([filler], dtype=inputs[name].dtype)), dim=1)
        return token_ids, self._model(**inputs).logits[0].log_softmax(dim=-1)


def prompt_of(family: str, *texts: str) -> str:
    """Texts with an image between each two."""
    return FAMILIES[family]["placeholder"].join(texts)


@pytest.fixture(scope="module", params=["llava", "qwen2_vl"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, LLM, Reference]]:
    family = request.param
    folder = write_checkpoint(tmp_path_factory.mktemp("images") / family, family)
    with LLM(
        str(folder), dtype="float32", max_model_len=400, num_gpu_blocks_override=30, max_num_batched_tokens=24,
        max_num_seqs=8, enable_prefix_caching=True,
    ) as llm:  # fmt: skip
        yield family, llm, Reference(folder, family)


def check(reference: Reference, text: str, images: Sequence[Image.Image], output: Any, number: int = 0) -> None:
    tokens = list(output.outputs[number].token_ids)
    token_ids, expected = reference.logprobs(text, images, tokens)
    assert list(output.prompt_token_ids) == token_ids
    for position, found in enumerate(output.outputs[number].logprobs):
        row = expected[len(token_ids) - 1 + position]
        assert found[tokens[position]].logprob == pytest.approx(float(row[tokens[position]]), abs=TOLERANCE)
    for position, found in enumerate(output.prompt_logprobs or ()):
        if found is not None:
            token = token_ids[position]
            assert found[token].logprob == pytest.approx(float(expected[position - 1, token]), abs=TOLERANCE)


def test_logprobs_are_those_of_transformers(served: tuple[str, LLM, Reference]) -> None:
    """Several images of odd sizes beside text alone, in chunks that end inside images."""
    family, llm, reference = served
    cases = [
        (prompt_of(family, "The first: ", " and then ", " which is more."), IMAGES[:2]),
        (prompt_of(family, "What is this? ", " Tell me."), IMAGES[2:]),
        ("The quick brown fox jumps over the lazy dog.", []),
        (prompt_of(family, "", ""), IMAGES[:1]),
    ]
    prompts = [{"prompt": text, "multi_modal_data": {"image": images}} if images else text for text, images in cases]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    for (text, images), output in zip(cases, llm.generate(prompts, params, use_tqdm=False), strict=True):
        check(reference, text, images, output)


def test_a_prefix_is_cached_up_to_a_place_inside_an_image(served: tuple[str, LLM, Reference]) -> None:
    """Two prompts share a first image and a part of the second's tokens: what follows an image depends on it."""
    family, llm, reference = served
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=0, ignore_eos=True)
    begin = "A prompt that begins with words and goes on: "
    cases = [(prompt_of(family, begin, " now", " end"), [IMAGES[0], image]) for image in (IMAGES[1], IMAGES[2])]
    for text, images in [*cases, cases[0]]:
        [output] = llm.generate(
            {"prompt": text, "multi_modal_data": {"image": images}}, params, use_tqdm=False
        )  # fmt: skip
        check(reference, text, images, output)
    assert output.num_cached_tokens >= 16 * (len(output.prompt_token_ids) // 16 - 1)


def test_conversations_have_images_and_calls_say_how_they_are_read(served: tuple[str, LLM, Reference]) -> None:
    family, llm, reference = served
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=0, ignore_eos=True)
    talks: Any = [
        [{"role": "user", "content": [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "What?"}]}]
        for image in IMAGES[:2]
    ]
    outputs = llm.chat([*talks, [{"role": "user", "content": "Hi"}]], params, use_tqdm=False)
    for images, output in zip((IMAGES[:1], IMAGES[1:2], []), outputs, strict=True):
        check(reference, output.prompt or "", images, output)
    if family != "qwen2_vl":
        return
    large: Any = {"prompt": prompt_of(family, "What? ", ""), "multi_modal_data": {"image": make_image(112, 112)}}
    small = {"max_pixels": 56 * 56}
    sized = [
        *llm.generate([large, {**large, "mm_processor_kwargs": small}, large], params),
        *llm.generate([large, {**large, "mm_processor_kwargs": {}}], params, mm_processor_kwargs=small),
    ]
    lengths = [len(output.prompt_token_ids) for output in sized]
    assert [lengths[0] - each for each in lengths] == [0, 12, 0, 12, 12]
    for kwargs, message in (({"sizes": 1}, "'sizes', which this model's"), ({"max_pixels": object()}, "plain values")):
        with pytest.raises(ParameterError, match=message) as refusal:
            llm.generate(large, params, mm_processor_kwargs=kwargs)
        assert refusal.value.param == "mm_processor_kwargs"


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_preempted_prompts_with_images_go_on(family: str, tmp_path: Path) -> None:
    """Prompts begin again in chunks that end inside images, whose rows the tower has to make again."""
    folder = write_checkpoint(tmp_path / family, family)
    reference, text = Reference(folder, family), prompt_of(family, "What is ", " and ", "?")
    with LLM(
        str(folder), dtype="float32", max_model_len=112, num_gpu_blocks_override=14, max_num_batched_tokens=24,
        max_num_seqs=4, enable_prefix_caching=False, disable_log_stats=False,
    ) as llm:  # fmt: skip
        params = SamplingParams(
            n=4, seed=1, max_tokens=56, logprobs=0, ignore_eos=True, allowed_token_ids=list(range(3, 200))
        )  # no placeholder, of which the library would want an image
        prompts: Any = [{"prompt": text, "multi_modal_data": {"image": pair}} for pair in (IMAGES[:2], IMAGES[1:])]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(output.metrics is not None for output in outputs)
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    for pair, output in zip((IMAGES[:2], IMAGES[1:]), outputs, strict=True):
        for number in range(4):
            check(reference, text, pair, output, number)


def test_two_ranks_read_images_as_one_does(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "llava", "llava")
    reference, text = Reference(folder, "llava"), prompt_of("llava", "What is ", " and ", "?")
    with LLM(
        str(folder), dtype="float32", max_model_len=200, num_gpu_blocks_override=40, max_num_batched_tokens=24,
        tensor_parallel_size=2,
    ) as llm:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, prompt_logprobs=0, ignore_eos=True)
        prompt: Any = {"prompt": text, "multi_modal_data": {"image": IMAGES[:2]}}
        check(reference, text, IMAGES[:2], llm.generate(prompt, params, use_tqdm=False)[0])


def test_streams_with_images_go_on_after_a_crash(tmp_path: Path) -> None:
    """The next engine makes the rows of images again, those of a prompt that was being computed as well."""
    folder = write_checkpoint(tmp_path / "llava", "llava")
    reference = Reference(folder, "llava")
    cases = [
        (prompt_of("llava", "What is this? ", ""), IMAGES[:1]),
        (prompt_of("llava", "The first: ", " and then ", "."), IMAGES[1:]),
        (prompt_of("llava", "Once again " * 12, " and ", " and ", "?"), IMAGES),
    ]
    params = SamplingParams(
        temperature=0, max_tokens=40, logprobs=0, ignore_eos=True, allowed_token_ids=list(range(3, 200))
    )

    async def run() -> list[Any]:
        engine = AsyncLLM.from_engine_args(
            model=str(folder), dtype="float32", max_model_len=400, num_gpu_blocks_override=100,
            max_num_batched_tokens=24, max_num_seqs=8,
        )  # fmt: skip
        killed = asyncio.Event()
        try:
            await engine.start()

            async def stream(number: int) -> Any:
                text, images = cases[number]
                prompt: Any = {"prompt": text, "multi_modal_data": {"image": images}}
                async for output in engine.generate(prompt, params, str(number)):
                    if not killed.is_set() and len(output.outputs[0].token_ids) > 2:
                        killed.set()
                        os.kill(engine.client.engine_pids[0] or 0, signal.SIGKILL)
                return output

            outputs = await asyncio.gather(*map(stream, range(len(cases))))
            assert engine.client.status().engine.restarts == 1
            return outputs
        finally:
            await engine.aclose()

    for (text, images), output in zip(cases, asyncio.run(run()), strict=True):
        assert len(output.outputs[0].token_ids) == 40
        check(reference, text, images, output)


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_rows_of_a_tower_stand_for_their_image(family: str, tmp_path: Path) -> None:
    """Rows that Transformers' tower makes, of the first layers as well, give the log-probabilities of the image."""
    folder = write_checkpoint(tmp_path / family, family)
    reference = Reference(folder, family)
    text = prompt_of(family, "The first: ", " and then ", " which is more.")
    prompts: list[Any] = [{"prompt": text, "multi_modal_data": {"image": IMAGES[:2]}}]
    given = [reference.rows(image) for image in IMAGES[:2]]
    prompts.append({"prompt": text, "multi_modal_data": {"image": given}})
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 200, "num_gpu_blocks_override": 40}
    with LLM(str(folder), enable_mm_embeds=True, max_num_batched_tokens=24, **options) as llm:
        for output in llm.generate(prompts, params, use_tqdm=False):
            check(reference, text, IMAGES[:2], output)
        whole = given[0]["image_embeds"] if isinstance(given[0], dict) else given[0]
        for rows, message in ((whole[:, :-1], "the shape"), (whole * float("nan"), "NaN"), (whole[:0], "the shape")):
            value = {**given[0], "image_embeds": rows} if isinstance(given[0], dict) else rows
            with pytest.raises(ParameterError, match=rf"multi_modal_data.image\[0\] .*{message}"):
                llm.generate({"prompt": text, "multi_modal_data": {"image": [value, value]}}, params, use_tqdm=False)
        if isinstance(given[0], dict):
            num_patches = 4 * len(whole)
            for grid, message in (
                ([1, 1, num_patches], "no multiple of 2"),
                ([65552, 61681, 4562284561], "no multiple of 2"),
                ([2**32, 2**32, 2], f"has {len(whole)} rows"),  # whose product is 0 in 64 bits
            ):
                value = {"image_embeds": whole, "image_grid_thw": torch.tensor([grid])}
                with pytest.raises(ParameterError, match=message):
                    llm.generate({"prompt": text, "multi_modal_data": {"image": [value]}}, params, use_tqdm=False)
