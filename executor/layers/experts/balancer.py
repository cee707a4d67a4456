"""Moves experts between ranks by their recent load, while the engine runs (EPLB, arXiv:2412.19437, section 3.4)."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.core.config.parallel import EplbConfig
from quire.core.logging import get_logger
from quire.executor.layers.experts.parallel import DividedExperts, ExpertParallel
from quire.executor.parallel.expert_placement import Move, moves_between

logger = get_logger(__name__)


class ExpertBalancer:
    """Counts each expert's tokens in a window before every `step_interval`-th step, and then moves experts.

    Each rank counts its engine's tokens. All take the same steps and compute the same placement from summed counts, so
    they agree without communication. The weights go from rank to rank as the backend packed them.

    Args:
        experts: the layers and the group of ranks.
        logs: whether this rank logs.

    Attributes:
        balancedness: mean load of the ranks over that of the busiest in the last window, as experts were placed in it,
            mean over the layers; 1 is best. None before the first window has ended.
    """

    def __init__(self, config: EplbConfig, experts: ExpertParallel, *, logs: bool) -> None:
        self._config = config
        self._experts = experts
        self._logs = logs
        self._step = 0
        self._seen: Sequence[Tensor] = ()
        self.balancedness: float | None = None
        self._prepare()

    def after_step(self) -> None:
        """Runs on every rank after each step, before the next."""
        self._step += 1
        config = self._config
        if config.log_balancedness and self._step % config.log_balancedness_interval == 0:
            self._log_balancedness()
        if self._step % config.step_interval == 0:
            self.rebalance()
        self._prepare()

    @torch.inference_mode()
    def rebalance(self) -> None:
        """Moves experts to where the counted tokens would have been divided most equally."""
        started = time.monotonic()
        layers = self._experts.layers
        num_moves, before, after = 0, [], []
        for layer, loads in zip(layers, (each.tolist() for each in self._total_loads()), strict=True):
            placement = layer.places.placement
            better = placement.balanced(loads)
            moves = moves_between(placement, better)
            self._move(layer, moves)
            layer.places.move(better)
            num_moves += len(moves)
            before.append(placement.imbalance(loads))
            after.append(better.imbalance(loads))
        self.balancedness = sum(1 / each for each in before) / len(before)
        if self._logs:
            logger.info(
                "rebalanced experts in %.2f s, %d moved: the busiest rank had %.2f times the mean load, and would "
                "have had %.2f times",
                time.monotonic() - started,
                num_moves,
                sum(before) / len(before),
                sum(after) / len(after),
            )

    def _total_loads(self) -> Sequence[Tensor]:
        """Sums the tokens of each expert over all ranks, layer by layer: [num_experts] each."""
        counted = [layer.places.loads for layer in self._experts.layers]
        return self._experts.group.all_reduce(torch.cat(counted)).split([len(each) for each in counted])

    def _move(self, layer: DividedExperts, moves: list[Move]) -> None:
        group = self._experts.group
        rank = group.rank
        # Copied first: one move may read a place that another writes.
        leaving = {move: _joined(layer.tensors(move.source_place)) for move in moves if move.source == rank}
        arriving = {
            move: torch.empty_like(_joined(layer.tensors(move.target_place)))
            for move in moves
            if move.target == rank != move.source
        }
        group.exchange(
            [(move.target, numbers) for move, numbers in leaving.items() if move.target != rank],
            [(move.source, numbers) for move, numbers in arriving.items()],
        )
        for move in moves:
            if move.target == rank:
                _write(arriving.get(move, leaving.get(move)), layer.tensors(move.target_place))

    def _prepare(self) -> None:
        """Starts to count at the beginning of the window."""
        config, place = self._config, self._step % self._config.step_interval
        window = min(config.window_size, config.step_interval)
        first = config.step_interval - window
        if place == first or (config.log_balancedness and place == 0):
            for layer in self._experts.layers:
                layer.places.count(on=True)
            self._seen = ()
        elif place == 0:
            for layer in self._experts.layers:
                layer.places.count(on=False)

    def _log_balancedness(self) -> None:
        """Logs the mean over layers of the ranks' mean load over that of the busiest, since the last such line."""
        layers = self._experts.layers
        now = self._total_loads()
        if self._logs:
            seen = self._seen or [torch.zeros_like(each) for each in now]
            loads = [total - before for total, before in zip(now, seen, strict=True)]
            shares = [
                1 / layer.places.placement.imbalance(each.tolist()) for layer, each in zip(layers, loads, strict=True)
            ]
            logger.info("balancedness of experts: %.3f over %d layers", sum(shares) / len(shares), len(shares))
        self._seen = now


def _joined(tensors: list[Tensor]) -> Tensor:
    """Joins the bytes of all tensors, [num_bytes] uint8."""
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors])


def _write(numbers: Tensor | None, tensors: list[Tensor]) -> None:
    assert numbers is not None
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        own, numbers = numbers[:size], numbers[size:]
        tensor.copy_(own.view(tensor.dtype).view(tensor.shape))
