"""Files of a checkpoint that a stranger made: an error that names the file, and no reader that waits."""

import os
import socket
from pathlib import Path

import pytest
from msgspec import Struct

from quire.core.checkpoint_file import check_inside, check_kinds, read_bytes, read_json, read_struct
from quire.core.errors import ModelLoadError


class Content(Struct):
    a: object = None


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a": ' + "[" * 200_000, "", "{", '{"a": "\\'])
def test_broken_json_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    for read in (read_json, lambda path: read_struct(path, Content)):
        with pytest.raises(ModelLoadError, match=r"Cannot read .*config.json: .*download it again"):
            read(path)


def test_other_encodings_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'{"a": "\xff"}')
    for read in (read_json, lambda path: read_struct(path, Content)):
        with pytest.raises(ModelLoadError, match=r"x.json"):
            read(tmp_path / "x.json")


def test_a_pipe_a_device_and_a_folder_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a named pipe"), (Path("/dev/zero"), "a device"), (tmp_path, "a folder")):
        with pytest.raises(ModelLoadError, match=f"{path} is {kind}, where a file belongs"):
            read_bytes(path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "absent")


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, 1 << 40)  # a hole, which takes no disk
    with pytest.raises(ModelLoadError, match=r"has 1099511627776 bytes; at most"):
        read_json(path)


def test_names_stay_inside(tmp_path: Path) -> None:
    source = tmp_path / "index.json"
    assert check_inside(tmp_path, "a/b.safetensors", source) == tmp_path / "a/b.safetensors"
    assert check_inside(tmp_path, "", source) == tmp_path
    for name in ("/etc/passwd", "../x", "a/../../x", "a\0", 3, None):
        with pytest.raises(ModelLoadError, match=r"index.json names .*, which is no file in"):
            check_inside(tmp_path, name, source)


def test_a_folder_with_anything_but_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "absent")
    check_kinds(tmp_path)
    os.mkfifo(tmp_path / "1_Pooling" / "config.json")
    with pytest.raises(ModelLoadError, match=r"1_Pooling/config.json is a named pipe, where a file belongs. Remove it"):
        check_kinds(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        with pytest.raises(ModelLoadError, match="is a socket"):
            check_kinds(tmp_path)
