"""The comparison with peers: engines run in turn, a failure affects only its row, ratios are ratios of medians."""

import contextlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture(autouse=True)
def _scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS / "peers"))


class Counter:
    """An engine that counts up from a start, and notes the order of turns."""

    def __init__(self, name: str, start: float, turns: list[str], *, serves: bool = True) -> None:
        from engines import DEFAULTS

        self.settings = (DEFAULTS,)
        self.name = name
        self.serves = serves
        self._rate = start
        self._turns = turns

    def output_rate(self, *sizes: object) -> float:
        from processes import MeasurementError

        self._turns.append(self.name)
        self._rate += 1
        if self.name == "llama.cpp" and len(self._turns) > 3:
            raise MeasurementError("out of memory")
        return self._rate


def test_engines_take_turns_and_medians_are_compared(tmp_path: Path) -> None:
    import compare
    from report import markdown
    from results import Results
    from rows import Bench, Row, offline
    from targets import at_least, at_most

    turns: list[str] = []
    engines = [
        Counter("Quire", 99, turns), Counter("vLLM", 49, turns), Counter("llama.cpp", 24, turns, serves=False),
    ]  # fmt: skip
    targets = {"output tok/s": at_least(1.9, "vLLM") + at_least(4.1, "llama.cpp") + at_most(200)}
    row = Row("r", "offline", offline(4, 8, 2), targets, served=False)
    bench = Bench(Path("models"), None, smoke=True)
    path = tmp_path / "results.json"
    results = Results(path, smoke=True, resume=False)
    compare.measure(row, engines, bench, 3, results)
    assert turns == ["Quire", "vLLM", "llama.cpp"] * 3
    assert results.errors == ["r: llama.cpp: out of memory"] * 2
    expected = (
        "| offline | output tok/s | 101 (≤ 200 ✓) | 51.00 | 25.00 | 1.98 × (≥ 1.9 ✓) | 4.04 × (≥ 4.1 ✗) | 3, 3, 1 |"
    )
    assert markdown([row], results.rows).splitlines()[2:] == [expected]
    compare.measure(Row("s", "", row.measure, {}), engines, bench, 0, results)
    assert list(results.rows["s"]["runs"]) == ["Quire", "vLLM"]


def test_another_quire_is_a_peer(tmp_path: Path) -> None:
    import compare
    from engines import Quire
    from report import markdown
    from results import Results
    from rows import Bench, Row, offline

    turns: list[str] = []
    before = Quire(tmp_path, 5, name="Quire before", python=Path(sys.executable))
    row = Row("r", "offline", offline(4, 8, 2), {}, served=False)
    results = Results(tmp_path / "results.json", smoke=True, resume=False)
    engines = [Counter("Quire", 5, turns), Counter(before.name, 2, turns)]
    compare.measure(row, engines, Bench(Path("models"), None, smoke=True), 1, results)
    titles, _, figures = markdown([row], results.rows).splitlines()
    assert titles == "| workload | figure | Quire | Quire before | Quire / Quire before | runs |"
    assert figures == "| offline | output tok/s | 6.00 | 3.00 | 2.00 × | 1, 1 |"


def test_a_comparison_is_taken_up_where_it_was_left(tmp_path: Path) -> None:
    import compare
    from results import Results, ResultsError
    from rows import Bench, Row, offline

    turns: list[str] = []
    engines = [Counter("Quire", 0, turns), Counter("vLLM", 0, turns)]
    row = Row("r", "offline", offline(4, 8, 2), {}, served=False)
    bench = Bench(Path("models"), None, smoke=True)
    path = tmp_path / "results.json"
    compare.measure(row, engines[:1], bench, 2, Results(path, smoke=True, resume=False))
    again = Results(path, smoke=True, resume=True)
    compare.measure(row, engines, bench, 3, again)
    assert turns == ["Quire", "Quire", "vLLM", "vLLM", "Quire", "vLLM"]
    assert Results(path, smoke=True, resume=True).rows == again.rows
    with pytest.raises(ResultsError, match="--resume"):
        Results(path, smoke=True, resume=False)
    with pytest.raises(ResultsError, match="with --smoke"):
        Results(path, smoke=False, resume=True)


class Clock:
    """A server with a simulated clock: a new prompt takes a second, a token 10 ms."""

    def __init__(self, *, remembers: bool = True) -> None:
        self.now = 0.0
        self._remembers = remembers
        self._known: list[list[int]] = []

    def complete(self, max_tokens: int, prompt: list[int]) -> dict:
        self.now += 0.01 * max_tokens + (0.0 if prompt in self._known else len(prompt) / 1000)
        if self._remembers:
            self._known.append(prompt)
        return {"usage": {"prompt_tokens": len(prompt), "completion_tokens": max_tokens}}


class ClockEngine:
    name = "clock"

    def __init__(self, server: Clock) -> None:
        self.server_of = server

    def server(self, *_: object, **__: object) -> contextlib.nullcontext[Clock]:
        return contextlib.nullcontext(self.server_of)


def test_time_per_token_leaves_the_prompt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import rows
    from processes import MeasurementError

    server = Clock()
    monkeypatch.setattr(rows, "time", SimpleNamespace(perf_counter=lambda: server.now))
    figures = rows.long_context(ClockEngine(server), rows.Bench(Path("models"), None, smoke=False))
    assert figures == pytest.approx({"time per token at 1k, ms": 10, "time per token at 32k, ms": 10, "32k / 1k, ×": 1})
    server = Clock(remembers=False)
    with pytest.raises(MeasurementError, match="cache"):
        rows.long_context(ClockEngine(server), rows.Bench(Path("models"), None, smoke=False))


def test_a_child_that_takes_too_long_or_fails_is_ended_and_told(tmp_path: Path) -> None:
    from processes import MeasurementError, run

    log = tmp_path / "log"
    assert run(["echo", "hello"], {}, 5, log) == "hello\n"
    with pytest.raises(MeasurementError, match=r"not done after 0 s"):
        run(["sleep", "60"], {}, 0.2, log)
    with pytest.raises(MeasurementError, match="ended with 3"):
        run(["sh", "-c", "exit 3"], {}, 5, log)
    assert "hello" in log.read_text()


def test_engines_that_read_gguf_files_share_one_of_each_kind(tmp_path: Path) -> None:
    import compare
    from engines import GgufFiles, gguf_engines
    from results import Results
    from rows import ROWS, Bench

    scripts = tmp_path / "scripts"
    scripts.mkdir()
    converter = "import sys; print('made'); open(sys.argv[2], 'w').write(sys.argv[3])"
    (scripts / "to_gguf.py").write_text(converter)
    rate = (
        "import sys; print('{{\"output_tokens\": 1, \"tok_s\": {}}}') if open(sys.argv[1]).read() == 'q8_0' else 1 / 0"
    )
    (scripts / "llama_server.py").write_text(rate.format(20.5))
    (scripts / "openvino_batch.py").write_text(rate.format(7))
    for name in ("llama", "openvino"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").symlink_to(sys.executable)
    engines = gguf_engines(tmp_path, scripts, GgufFiles(scripts / "to_gguf.py", tmp_path, 30, tmp_path), 30)
    results = Results(None, smoke=True, resume=False)
    bench = Bench(Path("models"), None, smoke=True)
    [row] = [row for row in ROWS if row.name == "stream-128-64-q8_0"]
    compare.measure(row, engines, bench, 2, results)
    assert results.rows[row.name]["runs"] == {
        "llama.cpp": [{"output tok/s": 20.5}] * 2,
        "OpenVINO": [{"output tok/s": 7.0}] * 2,
    }
    assert (tmp_path / "to_gguf.log").read_text().count("made\n") == 1
    [row] = [row for row in ROWS if row.name == "offline-128-64-q8_0-kv8"]
    compare.measure(row, engines, bench, 1, results)
    assert list(results.rows[row.name]["runs"]) == ["OpenVINO"], "llama.cpp's script has no such cache"
    [row] = [row for row in ROWS if row.name == "stream-128-64"]
    compare.measure(row, engines, bench, 1, results)
    assert list(results.rows[row.name]["runs"]) == ["llama.cpp"]
    assert "ended with 1" in results.errors[0]


def test_k_formats_need_the_library_that_rounds_to_them(tmp_path: Path) -> None:
    from engines import GgufFiles, Quire

    def weights() -> list[str]:
        quire = Quire(tmp_path, 30, files=GgufFiles(tmp_path / "to_gguf.py", tmp_path, 30, tmp_path))
        return list(dict.fromkeys(setting.weights for setting in quire.settings))

    assert weights() == ["bf16", "q8_0", "q4_0"]
    library = tmp_path / "llama" / "lib" / "python3.11" / "site-packages" / "xllamacpp" / "xllamacpp.abi3.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert weights() == ["bf16", "q8_0", "q4_0", "q4_k_m"]


def test_half_of_the_values_have_six_bits_in_q4_k_m() -> None:
    from k_quants import Q4_K, Q6_K, kind_of

    kinds = [kind_of(f"blk.{layer}.attn_v.weight", 28) for layer in range(28)]
    assert [layer for layer in range(28) if kinds[layer] == Q6_K] == [
        *range(3),
        5,
        8,
        11,
        14,
        17,
        20,
        23,
        *range(24, 28),
    ]
    assert kind_of("blk.0.attn_q.weight", 28) == Q4_K
    assert kind_of("token_embd.weight", 28) == Q6_K


def test_an_unknown_row_is_refused_by_name() -> None:
    script = [sys.executable, str(SCRIPTS / "peers" / "compare.py")]
    done = subprocess.run(
        [*script, "--vllm", "x", "--models", "y", "--only", "faster"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "faster" in done.stderr
    assert "offline-128-64" in done.stderr
