"""Main of the process that places nodes with Ray: `python -m quire.frontend.launch.ray_main`, started by `RayNodes`.

It reads a `RayStart` from standard input, and ends when that closes. Each of nodes 1 and up is an actor on another host
of Ray's. An actor that ends, with its host or alone, is started again where Ray finds room; node 0 waits for it.
"""

import importlib
import os
import select
import sys
import threading
import time
from typing import Any

import msgspec

from quire.core.logging import configure, get_logger
from quire.frontend.launch.ray_actor import NodeActor
from quire.frontend.launch.ray_nodes import RayStart

logger = get_logger(__name__)

WATCH_SECONDS = 0.5
CLOSE_SECONDS = 15.0
"""In which Ray has to end the actors; then this process ends, and Ray ends them because their owner is gone."""
PAUSE_SECONDS = 2.0
"""Before an actor is started again."""
ANY_SHARE = 0.001
"""Of a host's own resource, to name the host."""


def main() -> None:
    """Places the nodes, and watches them until standard input closes."""
    size = int.from_bytes(sys.stdin.buffer.read(8), "little")
    start = msgspec.msgpack.decode(sys.stdin.buffer.read(size), type=RayStart)
    configure("ray", start.logging)
    ray = importlib.import_module("ray")
    while not _parent_is_gone(PAUSE_SECONDS):
        try:
            ray.init(address="auto", log_to_driver=True, logging_level="warning")
        except (ConnectionError, RuntimeError, ValueError) as error:
            logger.warning("there is no Ray cluster to place nodes in (%s); trying again", str(error).split("\n")[0])
            continue
        placement = _Placement(ray, start)
        placement.watch()
        _end_soon()
        placement.remove()
        ray.shutdown()
        return


def _parent_is_gone(seconds: float) -> bool:
    """Waits up to `seconds` for the parent's end. Nothing more is written to standard input, so it is readable only
    then."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def _end_soon() -> None:
    """Makes this process end even if Ray does not answer."""
    timer = threading.Timer(CLOSE_SECONDS, os._exit, [1])
    timer.daemon = True
    timer.start()


class _Placement:
    """A placement group with a bundle for each node, on as many hosts, and an actor in each but the first."""

    def __init__(self, ray: Any, start: RayStart) -> None:
        util = importlib.import_module("ray.util")
        self._strategies = importlib.import_module("ray.util.scheduling_strategies")
        self._ray = ray
        self._start = start
        self._actors: dict[int, Any] = {}  # by number of the node
        # Node 0 is this host. Its bundle keeps other programs from its devices.
        here = {f"node:{util.get_node_ip_address()}": ANY_SHARE}
        bundles = [{**_needs(start.gpus), **here}, *(_needs(node.gpus) for node in start.nodes)]
        self._group = util.placement_group(bundles, strategy="STRICT_SPREAD")
        logger.info("asking Ray for %d hosts: %s", len(bundles), bundles)

    def watch(self) -> None:
        """Starts the actors, and again those that end, until the parent is gone."""
        ranks: dict[Any, int] = {}
        due = dict.fromkeys(range(1, len(self._start.nodes) + 1), 0.0)
        while not _parent_is_gone(WATCH_SECONDS):
            for rank in [rank for rank, when in due.items() if when <= time.monotonic()]:
                del due[rank]
                self._actors[rank] = self._actor(rank)
                ranks[self._actors[rank].run.remote()] = rank
            ended, _ = self._ray.wait(list(ranks), timeout=0) if ranks else ([], [])
            for reference in ended:
                rank = ranks.pop(reference)
                logger.error("node %d has ended (%s); it is started again", rank, self._reason(reference))
                due[rank] = time.monotonic() + PAUSE_SECONDS

    def remove(self) -> None:
        """Ends the actors."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        importlib.import_module("ray.util").remove_placement_group(self._group)

    def _actor(self, rank: int) -> Any:
        place = self._strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=rank
        )
        node = self._start.nodes[rank - 1]
        kind = self._ray.remote(num_cpus=1, num_gpus=node.gpus, scheduling_strategy=place)(NodeActor)
        return kind.remote(msgspec.msgpack.encode(node.args), self._start.secret)

    def _reason(self, reference: Any) -> str:
        try:
            return f"exit code {self._ray.get(reference)}; its log says why"
        except self._ray.exceptions.RayError as error:
            return str(error).strip().split("\n")[0]


def _needs(gpus: int) -> dict[str, float]:
    """The resources that a node takes of its host."""
    return {"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}


if __name__ == "__main__":
    main()
