"""Metrics as objects, where vLLM's programs import them."""

from quire.frontend.metrics.reader import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
