"""DSPy: a plain call, and a signature whose outputs are read from an answer in JSON."""

import os

import dspy

options = {"api_base": os.environ["QUIRE_URL"] + "/v1", "api_key": "none", "max_tokens": 400, "num_retries": 0}
model = dspy.LM("openai/quire-demo", **options)
assert model("What is the capital of France?") == ["The capital of France is Paris."]


class Extract(dspy.Signature):
    """Extract the data as JSON."""

    text: str = dspy.InputField()
    age: int = dspy.OutputField()


# DSPy asks a model that it does not know for no format, unless it is told to.
schema = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}
typed = {"type": "json_schema", "json_schema": {"name": "extract", "schema": schema, "strict": True}}
dspy.configure(lm=dspy.LM("openai/quire-demo", **options, response_format=typed), adapter=dspy.JSONAdapter())
prediction = dspy.Predict(Extract)(text="Ben is 42 years old.")
assert isinstance(prediction.age, int), prediction
