"""A file of requests, answered by `quire run-batch` without a server."""

import json
import subprocess
import tempfile
from pathlib import Path

QUESTIONS = {"france": "What is the capital of France?", "sum": "What is 47 + 38?"}

with tempfile.TemporaryDirectory() as folder:
    requests, answers = Path(folder, "requests.jsonl"), Path(folder, "answers.jsonl")
    with requests.open("w") as file:
        for name, question in QUESTIONS.items():
            body = {"model": "quire-demo", "messages": [{"role": "user", "content": question}]}
            line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")

    # --model CHECKPOINT names another model than the demo model.
    subprocess.run(["quire", "run-batch", "-i", requests, "-o", answers], check=True)

    # Answers stand in the order in which they were ready.
    bodies = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, answers.open())}
    for name, question in QUESTIONS.items():
        print(question, "->", bodies[name]["choices"][0]["message"]["content"])
