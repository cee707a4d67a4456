"""The seconds of one step on one pipeline stage, term by term. docs/scaling.md has the formulas.

Each product of weights takes the time of its bytes or of its operations, whichever is longer; all else adds up.
"""

import math
from dataclasses import dataclass

from quire.core.wire.expert_rows import CHOICE_BYTES, COUNTS_COST, chosen_share, saved_bytes
from quire.core.wire.model_cost import ModelCost, ShardCost, WeightCost
from quire.frontend.labs.cluster_model.hardware import Cluster
from quire.frontend.labs.cluster_model.layouts import ClusterLayout

WEIGHTS, COMPUTE, CACHE = "weights read", "compute", "cache read"
REDUCE_LATENCY, REDUCE_BYTES, EXCHANGE = "all-reduce latency", "all-reduce bandwidth", "expert exchange"
SEND, BUBBLE, OVERHEAD = "stage to stage", "pipeline bubble", "overhead"
TERMS = (WEIGHTS, COMPUTE, CACHE, REDUCE_LATENCY, REDUCE_BYTES, EXCHANGE, SEND, BUBBLE, OVERHEAD)
REDUCES_PER_LAYER = 2
"""After attention and after the feed-forward layer (arXiv:1909.08053)."""

Seconds = dict[str, float]


@dataclass(frozen=True)
class Rows:
    """The rows of one engine's step. The counts are means, which need not be whole.

    Attributes:
        decodes: sequences of which it computes one token.
        prompt_tokens: of prompts.
        prompts: whose last token it computes.
        seen: tokens that a decoding sequence has, on average.
        prompt_seen: tokens that a prompt's token sees, on average.
    """

    decodes: float
    prompt_tokens: float = 0.0
    prompts: float = 0.0
    seen: float = 0.0
    prompt_seen: float = 0.0

    @property
    def tokens(self) -> float:
        return self.decodes + self.prompt_tokens

    @property
    def outputs(self) -> float:
        """Tokens with logits."""
        return self.decodes + self.prompts


class StepTime:
    """The step of one layout on one cluster."""

    def __init__(self, cluster: Cluster, cost: ModelCost, shard: ShardCost, layout: ClusterLayout) -> None:
        self._cluster = cluster
        self._cost = cost
        self._shard = shard
        self._layout = layout
        reached = cluster.efficiency
        self._read = cluster.device.bytes_per_second * reached.memory_efficiency
        self._compute = cluster.device.operations_per_second * reached.compute_efficiency
        self._link = cluster.device.link_bytes_per_second * reached.link_efficiency
        self._network = cluster.network_bytes_per_second * reached.link_efficiency

    def stages(self, rows: Rows) -> list[Seconds]:
        """The terms of each kind of stage: one in the middle, if there is any, and the last, which has the head."""
        num_stages, num_layers = self._layout.pipeline, self._cost.num_layers
        most = -(-num_layers // num_stages) / num_layers
        last = num_layers // num_stages / num_layers
        if num_stages == 1:
            return [self._stage(rows, 1.0, has_head=True)]
        return [self._stage(rows, most, has_head=False), self._stage(rows, last, has_head=True)]

    def period(self, decodes: Rows, with_chunk: Rows, chunk_share: float) -> Seconds:
        """The terms of the mean seconds between two steps of the same sequences.

        As many plans are in flight as there are stages. `chunk_share` of them have a chunk of a prompt, too. A plan
        passes one stage after the other, so a round of the plans takes as long as the stages' number times the longest
        plan on the slowest stage: what is not work of the mean plan is the bubble.
        """
        num_stages = self._layout.pipeline
        short, long = self._through(decodes), self._through(with_chunk)
        period = {term: (1 - chunk_share) * short[term] + chunk_share * long[term] for term in TERMS}
        any_chunk = 1 - (1 - chunk_share) ** num_stages
        waits = (any_chunk - chunk_share) * (sum(long.values()) - sum(short.values()))
        period[BUBBLE] += max(0.0, waits)
        return period

    def _through(self, rows: Rows) -> Seconds:
        """The terms of one plan on its way through all stages. Each stage takes as long as the slowest one."""
        stages, num_stages = self.stages(rows), self._layout.pipeline
        totals = [sum(stage.values()) for stage in stages]
        counts = [num_stages - 1, 1] if len(stages) > 1 else [1]
        terms = {term: sum(count * stage[term] for count, stage in zip(counts, stages, strict=True)) for term in TERMS}
        terms[BUBBLE] += num_stages * max(totals) - sum(terms.values())
        return terms

    def _stage(self, rows: Rows, share: float, *, has_head: bool) -> Seconds:
        """Terms of a stage with `share` of the layers."""
        cost, shard, layout = self._cost, self._shard, self._layout
        num_layers = share * cost.num_layers
        seconds = dict.fromkeys(TERMS, 0.0)
        layers = WeightCost(shard.layers.num_bytes + shard.rest_bytes, shard.layers.num_weights)
        self._multiply(seconds, _part(layers, share), rows.tokens)
        if has_head:
            self._multiply(seconds, shard.head, rows.outputs)
        if cost.num_experts:
            self._add_experts(seconds, rows, share)
        self._add_attention(seconds, rows, share)
        hidden_bytes = rows.tokens * cost.hidden_size * cost.activation_bytes
        if layout.tensor > 1:
            logits_bytes = rows.outputs * cost.vocab_size * cost.activation_bytes * has_head
            times = REDUCES_PER_LAYER * num_layers
            seconds[REDUCE_LATENCY] += (times + has_head) * self._reduce_latency()
            # A gather of the logits moves half of what their sum would.
            seconds[REDUCE_BYTES] += times * self._reduce(hidden_bytes) + self._reduce(logits_bytes) / 2
        if layout.pipeline > 1 and not has_head:
            across = layout.tensor >= self._cluster.devices_per_node
            rate = self._network if across else self._link
            seconds[SEND] += hidden_bytes / layout.tensor / rate + self._latency(layout.tensor * 2)
        reached = self._cluster.efficiency
        seconds[OVERHEAD] += num_layers * reached.layer_microseconds / 1e6
        seconds[OVERHEAD] += reached.step_microseconds / 1e6 / layout.pipeline
        return seconds

    def _multiply(self, seconds: Seconds, weights: WeightCost, tokens: float, balance: float = 1.0) -> None:
        """Adds the time of a product to the term that is the longer one."""
        read = weights.num_bytes / self._read
        compute = 2 * tokens * weights.num_weights / self._compute / balance
        seconds[WEIGHTS if read >= compute else COMPUTE] += max(read, compute)

    def _add_experts(self, seconds: Seconds, rows: Rows, share: float) -> None:
        cost, layout = self._cost, self._layout
        whole = _part(self._shard.experts, share * layout.tensor)  # of all ranks of a stage
        is_divided = layout.expert > 1
        # Each rank gets the tokens of all engines, and computes its own experts for them.
        tokens = rows.tokens * (layout.data if is_divided else 1)
        chosen_share = cost.experts_per_token / cost.num_experts
        read_share = 1 - (1 - chosen_share) ** tokens
        ranks = layout.expert if is_divided else layout.tensor
        balance = self._cluster.efficiency.expert_balance if is_divided else 1.0
        read = whole.num_bytes * read_share / ranks / self._read
        compute = 2 * tokens * chosen_share * whole.num_weights / ranks / self._compute / balance
        seconds[WEIGHTS if read >= compute else COMPUTE] += max(read, compute)
        if is_divided and layout.data > 1:
            self._add_exchange(seconds, rows, share * cost.num_expert_layers)

    def _add_exchange(self, seconds: Seconds, rows: Rows, num_layers: float) -> None:
        """Each rank sends its engine's tokens to the ranks of its tensor coordinate in other engines.

        These return their sums. As engines have equally many tokens, the two directions are equally many rows. If it
        saves enough, a token goes only where it chose an expert. Over NCCL, a message before has the number of tokens;
        over gloo, the tokens carry their number.
        """
        cost, layout = self._cost, self._layout
        row_bytes = 2 * cost.hidden_size * cost.activation_bytes + cost.experts_per_token * CHOICE_BYTES
        engines_per_node = max(1, self._cluster.devices_per_node // (layout.tensor * layout.pipeline))
        across = max(0, layout.data - engines_per_node)
        inside = layout.data - 1 - across
        share, messages = chosen_share(cost.num_experts, layout.expert, cost.experts_per_token), 2
        if self._cluster.device.transport == "nccl":
            is_worth_counting = saved_bytes(rows.tokens, layout.data, row_bytes, share) > COUNTS_COST
            share, messages = (share, 3) if is_worth_counting else (1.0, 2)
        transfer = share * rows.tokens * row_bytes * (inside / self._link + across / self._network)
        message = self._cluster.device.link_seconds + (self._cluster.network.seconds if across else 0.0)
        seconds[EXCHANGE] += num_layers * (transfer + messages * message)

    def _add_attention(self, seconds: Seconds, rows: Rows, share: float) -> None:
        for kind in self._shard.attention:
            seen = _within(rows.seen, kind.window)
            read = rows.decodes * seen * kind.bytes_per_token / self._read
            compute = rows.decodes * seen * kind.operations / self._compute
            seconds[CACHE if read >= compute else COMPUTE] += share * max(read, compute)
            pairs = rows.prompt_tokens * _within(rows.prompt_seen, kind.window)
            seconds[COMPUTE] += share * pairs * kind.operations / self._compute
        seconds[CACHE] += share * 2 * rows.decodes * self._shard.state_bytes / self._read  # read and written

    def _latency(self, num_ranks: int) -> float:
        """Seconds of a collective over `num_ranks` devices, with hardly any bytes."""
        nodes = -(-num_ranks // self._cluster.devices_per_node)
        rounds = math.ceil(math.log2(nodes)) if nodes > 1 else 0
        return self._cluster.device.link_seconds + 2 * rounds * self._cluster.network.seconds

    def _reduce_latency(self) -> float:
        return self._latency(self._layout.tensor)

    def _reduce(self, num_bytes: float) -> float:
        """Seconds of the bytes of an all-reduce: within nodes, then between them what each device has of the sum."""
        size = self._layout.tensor
        within = min(size, self._cluster.devices_per_node)
        nodes = -(-size // self._cluster.devices_per_node)
        seconds = 2 * (within - 1) / within * num_bytes / self._link
        return seconds + 2 * (nodes - 1) / nodes * num_bytes / within / self._network


def _part(weights: WeightCost, share: float) -> WeightCost:
    return WeightCost(int(weights.num_bytes * share), int(weights.num_weights * share))


def _within(seen: float, window: int | None) -> float:
    return seen if window is None else min(seen, window)
