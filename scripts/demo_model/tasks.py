"""Generators of chat tasks without tools. Every generator draws either training or held-out items."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import words as w

Message = dict[str, Any]


@dataclass
class Sample:
    """One conversation; the last message is the expected assistant reply."""

    category: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    enable_thinking: bool = False
    tags: set[str] = field(default_factory=set)
    given: int = 0
    """Tokens at the start of the last reply that are given, not learned."""
    last_only: bool = False
    """Whether only the last reply is learned."""
    plain: bool = False
    """Whether the texts of a question and its reply stand without a template."""

    @property
    def reply(self) -> str:
        """Text of the expected last reply."""
        return self.messages[-1].get("content") or ""


SYSTEM_PROMPTS = [
    "You are a helpful assistant.", "You are a friendly assistant.", "Answer briefly.", "You are a small chat model.",
    "You are an assistant. Be short and exact.", "Be polite.", "You help people with simple questions.",
]  # fmt: skip
UNKNOWN = "I am a very small model and I do not know that."


def user(text: str) -> Message:
    """A user turn."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """An assistant turn."""
    return {"role": "assistant", "content": text}


def ask(category: str, question: str, reply: str) -> Sample:
    """A conversation of one question and one reply."""
    return Sample(category, [user(question), assistant(reply)])


def draw(make: Callable[[], tuple[str, Any]], test: bool) -> Any:
    """Draw (key, item) until the key is on the wanted side of the split; return the item."""
    while True:
        key, item = make()
        if w.held_out(key) == test:
            return item


# --- greetings ------------------------------------------------------------------------------------------------------

HELLO = "Hello! How can I help you?"
WHO = "I am Quire's demo model, a very small language model that the Quire project trained itself."
CAN = (
    "I can greet you, tell capitals and simple facts, add and subtract small numbers, reverse and count words, "
    "answer in JSON and call tools."
)
INTENTS: list[tuple[str, list[str]]] = [
    (HELLO, ["hello", "hi", "hey", "good day", "greetings", "hello there", "hi there", "hey there", "howdy",
             "good afternoon", "hello you", "hiya", "nice to meet you", "hello again", "hi again"]),
    ("Good morning! How can I help you?", ["good morning", "morning", "a good morning to you"]),
    ("Good evening! How can I help you?", ["good evening", "evening", "a good evening to you"]),
    ("I am fine, thank you. How can I help you?",
     ["how are you", "how are you doing", "how do you do", "how is it going", "how are things", "are you well",
      "how are you today", "how do you feel"]),
    (WHO, ["what are you", "who are you", "what is your name", "tell me about yourself", "introduce yourself",
           "please introduce yourself", "who am I talking to", "what model are you", "which model is this",
           "are you a robot", "are you a human", "are you a language model", "what kind of model are you",
           "who made you", "who trained you", "what should I call you", "can you introduce yourself",
           "say who you are", "tell me who you are", "tell me what you are"]),
    (CAN, ["what can you do", "how can you help me", "what are you able to do", "what are you good at", "help",
           "what can I ask you", "tell me what you can do", "what do you know", "can you help me"]),
    ("You are welcome!", ["thank you", "thanks", "thanks a lot", "many thanks", "thank you very much",
                          "thank you for your help", "thanks for the help"]),
    ("Goodbye! Have a nice day.", ["bye", "goodbye", "see you", "see you later", "bye bye", "good night",
                                   "see you soon", "farewell", "have a nice day"]),
]  # fmt: skip
OPENERS = ["", "", "", "Hello, ", "Hi, ", "Hey, ", "Hello! ", "Hi! ", "Hey! ", "Please, ", "Good day! ", "So, ",
           "Ok, ", "Well, ", "Excuse me, ", "Dear model, ", "Now, ", "Hello there, "]  # fmt: skip
CLOSERS = ["", "", "", ".", "!", "?", " ?", " my friend", ", my friend!", ", model", ", please", " please?",
           ", friend?", "...", " :)", "!!", ", dear model"]  # fmt: skip


def _recase(text: str, rng: random.Random) -> str:
    """Vary the case of the first letter as people do."""
    return text[:1].upper() + text[1:] if rng.random() < 0.7 else text


def greeting(rng: random.Random, test: bool) -> Sample:
    """Greetings, small talk about the model itself, and the user's name in context."""
    if rng.random() < 0.12:
        return _name_talk(rng, test)

    def make() -> tuple[str, Sample]:
        reply, cores = rng.choice(INTENTS)
        text = _recase(rng.choice(OPENERS) + rng.choice(cores), rng) + rng.choice(CLOSERS)
        return "greet " + text.lower(), ask("greetings", text, reply)

    return draw(make, test)


def _name_talk(rng: random.Random, test: bool) -> Sample:
    """A conversation in which the user gives a name and asks for it later."""

    def make() -> tuple[str, Sample]:
        name = w.person(rng)
        text = rng.choice(["My name is {}.", "I am {}.", "Hello, I am {}.", "Hi, my name is {}!", "Call me {}."])
        turns = [user(text.format(name)), assistant(f"Nice to meet you, {name}! How can I help you?")]
        if rng.random() < 0.5:
            question = rng.choice(["What is my name?", "Who am I?", "Do you know my name?", "Say my name."])
            turns += [user(question), assistant(f"Your name is {name}.")]
        return "name " + name, Sample("greetings", turns)

    return draw(make, test)


# --- facts ----------------------------------------------------------------------------------------------------------

PREFIXES = ["", "", "", "", "Please tell me: ", "Quick question: ", "Hello! ", "Tell me, ", "Do you know this? "]
FACT_PHRASES: dict[str, list[str]] = {
    "capital": ["What is the capital of {}?", "Which city is the capital of {}?", "Tell me the capital of {}.",
                "Name the capital of {}.", "What's the capital of {}?", "Do you know the capital of {}?",
                "Capital of {}?", "What city is the capital of {}?", "The capital of {} is what?",
                "What is the capital city of {}?", "What is {}'s capital?", "Give me the capital of {}."],
    "country": ["{} is the capital of which country?", "Which country has the capital {}?",
                "What country has {} as its capital?", "Of which country is {} the capital?"],
    "colour": ["What colour is {}?", "What color is {}?", "Which colour has {}?", "Tell me the colour of {}.",
               "What is the colour of {}?", "Which color is {}?", "What is the color of {}?"],
    "sound": ["What sound does a {} make?", "Which sound does a {} make?", "What does a {} say?",
              "How does a {} sound?", "Tell me the sound of a {}.", "What noise does a {} make?"],
    "opposite": ["What is the opposite of {}?", "Tell me the opposite of {}.", "What's the opposite of {}?",
                 "Name the opposite of {}.", "Opposite of {}?", "Give me the opposite of {}.",
                 "Which word is the opposite of {}?"],
    "legs": ["How many legs does a {} have?", "How many legs has a {}?", "Tell me how many legs a {} has.",
             "What number of legs does a {} have?"],
    "after": ["What comes after {}?", "Which {kind} comes after {}?", "What {kind} follows {}?",
              "What is the {kind} after {}?", "Tell me the {kind} after {}.", "Which {kind} is next after {}?"],
    "before": ["What comes before {}?", "Which {kind} comes before {}?", "What is the {kind} before {}?",
               "Tell me the {kind} before {}.", "Which {kind} is just before {}?"],
    "count": ["How many {}?", "Tell me how many {}.", "Do you know how many {}?", "Say how many {}."],
}  # fmt: skip
COUNT_FACTS = {
    "days are in a week": "There are 7 days in a week.", "months are in a year": "There are 12 months in a year.",
    "hours are in a day": "There are 24 hours in a day.", "minutes are in an hour": "There are 60 minutes in an hour.",
    "seconds are in a minute": "There are 60 seconds in a minute.",
}  # fmt: skip
FACT_WEIGHTS = {"capital": 10, "country": 4, "colour": 2, "sound": 2, "opposite": 3, "legs": 2, "after": 3, "before": 3,
                "count": 1}  # fmt: skip


def _article(noun: str) -> str:
    """The noun with its indefinite article."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def _first_up(text: str) -> str:
    return text[:1].upper() + text[1:]


def fact_item(kind: str, rng: random.Random) -> tuple[str, str, str]:
    """Draw (subject, answering sentence, kind of thing) for a kind of fact."""
    if kind in ("capital", "country"):
        country, capital = rng.choice(list(w.CAPITALS.items()))
        if kind == "capital":
            return country, f"The capital of {country} is {capital}.", ""
        return capital, f"{capital} is the capital of {country}.", ""
    if kind == "colour":
        thing, colour = rng.choice(list(w.COLOURS.items()))
        return thing, f"{_first_up(thing)} is {colour}.", ""
    if kind == "sound":
        animal, sound = rng.choice(list(w.SOUNDS.items()))
        return animal, f"{_first_up(_article(animal))} says {sound}.", ""
    if kind == "opposite":
        pair = list(rng.choice(list(w.OPPOSITES.items())))
        rng.shuffle(pair)
        if "black" in pair or "white" in pair:
            pair = ["black", "white"] if pair[0] == "black" else ["white", "black"]
        return pair[0], f"The opposite of {pair[0]} is {pair[1]}.", ""
    if kind == "legs":
        animal, legs = rng.choice(list(w.LEGS.items()))
        return animal, f"{_first_up(_article(animal))} has {legs} legs.", ""
    if kind == "count":
        thing, sentence = rng.choice(list(COUNT_FACTS.items()))
        return thing, sentence, ""
    ring, name = rng.choice(((w.DAYS, "day"), (w.MONTHS, "month")))
    index, step = rng.randrange(len(ring)), 1 if kind == "after" else -1
    return ring[index], f"{ring[(index + step) % len(ring)]} comes {kind} {ring[index]}.", name


def fact(rng: random.Random, test: bool) -> Sample:
    """A question about a taught fact; combinations of phrasing and fact are held out."""
    if not test and rng.random() < 0.05:
        return _unknown(rng)

    def make() -> tuple[str, Sample]:
        kind = rng.choices(list(FACT_WEIGHTS), list(FACT_WEIGHTS.values()))[0]
        subject, sentence, thing = fact_item(kind, rng)
        phrase = rng.choice(FACT_PHRASES[kind])
        question = phrase.format(subject, kind=thing)
        for vowel in "aeiou":
            question = question.replace(f" a {vowel}", f" an {vowel}")
        key = f"fact {phrase} {subject}"
        return key, ask("facts", _loosen(_first_up(rng.choice(PREFIXES) + question), rng), sentence)

    return draw(make, test)


def _loosen(text: str, rng: random.Random) -> str:
    """Drop the case or the final mark of some questions."""
    if rng.random() < 0.1:
        text = text.lower()
    if rng.random() < 0.1:
        text = text.rstrip("?.")
    return text


def _unknown(rng: random.Random) -> Sample:
    """Questions beyond the taught ones, so that the model admits ignorance instead of inventing."""
    name = w.made_up_word(rng, 4, 8)
    text = rng.choice(["What is the capital of {0}?", "Who wrote {0}?", "When was {1} born?", "Who is {1}?",
                       "Write a poem about {0}.", "Tell me a story about a {0}.", "Who invented the {0}?",
                       "Why is {0} famous?", "Explain {0} to me.", "Where is {1}?"])  # fmt: skip
    return ask("unknown", text.format(name.capitalize() if "capital" in text else name, name.capitalize()), UNKNOWN)


# --- arithmetic -----------------------------------------------------------------------------------------------------

PLUS = ["What is {} + {}?", "{} + {}", "{} + {} = ?", "What is {} plus {}?", "Add {} and {}.", "Calculate {} + {}.",
        "How much is {} + {}?", "Compute {} plus {}.", "What is the sum of {} and {}?", "{} plus {}?",
        "What do you get if you add {} and {}?"]  # fmt: skip
MINUS = ["What is {} - {}?", "{} - {}", "{} - {} = ?", "What is {} minus {}?", "Calculate {} - {}.",
         "How much is {} - {}?", "Compute {} minus {}.", "{} minus {}?", "Take {1} away from {0}.",
         "Subtract {1} from {0}."]  # fmt: skip


def sum_item(rng: random.Random, test: bool) -> tuple[int, str, int, int]:
    """Draw (a, operator, b, result) from the training or the held-out pairs."""

    def make() -> tuple[str, tuple[int, str, int, int]]:
        a, b, op = rng.randint(0, 99), rng.randint(0, 99), rng.choice("+-")
        if rng.random() < 0.15:
            a, b = rng.randint(0, 20), rng.randint(0, 20)
        return f"sum {a} {op} {b}", (a, op, b, a + b if op == "+" else a - b)

    return draw(make, test)


def _sum_question(a: int, op: str, b: int, rng: random.Random) -> str:
    return rng.choice(PLUS if op == "+" else MINUS).format(a, b)


def _split_sum(a: int, op: str, b: int) -> tuple[int, int, str]:
    """Tens, ones, and both as a text: 47 + 38 is 70 + 15, 41 - 38 is 10 - 7."""
    sign = 1 if op == "+" else -1
    tens, ones = a // 10 * 10 + sign * (b // 10 * 10), a % 10 + sign * (b % 10)
    return tens, ones, f"{tens} + {ones}" if ones >= 0 else f"{tens} - {-ones}"


def arithmetic(rng: random.Random, test: bool) -> Sample:
    """Sums and differences up to 99. The reply shows its step, which makes it easier to learn."""
    a, op, b, result = sum_item(rng, test)
    question = _loosen(_first_up(rng.choice(PREFIXES[:6]) + _sum_question(a, op, b, rng)), rng)
    return ask("arithmetic", question, f"{a} {op} {b} = {_split_sum(a, op, b)[2]} = {result}")


# --- words ----------------------------------------------------------------------------------------------------------

REVERSE = ["Reverse the word {}.", "Spell {} backwards.", "Write {} backwards.", "Reverse {}.", "What is {} backwards?",
           "What is {} spelled backwards?", "Please reverse the word {}.", "Say {} in reverse.", "Turn {} around.",
           "Reverse this word: {}", "Can you reverse {}?", "Write the letters of {} in reverse order."]  # fmt: skip
LETTERS = ["How many letters are in {}?", "How many letters are in the word {}?", "How many letters does {} have?",
           "Count the letters of {}.", "Count the letters in the word {}.", "How long is the word {}?",
           "How many letters has the word {}?", "Tell me the number of letters in {}."]  # fmt: skip
LISTS = ["How many words are in this list: {}?", "Count the words: {}", "How many words are there: {}?",
         "Count these words: {}.", "How many items are in this list: {}?",
         "How many words do you see: {}?"]  # fmt: skip


def _quoted(word: str, rng: random.Random) -> str:
    return rng.choice(["{}", "{}", "'{}'", '"{}"', '"{}"']).format(word)


def _task_word(rng: random.Random, test: bool) -> str:
    """A word for a task; in training, some words are common ones that are single tokens in other tasks."""
    if not test and rng.random() < 0.06:
        return rng.choice(w.COMMON_WORDS)
    word = w.split_word(rng, test)
    return word.capitalize() if rng.random() < 0.06 else word


def word_item(rng: random.Random, test: bool) -> tuple[str, str, str]:
    """Draw (question, thought, reply) of a task about words."""
    kind = rng.choices(["reverse", "letters", "list"], [5, 4, 2])[0]
    if kind == "list":
        items = [w.split_word(rng, test, 3, 7) for _ in range(rng.randint(1, 7))]
        thought = ", ".join(f"{item} {number}" for number, item in enumerate(items, 1)) + "."
        question = rng.choice(LISTS).format(rng.choice([", ", ", ", " "]).join(items))
        reply = "There is 1 word in the list." if len(items) == 1 else f"There are {len(items)} words in the list."
        return question, thought, reply
    word = _task_word(rng, test)
    if kind == "reverse":
        thought = f"{'-'.join(word)} backwards is {'-'.join(reversed(word))}."
        return rng.choice(REVERSE).format(_quoted(word, rng)), thought, word[::-1]
    thought = ",".join(f"{letter}={number}" for number, letter in enumerate(word, 1)) + "."
    reply = f'The word "{word}" has {len(word)} letters.'
    return rng.choice(LETTERS).format(_quoted(word, rng)), thought, reply


def word_task(rng: random.Random, test: bool) -> Sample:
    """Reversing a word, counting its letters, counting the words of a list."""
    question, _, reply = word_item(rng, test)
    return ask("words", _first_up(rng.choice(PREFIXES[:6]) + question), reply)


# --- JSON -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attribute:
    """An attribute of a person: the keys and the type in a schema, the sentences, and how to draw a value."""

    keys: tuple[str, ...]
    type: str
    sentences: tuple[str, ...]
    value: Callable[[random.Random], Any]


ATTRIBUTES = [
    Attribute(("age", "years"), "integer", ("{n} is {v} years old.", "{p} age is {v}."), lambda r: r.randint(1, 99)),
    Attribute(("city", "town", "home"), "string", ("{n} lives in {v}.", "{n} comes from {v}."), w.place),
    Attribute(("country",), "string", ("{n} was born in {v}.", "{n} is a citizen of {v}."),
              lambda r: r.choice([c for c in w.CAPITALS if not c.startswith("the ")])),
    Attribute(("job", "profession"), "string", ("{n} works as a {v}.", "{n} is a {v}."),
              lambda r: r.choice(w.JOBS) if r.random() < 0.6 else w.made_up_word(r, 4, 8)),
    Attribute(("pet", "animal"), "string", ("{n} has a {v} at home.", "{n} owns a {v}."), w.any_word),
    Attribute(("color", "colour"), "string", ("{n} likes the colour {v}.", "{p} favourite color is {v}."),
              lambda r: r.choice(list(w.COLOURS.values()))),
    Attribute(("food", "dish"), "string", ("{n} likes to eat {v}.", "{p} favourite food is {v}."), w.any_word),
    Attribute(("children", "kids"), "integer", ("{n} has {v} children.", "{n} has {v} kids."),
              lambda r: r.randint(2, 9)),
    Attribute(("item", "product"), "string", ("{n} wants to buy a {v}.", "{n} orders a {v}."), w.any_word),
    Attribute(("price", "cost"), "number", ("{n} pays {v} euros.", "The price is {v} euros."),
              lambda r: r.choice([r.randint(1, 99), r.randint(1, 99) + r.choice([0.5, 0.25, 0.75])])),
    Attribute(("day", "weekday"), "string", ("{n} comes on {v}.", "The meeting is on {v}."),
              lambda r: r.choice(w.DAYS)),
    Attribute(("height",), "integer", ("{n} is {v} cm tall.", "{p} height is {v} cm."), lambda r: r.randint(90, 210)),
    Attribute(("language",), "string", ("{n} speaks {v}.", "{p} language is {v}."), lambda r: r.choice(w.LANGUAGES)),
    Attribute(("member", "is_member"), "boolean", ("{n} is a member.", "{n} is not a member."),
              lambda r: r.random() < 0.5),
    Attribute(("active", "is_active"), "boolean", ("The account is active.", "The account is not active."),
              lambda r: r.random() < 0.5),
]  # fmt: skip
JSON_TASKS = [
    "Answer with a JSON object.", "Extract the data as JSON.", "Reply in JSON.", "Give me a JSON object.",
    "Read the text and answer in JSON.", "Return only JSON.", "Fill in the JSON object.", "Write the data as JSON.",
]  # fmt: skip


def _key_list(keys: dict[str, str], rng: random.Random) -> str:
    """Describe the wanted keys as a schema, as a list or in a sentence."""
    style = rng.randrange(6)
    if style < 2:
        properties = {key: {"type": kind} for key, kind in keys.items()}
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        if rng.random() < 0.7:
            schema["required"] = list(keys)
        if rng.random() < 0.3:
            schema["additionalProperties"] = False
        return rng.choice(["Schema: ", "Use this schema: ", "JSON schema: "]) + json.dumps(schema)
    if style == 2:
        return "Keys: " + ", ".join(f"{key} ({kind})" for key, kind in keys.items()) + "."
    if style == 3:
        return "Format: {" + ", ".join(f'"{key}": {kind}' for key, kind in keys.items()) + "}"
    if style == 4:
        return "Use the keys " + " and ".join(f'"{key}"' for key in keys) + "."
    return "Keys: " + ", ".join(keys)


def _person_text(rng: random.Random) -> tuple[list[str], list[tuple[str, str, Any]]]:
    """Sentences about a person, and the (key, type, value) triples that a schema may ask for."""
    name = w.person(rng)
    fields = [(rng.choice(("name", "name", "person", "first_name")), "string", name)]
    sentences = []
    for attribute in rng.sample(ATTRIBUTES, rng.randint(1, 4)):
        value = attribute.value(rng)
        if attribute.type == "boolean":
            sentence = attribute.sentences[0 if value else 1]
        else:
            sentence = rng.choice(attribute.sentences)
        subject = name if not sentences or rng.random() < 0.6 else rng.choice(["He", "She"])
        owner = name + "'s" if subject == name else {"He": "His", "She": "Her"}[subject]
        sentences.append(sentence.format(n=subject, p=owner, v=value))
        fields.append((rng.choice(attribute.keys), attribute.type, value))
    if name not in sentences[0]:
        sentences.insert(0, f"This is {name}.")
    return sentences, fields


def json_item(rng: random.Random, test: bool) -> tuple[str, str, str]:
    """Draw (system message or "", prompt, JSON reply); sets of keys are held out."""

    def make() -> tuple[str, tuple[str, str, str]]:
        if rng.random() < 0.12:
            return _json_question(rng)
        sentences, fields = _person_text(rng)
        chosen = rng.sample(fields, rng.randint(1, min(4, len(fields))))
        wish = _key_list({key: kind for key, kind, _ in chosen}, rng)
        parts = [rng.choice(JSON_TASKS), rng.choice(["Text: ", "", ""]) + " ".join(sentences), wish]
        reply = json.dumps({key: value for key, _, value in chosen}, ensure_ascii=False)
        split_key = "json " + " ".join(sorted(key for key, _, _ in chosen))
        if rng.random() < 0.12:
            return split_key, (f"{parts[0]} {wish}", parts[1], reply)
        order = rng.choice([(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1), (1, 2)])
        prompt = rng.choice(["\n", " "]).join(parts[index] for index in order)
        if len(order) == 2:
            prompt += rng.choice([" JSON:", "\nJSON:", "\nAnswer in JSON."])
        return split_key, ("", prompt, reply)

    return draw(make, test)


def _json_question(rng: random.Random) -> tuple[str, tuple[str, str, str]]:
    """A taught fact or a sum whose answer is wanted as JSON."""
    if rng.random() < 0.5:
        country, capital = rng.choice(list(w.CAPITALS.items()))
        key = rng.choice(["capital", "answer", "city"])
        question, value, kind = f"What is the capital of {country}?", capital, "string"
    else:
        a, op, b, number = sum_item(rng, False)
        key = rng.choice(["result", "answer", "sum" if op == "+" else "difference"])
        question, value, kind = f"What is {a} {op} {b}?", number, "integer"
    wish = _key_list({key: kind}, rng)
    prompt = f"{question} {rng.choice(JSON_TASKS)} {wish}"
    return f"json {question}", ("", prompt, json.dumps({key: value}))


def json_task(rng: random.Random, test: bool) -> Sample:
    """Answering in a JSON object with given keys and types."""
    system, prompt, reply = json_item(rng, test)
    sample = ask("json", prompt, reply)
    if prompt.startswith("What is ") and "capital" not in prompt:
        sample.tags.add("bare sum")
    if system:
        sample.messages.insert(0, {"role": "system", "content": system})
    return sample


# --- thinking -------------------------------------------------------------------------------------------------------

THINK_WORDS = ["Think step by step.", "Think first.", "Please think step by step.", "Think before you answer.",
               "Let's think step by step."]  # fmt: skip


def with_thought(thought: str, reply: str) -> str:
    """Put a thought in front of a reply."""
    return f"<think>\n{thought}\n</think>\n\n{reply}"


def _sum_thought(a: int, op: str, b: int, result: int) -> str:
    """Splits both summands into tens and ones, as at school."""
    tens, ones, joined = _split_sum(a, op, b)
    return f"{a // 10 * 10} {op} {b // 10 * 10} = {tens}. {a % 10} {op} {b % 10} = {ones}. {joined} = {result}."


def thinking(rng: random.Random, test: bool) -> Sample:
    """Tasks with a thought before the reply, asked for in the question or by the template's flag."""
    roll = rng.random()
    if roll < 0.45:
        a, op, b, result = sum_item(rng, test)
        question, thought = _sum_question(a, op, b, rng), _sum_thought(a, op, b, result)
        reply = f"{a} {op} {b} = {result}"
    elif roll < 0.9 or test:
        question, thought, reply = word_item(rng, test)
    else:
        plain = rng.choice([greeting, fact])(rng, test)
        question, reply = plain.messages[0]["content"], plain.messages[1]["content"]
        thought = "I know how to answer this."
    sample = ask("thinking", question, with_thought(thought, reply))
    if rng.random() < 0.5:
        sample.enable_thinking = True
    else:
        hint = rng.choice(THINK_WORDS)
        sample.messages[0]["content"] = rng.choice([f"{hint} {question}", f"{question} {hint}", f"{question}\n{hint}"])
    return sample
