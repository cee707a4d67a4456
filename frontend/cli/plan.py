"""`quire plan`: what a model would take of a device's memory, and how many requests would fit. Loads nothing.

With `--nodes` it plans for a cluster instead: `plan_cluster.py`.
"""

import argparse
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from quire.core.config.engine_args import EngineArgs
from quire.core.config.resolved import EngineConfig
from quire.core.errors import ConfigError
from quire.core.logging import configure
from quire.core.wire.inspection import LoadPlan
from quire.core.wire.kv_groups import KVGroupSpec, keeps_nothing
from quire.frontend.cli import plan_cluster
from quire.frontend.cli.columns import columns
from quire.frontend.flags.parser import CommandParser, add_engine_fields, add_sources
from quire.frontend.flags.values import Field, human_int
from quire.frontend.labs.cluster_model.hardware import DEVICES

COMMON = [
    "--device-memory", "--json", "--max-model-len", "--max-num-seqs", "--tensor-parallel-size", "--dtype",
    "--quantization", "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--device",
    "--nodes", "--gpus", "--network", "--input-len", "--output-len", "--concurrency", "--rate", "--top",
]  # fmt: skip
LENGTHS = (1024, 4096, 16384, 65536, 262144)
NO_FIT = 1
"""Exit code where the model does not fit."""


class Planned(NamedTuple):
    """The engine's options, and the device that a cluster is planned for: by its name or its file."""

    engine_args: EngineArgs
    device: str | None


class PlannedDevice:
    """Reads `--device`: the option's own values, or a device of a cluster."""

    def __init__(self, field: Field) -> None:
        self._field = field

    def __call__(self, text: str) -> Any:
        return text if text in DEVICES or text.endswith(".json") else self._field(text)


def _planned(given: dict[str, Any]) -> Planned:
    device = given.get("device")
    if device is None or device in ("auto", "cpu", "cuda"):
        return Planned(EngineArgs.from_flat(**given), None)
    return Planned(EngineArgs.from_flat(**{**given, "device": "cuda"}), device)


def add_arguments(parser: CommandParser) -> None:
    add_sources(parser, positional_model=True)
    parser.compose("planned", add_engine_fields(parser), _planned)
    parser.flags["--device"].type = PlannedDevice(parser.fields["--device"])
    group = parser.add_argument_group("plan")
    group.add_argument(
        "--device-memory", type=memory_size, metavar="BYTES",
        help="Plan for a device with this memory, such as 24GiB, instead of this machine's: with --device cuda a GPU, "
        "which need not be here, or else the RAM that all workers share.",
    )  # fmt: skip
    group.add_argument("--json", action="store_true", help="Print one JSON object.")
    plan_cluster.add_arguments(parser)
    parser.common = COMMON


def memory_size(text: str) -> int:
    """Bytes of `24GiB` (also `24G`, `24576MiB`), `24GB` (also `24g`) or a plain number."""
    match = re.fullmatch(r"([\d.]+)\s*(?:([KMGTkmgt])(i?B)?)?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError("needs bytes such as 24GiB, 80GB or 25769803776")
    number, power, unit = match.groups()
    if unit is not None:
        power = power.upper() if unit == "iB" else power.lower()
    try:
        return human_int(number + (power or ""))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    from quire.frontend.launch.inspection import plan_load  # imported here, so that --help reads no checkpoint

    engine_args, device = args.planned
    configure("plan", engine_args.observability.logging)
    if args.nodes is not None:
        return plan_cluster.run(args, engine_args, device)
    if device is not None:
        raise ConfigError(
            f"--device {device} is for a plan with --nodes; without, --device cuda --device-memory BYTES."
        )
    config, plan = plan_load(engine_args, args.device_memory)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(as_json(config, plan))).decode())
    else:
        print("\n".join(as_text(config, plan)))
    return NO_FIT if plan.obstacle else 0


def requests_that_fit(config: EngineConfig, plan: LoadPlan) -> dict[int, int]:
    """By length in tokens, the number of requests of that length that run at once."""
    limits, found = config.limits, {}
    longest = plan.max_model_len or config.max_model_len
    for length in [*(length for length in LENGTHS if length < longest), longest]:
        pages = sum(
            group.max_pages(length, block_size=limits.block_size, largest_chunk=limits.largest_chunk)
            for group in plan.kv_groups
        )
        fits = plan.num_pages // pages if pages else limits.max_num_seqs
        found[length] = 0 if plan.obstacle else min(fits, limits.max_num_seqs)
    return found


def as_json(config: EngineConfig, plan: LoadPlan) -> dict[str, Any]:
    """The whole plan under plain names."""
    spec, size = config.spec, config.limits.block_size
    return {
        "model": spec.name,
        "architecture": spec.architecture,
        "implementation": "quire" if plan.is_native else "transformers",
        "pooling": None if config.pooling is None else msgspec.to_builtins(config.pooling),
        "parameters": plan.num_parameters,
        "dtype": spec.dtype,
        "quantization": plan.quantization,
        "draft_model": None if config.draft_model is None else config.draft_model.spec.name,
        "device": config.device,
        "workers": [{name: getattr(rank, name) for name in rank.__struct_fields__} for rank in plan.ranks],
        "block_size": size,
        "kv_groups": [
            {
                "kind": group.kind,
                "layers": len(group.layers),
                "bytes_per_token": None if group.is_recurrent else group.page_bytes // size,
                "window": group.window,
                "encoder_tokens": group.encoder_rows,
                "state_bytes": group.state_bytes,
                "snapshot_interval": group.interval,
            }
            for group in plan.kv_groups
        ],
        "num_pages": plan.num_pages,
        "kv_cache_bytes": sum(plan.num_pages * rank.page_bytes for rank in plan.ranks),
        "max_model_len": plan.max_model_len,
        "max_num_seqs": config.limits.max_num_seqs,
        "requests_by_length": {str(length): count for length, count in requests_that_fit(config, plan).items()},
        "fits": plan.obstacle is None,
        "obstacle": plan.obstacle,
    }


def as_text(config: EngineConfig, plan: LoadPlan) -> Iterator[str]:
    """Lines for people."""
    spec, ranks, limits = config.spec, plan.ranks, config.limits
    path = "native" if plan.is_native else "Transformers' class with Quire's layers"
    kept = f"{spec.dtype}, {plan.quantization}" if plan.quantization else spec.dtype
    yield f"model       {spec.name} ({spec.architecture}, {path})"
    if config.pooling is not None:
        yield f"output      {config.pooling.describe()}"
    if spec.encoder is not None:
        yield f"encoder     reads up to {spec.encoder.max_rows:,} tokens, in one step"
    yield f"parameters  {plan.num_parameters:,} in {kept}"
    if config.draft_model is not None:
        yield f"drafts      of {config.draft_model.spec.name}, which weights and KV cache include"
    yield f"device      {config.device}, workers: {len(ranks)}, each with {_size(ranks[0].free_bytes)} free"
    yield f"weights     {_each(rank.weights_bytes for rank in ranks)}"
    yield f"workspace   {_each(rank.workspace_bytes for rank in ranks)}"
    if any(rank.state_bytes for rank in ranks):
        yield f"states      {_each(rank.state_bytes * limits.max_num_seqs for rank in ranks)}"
    if keeps_nothing(plan.kv_groups):
        yield "KV cache    none; a step computes a text whole"
    else:
        pages = f"{plan.num_pages:,} pages of {limits.block_size} tokens"
        yield f"KV cache    {_each(plan.num_pages * rank.page_bytes for rank in ranks)}, {pages}"
        yield ""
        yield from columns([("layers", "count", "keeps, on each worker"), *_kinds(config, plan.kv_groups)])
    yield ""
    rows = [(f"{length:,}", f"{count:,}") for length, count in requests_that_fit(config, plan).items()]
    yield from columns([("tokens of a request", f"at once (of {limits.max_num_seqs:,})"), *rows])
    if plan.obstacle:
        yield ""
        yield f"It does not fit: {plan.obstacle}"


def _kinds(config: EngineConfig, groups: Iterable[KVGroupSpec]) -> list[tuple[str, str, str]]:
    """Rows of a table: each kind of layer, how many layers are of it, and the bytes that they keep."""
    size, chunk = config.limits.block_size, config.limits.largest_chunk
    layers: dict[str, int] = {}
    numbers: dict[str, int] = {}
    units: dict[str, str] = {}
    for group in groups:
        if group.is_recurrent:
            kind, number, unit = "recurrent", group.state_bytes, "bytes a request"
        elif group.is_cross:
            kind, number, unit = "attention to the encoder", group.page_bytes // size, "bytes a token of its input"
        elif group.window is None:
            kind, number, unit = "full attention", group.page_bytes // size, "bytes a token"
        else:
            pages = group.max_pages(config.max_model_len, block_size=size, largest_chunk=chunk)
            kind, number, unit = f"window of {group.window:,}", pages * group.page_bytes, "bytes a request at most"
        layers[kind] = layers.get(kind, 0) + len(group.layers)
        numbers[kind] = numbers.get(kind, 0) + number
        units[kind] = unit
    return [(kind, str(layers[kind]), f"{numbers[kind]:,} {units[kind]}") for kind in layers]


def _each(sizes: Iterable[int]) -> str:
    """The bytes of each worker: one figure where all are about alike."""
    texts = list(dict.fromkeys(map(_size, sizes)))
    return " and ".join(texts)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 // 10 else f"{num_bytes / 2**20:.1f} MiB"
