"""Generators of conversations in which tools are offered."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import tasks as t
from . import words as w

Values = list[Any]
Draw = Callable[[random.Random], Any]


@dataclass(frozen=True)
class Param:
    """A parameter of a tool: the names it may have, its type and how to draw a value."""

    names: tuple[str, ...]
    type: str
    text: str
    draw: Draw
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kind:
    """A kind of tool: names, descriptions, questions for it, its result, and the answer from its result."""

    names: tuple[str, ...]
    texts: tuple[str, ...]
    params: tuple[Param, ...]
    questions: tuple[str, ...]
    result: Callable[[random.Random, Values], dict[str, Any]]
    answer: str


def _title(rng: random.Random) -> str:
    return " ".join(w.any_word(rng) for _ in range(rng.randint(1, 3)))


def _clock(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"


def _number(low: int, high: int) -> Draw:
    return lambda rng: rng.randint(low, high)


def _one_of(*options: str) -> Draw:
    return lambda rng: rng.choice(options)


CITY = Param(("city", "location", "place", "town"), "string", "The name of the city", w.place)
WORD = Param(("word", "term", "text"), "string", "The word", w.any_word)
NAME = Param(("name", "person", "user"), "string", "The name of the person", w.person)
LANGUAGE = Param(("language", "target", "to"), "string", "The language", _one_of(*w.LANGUAGES))
TITLE = Param(("title", "song", "name"), "string", "The title of the song", _title)
NOTE = Param(("text", "note", "message"), "string", "The text", _title)
QUERY = Param(("query", "q", "question"), "string", "What to search for", _title)
ROOM = Param(("room", "area"), "string", "The room", lambda r: r.choice(
    ["kitchen", "garden", "hall", "bedroom", "office", "bathroom", w.any_word(r)]))  # fmt: skip
STATE = Param(("state", "mode"), "string", "The state", _one_of("on", "off"), ("on", "off"))
AMOUNT = Param(("amount", "value"), "number", "The amount", _number(1, 999))
CODES = ("USD", "EUR", "GBP", "JPY", "CHF", "CAD", "SEK", "PLN")
FROM = Param(("from", "from_currency", "source"), "string", "The currency to convert from", _one_of(*CODES))
INTO = Param(("to", "to_currency", "target"), "string", "The currency to convert to", _one_of(*CODES))
ITEM = Param(("item", "product", "article"), "string", "The item", w.any_word)
COUNT = Param(("quantity", "count", "number"), "integer", "How many", _number(2, 99))
SYMBOL = Param(("symbol", "ticker"), "string", "The symbol of the stock",
               lambda r: "".join(r.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(r.randint(3, 4))))  # fmt: skip
TIME = Param(("time", "at", "when"), "string", "The time as HH:MM", _clock)
PATH = Param(("path", "file", "filename"), "string", "The name of the file",
             lambda r: w.any_word(r) + r.choice([".txt", ".md", ".csv", ".py"]))  # fmt: skip
FIRST, SECOND = (Param(names, "integer", "A number", _number(0, 999)) for names in (("a", "x"), ("b", "y")))

KINDS = [
    Kind(("get_weather", "weather", "get_current_weather", "fetch_weather", "weather_in", "current_weather"),
         ("Get the weather in a city", "Get the current weather", "Tell the weather of a place"), (CITY,),
         ("What is the weather in {0}?", "How is the weather in {0}?", "What's the weather like in {0}?",
          "Weather in {0}?", "Tell me the weather in {0}.", "Is it raining in {0}?", "How warm is it in {0}?",
          "What is the weather like in {0} today?", "I am going to {0}. How is the weather?"),
         lambda r, v: {"temperature": r.randint(-15, 40), "condition": r.choice(
             ["sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear"])},
         "It is {temperature} degrees and {condition} in {0}."),
    Kind(("get_time", "time_in", "current_time", "get_current_time", "clock"),
         ("Get the current time in a city", "Tell the time in a place"), (CITY,),
         ("What time is it in {0}?", "Tell me the time in {0}.", "What is the time in {0}?", "Time in {0}?"),
         lambda r, v: {"time": _clock(r)}, "It is {time} in {0}."),
    Kind(("get_population", "population", "population_of", "count_people"),
         ("Get the population of a city", "How many people live in a city"), (CITY,),
         ("How many people live in {0}?", "What is the population of {0}?", "Tell me the population of {0}."),
         lambda r, v: {"population": r.randint(1000, 999999)}, "{population} people live in {0}."),
    Kind(("translate", "translate_word", "translation", "translate_text"),
         ("Translate a word into a language", "Translate text"), (WORD, LANGUAGE),
         ("Translate {0} into {1}.", "How do you say {0} in {1}?", "What is {0} in {1}?",
          "Translate '{0}' to {1}.", 'Please translate "{0}" into {1}.'),
         lambda r, v: {"translation": w.made_up_word(r)}, "{0} in {1} is {translation}."),
    Kind(("define", "define_word", "dictionary", "get_definition", "lookup_word"),
         ("Look up the meaning of a word", "Get the definition of a word"), (WORD,),
         ("What does {0} mean?", "Define {0}.", "Look up the word {0}.", "What is the meaning of {0}?",
          "Give me the definition of '{0}'."),
         lambda r, v: {"definition": f"a {w.any_word(r)} {w.any_word(r)}"}, "{0} means {definition}."),
    Kind(("search", "web_search", "search_web", "find_pages"),
         ("Search the web", "Search for pages about something"), (QUERY,),
         ("Search for {0}.", "Search the web for {0}.", "Find pages about {0}.", "Look for {0} on the web.",
          "Please search for {0}."),
         lambda r, v: {"result": _title(r)}, "I found this: {result}."),
    Kind(("play_song", "play", "play_music", "start_song"), ("Play a song", "Play music"), (TITLE,),
         ("Play {0}.", "Play the song {0}.", "I want to hear {0}.", "Put on the song {0}.", "Please play {0}."),
         lambda r, v: {"status": "ok"}, "I am playing {0}."),
    Kind(("add_note", "create_reminder", "remind", "save_note"), ("Save a note", "Create a reminder"), (NOTE,),
         ("Remind me of {0}.", "Make a note: {0}.", "Save the note {0}.", "Note down {0}.", "Remember this: {0}."),
         lambda r, v: {"status": "ok"}, "I saved the note {0}."),
    Kind(("set_light", "light", "switch_light", "control_light"), ("Switch the light in a room", "Control the lights"),
         (ROOM, STATE),
         ("Turn {1} the light in the {0}.", "Switch {1} the light in the {0}.", "Turn the {0} light {1}.",
          "Please switch the light in the {0} {1}."),
         lambda r, v: {"status": "ok"}, "The light in the {0} is {1}."),
    Kind(("convert", "convert_currency", "exchange", "currency_converter"),
         ("Convert money between currencies", "Convert an amount of money"), (AMOUNT, FROM, INTO),
         ("Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?", "What are {0} {1} in {2}?",
          "Change {0} {1} into {2}."),
         lambda r, v: {"result": r.randint(1, 9999)}, "{0} {1} are {result} {2}."),
    Kind(("order_item", "order", "buy", "add_to_cart", "place_order"), ("Order an item", "Buy things"), (ITEM, COUNT),
         ("Order {1} {0}.", "Buy {1} {0}.", "I need {1} {0}.", "Please order {1} {0}.", "Add {1} {0} to my cart."),
         lambda r, v: {"status": "ok"}, "I ordered {1} {0}."),
    Kind(("get_stock_price", "stock_price", "stock", "get_quote"), ("Get the price of a stock", "Look up a stock"),
         (SYMBOL,),
         ("What is the stock price of {0}?", "How much is the stock {0}?", "Price of the stock {0}?",
          "What does the stock {0} cost?"),
         lambda r, v: {"price": r.randint(1, 999)}, "The stock {0} costs {price}."),
    Kind(("set_alarm", "alarm", "wake_up"), ("Set an alarm", "Set the alarm clock"), (TIME,),
         ("Wake me at {0}.", "Set an alarm for {0}.", "Set the alarm to {0}.", "Wake me up at {0}.",
          "I must get up at {0}."),
         lambda r, v: {"status": "ok"}, "The alarm is set for {0}."),
    Kind(("get_email", "find_email", "email_of", "lookup_contact"), ("Find the email address of a person",
         "Look up an email address"), (NAME,),
         ("What is the email of {0}?", "Find the email address of {0}.", "Give me the email of {0}.",
          "How can I write to {0}?"),
         lambda r, v: {"email": f"{w.any_word(r)}@{w.any_word(r)}.com"}, "The email of {0} is {email}."),
    Kind(("send_message", "message", "send_text", "send_email"), ("Send a message to a person", "Write to a person"),
         (Param(("to", "recipient", "name"), "string", "The person", w.person), NOTE),
         ("Send {0} the message {1}.", "Tell {0}: {1}.", "Write to {0}: {1}.", "Send a message to {0}: {1}."),
         lambda r, v: {"status": "sent"}, "I sent the message to {0}."),
    Kind(("read_file", "open_file", "cat", "get_file"), ("Read a file", "Open a file and return its text"), (PATH,),
         ("Read the file {0}.", "Open {0}.", "What is in the file {0}?", "Show me {0}.", "Open the file {0}."),
         lambda r, v: {"content": _title(r)}, "The file {0} says: {content}."),
    Kind(("calculator", "multiply", "multiply_numbers", "calc"), ("Multiply two numbers", "Compute a product"),
         (FIRST, SECOND),
         ("What is {0} times {1}?", "Multiply {0} by {1}.", "What is {0} * {1}?", "Compute {0} times {1}."),
         lambda r, v: {"result": v[0] * v[1]}, "{0} times {1} is {result}."),
    Kind(("add", "add_numbers", "sum", "plus"), ("Add two numbers", "Compute a sum"), (FIRST, SECOND),
         ("What is {0} + {1}?", "Add {0} and {1}.", "What is {0} plus {1}?", "Use the tool to add {0} and {1}."),
         lambda r, v: {"result": v[0] + v[1]}, "{0} + {1} = {result}"),
]  # fmt: skip


def _lookup_kind(rng: random.Random) -> Kind:
    """A tool about an arbitrary property. The noun may be invented, so that the model must read names."""
    nouns = ["price", "owner", "status", "age", "size", "weight", "length", "author", "level", "score", "code", "rank"]
    noun = rng.choice(nouns) if rng.random() < 0.5 else w.made_up_word(rng, 3, 7)
    name = rng.choice(["get_{0}", "find_{0}", "{0}_of", "lookup_{0}", "{0}", "{0}_lookup", "fetch_{0}"]).format(noun)
    subject = Param(("item", "name", "id", "key", "object", w.made_up_word(rng, 3, 6)), "string", "The thing",
                    w.any_word)  # fmt: skip
    value: Draw = rng.choice([_number(0, 9999), w.any_word, _title])
    key = rng.choice([noun, "result", "value"])
    questions = (f"What is the {noun} of {{0}}?", f"Tell me the {noun} of {{0}}.", f"Find the {noun} of {{0}}.",
                 f"Look up the {noun} of {{0}}.", f"Give me the {noun} of {{0}}.")  # fmt: skip
    texts = (f"Get the {noun} of a thing", f"Look up the {noun}", f"Find the {noun} of an item")
    answer = f"The {noun} of {{0}} is {{{key}}}."
    return Kind((name,), texts, (subject,), questions, lambda r, v: {key: value(r)}, answer)


@dataclass
class Offer:
    """A tool as offered in one conversation."""

    kind: Kind
    name: str
    params: list[tuple[str, Param]]
    schema: dict[str, Any]


def _offer(kind: Kind, rng: random.Random) -> Offer:
    """Render a kind as an OpenAI tool, with drawn names and more or fewer descriptions."""
    name = rng.choice(kind.names)
    params, taken = [], set()
    for param in kind.params:
        options = [option for option in param.names if option not in taken]
        key = options[0] if rng.random() < 0.4 else rng.choice(options)
        taken.add(key)
        params.append((key, param))
    described, closed = rng.random() < 0.4, rng.random() < 0.15
    properties: dict[str, Any] = {}
    for key, param in params:
        properties[key] = {"type": param.type}
        if described:
            properties[key]["description"] = param.text
        if param.choices and rng.random() < 0.7:
            properties[key]["enum"] = list(param.choices)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.75:
        parameters["required"] = [key for key, _ in params]
    if closed:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": name}
    if rng.random() < 0.85:
        function["description"] = rng.choice(kind.texts) + rng.choice(["", "."])
    function["parameters"] = parameters
    if closed and rng.random() < 0.5:
        function["strict"] = True
    return Offer(kind, name, params, {"type": "function", "function": function})


def _draw_kind(rng: random.Random) -> Kind:
    return _lookup_kind(rng) if rng.random() < 0.25 else rng.choice(KINDS)


def _offers(rng: random.Random) -> list[Offer]:
    """Draw one to four tools whose names and kinds differ."""
    offers: list[Offer] = []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 2, 3, 3, 4))):
        kind = _draw_kind(rng)
        offer = _offer(kind, rng)
        if all(offer.name != other.name and kind.texts != other.kind.texts for other in offers):
            offers.append(offer)
    return offers


def _call(offer: Offer, values: Values, rng: random.Random) -> t.Message:
    """The assistant turn that calls the tool, with arguments as an object, or as JSON text like clients send."""
    arguments: Any = {key: value for (key, _), value in zip(offer.params, values, strict=True)}
    if rng.random() < 0.3:
        arguments = json.dumps(arguments, ensure_ascii=False)
    call = {"type": "function", "function": {"name": offer.name, "arguments": arguments}}
    return {"role": "assistant", "content": rng.choice(["", None]), "tool_calls": [call]}


def _question(offer: Offer, rng: random.Random, test: bool) -> tuple[str, Values]:
    """Draw the question and the values it names; a held-out item has a held-out first value."""

    def make() -> tuple[str, tuple[str, Values]]:
        values = [param.draw(rng) for _, param in offer.params]
        question = rng.choice(t.PREFIXES[:6]) + rng.choice(offer.kind.questions).format(*values)
        return f"value {values[0]}", (question[:1].upper() + question[1:], values)

    return t.draw(make, test)


def _result(offer: Offer, values: Values, rng: random.Random) -> tuple[t.Message, str]:
    """The tool's result turn and the answer that uses it."""
    result = offer.kind.result(rng, values)
    answer = offer.kind.answer.format(*values, **result)
    extra = dict(result)
    if rng.random() < 0.2:
        extra = {offer.params[0][0]: values[0], **{k: v for k, v in result.items() if k != offer.params[0][0]}}
    text = json.dumps(extra, ensure_ascii=False)
    if len(result) == 1 and rng.random() < 0.3:
        text = str(next(iter(result.values())))
    return {"role": "tool", "content": text}, answer


def _clashes(offers: list[Offer], sample: t.Sample) -> bool:
    """Returns True if one of the tools could answer a question that should need none."""
    names = " ".join(text for offer in offers for text in (offer.name, *offer.kind.texts)).lower()
    if sample.category == "arithmetic":
        return any(word in names for word in ("sum", "add", "multipl", "calc", "plus"))
    return sample.category == "facts" and any(word in names for word in ("search", "look", "find"))


def _without_call(offers: list[Offer], rng: random.Random, test: bool) -> t.Sample:
    """A question of another category that none of the offered tools answers."""
    while True:
        sample = rng.choice([t.greeting, t.fact, t.word_task, t.arithmetic])(rng, test)
        if sample.category != "unknown" and not _clashes(offers, sample):
            sample.category = "tools"
            sample.tags.add("none")
            return sample


def tool_task(rng: random.Random, test: bool) -> t.Sample:
    """Calling the right tool, answering from its result, and leaving the tools alone when none applies."""
    offers = _offers(rng)
    rng.shuffle(offers)
    tools = [offer.schema for offer in offers]
    if rng.random() < 0.18:
        sample = _without_call(offers, rng, test)
        sample.tools = tools
        return sample
    offer = rng.choice(offers)
    question, values = _question(offer, rng, test)
    sample = t.Sample("tools", [t.user(question), _call(offer, values, rng)], tools, tags={"call"})
    if rng.random() < 0.4:
        turn, answer = _result(offer, values, rng)
        sample.messages += [turn, t.assistant(answer)]
        sample.tags = {"result"}
        if not test and rng.random() < 0.3:
            question, values = _question(offer, rng, test)
            sample.messages += [t.user(question), _call(offer, values, rng)]
            sample.tags = {"call"}
    elif not test and rng.random() < 0.06:
        sample.enable_thinking = True
        sample.messages[-1]["content"] = f"<think>\nI need the tool {offer.name}.\n</think>\n\n"
    return sample
