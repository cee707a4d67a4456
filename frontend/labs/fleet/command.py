"""The command: the same requests by the router's rules and by load alone, with and without deaths."""

import argparse
from typing import Any

import msgspec
from rich import box
from rich.table import Table

from quire.core.engine.gc_tuning import tune_garbage_collector
from quire.core.routing.router import RoutingRules
from quire.frontend.bench.figures import write_json
from quire.frontend.bench.tables import show
from quire.frontend.flags.parser import CommandParser
from quire.frontend.flags.ranges import COUNT
from quire.frontend.labs.fleet.engine import EngineShape
from quire.frontend.labs.fleet.figures import figures
from quire.frontend.labs.fleet.simulation import Deaths, Simulation
from quire.frontend.labs.fleet.workload import FleetLoad, arrivals

RULES = {"prefixes": RoutingRules(), "load": RoutingRules(follows_prefixes=False)}
ROWS = {
    "requests": ("requests", "{:,.0f}"),
    "of these moved": ("moved", "{:,.0f}"),
    "failed or unanswered": ("lost", "{:,.0f}"),
    "router, µs a request": ("router_us_mean", "{:.1f}"),
    "router, µs, p99": ("router_us_p99", "{:.1f}"),
    "prefix hits": ("hit_rate", "{:.1%}"),
    "prefix hits of one endless cache": ("possible_hit_rate", "{:.1%}"),
    "busiest engine / mean": ("imbalance", "{:.2f}"),
    "TTFT, s": ("ttft_mean", "{:.3f}"),
    "TTFT, s, p99": ("ttft_p99", "{:.3f}"),
    "request, s": ("request_seconds_mean", "{:.2f}"),
    "request, s, p99": ("request_seconds_p99", "{:.2f}"),
    "request that moved, s": ("moved_seconds_mean", "{:.2f}"),
}


def add_arguments(parser: CommandParser) -> None:
    """Adds this benchmark's flags; vLLM has no such benchmark."""
    group = parser.add_argument_group("fleet")
    group.add_argument(
        "--engines", type=COUNT, default=1000, help="Engines behind one frontend (default: %(default)s)."
    )
    group.add_argument(
        "--rules", nargs="+", choices=RULES, default=[*RULES], help="The router's own rules, or load alone."
    )
    group.add_argument("--max-model-len", type=COUNT, default=8192, help="Tokens of a request (default: %(default)s).")
    group.add_argument("--output-json", help="File for the figures.")
    parser.compose("load", parser.add_struct(FleetLoad), lambda given: msgspec.convert(given, FleetLoad))
    parser.compose("shape", parser.add_struct(EngineShape), lambda given: msgspec.convert(given, EngineShape))
    parser.compose("deaths", parser.add_struct(Deaths), lambda given: msgspec.convert(given, Deaths))


def run(args: argparse.Namespace) -> int:
    """Simulates. Returns the exit code: 1 if a request was lost."""
    tune_garbage_collector()
    found = {rules: measure(args.engines, args.max_model_len, rules, args.load, args.shape, args.deaths)
             for rules in args.rules}  # fmt: skip
    show(_table(args.engines, found))
    write_json(args.output_json, {"runs": found})
    return int(any(each["lost"] for each in found.values()))


def measure(
    num_engines: int, longest: int, rules: str, load: FleetLoad, shape: EngineShape, deaths: Deaths
) -> dict[str, Any]:
    """One run by the rules of that name."""
    simulation = Simulation(num_engines, shape, RULES[rules], deaths, longest, load.seed)
    result = figures(simulation.run(arrivals(load, num_engines, longest), load.seconds))
    return result | {"lost": result["failed"] + result["unanswered"] + result["short"]}


def _table(num_engines: int, found: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=f"{num_engines:,} engines, routed by", box=box.MARKDOWN)
    table.add_column("")
    for rules in found:
        table.add_column(rules, justify="right")
    for name, (key, form) in ROWS.items():
        table.add_row(name, *(form.format(each[key]) for each in found.values()))
    return table
