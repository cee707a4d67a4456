"""The installed program: exit codes, versions, start-up time, and no traceback for a user's mistake."""

import contextlib
import os
import subprocess
import sys

import pytest

import quire
from quire.core.errors import ModelLoadError
from quire.frontend.cli import collect_env, serve
from quire.frontend.cli.main import QUIRE, main


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "quire", *words], capture_output=True, text=True, timeout=60)


def test_overview_loads_nothing_heavy() -> None:
    heavy = ["torch", "litestar", "transformers", "httpx", "msgspec", "yaml", "uvloop", "zmq"]
    code = (
        "import sys\nfrom quire.frontend.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        f"print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "serve" in result.stdout
    assert result.stderr.strip() == "[]"


def test_version_and_usage_errors() -> None:
    assert run("--version").stdout.strip() == quire.__version__
    assert run("version").stdout.strip() == quire.__version__
    wrong = run("serve", "--prot", "1")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "quire serve: there is no option --prot; did you mean --port?\n"


def test_ctrl_c_while_the_program_is_imported_prints_nothing() -> None:
    code = (
        "import os, signal, sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'quire.frontend.cli.command_group': os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where a shell runs the suite with &
        "sys.meta_path.insert(0, Interrupted())\n"
        "from quire.__main__ import main\n"
        "main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.parametrize("part", ["add_arguments", "run"])
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 0), ("SIGINT", 130)])
def test_a_signal_ends_a_service_that_starts_whatever_runs(name: str, code: int, part: str) -> None:
    """An error that its handler raised here would be swallowed, as in a callback of C code, or crash that."""
    program = f"""if True:
        import os, signal, sys, types
        from quire.frontend.cli.command_group import Command

        class Swallows:
            def __del__(self):
                os.kill(os.getpid(), signal.{name})

        def swallow(_):
            Swallows()
            print("went on")

        service = sys.modules["service"] = types.ModuleType("service")
        service.add_arguments = service.run = lambda _: None
        service.{part} = swallow
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs the suite with &
        sys.exit(Command("service", "A service.", is_service=True).run("service", []))
    """
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (code, "", "")


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*words: str) -> str:
        with contextlib.suppress(SystemExit):  # a command's help leaves at once
            QUIRE.run("quire", list(words))
        return capsys.readouterr().out

    assert printed("help") == printed("--help") != ""
    assert printed("help", "chat") == printed("chat", "--help") != ""
    assert printed("help", "bench", "sweep", "serve") == printed("bench", "sweep", "serve", "--help") != ""
    assert printed("bench", "help") == printed("bench", "--help") != ""


def test_unknown_commands_get_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert QUIRE.run("quire", ["srve"]) == 2
    assert "did you mean serve?" in capsys.readouterr().err
    assert QUIRE.run("quire", ["bench", "mm-processor"]) == 2
    assert "quire bench: mm-processor is not supported" in capsys.readouterr().err
    assert QUIRE.run("quire", ["bench"]) == 0
    assert "throughput" in capsys.readouterr().out


def test_errors_of_the_work_are_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> None:
        raise ModelLoadError("the checkpoint is\ntorn.")

    monkeypatch.setattr(serve, "run", fail)
    assert QUIRE.run("quire", ["serve"]) == 1
    assert capsys.readouterr().err == "quire serve: the checkpoint is torn.\n"


def test_interrupts_are_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "run", interrupt)
    with pytest.raises(SystemExit) as stopped:
        main(["serve"])
    assert stopped.value.code == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_leaves_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "quire", "serve", "--help=all"], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")


def test_collect_env_masks_secrets() -> None:
    rows = dict(
        collect_env.environment(
            {"QUIRE_API_KEY": "hush", "HF_TOKEN": "hush", "VLLM_LOGGING_LEVEL": "DEBUG", "HOME": "/home/me"}
        )
    )
    assert rows == {
        "HF_TOKEN": "(set, not shown)",
        "QUIRE_API_KEY": "(set, not shown)",
        "VLLM_LOGGING_LEVEL": "DEBUG",
    }


def test_collect_env_names_what_matters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(collect_env, "TORCH_PROBE", "raise ImportError('no torch here')")
    assert QUIRE.run("quire", ["collect-env"]) == 0
    text = capsys.readouterr().out
    for word in (quire.__version__, "python", "memory", "msgspec", "no torch here"):
        assert word in text
