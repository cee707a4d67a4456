"""Checks hosts before anything is served: which hosts there are, and whether the model fits on them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from quire.core.cluster.check_messages import CheckStart, GPUMemory, NodeReport
from quire.core.config.engine_args import EngineArgs
from quire.core.config.parallel import ParallelConfig
from quire.core.errors import ConfigError
from quire.frontend.checkpoint import model_source
from quire.frontend.launch.inspection import find_obstacles
from quire.frontend.launch.layout import hosts_of_engine
from quire.frontend.launch.nodes import check_start
from quire.frontend.launch.options import resolve


def with_nodes(asked: ParallelConfig) -> ParallelConfig:
    """Completes the options with the number of hosts and this host's rank, which may be given as numbers of engines.

    Raises:
        ConfigError: the options do not say how many hosts there are.
    """
    if asked.nnodes > 1:
        return asked
    rank, start, local = asked.data_parallel_rank, asked.data_parallel_start_rank, asked.data_parallel_size_local
    engines, here = asked.data_parallel_size, local or (0 if rank is None else 1)
    if not here or here == engines:
        raise ConfigError("--nnodes must say the number of hosts, 2 or more, and --node-rank this host's number.")
    first = start or 0 if rank is None else rank
    if engines % here or first % here or first >= engines:
        raise ConfigError(
            f"{here} of {engines} engines from number {first} on leave open which host this is: give the number of "
            "hosts as --nnodes, and this host's as --node-rank."
        )
    return replace(asked, nnodes=engines // here, node_rank=first // here)


class Place(NamedTuple):
    """The place of a worker: its host, its device on the host, and the number of workers there."""

    node: int
    device: int
    num_workers: int


def places(parallel: ParallelConfig, num_workers: int) -> list[list[Place]]:
    """The places of workers, by their rank in an engine: one place for each engine.

    Args:
        parallel: with the number of hosts.
        num_workers: of one engine.
    """
    engines, hosts = parallel.data_parallel_size, hosts_of_engine(parallel)
    if hosts > 1:
        here = num_workers // hosts
        return [
            [Place(data * hosts + number // here, number % here, here) for data in range(engines)]
            for number in range(num_workers)
        ]
    each = engines // parallel.nnodes
    return [
        [Place(data // each, data % each * num_workers + number, each * num_workers) for data in range(engines)]
        for number in range(num_workers)
    ]


def check_of(
    args: EngineArgs, devices: str, ram_bytes: int, gpus: list[GPUMemory]
) -> "tuple[CheckStart, MemoryCheck | None]":
    """The start of this host's check, and on node 0 the memory check, if a model is named.

    Args:
        devices, ram_bytes, gpus: this host's, as in `NodeReport`.

    Raises:
        ConfigError: an option, an address or the checkpoint is wrong, or there is no join token.
    """
    parallel = with_nodes(args.parallel)
    folder = None if args.model.model is None else model_source.find_model(args.model, args.load)
    start = check_start(parallel, folder, devices, ram_bytes, gpus)
    return start, None if parallel.node_rank else MemoryCheck.of(args, parallel)


class MemoryCheck:
    """Compares each host's free memory with the needs of its workers, as `quire plan` counts them.

    Raises:
        ConfigError: an option or the checkpoint is wrong.
    """

    def __init__(self, args: EngineArgs, parallel: ParallelConfig) -> None:
        """`parallel`: the options of `args` with the number of hosts."""
        folder = model_source.find_model(args.model, args.load)
        self._config = resolve(args, model_source.read_model_spec(folder, args.model), "server")
        self._places = places(parallel, self._config.layout.num_workers)

    @classmethod
    def of(cls, args: EngineArgs, parallel: ParallelConfig) -> "MemoryCheck | None":
        """The check; None if the options name no model, or do not divide it among the hosts."""
        is_divided = args.parallel.data_parallel_size > 1 or _num_workers(args.parallel) > 1
        runs_engines = args.parallel.data_parallel_size_local != 0
        return cls(args, parallel) if args.model.model is not None and is_divided and runs_engines else None

    def misfits(self, reports: Mapping[int, NodeReport]) -> list[str]:
        """A sentence for each host that lacks memory or devices."""
        lacking = {
            place.node: self._lacking(place)
            for own in self._places
            for place in own
            if self._memory(reports, place) is None
        }
        problems = dict(lacking)
        if not lacking:
            obstacles = find_obstacles(self._config, [self._memories(reports, own) for own in self._places])
            for own, why in zip(self._places, obstacles, strict=True):
                for place, obstacle in zip(own, why, strict=True):
                    if obstacle is not None:
                        problems.setdefault(place.node, obstacle)
        return [f"Node {node} ({reports[node].facts.hostname}): {problems[node]}" for node in sorted(problems)]

    def _memories(self, reports: Mapping[int, NodeReport], own: Sequence[Place]) -> list[tuple[int, int]]:
        found = [self._memory(reports, place) for place in own]
        return [each for each in found if each is not None]

    def _memory(self, reports: Mapping[int, NodeReport], place: Place) -> tuple[int, int] | None:
        """Total and free bytes of a worker's device; None where there is no such device."""
        report = reports[place.node]
        if self._config.device == "cpu":
            share = report.ram_bytes // place.num_workers
            return share, share
        if place.device >= len(report.gpus):
            return None
        gpu = report.gpus[place.device]
        return gpu.total_bytes, gpu.free_bytes

    @staticmethod
    def _lacking(place: Place) -> str:
        return (
            f"There are fewer GPUs than its {place.num_workers} workers; divide the model among fewer workers, or give "
            "more hosts."
        )


def _num_workers(parallel: ParallelConfig) -> int:
    copies = parallel.prefill_context_parallel_size
    return copies * parallel.tensor_parallel_size * parallel.pipeline_parallel_size
