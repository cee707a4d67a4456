"""Outputs of models with an encoder and a decoder by several engines: output tokens a second of 16 inputs at once.

    python scripts/peers/translations.py make MODELS
    python scripts/peers/translations.py compare MODELS/bart-base-shape --engines quire:float32 quire:bfloat16:int8 \
        --peers transformers:float32 ctranslate2:float32 ctranslate2:int8 --peer-python VENV/bin/python

`make` writes two checkpoints of random weights, of the shapes of BART-base and T5-small, and needs this environment's
transformers. Each engine of `compare` runs in a process of its own, in turn. After a colon: the dtype, the format of
weights that Quire makes, and the bits of its activations; CTranslate2 has one for all. The peers' environment has the
packages ctranslate2 and transformers with torch, of versions that fit each other. All outputs are greedy and of full
length.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import turns  # beside this file

NUM_INPUTS, INPUT_LENGTH, OUTPUT_LENGTH = 16, 256, 64
WORK = f"{NUM_INPUTS} × {INPUT_LENGTH}/{OUTPUT_LENGTH}, output tokens/s"
NUM_SPECIAL = 4  # start, padding, end, unknown

Write = Callable[[list[list[int]]], list[int]]
"""Maps token ids of inputs to the lengths of the outputs."""

SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bart-base-shape": (
        "bart",
        "BartForConditionalGeneration",
        {
            "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
            "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "vocab_size": 50265,
            "max_position_embeddings": 1024, "decoder_start_token_id": 2, "forced_eos_token_id": None,
            "normalize_before": False, "normalize_embedding": True,
        },
    ),
    "t5-small-shape": (
        "t5",
        "T5ForConditionalGeneration",
        {
            "d_model": 512, "d_kv": 64, "num_layers": 6, "num_heads": 8, "d_ff": 2048, "vocab_size": 32128,
            "n_positions": 512, "decoder_start_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
        },
    ),
}  # fmt: skip
"""Folder → (model type, class, settings)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="Write the checkpoints.")
    make.add_argument("models", type=Path, help="The folder for them.")
    compare = commands.add_parser("compare", help="Measure engines in turn.")
    compare.add_argument("model", type=Path, help="Folder of a checkpoint.")
    turns.add_options(compare)
    args = parser.parse_args()
    if args.command == "make":
        for name in SHAPES:
            _make(args.models / name, *SHAPES[name])
    elif args.measure:
        print(json.dumps(_measure(args.model, _start(args.measure, args.model))))
    else:
        _compare(args)


def _compare(args: argparse.Namespace) -> None:
    found = turns.run(args, [__file__, "compare", str(args.model)])
    print(f"| {args.model.name} | {WORK} |\n|---|---|")
    for name, rates in found.items():
        print(f"| {name} | {statistics.median(rates):.0f} |")


def _measure(model: Path, write: Write) -> float:
    """Returns the best rate of three batches, after one that is not counted. All inputs differ."""
    vocab_size, draw = json.loads((model / "config.json").read_text())["vocab_size"], random.Random(0)

    def inputs() -> list[list[int]]:
        return [[draw.randrange(NUM_SPECIAL, vocab_size) for _ in range(INPUT_LENGTH)] for _ in range(NUM_INPUTS)]

    write(inputs())
    rates = []
    for _ in range(3):
        batch = inputs()
        started = time.perf_counter()
        lengths = write(batch)
        rates.append(sum(lengths) / (time.perf_counter() - started))
        if lengths != [OUTPUT_LENGTH] * NUM_INPUTS:
            raise SystemExit(f"outputs of {lengths} tokens instead of {OUTPUT_LENGTH}")
    return max(rates)


def _start(name: str, model: Path) -> Write:
    engine, *settings = name.split(":")
    return ENGINES[engine](model, *settings)


def _quire(model: Path, dtype: str = "auto", quantization: str | None = None, bits: str = "") -> Write:
    from quire import LLM, SamplingParams

    if bits:
        os.environ["QUIRE_CPU_ACTIVATION_BITS"] = bits
    llm = LLM(str(model), dtype=dtype, quantization=quantization, skip_tokenizer_init=True, max_num_seqs=NUM_INPUTS)
    sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_LENGTH, ignore_eos=True, detokenize=False)

    def write(inputs: list[list[int]]) -> list[int]:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in inputs], sampling, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return write


def _transformers(model: Path, dtype: str = "float32") -> Write:
    import torch
    from transformers import AutoModelForSeq2SeqLM

    loaded = AutoModelForSeq2SeqLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def write(inputs: list[list[int]]) -> list[int]:
        with torch.inference_mode():
            found = loaded.generate(
                torch.tensor(inputs), do_sample=False, num_beams=1, min_new_tokens=OUTPUT_LENGTH,
                max_new_tokens=OUTPUT_LENGTH,
            )  # fmt: skip
        return [len(row) - 1 for row in found]

    return write


def _ctranslate2(model: Path, compute_type: str = "float32") -> Write:
    import ctranslate2

    with tempfile.TemporaryDirectory() as folder:
        converter = ctranslate2.converters.TransformersConverter(str(model))
        converter.convert(folder, force=True)
        translator = ctranslate2.Translator(folder, device="cpu", compute_type=compute_type)

    def write(inputs: list[list[int]]) -> list[int]:
        found = translator.translate_batch(
            [_words(ids) for ids in inputs], beam_size=1, max_batch_size=NUM_INPUTS,
            min_decoding_length=OUTPUT_LENGTH, max_decoding_length=OUTPUT_LENGTH,
        )  # fmt: skip
        return [len(each.hypotheses[0]) for each in found]

    return write


ENGINES: dict[str, Callable[..., Write]] = {
    "quire": _quire,
    "transformers": _transformers,
    "ctranslate2": _ctranslate2,
}


def _words(token_ids: Sequence[int]) -> list[str]:
    return [f"w{token_id}" for token_id in token_ids]


def _make(folder: Path, kind: str, architecture: str, settings: dict[str, Any]) -> None:
    """Writes a checkpoint of random weights, and a tokenizer with a word a token, for CTranslate2's converter."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    model = getattr(transformers, architecture)(transformers.AutoConfig.for_model(kind, **settings))
    model.save_pretrained(folder)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    words = special + _words(range(NUM_SPECIAL, settings["vocab_size"]))
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


if __name__ == "__main__":
    main()
