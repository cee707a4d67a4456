"""`quire plan MODEL --nodes N`: which layout of a cluster gives which speed under a load, and why others are worse."""

import argparse
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.core.config.engine_args import EngineArgs
from quire.core.config.resolved import EngineConfig
from quire.core.errors import ConfigError
from quire.core.wire.model_cost import ModelCost
from quire.frontend.cli.columns import columns
from quire.frontend.flags.parser import CommandParser
from quire.frontend.flags.ranges import COUNT
from quire.frontend.labs.cluster_model.comparison import bound, milliseconds, reason
from quire.frontend.labs.cluster_model.estimate import Estimate, estimate_all
from quire.frontend.labs.cluster_model.hardware import DEVICES, NETWORKS, Cluster, Efficiency, find_device, find_network
from quire.frontend.labs.cluster_model.layouts import tensor_sizes
from quire.frontend.labs.cluster_model.load import Load
from quire.frontend.labs.cluster_model.memory_fit import gib

NO_FIT = 1


def add_arguments(parser: CommandParser) -> None:
    """The flags of a plan for a cluster."""
    group = parser.add_argument_group("cluster", "Plan for a cluster, with --nodes; see docs/scaling.md.")
    group.add_argument("--nodes", type=COUNT, metavar="N", help="Nodes of the cluster, which need not be here.")
    group.add_argument("--gpus", type=COUNT, default=8, metavar="N", help="Devices of a node (default: %(default)s).")
    group.add_argument(
        "--network", default="ib-ndr", metavar="NAME|FILE",
        help=f"Links between nodes: {', '.join(NETWORKS)}, or a JSON file (default: %(default)s).",
    )  # fmt: skip
    group.add_argument("--input-len", type=COUNT, default=1024, help="Prompt tokens (default: %(default)s).")
    group.add_argument("--output-len", type=COUNT, default=256, help="Output tokens (default: %(default)s).")
    group.add_argument(
        "--concurrency", type=COUNT, default=256, help="Requests at once in the whole cluster (default: %(default)s)."
    )
    group.add_argument("--rate", type=float, metavar="X", help="Requests a second, instead of --concurrency.")
    group.add_argument(
        "--experts-over-engines", action="store_true",
        help="Consider whole experts divided over several engines, too, each of which is on one host.",
    )  # fmt: skip
    group.add_argument("--top", type=COUNT, default=12, help="Layouts of the table (default: %(default)s).")
    parser.compose("efficiency", parser.add_struct(Efficiency), lambda given: msgspec.convert(given, Efficiency))


def run(args: argparse.Namespace, engine_args: EngineArgs, device: str | None) -> int:
    """Prints the plan; returns the exit code."""
    if device is None:
        raise ConfigError(
            f"--nodes needs --device: one of {', '.join(DEVICES)}, or a JSON file with a device's figures."
        )
    if args.rate is not None and args.rate <= 0:
        raise ConfigError(f"--rate must be above 0, got {args.rate}.")
    from quire.frontend.launch.inspection import count_cost  # imported here, so that --help reads no checkpoint

    cluster = Cluster(
        num_nodes=args.nodes,
        devices_per_node=args.gpus,
        device=find_device(device),
        network=find_network(args.network),
        efficiency=args.efficiency,
    )
    load = Load(input_len=args.input_len, output_len=args.output_len, concurrency=args.concurrency, rate=args.rate)
    asked = engine_args.parallel.tensor_parallel_size
    sizes = tensor_sizes(cluster) if asked == 1 else [asked]
    config, cost = count_cost(engine_args, cluster.device.memory_bytes, sizes)
    if config.max_model_len < load.num_tokens:
        raise ConfigError(
            f"--input-len {load.input_len} and --output-len {load.output_len} are more than the {config.max_model_len} "
            "tokens of a request that are served; lower them or raise --max-model-len."
        )
    found = estimate_all(config, cluster, cost, load, experts_over_engines=args.experts_over_engines)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(as_json(config, cluster, cost, load, found))).decode())
    else:
        print("\n".join(as_text(config, cluster, cost, load, found, args.top, device)))
    return 0 if found and found[0].fit.obstacle is None else NO_FIT


def as_json(
    config: EngineConfig, cluster: Cluster, cost: ModelCost, load: Load, found: list[Estimate]
) -> dict[str, Any]:
    """Everything that the estimates were made of, and all of them, the best first."""
    return {
        "model": config.spec.name,
        "cluster": msgspec.to_builtins(cluster),
        "load": msgspec.to_builtins(load),
        "cost": {name: msgspec.to_builtins(getattr(cost, name)) for name in cost.__struct_fields__ if name != "shards"},
        "layouts": [
            {
                **{name: getattr(each.layout, name) for name in each.layout.__struct_fields__},
                "flags": each.layout.flags,
                "fits": each.fit.obstacle is None,
                "weights_bytes": each.fit.weights_bytes,
                "cache_bytes": each.fit.cache_bytes,
                "requests_per_engine": each.fit.requests,
                "running_per_engine": each.running,
                "limit": each.limit,
                "is_sustained": each.is_sustained,
                "output_tokens_per_second": each.output_tokens_per_second,
                "ttft_seconds": each.ttft_seconds,
                "tpot_seconds": each.tpot_seconds,
                "step_seconds": each.terms,
                "reason": reason(each, found[0], load),
            }
            for each in found
        ],
        "refused": [{"tensor": size, "reason": why} for size, why in cost.refusals],
    }


def as_text(
    config: EngineConfig, cluster: Cluster, cost: ModelCost, load: Load, found: list[Estimate], top: int, device: str
) -> Iterator[str]:
    """Lines for people: what was asked, the layouts, why the best is, and what cannot be."""
    yield f"model    {config.spec.name} ({config.spec.architecture}), {gib(cost.shards[0].weights_bytes)} of weights"
    yield f"cluster  {cluster.num_nodes} nodes of {cluster.devices_per_node} × {device}"
    asked = f"{load.concurrency:,} requests at once" if load.rate is None else f"{load.rate:g} requests a second"
    yield f"load     {asked}, each {load.input_len:,} tokens in and {load.output_len:,} out"
    yield ""
    fitting = [each for each in found if each.fit.obstacle is None]
    if fitting:
        yield from columns([HEADER, *(_row(each, fitting[0], load) for each in fitting[:top])])
        if len(fitting) > top:
            yield f"... and {len(fitting) - top} more; --top {len(fitting)} shows them."
        yield ""
        yield f"Best: {fitting[0].layout}, on {cluster.num_devices} devices, with {_flags(fitting[0])}."
    if too_large := found[len(fitting) :]:
        yield f"Too large: {', '.join(str(each.layout) for each in too_large)}."
        yield f"{too_large[-1].layout}: {too_large[-1].fit.obstacle}."
    for size, why in cost.refusals:
        yield f"TP {size} cannot be: {why}"


HEADER = ("layout", "out tok/s", "TTFT", "TPOT", "requests an engine", "most of a step", "worse because of")


def _row(estimate: Estimate, best: Estimate, load: Load) -> tuple[str, ...]:
    running = f"{estimate.running:,.0f} of {estimate.fit.requests:,}"
    late = "" if estimate.is_sustained else " (too slow)"
    return (
        str(estimate.layout),
        f"{estimate.output_tokens_per_second:,.0f}{late}",
        milliseconds(estimate.ttft_seconds),
        milliseconds(estimate.tpot_seconds),
        running,
        bound(estimate),
        reason(estimate, best, load),
    )


def _flags(estimate: Estimate) -> str:
    return f"`{' '.join(estimate.layout.flags)}`" if estimate.layout.flags else "no flags"
