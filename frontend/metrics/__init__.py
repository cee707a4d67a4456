"""Metrics: the counters of `/metrics`, and a log line of them."""
