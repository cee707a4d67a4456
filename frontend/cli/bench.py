"""`quire bench NAME`: the table of benchmarks; each module declares its own arguments."""

from quire.frontend.cli.command_group import Command, CommandGroup

SWEEP = CommandGroup(
    "Run one benchmark over a grid of settings: JSON results, a table, and plots of throughput against latency.",
    {
        "serve": Command(
            "quire.frontend.bench.sweep.serve", "Servers by setting, and loads on each of them.", ("sweep",)
        ),
        "throughput": Command("quire.frontend.bench.sweep.throughput", "Offline throughput by setting.", ("sweep",)),
    },
    refused={
        "serve_workload": "name the loads yourself: sweep serve --bench-params '{\"max_concurrency\": [1, 8, 64]}'.",
        "startup": "run `quire bench startup` once for each setting.",
        "plot": "every sweep draws its plots; --resume draws those of an old one again.",
        "plot_pareto": "every sweep draws its plots; --resume draws those of an old one again.",
    },
)

BENCH = CommandGroup(
    "Measure throughput, latency, a running server, start-up, a step's parts, kernels, the host's cost, or quality.",
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
        "fleet": Command(
            "quire.frontend.labs.fleet.command", "The router before a thousand engines without a model.", ("bench",)
        ),
        "grammar": Command(
            "quire.frontend.bench.grammar", "What schemas cost a token, and hostile ones everybody else.", ("bench",)
        ),
        "step": Command("quire.frontend.bench.step", "Where the time of a decode step goes.", ("bench",)),
        "ops": Command("quire.frontend.bench.ops", "The CPU kernels against the processor's own limits.", ("bench",)),
        "quality": Command(
            "quire.frontend.bench.quality", "What weights or a KV cache of fewer bits change, on a text.", ("bench",)
        ),
        "sweep": SWEEP,
    },
    refused={
        "mm-processor": "models with images, audio or video are not served yet.",
    },
)
