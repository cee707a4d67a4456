"""The flight recorder: rings that stay small, records that outlive a killed process, damaged files."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire.core.flight.dumps import FlightFolder, FlightMemory, dump_folder
from quire.core.flight.recorder import FlightRecorder
from quire.core.flight.recording import Recording, find_recordings
from quire.core.flight.records import SUFFIX, Answered, Cut, Ended, Kind, Planned
from quire.core.flight.segments import MAX_FILES, FileSegments, MemorySegments
from quire.core.wire.protocol import (
    AbortRequests,
    EngineReady,
    EngineRequest,
    FinishReason,
    NewSlot,
    RequestDelta,
    SequenceStart,
    StepPlan,
    StepResult,
    encoder,
)
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.cli.doctor_recording import examine_recording
from tests.core.engine.null_engine import Stream, client_of, engine_config
from tests.core.engine.supervised import ENDLESS, launcher, until
from tests.limits import small_files

READY = EngineReady(16, 16, 256, 0, 0, "none", [], caches_prefixes=True)
REQUEST = EngineRequest([SequenceStart("a", seed=1)], [1, 2, 3], SamplingParams(max_tokens=2))


def plan(step_id: int, **fields: object) -> StepPlan:
    return StepPlan(step_id, [], **{"admitted": [], "slots": [0], "num_computed": [0], "num_scheduled": [3],
                                    "num_wanted": [1], "appended_pages": [], **fields})  # type: ignore[arg-type]  # fmt: skip


def record(recorder: FlightRecorder, num_steps: int) -> None:
    recorder.start(engine_config(), READY)
    recorder.add_input(encoder().encode(REQUEST))
    new = NewSlot(0, [1, 2, 3], 3, [[]], SamplingParams())
    recorder.add_plan(plan(0, admitted=[new]), ["a"])
    recorder.add_result(StepResult(0, [[7]]))
    for step_id in range(1, num_steps):
        recorder.add_plan(plan(step_id), [])
        recorder.add_result(StepResult(step_id, [[step_id]]))
    recorder.add_deltas([RequestDelta("a", [1], FinishReason.LENGTH), RequestDelta("b", [1])])


def contents(recording: Recording) -> list[object]:
    return [event for _, event in recording.events()]


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    recorder = FlightRecorder(FileSegments(tmp_path, "engine"))
    record(recorder, 2)
    recorder.add_input(encoder().encode(AbortRequests(["a"])))
    recorder.add_fault("bad luck")
    [recording] = find_recordings(tmp_path)
    assert recording.is_whole
    assert (recording.preamble.config, recording.preamble.ready) == (engine_config(), READY)
    request, first, answer, second, _, ended, abort, fault = contents(recording)
    assert request == REQUEST
    assert isinstance(first, Planned)
    assert (first.plan.admitted[0].token_ids, first.admitted) == ([1, 2, 3], ["a"])
    assert answer == Answered(0, [[7]])
    assert second == Planned(plan(1), [])
    assert ended == Ended([("a", "length")])
    assert abort == AbortRequests(["a"])
    assert fault == "bad luck"
    times = [at for at, _ in recording.events()]
    assert times == sorted(times)
    assert 0 <= times[0] < 60


def test_files_are_a_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileSegments, "num_bytes", 10_000)
    for _ in range(2):  # one engine after another
        record(FlightRecorder(FileSegments(tmp_path, "engine")), 2000)
    files = sorted(tmp_path.iterdir())
    assert len(files) == MAX_FILES
    assert all(path.stat().st_size <= 10_000 and path.suffix == SUFFIX for path in files)
    recording = find_recordings(tmp_path)[-1]
    assert not recording.is_whole
    steps = [event.plan.step_id for event in contents(recording) if isinstance(event, Planned)]
    assert steps == list(range(steps[0], 2000))
    assert steps[0] > 0


def test_memory_is_a_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(MemorySegments, "num_bytes", 10_000)
    memory = FlightMemory("engine")
    record(FlightRecorder(MemorySegments(memory.descriptors)), 1000)
    path = memory.save("it fell over")
    assert path is not None
    [recording] = find_recordings(path)
    *events, fault = contents(recording)
    steps = [event.plan.step_id for event in events if isinstance(event, Planned)]
    assert steps == list(range(steps[0], 1000))
    assert 5_000 < path.stat().st_size < 25_000
    assert fault == "it fell over"


def test_an_engine_that_did_nothing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    memory = FlightMemory("engine")
    FlightRecorder(MemorySegments(memory.descriptors)).start(engine_config(), READY)
    assert memory.save("gone") is None
    assert FlightFolder(tmp_path).save("gone") is None
    assert not dump_folder().exists()


def test_a_record_that_is_too_large_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileSegments, "num_bytes", 10_000)
    recorder = FlightRecorder(FileSegments(tmp_path, "engine"))
    recorder.start(engine_config(), READY)
    recorder.add_input(bytes(6000))
    assert contents(find_recordings(tmp_path)[0]) == [Cut(Kind.INPUT, 6000)]


def test_a_full_disk_ends_the_recording_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = FlightRecorder(FileSegments(tmp_path / "file" / "folder", "engine"))
    (tmp_path / "file").touch()
    record(recorder, 3)
    assert "the flight recorder stops" in caplog.text


def test_a_half_written_record_is_no_record(tmp_path: Path) -> None:
    record(FlightRecorder(FileSegments(tmp_path, "engine")), 3)
    [path] = tmp_path.iterdir()
    data = path.read_bytes()
    whole = len(contents(find_recordings(path)[0]))
    path.write_bytes(data[:-3])
    assert len(contents(find_recordings(path)[0])) == whole - 1


@pytest.mark.parametrize("change", [lambda data: b"", lambda data: b"x" * 100, lambda data: data[:40]])
def test_other_files_are_refused(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    record(FlightRecorder(FileSegments(tmp_path, "engine")), 1)
    [path] = tmp_path.iterdir()
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ConfigError, match="is no file of a flight recorder"):
        find_recordings(path)
    with pytest.raises(ConfigError, match="has no files of a flight recorder"):
        find_recordings(tmp_path)
    with pytest.raises(ConfigError, match="There is no"):
        find_recordings(tmp_path / "gone")


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    record(FlightRecorder(FileSegments(tmp_path, "engine")), 1)
    [path] = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    place = data.index(encoder().encode(REQUEST))
    data[place] = 0xC1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=f"{path} is damaged"):
        contents(find_recordings(path)[0])


def test_a_killed_engine_leaves_its_last_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is left of the process but the memory that its parent keeps."""
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))

    async def scenario() -> None:
        async with client_of(launcher()) as client:
            await client.start()
            stream = Stream(client, "victim", [1, 2], ENDLESS)
            await until(lambda: len(stream.token_ids) > 100)
            os.kill(client.engine_pids[0] or 0, signal.SIGKILL)
            await until(lambda: "what the engine did before it ended is in" in caplog.text)
            client.abort(["victim"])

    asyncio.run(scenario())
    [path] = dump_folder().iterdir()
    assert str(path) in caplog.text
    [recording] = find_recordings(path)
    tokens = [event.token_ids for event in contents(recording) if isinstance(event, Answered)]
    assert len(tokens) > 50
    said = "\n".join(examine_recording(recording))
    assert "After" in said
    assert "the engine was killed by signal 9." in said
    assert "Unfinished then: victim." in said


def test_a_crash_that_the_disk_does_not_take_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    memory = FlightMemory("engine")
    record(FlightRecorder(MemorySegments(memory.descriptors)), 100)
    with small_files(1000):
        assert memory.save("it fell over") is None
    assert list(dump_folder().iterdir()) == []
    assert "cannot be written" in caplog.text
    assert memory.save("it fell over") is not None


def test_a_disk_that_fills_up_ends_the_recording_and_the_records_before_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = FlightRecorder(FileSegments(tmp_path, "engine"))
    record(recorder, 5)
    [path] = tmp_path.iterdir()
    with small_files(path.stat().st_size + 10):
        recorder.add_result(StepResult(5, [[1]]))
        recorder.add_result(StepResult(6, [[1]]))
    assert caplog.text.count("the flight recorder stops") == 1
    steps = [event.step_id for event in contents(find_recordings(tmp_path)[0]) if isinstance(event, Answered)]
    assert steps == [0, 1, 2, 3, 4]
