"""Adapters of models that read images: of their language model, and by default for requests with an image."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, LoRARequest, SamplingParams
from quire.core.errors import ConfigError, ParameterError
from tests.adapters import random_tensors, save_adapter
from tests.image_checkpoints import make_image, write_checkpoint
from tests.test_images import Reference, check, prompt_of

pytestmark = pytest.mark.turns(4, among="whole systems")

torch.set_num_threads(1)

PARAMS = SamplingParams(temperature=0, max_tokens=5, logprobs=0, ignore_eos=True)
IMAGE = make_image(70, 45)
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 400, "num_gpu_blocks_override": 60, "enable_lora": True, "max_loras": 2,
    "max_lora_rank": 4, "max_num_batched_tokens": 24,
}  # fmt: skip


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_requests_with_an_image_have_the_default_adapter(implementation: str, tmp_path: Path) -> None:
    """Unless they name another; names of the language model's layers have the forms of several libraries."""
    family = "qwen2_vl"
    folder = write_checkpoint(tmp_path / "model", family)
    base, references = Reference(folder, family), [Reference(folder, family) for _ in range(2)]
    paths = []
    for number, reference in enumerate(references):
        tensors = random_tensors(reference._model, number, ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"))
        tensors = {name: each for name, each in tensors.items() if ".language_model." in name}
        with torch.no_grad():
            for name, a in tensors.items():
                if name.endswith("lora_A.weight"):
                    module = reference._model.get_submodule(name.removesuffix(".lora_A.weight"))
                    module.weight += 2 * tensors[name.replace("lora_A", "lora_B")] @ a
        if number:
            tensors = {name.replace("model.language_model.", "language_model.model."): t for name, t in tensors.items()}
        paths.append(str(save_adapter(tmp_path / str(number), tensors)))
    text, plain = prompt_of(family, "What is this? ", " Tell me."), "The quick brown fox jumps over the lazy dog."
    pictured: Any = {"prompt": text, "multi_modal_data": {"image": [IMAGE]}}
    named = LoRARequest("other", 7, paths[1])
    tower = "model.visual.blocks.0.attn.proj"
    weight = base._model.get_submodule(tower).weight
    ones = {
        f"{tower}.lora_A.weight": torch.ones(1, weight.shape[1]),
        f"{tower}.lora_B.weight": torch.ones(len(weight), 1),
    }
    of_tower = LoRARequest("tower", 8, str(save_adapter(tmp_path / "tower", ones, r=1)))
    options = OPTIONS | {"model_impl": implementation, "default_mm_loras": {"image": paths[0]}}
    with LLM(str(folder), **options) as llm:
        for _ in range(2):  # the second time with cached prefixes
            outputs = llm.generate(
                [pictured, pictured, plain, plain], PARAMS, use_tqdm=False, lora_request=[None, named, None, named]
            )
            for output, reference in zip(outputs, [*references, base, references[1]], strict=True):
                has_image = output.prompt != plain
                check(reference, text if has_image else plain, [IMAGE] if has_image else [], output)
        with pytest.raises(ParameterError, match="a layer for images or sounds"):
            llm.generate(plain, PARAMS, lora_request=of_tower)


def test_wrong_defaults_are_refused(tmp_path: Path, checkpoint: Any) -> None:
    for options, message in (
        ({"default_mm_loras": {"picture": "a"}}, "'picture' must be one of image, audio, video"),
        ({"default_mm_loras": {"image": "a"}, "enable_lora": False}, "needs --enable-lora"),
        ({"default_mm_loras": {"image": "a"}}, "reads text alone"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(str(checkpoint("qwen3")), **(OPTIONS | options))
