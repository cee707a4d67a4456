"""`quire doctor` on outputs of `quire collect-env`."""

from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire.frontend.cli.collect_env import read_facts
from quire.frontend.cli.doctor import lines
from quire.frontend.cli.doctor_machine import examine_machine

GOOD = {
    "quire": "1.0", "processor": "Some CPU (x86_64)", "cores": "8 physical, 16 logical, 16 usable", "features": "avx2",
    "memory": "64.0 GiB, 60.0 GiB available", "/dev/shm": "8.0 GiB, 8.0 GiB free", "CUDA build": "none", "GPU": "none",
    "cgroup cpu.max": "max 100000", "cgroup memory.max": "max",
}  # fmt: skip


def test_a_good_machine() -> None:
    assert list(examine_machine(GOOD))[1:] == ["  Nothing stands out."]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"features": "sse4_2"}, "no AVX2"),
        ({"cgroup cpu.max": "150000 100000"}, "may use 1.5 of 16 cores"),
        ({"/dev/shm": "absent"}, "/dev/shm is absent"),
        ({"/dev/shm": "0.1 GiB, 0.1 GiB free"}, "/dev/shm is down to 0.1 GiB"),
        ({"memory": "8.0 GiB, 1.5 GiB available"}, "Only 1.5 GiB"),
        ({"cgroup memory.max": str(6 << 30)}, "more than 6.0 GiB"),
        ({"CUDA build": "12.8"}, "finds no GPU"),
        ({"torch": "does not import: ImportError: x"}, "torch does not import: ImportError: x. Install it anew"),
        ({"uvloop": "not installed"}, "The package uvloop is missing"),
        ({"OMP_NUM_THREADS": "64"}, "OMP_NUM_THREADS is 64 with 16 usable cores"),
        ({"QUIRE_DISABLED_KERNELS": "cpu_native"}, "plain torch does their work"),
        ({"QUIRE_LOGGING_LEVEL": "debug"}, "logs have prompts"),
        ({"QUIRE_CPU_ISA": "avx2"}, "a better level"),
    ],
)
def test_what_stands_out(facts: dict[str, str], said: str) -> None:
    [line] = list(examine_machine(GOOD | facts))[1:]
    assert said in line


def test_a_file_of_facts_is_read_as_it_was_printed(tmp_path: Path) -> None:
    path = tmp_path / "env.txt"
    long = "A_NAME_THAT_IS_LONGER_THAN_ITS_COLUMN"
    rows = [f"  {name:<24} {value}" for name, value in {**GOOD, long: "a b", "empty": ""}.items()]
    path.write_text("System\n" + "\n".join(rows) + "\n\n")
    assert read_facts(path) == {**GOOD, long: "a b", "empty": ""}
    assert "Nothing stands out." in "\n".join(lines([str(path)]))
    path.write_text("something else")
    with pytest.raises(ConfigError, match="neither a file of a flight recorder nor an output of"):
        list(lines([str(path)]))
