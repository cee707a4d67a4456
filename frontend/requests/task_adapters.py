"""The tasks that requests for vectors may name, where the checkpoint has an adapter for each."""

from typing import NamedTuple

from quire.core.config.pooling import PoolingSpec
from quire.core.errors import ParameterError
from quire.core.wire.adapters import Adapter


class ChosenTask(NamedTuple):
    """What a request's task means.

    Attributes:
        adapter: None: that of the weights as they are loaded.
        before: the text that the checkpoint puts before each text of the task.
    """

    adapter: Adapter | None = None
    before: str = ""


def choose_task(spec: PoolingSpec | None, task: str | None, name: str = "task") -> ChosenTask:
    """Reads the task of a request, which may have none; `name` is the client's name of the field.

    Raises:
        ParameterError: the model has no such task.
    """
    if task is None:
        return ChosenTask()
    tasks = None if spec is None else spec.task_adapters
    if spec is None or tasks is None:
        raise ParameterError(
            f"{name} {task!r} chooses an adapter of the checkpoint, and this model has none; leave it out.", param=name
        )
    if task not in tasks.choices:
        remedy = "start the server without jina_task" if tasks.is_fixed and task in tasks.names else "choose one"
        raise ParameterError(
            f"{name} {task!r} is none that this server has, which are {', '.join(tasks.choices)}; {remedy}.", param=name
        )
    adapter = None if task == tasks.loaded else Adapter.of_task(task)
    return ChosenTask(adapter, spec.prompts.get(task, ""))
