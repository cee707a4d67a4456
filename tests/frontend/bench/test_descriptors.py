"""Benchmarks with many connections raise the limit of open files, or name the limit that forbids it."""

import subprocess
import sys

HOST = [sys.executable, "-m", "quire", "bench", "host", "--executors", "uni", "--stages", "http", "--seconds", "0.1"]


def host_bench(limits: str, streams: int) -> subprocess.CompletedProcess[str]:
    """The benchmark in a shell with other limits, so that this process keeps its own."""
    shell = ["sh", "-c", f'ulimit {limits}; exec "$@"', "sh"]
    command = [*shell, *HOST, "--num-streams", str(streams), "--output-len", "2"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_soft_limit_is_raised_for_client_and_server() -> None:
    done = host_bench("-Sn 128", 200)
    assert done.returncode == 0, done.stderr
    assert "200" in done.stdout


def test_a_hard_limit_that_is_too_low_is_named_with_the_remedy() -> None:
    done = host_bench("-n 300", 200)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "ulimit -Hn" in done.stderr
    assert "--num-streams" in done.stderr
