"""Why a layout is worse than the best one: the part of a request's time that grew most."""

import math

from quire.frontend.labs.cluster_model.estimate import Estimate
from quire.frontend.labs.cluster_model.load import Load
from quire.frontend.labs.cluster_model.step_time import COMPUTE, TERMS, WEIGHTS

PARTS = [(WEIGHTS, COMPUTE), *((term,) for term in TERMS if term not in (WEIGHTS, COMPUTE))]
"""Terms that are compared as one: a product takes the time of its bytes or of its operations."""


def bound(estimate: Estimate) -> str:
    """The term that most of a step goes to, and its share."""
    term = max(TERMS, key=lambda name: estimate.terms[name])
    return f"{term} {100 * estimate.terms[term] / estimate.tpot_seconds:.0f} %"


def reason(estimate: Estimate, best: Estimate, load: Load) -> str:
    """One line; empty for the best layout itself."""
    if estimate is best:
        return ""
    if estimate.fit.obstacle is not None:
        return estimate.fit.obstacle
    if estimate.limit == "cache" and best.limit != "cache":
        return f"cache too small: an engine runs {estimate.running:,.0f} requests at once, and the others wait"
    if estimate.limit is not None and best.limit is None:
        return f"--max-num-seqs: an engine runs {estimate.running:,.0f} requests at once, and the others wait"
    grown = max(PARTS, key=lambda part: _total(estimate, part) - _total(best, part))
    growth = (load.output_len - 1) * (_total(estimate, grown) - _total(best, grown))
    prompt = estimate.ttft_seconds - best.ttft_seconds
    if prompt > growth and math.isfinite(prompt):
        return f"time to first token: {milliseconds(estimate.ttft_seconds)} and not {milliseconds(best.ttft_seconds)}"
    term = max(grown, key=lambda name: estimate.terms[name])
    return f"{term}: {milliseconds(_total(estimate, grown))} of a step and not {milliseconds(_total(best, grown))}"


def _total(estimate: Estimate, part: tuple[str, ...]) -> float:
    return sum(estimate.terms[term] for term in part)


def milliseconds(seconds: float) -> str:
    """For people."""
    if not math.isfinite(seconds):
        return "-"
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
