"""No option is declared and then forgotten: the program reads each field of each options Struct."""

import ast
from pathlib import Path

import msgspec
import pytest

from quire.core.config.engine_args import EngineArgs
from quire.core.config.observability import ProfilerConfig
from quire.core.config.resolved import EngineConfig, SchedulerLimits
from quire.core.config.structured_outputs import StructuredOutputsOptions
from quire.frontend.batch.config import BatchConfig
from quire.frontend.checkpoint.served_model import ServedModel
from quire.frontend.http.server_config import ServerConfig

ROOT = Path(__file__).parents[3]
STRUCTS = [
    *(group.type for group in msgspec.structs.fields(EngineArgs)),
    *(ProfilerConfig, StructuredOutputsOptions, ServerConfig, BatchConfig, EngineConfig, SchedulerLimits, ServedModel),
]


@pytest.fixture(scope="module")
def attributes_read() -> set[str]:
    """Every name that the program reads as an attribute. A declaration is none, nor is a keyword of a call."""
    files = [path for folder in ("core", "executor", "frontend", "ops") for path in (ROOT / folder).rglob("*.py")]
    return {
        node.attr
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


@pytest.mark.parametrize("struct", STRUCTS)
def test_every_field_is_read(struct: type[msgspec.Struct], attributes_read: set[str]) -> None:
    assert set(struct.__struct_fields__) - attributes_read == set()
