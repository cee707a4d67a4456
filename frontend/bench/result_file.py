"""`--save-result` and related flags: writes figures and settings to a file named like vLLM's."""

import argparse
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.core.errors import ConfigError
from quire.frontend.bench.figures import RequestTiming


def add_result_arguments(parser: Any) -> None:
    """Adds vLLM's flags."""
    parser.add_argument("--save-result", action="store_true", help="Keep the figures, and the settings, as JSON.")
    parser.add_argument("--save-detailed", action="store_true", help="Keep the times of every request as well.")
    parser.add_argument("--result-dir", default=".", help="Folder of the saved result (default: the current one).")
    parser.add_argument("--result-filename", help="Name of the result file (default: backend, load, model and time).")
    parser.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="Fields to add to the result.")
    parser.add_argument("--label", help="Name of this run in the result; starts the file's name.")


def result_path(args: argparse.Namespace, model: str, now: datetime) -> Path:
    """The path of the result file."""
    if args.result_filename:
        return Path(args.result_dir) / args.result_filename
    concurrency = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    name = f"{args.label or args.backend}-{args.request_rate}qps{concurrency}-{Path(model).name}-{now:%Y%m%d-%H%M%S}"
    return Path(args.result_dir) / f"{name}.json"


def settings(args: argparse.Namespace, model: str, now: datetime) -> dict[str, Any]:
    """The settings of the benchmark, under vLLM's keys.

    Raises:
        ConfigError: --metadata is not KEY=VALUE.
    """
    if bad := [item for item in args.metadata if "=" not in item]:
        raise ConfigError(f"--metadata takes KEY=VALUE, got {bad[0]!r}.")
    return {
        "date": f"{now:%Y%m%d-%H%M%S}",
        "backend": args.backend,
        "label": args.label,
        "model_id": model,
        "num_prompts": args.num_prompts,
        "request_rate": args.request_rate if args.request_rate != float("inf") else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **dict(item.split("=", 1) for item in args.metadata),
    }


def details(timings: list[RequestTiming]) -> dict[str, Any]:
    """Every request's lengths, seconds and error, in the order of sending."""
    return {
        "input_lens": [timing.prompt_tokens for timing in timings],
        "output_lens": [timing.output_tokens for timing in timings],
        "ttfts": [timing.ttft for timing in timings],
        "itls": [timing.gaps for timing in timings],
        "errors": [timing.error for timing in timings],
    }
