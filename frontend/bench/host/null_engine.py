"""An engine whose workers have no model: real processes and messages, and made-up tokens."""

from pathlib import Path

from msgspec import Struct

from quire.core.config.engine_args import EngineArgs
from quire.core.config.resolved import EngineConfig
from quire.core.engine.client import EngineClient
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.checkpoint import model_source
from quire.frontend.checkpoint.model_spec import read_model_spec
from quire.frontend.checkpoint.served_model import ServedModel
from quire.frontend.launch.launcher import EngineLauncher
from quire.frontend.launch.options import resolve
from quire.frontend.metrics.metrics import Metrics
from quire.frontend.text.tokenizer import Tokenizer

NULL_WORKER = "quire.executor.processes.null_worker:NullWorker"
MIN_BATCHED_TOKENS = 8192


class NullSetup(Struct, frozen=True):
    """The options of one measured engine, which can be passed to another process."""

    executor: str  # "uni": the worker is a thread of the engine; "mp": a process behind a ring
    max_num_seqs: int
    max_model_len: int
    model: str | None = None  # the model whose configuration and tokenizer are used; None: the demo model

    @property
    def engine_args(self) -> EngineArgs:
        return EngineArgs.from_flat(
            model=self.model,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=max(MIN_BATCHED_TOKENS, self.max_num_seqs),
            max_model_len=self.max_model_len,
            distributed_executor_backend=self.executor,
        )

    def resolve(self) -> tuple[EngineConfig, Path]:
        """The resolved options, and the folder of the tokenizer.

        Raises:
            ConfigError: the model cannot be found, or its context is shorter than `max_model_len`.
        """
        args = self.engine_args
        folder = model_source.find_model(args.model, args.load)
        tokenizer_folder = model_source.find_tokenizer(args.model, args.load, folder)
        return resolve(args, read_model_spec(folder, args.model, tokenizer_folder), "server"), tokenizer_folder

    def client(self) -> EngineClient:
        """A client of the engine, for token ids."""
        config, _ = self.resolve()
        return EngineClient([EngineLauncher(config, worker_factory=NULL_WORKER)], num_slots=self.max_num_seqs)

    def llm(self) -> AsyncLLM:
        """The engine with tokenizer and metrics, as in a server."""
        config, tokenizer_folder = self.resolve()
        options = self.engine_args.model
        model = ServedModel.from_args(self.engine_args, tokenizer_folder)
        metrics = Metrics(model.name, config.max_model_len)
        launcher = EngineLauncher(config, worker_factory=NULL_WORKER)
        client = EngineClient([launcher], num_slots=self.max_num_seqs, on_stats=metrics.on_stats)
        return AsyncLLM(
            config,
            model,
            client,
            Tokenizer.from_folder(tokenizer_folder, options.tokenizer_mode, options.trust_remote_code),
            metrics,
        )
