"""`LLM` on a real engine: generation, chat, errors, Ctrl-C, and the end of all processes."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError, ModelLoadError, ParameterError
from tests.checkpoints import VOCAB_SIZE

OPTIONS = {"max_model_len": 256, "num_gpu_blocks_override": 256, "max_num_seqs": 32, "device": "cpu"}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> str:
    return str(checkpoint("llama"))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, max_num_queued_reqs=40, scheduling_policy="priority", **OPTIONS) as llm:
        yield llm


def text_of(llm: LLM, prompt, sampling: SamplingParams = GREEDY) -> str:
    return llm.generate(prompt, sampling)[0].outputs[0].text


class TestGenerate:
    def test_every_form_of_prompt(self, llm: LLM) -> None:
        [by_text] = llm.generate("Hello there", GREEDY)
        ids = by_text.prompt_token_ids
        assert by_text.prompt == "Hello there"
        assert len(by_text.outputs[0].token_ids) == 8
        forms = [ids, {"prompt": "Hello there"}, {"prompt_token_ids": ids}]
        for form in [*forms, forms, ["Hello there"]]:
            for output in llm.generate(form, GREEDY):
                assert output.prompt_token_ids == ids
                assert output.outputs[0].token_ids == by_text.outputs[0].token_ids
                assert output.finished

    def test_outputs_keep_the_order_of_prompts_beyond_the_queues_bound(self, llm: LLM) -> None:
        prompts = [[5 + i % 50, 9, 10 + i % 7] for i in range(150)]  # the engine holds 32 and queues 40
        outputs = llm.generate(prompts, GREEDY)
        assert [output.prompt_token_ids for output in outputs] == prompts

    def test_parameters_one_for_each(self, llm: LLM) -> None:
        params = [GREEDY.replace(max_tokens=length) for length in (1, 5, 3)]
        outputs = llm.generate(["a", "b", "c"], params)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]
        assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 3

    def test_several_completions_differ_and_repeat_with_the_seed(self, llm: LLM) -> None:
        sampling = SamplingParams(n=4, seed=3, max_tokens=8, ignore_eos=True)
        first, again = (llm.generate("x", sampling)[0].outputs for _ in range(2))
        assert [each.index for each in first] == [0, 1, 2, 3]
        assert len({each.text for each in first}) == 4
        assert [each.text for each in first] == [each.text for each in again]
        assert first[0].text == text_of(llm, "x", sampling.replace(n=1))

    def test_stop_strings_cut_text_and_end_the_engines_work(self, llm: LLM) -> None:
        text = text_of(llm, "The quick", GREEDY.replace(max_tokens=40))
        stop = text[10:13]
        [output] = llm.generate("The quick", GREEDY.replace(max_tokens=200, stop=[stop]))
        [completion] = output.outputs
        assert completion.text == text[: text.index(stop)]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)

    def test_logprobs(self, llm: LLM) -> None:
        [completion] = llm.generate("a", GREEDY.replace(logprobs=3))[0].outputs
        assert len(completion.logprobs) == 8
        for token_id, row in zip(completion.token_ids, completion.logprobs, strict=True):
            assert row[token_id].rank == 1
            assert len(row) == 3
            assert sorted(each.rank for each in row.values()) == [1, 2, 3]
        total = sum(
            row[token_id].logprob for token_id, row in zip(completion.token_ids, completion.logprobs, strict=True)
        )
        assert completion.cumulative_logprob == pytest.approx(total)

    def test_max_tokens_ends_at_the_context(self, llm: LLM) -> None:
        [output] = llm.generate([5] * 250, GREEDY.replace(max_tokens=1000))
        assert len(output.outputs[0].token_ids) == 6
        assert output.outputs[0].finish_reason == "length"

    def test_a_wrong_prompt_among_many_fails_the_call_and_leaves_the_engine_usable(self, llm: LLM) -> None:
        with pytest.raises(ParameterError, match=f"Token id {VOCAB_SIZE}"):
            llm.generate([[5], [VOCAB_SIZE], [6]], GREEDY)
        with pytest.raises(ParameterError, match="limited to 256"):
            llm.generate([[5] * 300], GREEDY)
        assert text_of(llm, "a")

    def test_one_entry_a_prompt(self, llm: LLM) -> None:
        with pytest.raises(ParameterError, match="sampling_params has 1 entries for 2 prompts"):
            llm.generate(["a", "b"], [GREEDY])
        with pytest.raises(ParameterError, match="priority has 1 entries for 2 prompts"):
            llm.generate(["a", "b"], GREEDY, priority=[1])
        assert len(llm.generate(["a", "b"], GREEDY, priority=[1, 0])) == 2
        assert llm.generate([], GREEDY) == []


def test_chat_renders_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Hi"}]
    [output] = llm.chat(conversation, GREEDY)
    assert output.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    several = llm.chat([conversation, conversation], GREEDY)
    assert [each.outputs[0].text for each in several] == [output.outputs[0].text] * 2
    [other] = llm.chat(conversation, GREEDY, chat_template="{{ x }}", chat_template_kwargs={"x": "so"})
    assert other.prompt == "so"


def test_tokenizer_and_defaults(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(tokenizer("Grüße")["input_ids"]) == "Grüße"
    assert llm.get_default_sampling_params() == SamplingParams()


def test_a_running_event_loop_does_not_matter(llm: LLM) -> None:
    import asyncio

    async def cell() -> str:
        return text_of(llm, "a")

    assert asyncio.run(cell()) == text_of(llm, "a")


def test_ctrl_c_ends_the_call_and_leaves_the_engine_usable(llm: LLM) -> None:
    expected = text_of(llm, "a")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores the signal
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5]] * 2000, GREEDY.replace(max_tokens=200))
    assert llm._llm.num_unfinished == 0
    assert text_of(llm, "a") == expected


def test_a_progress_bar_when_asked_for(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    assert capfd.readouterr().err == ""
    llm.generate(["a", "b"], GREEDY, use_tqdm=True)
    assert "2/2" in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------------------ lifetime


def gone(pids: list[int], seconds: float = 60.0) -> bool:
    """Whether the processes end within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.05)
    return False


def run_script(body: str, folder: str) -> tuple[int, list[int], str]:
    """Runs a script without a main guard. Returns its exit code, the pids it printed, and all its output."""
    head = f"""
        from quire import LLM, SamplingParams
        llm = LLM({folder!r}, **{OPTIONS!r})
        print("PID", llm._llm.client.engine_pids[0])
    """
    script = textwrap.dedent(head) + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90, check=False)
    pids = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("PID")]
    return done.returncode, pids, done.stdout + done.stderr


def test_a_plain_script_ends_by_itself_and_imports_no_torch(folder: str) -> None:
    code, pids, output = run_script(
        """
        import sys
        print("TEXT", llm.generate("a", SamplingParams(max_tokens=4))[0].outputs[0].finish_reason)
        assert not {"torch", "transformers"} & set(sys.modules)
        """,
        folder,
    )
    assert code == 0, output
    assert "TEXT" in output
    assert "Traceback" not in output
    assert pids
    assert gone(pids)


@pytest.mark.parametrize("end", ["import os; os._exit(3)", "del llm; import time; time.sleep(2); print('ENDED')"])
def test_no_engine_outlives_its_owner(folder: str, end: str) -> None:
    code, pids, output = run_script(end, folder)
    assert code == (0 if "del" in end else 3), output
    assert "Traceback" not in output
    assert pids
    assert gone(pids)


def test_fork_has_no_say_over_the_engine(folder: str) -> None:
    end = """
        import os, sys
        child = os.fork()
        if child == 0:
            try:
                llm.generate("a")
            except Exception as error:
                sys.exit(3 if "was forked" in str(error) else 4)
            sys.exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(llm.generate("a")))
    """
    code, pids, output = run_script(end, folder)
    assert code == 0, output
    assert "3 1" in output
    assert gone(pids)


def test_wrong_types_are_told(llm: LLM) -> None:
    for arguments, param in (((5,), "prompts"), (("a", 5), "sampling_params"), (("a", [5]), "sampling_params")):
        with pytest.raises(ParameterError, match=f"^{param} must be") as caught:
            llm.generate(*arguments)
        assert caught.value.param == param


def test_without_a_profiler_it_says_what_to_ask_for(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="--profiler-config"):
        llm.start_profile()


def test_bad_checkpoints_and_options_are_named(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'max_model_length': there is no option .* did you mean --max-model-len\?"):
        LLM(folder, max_model_length=4)
    with pytest.raises(ConfigError, match=r"is not quantized, and --quantization awq names a format of checkpoints"):
        LLM(folder, quantization="awq")
    with pytest.raises(ConfigError, match="there is no folder"):
        LLM(str(tmp_path / "nothing"))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(folder) / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"garbage" * 10)
    before = set(psutil.Process().children())
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        LLM(str(tmp_path), **OPTIONS)
    assert set(psutil.Process().children()) <= before
