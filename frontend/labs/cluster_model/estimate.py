"""Estimates a layout's performance under a load: tokens a second, time to first token, time between tokens."""

import math
from dataclasses import replace

from msgspec import Struct

from quire.core.config.resolved import EngineConfig
from quire.core.wire.model_cost import ModelCost, ShardCost
from quire.frontend.labs.cluster_model.hardware import Cluster
from quire.frontend.labs.cluster_model.layouts import ClusterLayout, layouts
from quire.frontend.labs.cluster_model.load import Load
from quire.frontend.labs.cluster_model.memory_fit import MemoryFit, fit
from quire.frontend.labs.cluster_model.step_time import Rows, StepTime

ROUNDS = 12
"""In which the part of its time that a request decodes settles."""


class Estimate(Struct, frozen=True, kw_only=True):
    """A layout under a load, in its steady state. If it does not fit, only `fit` says something.

    Attributes:
        running: requests that one engine runs at once.
        limit: what keeps requests waiting: "cache" or "max_num_seqs"; None: none wait.
        output_tokens_per_second: of the whole cluster.
        tpot_seconds: between two tokens of a sequence; `terms` are its parts.
        ttft_seconds: from a request's arrival to its first token.
        is_sustained: requests are answered as fast as they arrive.
    """

    layout: ClusterLayout
    fit: MemoryFit
    running: float = 0.0
    limit: str | None = None
    output_tokens_per_second: float = 0.0
    tpot_seconds: float = math.inf
    ttft_seconds: float = math.inf
    terms: dict[str, float] = {}
    is_sustained: bool = False

    def request_seconds(self, load: Load) -> float:
        """From a request's arrival to its last token."""
        return self.ttft_seconds + (load.output_len - 1) * self.tpot_seconds


def estimate_all(
    config: EngineConfig, cluster: Cluster, cost: ModelCost, load: Load, *, experts_over_engines: bool = False
) -> list[Estimate]:
    """Estimates every layout, and sorts them. First come layouts that sustain the load, by the seconds of a request;
    then the others that fit, by tokens a second; last those without enough memory."""
    shards = {shard.tensor: shard for shard in cost.shards}
    found = [
        Estimator(config, cluster, cost, shards[layout.tensor], layout, load).estimate()
        for layout in layouts(cluster, cost, experts_over_engines=experts_over_engines)
    ]
    return sorted(found, key=lambda each: _order(each, load))


def _order(estimate: Estimate, load: Load) -> tuple[bool, bool, float]:
    """A closed loop's tokens a second are its requests divided by the seconds of one."""
    value = estimate.request_seconds(load) if estimate.is_sustained else -estimate.output_tokens_per_second
    return estimate.fit.obstacle is not None, not estimate.is_sustained, value


class Estimator:
    """Estimates one layout."""

    def __init__(
        self,
        config: EngineConfig,
        cluster: Cluster,
        cost: ModelCost,
        shard: ShardCost,
        layout: ClusterLayout,
        load: Load,
    ) -> None:
        self._limits = config.limits
        self._layout = layout
        self._load = load
        self._step = StepTime(cluster, cost, shard, layout)
        self._fit = fit(config, cluster, cost, shard, layout, load)

    def estimate(self) -> Estimate:
        """The steady state."""
        if self._fit.obstacle is not None:
            return Estimate(layout=self._layout, fit=self._fit)
        most = min(self._fit.requests, self._limits.max_num_seqs)
        limit = "cache" if self._fit.requests < self._limits.max_num_seqs else "max_num_seqs"
        load, engines = self._load, self._layout.data
        if load.rate is not None:
            return self._with_rate(load.rate / engines, most, limit)
        asked = max(1.0, load.concurrency / engines)
        state = self._state(min(asked, most))
        if asked <= most:
            return self._result(state, min(asked, most))
        return self._result(state, most, queue_seconds=(asked - most) / state.requests_per_second, limit=limit)

    def _with_rate(self, rate: float, most: int, limit: str) -> Estimate:
        """With `rate` requests a second for each engine, and as few at once as answer them."""
        if (state := self._state(most)).requests_per_second < rate:
            return self._result(state, most, queue_seconds=math.inf, limit=limit)
        fewest, enough = 0, most
        while enough - fewest > 1:
            middle = (fewest + enough) // 2
            if self._state(middle).requests_per_second < rate:
                fewest = middle
            else:
                enough = middle
        return self._result(self._state(enough), enough, rate=rate)

    def _state(self, running: float) -> "SteadyState":
        """The steady state of an engine that always has `running` requests, which share the plans in flight.

        As many prompt tokens are computed for each decoded token as the load has. A request decodes for a part of its
        time only, and that part depends on the step, so both are found in turns.
        """
        load, budget, stages = self._load, self._limits.max_num_batched_tokens, self._layout.pipeline
        plans = min(stages, max(1.0, running))
        most_decodes = budget * load.output_len / load.num_tokens
        decoding = 1.0
        for _ in range(ROUNDS):
            decodes = min(decoding * running / plans, most_decodes)
            prompt_tokens = decodes / load.output_len * load.input_len  # of the mean plan
            chunk = max(prompt_tokens, min(load.input_len, max(1.0, budget - decodes)))
            rows = Rows(decodes, seen=load.input_len + load.output_len / 2, prompt_seen=load.input_len / 2)
            with_chunk = replace(rows, prompt_tokens=chunk, prompts=chunk / load.input_len)
            terms = self._step.period(rows, with_chunk, prompt_tokens / chunk)
            tpot = sum(terms.values())
            decode_seconds = (load.output_len - 1) * tpot
            stage = max(sum(each.values()) for each in self._step.stages(with_chunk))
            # The rest of the step that runs, then the prompt's chunks, which follow one another through the stages.
            prefill = tpot / stages / 2 + (math.ceil(load.input_len / chunk) + stages - 1) * stage
            # A request waits longer for its prompt where the steps have no room for more.
            finished_per_second = decodes / load.output_len * plans / tpot
            ttft = max(prefill, running / finished_per_second - decode_seconds)
            if load.output_len > 1:
                decoding = (decoding + decode_seconds / (ttft + decode_seconds)) / 2
        return SteadyState(terms=terms, ttft_seconds=ttft, requests_per_second=running / (ttft + decode_seconds))

    def _result(
        self,
        state: "SteadyState",
        running: float,
        *,
        queue_seconds: float = 0.0,
        limit: str | None = None,
        rate: float | None = None,
    ) -> Estimate:
        per_engine = state.requests_per_second if rate is None else rate
        return Estimate(
            layout=self._layout,
            fit=self._fit,
            running=running,
            limit=limit,
            output_tokens_per_second=per_engine * self._load.output_len * self._layout.data,
            tpot_seconds=sum(state.terms.values()),
            ttft_seconds=state.ttft_seconds + queue_seconds,
            terms=state.terms,
            is_sustained=math.isfinite(queue_seconds),
        )


class SteadyState(Struct, frozen=True, kw_only=True):
    """One engine with as many requests as it always has."""

    terms: dict[str, float]
    ttft_seconds: float
    requests_per_second: float
