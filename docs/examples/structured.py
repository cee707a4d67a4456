"""An answer as an object of a pydantic class: the server lets the model write nothing else."""

import os

from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="none")
answer = client.chat.completions.parse(
    model="quire-demo",
    messages=[
        {
            "role": "user",
            "content": "Extract the data as JSON. Ben is 42 years old. Keys: name (string), age (integer).",
        }
    ],
    response_format=Person,
)
person = answer.choices[0].message.parsed
print(person.name, "will be", person.age + 1)
