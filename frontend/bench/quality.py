"""`quire bench quality`: the effect of quantized weights or a quantized KV cache on the likelihood of a user's text."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from rich import box
from rich.table import Table

from quire.core.config.engine_args import EngineArgs
from quire.core.errors import ConfigError
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.bench.figures import write_json
from quire.frontend.bench.sweep.grid import Setting, read_settings
from quire.frontend.bench.tables import show
from quire.frontend.flags.parser import CommandParser, add_engine_options
from quire.frontend.flags.ranges import COUNT
from quire.frontend.llm import LLM

WEIGHTS = ("int8", "fp8", "fp8_per_tensor", "fp8_per_block", "mxfp8", "int4", "bitsandbytes", "mxfp4")
SETTINGS = [
    *(Setting(f"{name} weights", {"quantization": name}) for name in WEIGHTS),
    *(Setting(f"{name} cache", {"kv_cache_dtype": name}) for name in ("int8", "fp8", "fp8_e5m2", "int4")),
]
"""What is compared where `--settings` is left out: all formats of `--quantization` and `--kv-cache-dtype`."""


class Sample(NamedTuple):
    """Token ids. Those from index `first` on are scored; the first token of all has no probability."""

    token_ids: list[int]
    first: int = 1


class Record(Struct):
    """A line of a `.jsonl` file."""

    prompt: str
    completion: str


class Scores(NamedTuple):
    """An engine's log-probabilities of the scored tokens.

    Attributes:
        logprobs: [n] float64, of the text's tokens.
        likeliest: [n] int64, the token that greedy decoding would take.
    """

    logprobs: np.ndarray
    likeliest: np.ndarray


class Difference(NamedTuple):
    """The difference that quantization makes.

    Attributes:
        loss: mean negative log-likelihood of a token, in nats.
        change: mean absolute difference between a token's log-probability and the baseline's.
        agreement: share of positions where both would take the same token.
    """

    loss: float
    change: float
    agreement: float


def add_arguments(parser: CommandParser) -> None:
    """Adds this benchmark's flags, and all engine options, which are the baseline's; vLLM has no such benchmark."""
    add_engine_options(parser)
    group = parser.add_argument_group("quality")
    group.add_argument(
        "--text",
        nargs="+",
        required=True,
        type=Path,
        help="Files to score: plain text, in windows; or .jsonl of prompt and completion, which alone counts.",
    )
    group.add_argument(
        "--input-len",
        type=COUNT,
        default=512,
        help="Tokens of a window, and most tokens of a line of .jsonl (default: %(default)s).",
    )
    group.add_argument("--num-windows", type=COUNT, help="Windows or lines to score; all when left out.")
    group.add_argument(
        "--settings",
        metavar="JSON",
        help="Engine options to compare with the baseline: a list of objects, or a file of it. Every online format of "
        "weights and of the KV cache when left out.",
    )
    group.add_argument("--output-json", help="File for the figures.")


def run(args: argparse.Namespace) -> int:
    """Scores the text with the baseline and with each setting, one engine after another. Returns the exit code."""
    if args.input_len < 2:
        raise ConfigError("--input-len must be at least 2: the first token of a window has no probability.")
    settings = SETTINGS if args.settings is None else read_settings("--settings", args.settings)
    options = args.engine_args.flat()
    if options["max_model_len"] is None:
        options["max_model_len"] = args.input_len + 1  # a window, and the token that a request has to generate
    if wrong := next((name for setting in settings for name in setting.flags if name not in options), None):
        raise ConfigError(f"--settings has {wrong!r}, which is no option of the engine.")
    _check(options, settings)
    texts = [_read(path) for path in args.text]
    baseline = _score(options, texts, args.input_len, args.num_windows)
    found = {"baseline": compare(baseline, baseline)}
    for setting in settings:
        scores = _score(options | setting.flags, texts, args.input_len, args.num_windows)
        found[setting.name] = compare(scores, baseline)
    show(_table(found, len(baseline.logprobs)))
    figures = {name: difference._asdict() for name, difference in found.items()}
    write_json(args.output_json, {"num_tokens": len(baseline.logprobs), "settings": figures})
    return 0


def _check(options: dict[str, Any], settings: Sequence[Setting]) -> None:
    """Raises ConfigError if a setting has a value that no engine takes: now, and not after those before it."""
    for setting in settings:
        try:
            EngineArgs.from_flat(**options | setting.flags)
        except ConfigError as error:
            raise ConfigError(f"--settings {setting.name}: {error}") from None


def compare(scores: Scores, baseline: Scores) -> Difference:
    """`scores` against those of the baseline, of the same tokens."""
    return Difference(
        loss=float(-scores.logprobs.mean()),
        change=float(np.abs(scores.logprobs - baseline.logprobs).mean()),
        agreement=float((scores.likeliest == baseline.likeliest).mean()),
    )


def windows_of(token_ids: Sequence[int], size: int) -> list[Sample]:
    """Windows of `size` tokens, one after another; a rest of fewer than two tokens is left out."""
    windows = [list(token_ids[first : first + size]) for first in range(0, len(token_ids), size)]
    return [Sample(window) for window in windows if len(window) > 1]


def _read(path: Path) -> str | list[Record]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return [msgspec.json.decode(line, type=Record) for line in text.splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read: {error}.") from None
    return text


def _samples(texts: Sequence[str | list[Record]], encode: Callable[[str], list[int]], size: int) -> list[Sample]:
    samples = []
    for text in texts:
        if isinstance(text, str):
            samples += windows_of(encode(text), size)
            continue
        for record in text:
            prompt, completion = encode(record.prompt), encode(record.completion)
            if len(prompt) + len(completion) > size:
                raise ConfigError(f"--text has a line of {len(prompt) + len(completion)} tokens: raise --input-len.")
            samples.append(Sample(prompt + completion, max(1, len(prompt))))
    return samples


def _score(options: dict[str, Any], texts: Sequence[str | list[Record]], size: int, limit: int | None) -> Scores:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    with LLM(**options) as llm:
        encode = partial(llm.get_tokenizer().encode, add_special_tokens=False, verbose=False)
        samples = _samples(texts, encode, size)[:limit]
        if not samples:
            raise ConfigError("--text has fewer than two tokens.")
        outputs = llm.generate([sample.token_ids for sample in samples], params, use_tqdm=False)
    logprobs, likeliest = [], []
    for sample, output in zip(samples, outputs, strict=True):
        assert output.prompt_logprobs is not None
        rows = list(output.prompt_logprobs)[sample.first :]
        for token, row in zip(sample.token_ids[sample.first :], rows, strict=True):
            assert row is not None
            logprobs.append(row[token].logprob)
            likeliest.append(max(row, key=lambda each: row[each].logprob))
    return Scores(np.array(logprobs), np.array(likeliest))


def _table(found: dict[str, Difference], num_tokens: int) -> Table:
    """A table in Markdown, to be pasted into notes."""
    table = Table(title=f"{num_tokens:,} tokens", box=box.MARKDOWN)
    table.add_column("setting")
    for column in ("negative log-likelihood", "change of a log-probability, mean", "same likeliest token"):
        table.add_column(column, justify="right")
    for name, (loss, change, agreement) in found.items():
        table.add_row(name, f"{loss:.4f}", f"{change:.4f}", f"{agreement:.2%}")
    return table
