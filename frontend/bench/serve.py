"""`quire bench serve`: puts load on a running OpenAI-compatible server, and measures latencies at the client."""

import argparse
import asyncio
import contextlib
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
from rich.progress import Progress

from quire.core.config.model import TokenizerMode
from quire.core.errors import ConfigError, QuireError
from quire.frontend.bench.datasets.choice import add_dataset_arguments, check_text_only, make_requests
from quire.frontend.bench.datasets.request import BenchRequest, Vocabulary
from quire.frontend.bench.descriptors import make_room
from quire.frontend.bench.figures import (
    METRICS,
    RequestTiming,
    print_table,
    serve_rows,
    summarize,
    summarize_vectors,
    write_json,
)
from quire.frontend.bench.goodput import parse_objectives, request_goodput
from quire.frontend.bench.load import Target, run_load
from quire.frontend.bench.profile import add_profile_argument, server_recording
from quire.frontend.bench.result_file import add_result_arguments, details, result_path, settings
from quire.frontend.bench.speech_target import ENDPOINTS as SPEECH_ENDPOINTS
from quire.frontend.bench.speech_target import SpeechTarget
from quire.frontend.bench.text_target import TextTarget
from quire.frontend.bench.vector_target import ENDPOINTS as VECTOR_ENDPOINTS
from quire.frontend.bench.vector_target import VectorTarget, batched
from quire.frontend.bench.word_errors import speech_figures, speech_rows
from quire.frontend.flags.ranges import COUNT, COUNT_OR_NONE, POSITIVE
from quire.frontend.text.tokenizer import Tokenizer

ENDPOINTS: dict[str, str] = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    **SPEECH_ENDPOINTS,
    **VECTOR_ENDPOINTS,
}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds vLLM's flags for text, sounds, vectors and ranks."""
    add_dataset_arguments(parser)
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=sorted(ENDPOINTS), default="openai", help="API of the server.")
    server.add_argument("--base-url", help="Server's address, such as http://localhost:8000; wins over host and port.")
    server.add_argument("--host", default="127.0.0.1", help="Server's host (default: %(default)s).")
    server.add_argument("--port", type=int, default=8000, help="Server's port (default: %(default)s).")
    server.add_argument("--endpoint", help="Path of the API, if not the backend's own.")
    server.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE", help="Headers to send.")
    server.add_argument("--model", help="Model name in requests (default: the server's first).")
    server.add_argument("--tokenizer", help="Folder of the tokenizer that writes the prompts; else --model's.")
    server.add_argument(
        "--tokenizer-mode", choices=get_args(TokenizerMode), default="auto", help="How it is read, as in quire serve."
    )
    server.add_argument("--trust-remote-code", action="store_true", help="Import a tokenizer that is a folder's code.")
    server.add_argument(
        "--ready-check-timeout-sec", type=float, default=0, help="Seconds to wait for the server to be ready."
    )
    load = parser.add_argument_group("load")
    load.add_argument("--max-concurrency", type=COUNT, help="Most requests in flight.")
    load.add_argument("--request-rate", type=POSITIVE, default=float("inf"), help="Arrivals per second (default: inf).")
    load.add_argument("--burstiness", type=POSITIVE, default=1.0, help="1 is Poisson arrivals, less is burstier.")
    load.add_argument("--num-warmups", type=COUNT_OR_NONE, default=0, help="Requests sent before the measurement.")
    load.add_argument("--seed", type=int, default=0, help="Seed of lengths, tokens and arrival times.")
    load.add_argument(
        "--random-batch-size", type=COUNT, default=1, help="Texts in each request for vectors or ranks (default: 1)."
    )
    load.add_argument("--ignore-eos", action="store_true", help="Generate the full length.")
    for name in SAMPLING:
        load.add_argument(f"--{name.replace('_', '-')}", type=float, help="Sampling parameter of every request.")
    load.add_argument(
        "--extra-body",
        type=_json_object,
        default={},
        metavar="JSON",
        help='Fields of every request besides, such as {"language": "en"}.',
    )
    report = parser.add_argument_group("report")
    report.add_argument(
        "--percentile-metrics",
        help="Latencies to show, by comma (default: all that there are).",
    )
    report.add_argument("--metric-percentiles", default="99", help="Percentiles to show, by comma.")
    report.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="Objectives per request, of ttft, tpot and e2el; shows how many requests per second meet all.",
    )
    report.add_argument("--output-json", help="File for the figures.")
    add_result_arguments(report)
    add_profile_argument(report, "what the server does under the load")
    report.add_argument("--disable-tqdm", action="store_true", help="No progress bar.")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark. Returns the exit code.

    Raises:
        QuireError: a request failed.
    """
    percentiles = [float(value) for value in args.metric_percentiles.split(",")]
    of_vectors = args.backend in VECTOR_ENDPOINTS
    metrics = (args.percentile_metrics or ("e2el" if of_vectors else ",".join(METRICS))).split(",")
    known = ["e2el"] if of_vectors else METRICS
    if unknown := set(metrics) - set(known):
        raise ConfigError(f"--percentile-metrics: unknown {sorted(unknown)[0]!r}; choose from {', '.join(known)}.")
    objectives = parse_objectives(args.goodput)
    now = datetime.now()
    asked = settings(args, args.model or "", now)
    model, requests, timings, duration = asyncio.run(_measure(args))
    errors = [timing.error for timing in timings if timing.error]
    if len(errors) == len(timings):  # there are no figures
        raise QuireError(f"All {len(errors)} requests failed; the first: {errors[0]}")
    figures = (summarize_vectors if of_vectors else summarize)(timings, duration, percentiles)
    figures |= speech_figures(requests, timings, duration)
    if objectives:
        figures["request_goodput"] = request_goodput(timings, objectives, duration)
    print_table("Serving benchmark", serve_rows(figures, metrics, percentiles) + speech_rows(figures))
    write_json(args.output_json, figures)
    if args.save_result:
        saved = asked | {"model_id": model} | figures | (details(timings) if args.save_detailed else {})
        write_json(str(result_path(args, model, now)), saved)
    if errors:
        raise QuireError(f"{len(errors)} requests failed; the first: {errors[0]}")
    return 0


async def _measure(args: argparse.Namespace) -> tuple[str, list[BenchRequest], list[RequestTiming], float]:
    """Returns the model's name, all requests, their timings, and the seconds from start to end."""
    base_url = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    headers = {"Content-Type": "application/json"} | dict(item.split("=", 1) for item in args.header)
    if key := os.environ.get("OPENAI_API_KEY"):
        headers.setdefault("Authorization", f"Bearer {key}")
    await _wait_until_ready(base_url, args.ready_check_timeout_sec)
    model, folder = args.model, args.tokenizer
    reads_texts = args.backend not in SPEECH_ENDPOINTS
    if not model or (reads_texts and not folder):  # not every server that is compared has the route
        name, root = await _served_model(base_url, headers)
        model, folder = model or name, folder or root
    url = base_url + (args.endpoint or ENDPOINTS[args.backend])
    target = _target(args, url, headers, model)
    requests = _requests(args, folder if reads_texts else None)
    make_room(min(len(requests), args.max_concurrency or len(requests)), "--max-concurrency")
    options = {"burstiness": args.burstiness, "max_concurrency": args.max_concurrency, "seed": args.seed}
    if args.num_warmups:
        await run_load(requests[: args.num_warmups], target, request_rate=float("inf"), on_done=lambda: None, **options)
    with Progress(disable=args.disable_tqdm, transient=True) as progress:
        bar = progress.add_task("requests", total=len(requests))
        async with server_recording(base_url, headers, args.profile):
            timings, duration = await run_load(
                requests, target, request_rate=args.request_rate, on_done=lambda: progress.advance(bar), **options
            )
    return model, requests, timings, duration


def _requests(args: argparse.Namespace, folder: str | None) -> list[BenchRequest]:
    """What the backend is asked. `folder` is that of the tokenizer; None: the backend takes sounds."""
    if folder is None:
        requests = make_requests(args, Vocabulary(1), args.seed, as_text=False)
        if any(request.sound is None for request in requests):
            raise ConfigError(f"--backend {args.backend} takes sounds: add --dataset-name custom_audio.")
        return requests
    tokenizer = Tokenizer.from_folder(Path(folder), args.tokenizer_mode, args.trust_remote_code)
    requests = make_requests(args, Vocabulary(tokenizer.vocab_size, tokenizer), args.seed, as_text=True)
    if args.backend != "openai-chat":
        check_text_only(requests, f"--backend {args.backend}")
    return batched(requests, args.random_batch_size, args.backend) if args.backend in VECTOR_ENDPOINTS else requests


def _target(args: argparse.Namespace, url: str, headers: dict[str, str], model: str) -> Target:
    sampling = _sampling(args)
    body = {"model": model} | sampling | args.extra_body
    if args.backend in VECTOR_ENDPOINTS:
        if sampling:
            raise ConfigError(f"--backend {args.backend} samples no tokens; leave {sorted(sampling)[0]} out.")
        return VectorTarget(url, args.backend, headers, body)
    if args.random_batch_size != 1:
        raise ConfigError("--random-batch-size is for backends of vectors and ranks.")
    if args.backend in SPEECH_ENDPOINTS:
        return SpeechTarget(url, {name: headers[name] for name in headers if name != "Content-Type"}, body)
    return TextTarget(url, args.backend == "openai-chat", headers, body)


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object: {error}") from None


def _sampling(args: argparse.Namespace) -> dict:
    """The sampling parameters of every request's body."""
    body = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    if args.top_k is not None:
        body["top_k"] = int(args.top_k)
    if args.ignore_eos:
        body["ignore_eos"] = True
    return body


async def _wait_until_ready(base_url: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    async with httpx.AsyncClient(timeout=5) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"{base_url}/health")).status_code == 200:
                    return
            if time.monotonic() >= deadline:
                raise ConfigError(f"No server is ready at {base_url}; start one with `quire serve`, or set --base-url.")
            await asyncio.sleep(0.2)


async def _served_model(base_url: str, headers: dict[str, str]) -> tuple[str, str]:
    """The name of the first served model, and the folder that it was loaded from."""
    async with httpx.AsyncClient(headers=headers) as client:
        response = await client.get(f"{base_url}/v1/models")
    if response.status_code != 200:
        raise ConfigError(f"{base_url}/v1/models answered {response.status_code}: {response.text[:200]}")
    model = response.json()["data"][0]
    return model["id"], model.get("root") or model["id"]
