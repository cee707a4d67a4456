"""lm-evaluation-harness: a tiny new task with completions (likelihoods) and with chats (answers)."""

import json
import os
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

URL = os.environ["QUIRE_URL"] + "/v1"
MODEL = {"model": "quire-demo", "tokenizer": os.environ["QUIRE_ROOT"] + "/quire/demo_model", "num_concurrent": 2}
ROWS = [
    {"question": "What is the capital of France?", "choices": ["Paris", "Tokyo"], "answer": 0},
    {"question": "What is the capital of Japan?", "choices": ["Paris", "Tokyo"], "answer": 1},
]
TASK = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
}
CHOOSE = {
    "task": "choose",
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
}
SAY = {
    "task": "say",
    "output_type": "generate_until",
    "doc_to_target": "The capital of {{['France', 'Japan'][answer]}} is {{choices[answer]}}.",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 64},
    "metric_list": [{"metric": "exact_match"}],
}
Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
for task in (CHOOSE, SAY):
    Path(f"{task['task']}.yaml").write_text(json.dumps(TASK | task))
tasks = TaskManager(include_path=".", include_defaults=False)


def run(kind: str, path: str, task: str, **options: object) -> dict[str, float]:
    arguments = MODEL | {"base_url": URL + path}
    return lm_eval.simple_evaluate(kind, model_args=arguments, tasks=[task], task_manager=tasks, **options)["results"][
        task
    ]


scores = run("local-completions", "/completions", "choose")
assert 0 <= scores["acc,none"] <= 1, scores
scores = run("local-chat-completions", "/chat/completions", "say", apply_chat_template=True)
assert scores["exact_match,none"] == 1, scores
