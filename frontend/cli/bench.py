"""`quire bench NAME`: the table of benchmarks; each module declares its own arguments."""

from quire.frontend.cli.program import Command, Program

BENCH = Program(
    "Measure throughput, latency, a running server, start-up, or the host's own cost.",
    {
        "throughput": Command(
            "quire.frontend.bench.throughput", "Requests and tokens per second of the engine.", ("bench",)
        ),
        "latency": Command(
            "quire.frontend.bench.latency", "Seconds that one batch takes, from start to end.", ("bench",)
        ),
        "serve": Command(
            "quire.frontend.bench.serve", "Load a running server; throughput and times to tokens.", ("bench",)
        ),
        "startup": Command(
            "quire.frontend.bench.startup", "Seconds from the start of a process to an answer.", ("bench",)
        ),
        "host": Command(
            "quire.frontend.bench.host.command", "What everything but the model costs, stage by stage.", ("bench",)
        ),
    },
    refused={
        "sweep": "run one benchmark for each setting instead.",
        "mm-processor": "models with images, audio or video are not served yet.",
    },
)
