"""Vectors of images by the tower of SigLIP base (224 pixels, patches of 16): images a second, 16 at once.

    python scripts/peers/image_vectors.py make MODEL
    python scripts/peers/image_vectors.py compare MODEL --engines quire:bfloat16 \
        --peers transformers:bfloat16 openvino:bf16 --peer-python VENV/bin/python

`make` writes a checkpoint of random weights. Each engine of `compare` runs in a process of its own, in turn, and reads
arrays [224, 224, 3] of bytes. After a colon: the dtype, and for Quire the format of weights that it makes. The peers'
environment has transformers, torch, pillow and openvino, which converts the library's class.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import turns  # beside this file

NUM_IMAGES, SIDE = 16, 224
WORK = f"{NUM_IMAGES} images, images/s"
VISION = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": SIDE, "patch_size": 16,
}  # fmt: skip
TEXT = {**VISION, "num_hidden_layers": 1, "vocab_size": 1100, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}

Embed = Callable[[list[Any]], int]
"""Maps images to the length of the first one's vector."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="Write the checkpoint.")
    make.add_argument("model", type=Path, help="The folder for it.")
    compare = commands.add_parser("compare", help="Measure engines in turn.")
    compare.add_argument("model", type=Path, help="Folder of the checkpoint.")
    turns.add_options(compare)
    args = parser.parse_args()
    if args.command == "make":
        _make(args.model)
    elif args.measure:
        engine, *settings = args.measure.split(":")
        print(json.dumps(_measure(ENGINES[engine](args.model, *settings))))
    else:
        found = turns.run(args, [__file__, "compare", str(args.model)])
        print(f"| engine | {WORK} |\n|---|---|")
        for name, runs in found.items():
            print(f"| {name} | {statistics.median(run[WORK] for run in runs):.1f} |")


def _measure(embed: Embed) -> dict[str, float]:
    """Returns the best rate of five, after a batch that is not counted. All images differ."""
    import numpy as np

    draw, rates = np.random.default_rng(0), []
    for _ in range(6):
        images = list(draw.integers(0, 256, (NUM_IMAGES, SIDE, SIDE, 3), dtype=np.uint8))
        started = time.perf_counter()
        length = embed(images)
        rates.append(NUM_IMAGES / (time.perf_counter() - started))
        assert length == VISION["hidden_size"]
    return {WORK: max(rates[1:])}


def _quire(model: Path, dtype: str = "auto", quantization: str | None = None) -> Embed:
    from quire import LLM

    llm = LLM(str(model), dtype=dtype, quantization=quantization, max_num_seqs=NUM_IMAGES)

    def embed(images: list[Any]) -> int:
        prompts: list[Any] = [{"prompt": "", "multi_modal_data": {"image": image}} for image in images]
        return len(llm.embed(prompts, use_tqdm=False)[0].outputs.embedding)

    return embed


def _transformers(model: Path, dtype: str = "float32") -> Embed:
    import torch
    from transformers import SiglipModel
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    loaded = SiglipModel.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    processor = SiglipImageProcessorPil.from_pretrained(model)

    def embed(images: list[Any]) -> int:
        with torch.inference_mode():
            pixels = processor(images=images, return_tensors="pt")["pixel_values"]
            found = loaded.get_image_features(pixel_values=pixels.to(loaded.dtype))
        return len(getattr(found, "pooler_output", found)[0])

    return embed


def _openvino(model: Path, precision: str = "f32") -> Embed:
    import openvino
    import torch
    from transformers import SiglipVisionModel
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = SiglipVisionModel.from_pretrained(model, dtype=torch.float32).eval()

        def forward(self, pixels: Any) -> Any:
            return self.tower(pixel_values=pixels).pooler_output

    converted = openvino.convert_model(Pooled(), example_input=torch.zeros(NUM_IMAGES, 3, SIDE, SIDE))
    compiled = openvino.compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": precision})
    processor = SiglipImageProcessorPil.from_pretrained(model)

    def embed(images: list[Any]) -> int:
        pixels = processor(images=images, return_tensors="np")["pixel_values"]
        return len(compiled([pixels])[0][0])

    return embed


ENGINES: dict[str, Callable[..., Embed]] = {"quire": _quire, "transformers": _transformers, "openvino": _openvino}


def _make(folder: Path) -> None:
    """Writes random weights in bfloat16, a tokenizer of words without a meaning, and the processor's settings."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<s>", "</s>", *(f"w{number}" for number in range(1000))]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="w0"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = transformers.SiglipConfig(text_config=TEXT, vision_config=VISION, dtype="bfloat16")
    transformers.SiglipModel(config).save_pretrained(folder)
    half = [0.5, 0.5, 0.5]
    settings = {
        "image_processor_type": "SiglipImageProcessor", "processor_class": "SiglipProcessor", "image_mean": half,
        "image_std": half, "size": {"height": SIDE, "width": SIDE},
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    main()
