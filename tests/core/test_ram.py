"""The RAM of this host."""

from pathlib import Path

import psutil

from quire.core.ram import available_ram


def test_ram_is_bounded_by_the_control_group(tmp_path: Path) -> None:
    everything = psutil.virtual_memory().available
    assert everything > 0
    assert available_ram(tmp_path) >= everything // 2, "no control group, no bound"
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert available_ram(tmp_path) >= everything // 2
    (tmp_path / "memory.max").write_text("50000\n")
    assert available_ram(tmp_path) == 49000
    (tmp_path / "memory.stat").write_text("anon 900\ninactive_file 100\n")
    assert available_ram(tmp_path) == 49100
