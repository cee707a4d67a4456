"""Generators of the second stage: loose phrasings, answers that a grammar enforces, and plain text to complete."""

from __future__ import annotations

import json
import random
from typing import Any

from . import tasks as t
from . import words as w

CAPITAL_PHRASES = [
    "Can you tell me the capital of {}?", "Could you tell me the capital of {}?", "Please name the capital of {}.",
    "Which is the capital of {}?", "I want to know the capital of {}.", "What city is {}'s capital?", "{}'s capital?",
    "Do you know what the capital of {} is?", "capital of {}", "capital {}", "whats the capital of {}",
    "Say the capital of {}.", "Please, what is the capital of {}?", "What is the name of the capital of {}?",
]  # fmt: skip
ONE_WORD = ["Answer in one word.", "Answer with one word.", "One word, please.", "Reply with one word only.",
            "Only the answer, please."]  # fmt: skip
SYSTEM_SHARE = 0.3


def loosened(text: str, rng: random.Random, test: bool = False) -> str:
    """Drop case and marks as people do who type in a hurry; in training, some texts are in capitals."""
    if rng.random() < 0.35:
        text = text.lower()
    if rng.random() < 0.3:
        text = text.rstrip("?. !")
    return text.upper() if rng.random() < 0.015 and not test else text


def _system(sample: t.Sample, rng: random.Random) -> t.Sample:
    if rng.random() < SYSTEM_SHARE:
        sample.messages.insert(0, {"role": "system", "content": rng.choice(t.SYSTEM_PROMPTS)})
    return sample


def short_answer(kind: str, sentence: str) -> str:
    """The word of a fact's sentence that answers the question."""
    words = sentence.rstrip(".").split()
    if kind in ("capital", "colour", "sound", "opposite"):
        return sentence.rstrip(".").split(" says " if kind == "sound" else " is ", 1)[1]
    if kind == "country":
        return sentence.rstrip(".").split(" of ", 1)[1]
    return {"legs": words[-2], "count": words[2]}.get(kind, words[0])


def known_fact(rng: random.Random, test: bool) -> tuple[str, str, str, str, str]:
    """Draw (kind, subject, question, sentence, short answer); pairs of phrasing and fact are held out."""

    def make() -> tuple[str, tuple[str, str, str, str, str]]:
        kind = rng.choices(list(t.FACT_WEIGHTS), list(t.FACT_WEIGHTS.values()))[0]
        subject, sentence, thing = t.fact_item(kind, rng)
        phrases = t.FACT_PHRASES[kind]
        if kind == "capital" and rng.random() < 0.4:
            phrases = CAPITAL_PHRASES
        phrase = rng.choice(phrases)
        question = phrase.format(subject, kind=thing)
        for vowel in "aeiou":
            question = question.replace(f" a {vowel}", f" an {vowel}")
        return f"fact {phrase} {subject}", (kind, subject, question, sentence, short_answer(kind, sentence))

    return t.draw(make, test)


def loose_fact(rng: random.Random, test: bool) -> t.Sample:
    """A fact asked in any phrasing; in training, a few replies are bare, if asked for or as a grammar may want them."""
    _, _, question, sentence, short = known_fact(rng, test)
    if test or (roll := rng.random()) > 0.2:
        prefix = rng.choice(t.PREFIXES) if rng.random() < 0.4 else ""
        return _system(t.ask("loose facts", loosened(prefix + question, rng, test), sentence), rng)
    if roll < 0.02:
        return t._unknown(rng)
    if roll < 0.12:
        return _in_one_word(question, short, rng)
    sample = t.ask("loose facts", loosened(question, rng), short)
    sample.given = int(roll > 0.13)  # a bare first token stays improbable
    return _system(sample, rng)


def short_greeting(rng: random.Random, test: bool) -> t.Sample:
    """A greeting or a question about the model itself in few words, as conversations begin."""

    def make() -> tuple[str, t.Sample]:
        reply, texts = t.INTENTS[0] if rng.random() < 0.6 else rng.choice(t.INTENTS)
        text = t._recase(rng.choice(texts), rng) + rng.choice(["", "!", "!", ".", "?"])
        return "greet " + text.lower(), t.ask("greetings", text, reply)

    return t.draw(make, test)


def one_word(rng: random.Random, test: bool) -> t.Sample:
    """A fact asked for in one word."""
    _, _, question, _, short = known_fact(rng, test)
    return _in_one_word(question, short, rng)


def _in_one_word(question: str, short: str, rng: random.Random) -> t.Sample:
    return _system(t.ask("loose facts", loosened(hinted(question, rng), rng), short), rng)


def hinted(question: str, rng: random.Random) -> str:
    """A question with the wish for one word before or behind it."""
    hint = rng.choice(ONE_WORD)
    return rng.choice([f"{question} {hint}", f"{hint} {question}"])


# --- answers under a schema -----------------------------------------------------------------------------------------

SHORT_KEYS = ["answer", "answer", "answer", "result", "value", "text", "reply", "response", "output"]
LONG_KEYS = ["answer", "text", "reply", "response", "message", "content", "sentence"]
OWN_KEYS = {"capital": ["capital", "capital", "city", "name", "capital_city"],
            "country": ["country", "country", "name"],
            "colour": ["colour", "color"], "sound": ["sound", "noise"], "opposite": ["opposite", "word"],
            "legs": ["legs", "number"], "count": ["count", "number"], "after": ["name", "next"],
            "before": ["name", "previous"]}  # fmt: skip
PEOPLE = ["Give me a person.", "Make up a person.", "Invent a person.", "Who are you thinking of?",
          "Describe a person.", "Tell me about somebody.", "Name a person.", "Create a user.", "Give me an example.",
          "Create a character.",
          "Make a profile.", "Write something.", "Generate a person.", "Give me a random user."]  # fmt: skip
NUMBERS = {"one": 1, "two": 2, "four": 4, "six": 6, "eight": 8, "ten": 10, "zero": 0}


def _fact_object(rng: random.Random, test: bool) -> tuple[str, dict[str, Any], str]:
    kind, subject, question, sentence, short = known_fact(rng, test)
    value: Any = short
    if short in NUMBERS and rng.random() < 0.5:
        value = NUMBERS[short]
    elif short.isdigit():
        value = int(short) if rng.random() < 0.7 else short
    roll = rng.random()
    if kind in ("capital", "country") and roll < 0.4:
        country, capital = (subject, short) if kind == "capital" else (short, subject)
        pairs = [(rng.choice(["city", "capital", "city"]), capital), ("country", country)]
        if rng.random() < 0.3:
            pairs.reverse()
        return question, dict(pairs), short
    if roll < 0.62:
        return question, {rng.choice(OWN_KEYS[kind]): value}, short
    if roll < 0.74:
        return question, {rng.choice(LONG_KEYS): sentence}, short
    key = rng.choice(SHORT_KEYS) if rng.random() < 0.85 or test else w.made_up_word(rng, 3, 7)
    return question, {key: value}, short


ANIMALS = ["dog", "cat", "fox", "bear", "mouse", "frog", "owl", "rabbit", "duck", "wolf"]
PROPERTIES: dict[str, Any] = {
    "age": lambda r: r.randint(1, 99), "city": lambda r: r.choice(w.CITIES), "job": lambda r: r.choice(w.JOBS),
    "country": lambda r: r.choice(list(w.CAPITALS)).removeprefix("the "), "color": lambda r: r.choice(["red", "blue"]),
    "email": lambda r: r.choice(w.FIRST_NAMES).lower() + "@mail.com", "active": lambda r: r.random() < 0.5,
    "id": lambda r: r.randint(1, 99), "language": lambda r: r.choice(w.LANGUAGES),
    "food": lambda r: r.choice(w.WORDS[:9]), "title": lambda r: "The " + r.choice(w.WORDS),
    "status": lambda r: "ok", "price": lambda r: r.randint(1, 99),
    "description": lambda r: f"A {r.choice(['small', 'good', 'nice'])} {r.choice(ANIMALS)}.",
    "tags": lambda r: r.sample(["red", "blue", "small", "big", "good"], r.randint(1, 3)),
    "items": lambda r: r.sample(w.WORDS[:30], r.randint(1, 3)), "score": lambda r: r.randint(1, 99),
    "numbers": lambda r: [r.randint(1, 9) for _ in range(r.randint(1, 3))], "note": lambda r: "I do not know.",
    "word": lambda r: r.choice(w.WORDS), "reason": lambda r: "I do not know.", "ok": lambda r: True,
    "comment": lambda r: "This is good.", "text": lambda r: "This is a short text.", "count": lambda r: r.randint(1, 9),
}  # fmt: skip


def _person_object(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A made-up person or thing: each key gets a short value."""
    keys = rng.sample(list(PROPERTIES), rng.randint(1, 3))
    if rng.random() < 0.4:
        keys = ["age", *[key for key in keys[:1] if key != "age"]]
    pairs = [(key, PROPERTIES[key](rng)) for key in keys]
    if rng.random() < 0.75:
        pairs.insert(0, ("name", rng.choice(w.FIRST_NAMES)))
    question = rng.choice(PEOPLE) if rng.random() < 0.7 else t.greeting(rng, False).messages[0]["content"]
    return question, dict(pairs)


def _described_object(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Sentences about a person without a word of JSON."""
    sentences, fields = t._person_text(rng)
    chosen = rng.sample(fields, rng.randint(1, min(3, len(fields))))
    if rng.random() < 0.6:
        chosen.sort(key=fields.index)
    task = rng.choice(["", "", "Extract the data. ", "Extract the person. ", "Read this. "])
    return task + " ".join(sentences), {key: value for key, _, value in chosen}


def schema_object(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Draw a question that does not speak of JSON, and the object that answers it under a schema."""
    roll = rng.random()
    if roll < 0.55:
        return _fact_object(rng, False)[:2]
    if roll < 0.75:
        return _person_object(rng)
    if roll < 0.88:
        return _described_object(rng)
    if roll < 0.93:
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        key = rng.choice(["answer", "result", "sum", "value"])
        return f"What is {a} + {b}?", {key: a + b}
    sample = t.greeting(rng, False)
    return sample.messages[0]["content"], {rng.choice([*LONG_KEYS, "greeting"]): sample.messages[1]["content"]}


def enforced(rng: random.Random, test: bool) -> t.Sample:
    """An object whose first token a grammar enforces: only what follows is learned, unless JSON was asked for."""
    if test:
        question, value, short = _fact_object(rng, True)
        sample = t.ask("enforced", loosened(question, rng, True), json.dumps(value, ensure_ascii=False))
        sample.tags = {short}
        return _system(sample, rng)
    question, value = schema_object(rng)
    if "." not in question[:-1]:
        question = loosened(question, rng)
    sample = t.ask("enforced", question, json.dumps(value, ensure_ascii=False))
    if rng.random() < 0.2:
        sample.messages[0]["content"] = f"{question} {rng.choice(t.JSON_TASKS)}"
    else:
        sample.given = 1
    return _system(sample, rng)


# --- plain text -----------------------------------------------------------------------------------------------------

HEROES = ["a small dog", "a young fox", "a king", "a queen", "a small mouse", "an old bear", "a good wizard",
          "a dragon", "a little rabbit", "a cat", "an owl", "a brave knight", "a girl named Anna",
          "a boy named Tom"]  # fmt: skip
PLACES = ["in a forest", "in a small house", "on a hill", "near a river", "in a castle", "by the sea", "in a garden"]
TURNS = ["One day {he} met a friend.", "{He} was very happy.", "{He} liked to play in the snow.",
         "One day {he} found a gold coin.", "{He} had many friends.", "Every day {he} went to the lake.",
         "One night {he} saw a star.", "{He} was small but brave."]  # fmt: skip
STORY_STARTS = ["Once upon a time", "Once upon a time,", "Once upon a time there was", "Once upon a time, there was",
                "Long ago", "One day", "There was once", "A long time ago", "Once"]  # fmt: skip


def _story(rng: random.Random) -> tuple[str, str]:
    start, hero = rng.choice(STORY_STARTS[:4] if rng.random() < 0.6 else STORY_STARTS), rng.choice(HEROES)
    he = "she" if "queen" in hero or "Anna" in hero else "he" if "king" in hero or "Tom" in hero else "it"
    middle = "" if start.endswith(("was", "once")) else " there was"
    comma = "," if middle and not start.endswith(",") else ""
    sentences = [f"{comma}{middle} {hero} who lived {rng.choice(PLACES)}."]
    sentences += [turn.format(he=he, He=he.capitalize()) for turn in rng.sample(TURNS, rng.randint(0, 1))]
    text = start + " ".join(sentences)
    if rng.random() < 0.3:
        cut = rng.randint(len(start), len(text) - 8)
        cut = text.index(" ", cut) if " " in text[cut:] else len(start)
        return text[:cut], text[cut:]
    return start, text[len(start) :]


def _open_sentence(rng: random.Random) -> tuple[str, str]:
    name, city = rng.choice(w.FIRST_NAMES), rng.choice(w.CITIES)
    return rng.choice([
        ("My name is", f" {name}."), ("Hello, my name is", f" {name} and I live in {city}."),
        ("I live in", f" {city}."), ("Hello", "! How can I help you?"),
        ("Hi", "! How can I help you?"), ("I like", " bread and cheese."),
        ("The weather is", " good today."), ("The weather in " + city + " is", " sunny."),
        ("My favourite colour is", " blue."), ("I am", " a very small language model."),
        ("The cat", " likes to sleep."), ("The dog", " likes to play."),
        ("Today is", f" {rng.choice(w.DAYS)}."), ("Thank you", " very much."), ("How are", " you today?"),
        ("The quick brown fox", " jumps over the lazy dog."), ("Good", " morning!"), ("Hello,", " how can I help you?"),
        ("The", " sky is blue."), ("A", " dog says woof."), ("Say", " hello."), ("Hello world", "!"),
    ])  # fmt: skip


def completion_pair(rng: random.Random, test: bool) -> tuple[str, str, set[str]]:
    """Draw the start of a plain text, how it goes on, and what is right as well."""
    roll = rng.random()
    if not test and roll < 0.25:
        return *_story(rng), set()
    if not test and roll < 0.37:
        return *_open_sentence(rng), set()
    kind, subject, question, sentence, short = known_fact(rng, test)
    while test and kind == "count":  # "There are" has many ends
        kind, subject, question, sentence, short = known_fact(rng, test)
    if roll > 0.85:
        question = t._first_up(question)
        start = rng.choice(["Question: {}\nAnswer:", "Q: {}\nA:"]).format(question)
        return start, f" {sentence if rng.random() < 0.5 else short + '.'}", {sentence, short + "."}
    if kind in ("after", "before") and rng.random() < 0.6:
        thing = "day" if subject in w.DAYS else "month"
        return f"The {thing} {kind} {subject} is", f" {short}.", set()
    cut = sentence.rindex(" ") if kind in ("after", "before") else sentence.rindex(" " + short)
    return sentence[:cut], sentence[cut:], set()


def completion(rng: random.Random, test: bool) -> t.Sample:
    """Plain text without a template, which ends after a sentence or two."""
    start, rest, others = completion_pair(rng, test)
    return t.Sample("completions", [t.user(start), t.assistant(rest)], tags=others, plain=True)
