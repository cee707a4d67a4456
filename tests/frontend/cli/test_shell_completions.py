"""Scripts that complete `quire` in a shell, tried in those shells that are installed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ASK = """
cd "$1"; source "$2"; shift 2
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
_shtab_quire; printf '%s\\n' "${COMPREPLY[@]}"
"""


def completions(shell: str) -> str:
    done = subprocess.run([sys.executable, "-m", "quire", "completions", shell], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bash") / "quire.bash"
    path.write_text(completions("bash"))
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ser"], ["serve"]),
        (["bench", "th"], ["throughput"]),
        (["bench", "sweep", "s"], ["serve"]),
        (["serve", "--max-num-s"], ["--max-num-seqs"]),
        (["serve", "--dtype", "flo"], ["float", "float16", "float32"]),
        (["serve", "--chat-template", "te"], ["template.jinja"]),
        (["serve", "che"], ["checkpoint"]),
        (["completions", "z"], ["zsh"]),
    ],
    ids=" ".join,
)
def test_bash_completes(script: Path, tmp_path: Path, words: list[str], expected: list[str]) -> None:
    (tmp_path / "template.jinja").touch()
    (tmp_path / "checkpoint").mkdir()
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK, "bash", str(tmp_path), str(script), "quire", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert sorted(done.stdout.split()) == expected, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_script(shell: str, tmp_path: Path) -> None:
    text = completions(shell)
    assert "--max-num-seqs" in text or "max-num-seqs" in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = tmp_path / "script"
    path.write_text(text)
    subprocess.run([shell, "-n", str(path)], check=True, timeout=60)


def test_an_unknown_shell_is_told_what_there_is() -> None:
    done = subprocess.run([sys.executable, "-m", "quire", "completions", "tcsh"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "choose from bash, zsh, fish (got 'tcsh')" in done.stderr
