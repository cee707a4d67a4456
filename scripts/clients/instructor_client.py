"""instructor: typed answers through a function and through a JSON schema."""

import os

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


QUESTION = "Extract the data as JSON. Ben is 42 years old. Keys: name (string), age (integer)."
client = OpenAI(base_url=os.environ["QUIRE_URL"] + "/v1", api_key="none", max_retries=0)
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    person = instructor.from_openai(client, mode=mode).chat.completions.create(
        model="quire-demo",
        messages=[{"role": "user", "content": QUESTION}],
        response_model=Person,
        temperature=0,
        max_tokens=200,
        max_retries=0,
    )
    assert isinstance(person, Person), person
