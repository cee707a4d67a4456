"""The waiting time for a refused client is estimated from recent throughput."""

from quire.core.scheduling.throughput import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, WINDOW_SECONDS, Throughput


def test_rates_are_per_second_of_the_time_measured() -> None:
    throughput = Throughput(0.0)
    for second in range(10):
        throughput.record(float(second), num_tokens=30, num_finished=2)
    assert throughput.rates(10.0) == (30.0, 2.0)


def test_what_is_older_than_the_window_does_not_count() -> None:
    throughput = Throughput(0.0)
    throughput.record(0.0, num_tokens=1000, num_finished=1000)
    throughput.record(50.0, num_tokens=10, num_finished=1)
    tokens, requests = throughput.rates(60.0)
    assert (tokens, requests) == (1.0, 0.1)
    assert throughput.rates(60.0 + 2 * WINDOW_SECONDS) == (0.0, 0.0)


def test_the_wait_is_that_of_the_queue() -> None:
    throughput = Throughput(0.0)
    throughput.record(5.0, num_tokens=500, num_finished=20)
    assert throughput.retry_after_seconds(10.0, num_waiting=40, num_pending_tokens=10**6) == 10.0


def test_before_anything_finishes_tokens_are_the_measure() -> None:
    throughput = Throughput(0.0)
    throughput.record(0.5, num_tokens=500, num_finished=0)
    assert throughput.retry_after_seconds(10.0, num_waiting=4, num_pending_tokens=1500) == 30.0


def test_the_wait_is_never_silly() -> None:
    throughput = Throughput(0.0)
    assert throughput.retry_after_seconds(0.0, num_waiting=5, num_pending_tokens=5) == MIN_RETRY_SECONDS
    throughput.record(0.0, num_tokens=1, num_finished=1)
    assert throughput.retry_after_seconds(20.0, num_waiting=10**6, num_pending_tokens=0) == MAX_RETRY_SECONDS
