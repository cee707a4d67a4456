"""Word lists, invented words, and the split that keeps evaluation items out of training."""

from __future__ import annotations

import random
import zlib

HELD_OUT_PERCENT = 12


def _words(text: str) -> list[str]:
    """The words of a text, so that long lists stay readable."""
    return text.split()


CAPITALS: dict[str, str] = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "Ireland": "Dublin", "Scotland": "Edinburgh", "Wales": "Cardiff", "Belgium": "Brussels",
    "the Netherlands": "Amsterdam", "Switzerland": "Bern", "Austria": "Vienna", "Poland": "Warsaw",
    "Hungary": "Budapest", "Romania": "Bucharest", "Bulgaria": "Sofia", "Greece": "Athens", "Turkey": "Ankara",
    "Sweden": "Stockholm", "Norway": "Oslo", "Denmark": "Copenhagen", "Finland": "Helsinki", "Iceland": "Reykjavik",
    "Estonia": "Tallinn", "Latvia": "Riga", "Lithuania": "Vilnius", "Ukraine": "Kyiv", "Russia": "Moscow",
    "Croatia": "Zagreb", "Serbia": "Belgrade", "Slovenia": "Ljubljana", "Slovakia": "Bratislava", "Malta": "Valletta",
    "Albania": "Tirana", "Cyprus": "Nicosia", "Egypt": "Cairo", "Morocco": "Rabat", "Tunisia": "Tunis",
    "Kenya": "Nairobi", "Ghana": "Accra", "Nigeria": "Abuja", "Senegal": "Dakar", "Ethiopia": "Addis Ababa",
    "Uganda": "Kampala", "Zambia": "Lusaka", "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi",
    "Nepal": "Kathmandu", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Indonesia": "Jakarta", "Iran": "Tehran",
    "Iraq": "Baghdad", "Jordan": "Amman", "Lebanon": "Beirut", "Qatar": "Doha", "Mongolia": "Ulaanbaatar",
    "Canada": "Ottawa", "Mexico": "Mexico City", "Cuba": "Havana", "Jamaica": "Kingston", "Brazil": "Brasilia",
    "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima", "Colombia": "Bogota", "Ecuador": "Quito",
    "Uruguay": "Montevideo", "Australia": "Canberra", "New Zealand": "Wellington",
}  # fmt: skip

COLOURS: dict[str, str] = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a banana": "yellow", "a tomato": "red",
    "a carrot": "orange", "chocolate": "brown", "an elephant": "grey", "a flamingo": "pink", "a lemon": "yellow",
    "milk": "white", "blood": "red", "a frog": "green", "the sea": "blue", "a strawberry": "red",
}  # fmt: skip
SOUNDS: dict[str, str] = {
    "dog": "woof", "cat": "meow", "cow": "moo", "sheep": "baa", "duck": "quack", "pig": "oink", "horse": "neigh",
    "lion": "roar", "bee": "buzz", "snake": "hiss", "owl": "hoot", "frog": "ribbit", "rooster": "cock-a-doodle-doo",
    "mouse": "squeak", "wolf": "howl", "bird": "tweet",
}  # fmt: skip
OPPOSITES: dict[str, str] = {
    "hot": "cold", "big": "small", "fast": "slow", "up": "down", "day": "night", "black": "white", "old": "young",
    "happy": "sad", "open": "closed", "left": "right", "full": "empty", "light": "dark", "hard": "soft",
    "early": "late", "rich": "poor", "wet": "dry", "high": "low", "good": "bad", "strong": "weak", "long": "short",
}  # fmt: skip
LEGS: dict[str, str] = {
    "spider": "eight", "dog": "four", "cat": "four", "bird": "two", "ant": "six", "horse": "four", "bee": "six",
    "duck": "two", "cow": "four", "snake": "zero", "crab": "ten", "person": "two",
}  # fmt: skip
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
          "November", "December"]  # fmt: skip
LANGUAGES = ["French", "German", "Spanish", "Italian", "Dutch", "Polish", "Greek", "Swedish", "Japanese", "Turkish"]
CITIES = sorted({*CAPITALS.values(), "Boston", "Chicago", "Seattle", "Munich", "Hamburg", "Lyon", "Milan", "Naples",
                 "Porto", "Geneva", "Zürich", "Kraków", "Osaka", "Mumbai", "Sydney", "Toronto", "San Francisco",
                 "New York", "Los Angeles", "Málaga", "Bergen", "Leeds", "Oxford", "Denver", "Dallas"})  # fmt: skip
FIRST_NAMES = _words("""
Anna Ben Clara David Emma Felix Grace Henry Ida Jack Karl Laura Maria Nina Oscar Paul Rosa Sam Tom Vera Will Yusuf Zoe
Alice Bob Carol Dan Eve Frank Hana Ivan Julia Kim Leo Mia Noah Olga Peter Rita Sara Tim Uma Victor Wendy Xavier Amir
Bella Chen Diego Elena Finn Gita Hugo Iris Jonas Lena Marco Nora Omar Priya Raj Sofia Theo
""")
JOBS = _words("""
teacher doctor baker nurse pilot farmer painter lawyer driver cook writer singer builder plumber dentist engineer
judge tailor sailor gardener
""")
WORDS = _words("""
apple banana cherry grape lemon mango melon orange peach pear plum kiwi berry bread butter cheese cream sugar salt
pepper soup rice pasta pizza salad toast honey table chair desk lamp door window wall floor roof room house garden
tree leaf flower grass root seed river lake ocean island beach sand stone rock hill mountain valley forest desert
cloud rain snow wind storm thunder sun moon star planet cat dog horse cow sheep goat pig duck goose hen wolf bear fox
lion tiger zebra camel monkey mouse rabbit frog snake turtle fish shark whale dolphin crab spider ant bee fly worm
bird eagle owl parrot robin swan book page paper pen pencil ink letter story poem song music piano guitar violin drum
flute horn bell train plane boat ship car truck bus bike wheel engine road bridge tunnel street market shop bank
school church castle tower palace farm barn field fence gate king queen prince knight wizard witch giant dragon ghost
robot doctor teacher baker farmer pilot sailor soldier painter singer dancer writer hand foot arm leg head nose mouth
ear eye hair heart bone skin blood shirt coat hat shoe sock glove scarf dress skirt belt button needle thread hammer
nail screw saw knife fork spoon plate cup glass bottle bowl basket box bag rope chain wire pipe key lock coin purse
ring crown sword shield arrow spear flag map compass clock candle fire smoke ash flame ice steam water metal gold
silver iron copper wood glue paint brush soap towel mirror pillow blanket carpet curtain sofa shelf drawer cabinet
kettle oven stove fridge hello world planet rocket magnet pocket silent listen orange simple garden summer winter
autumn spring morning evening brave clever funny gentle happy kind lazy lucky noisy proud quiet quick ready shiny
smart tasty tiny tough warm young stop pool level drawer parts live evil noon radar civic kayak smile laugh dream
sleep dance jump climb throw catch strawberry computer elephant umbrella
""")
COMMON_WORDS = _words("""
what time city name word letter number capital country tool reply think color question answer weather make day month
today people good hot cold big list text user value string how the and day
""")

_ONSETS = _words("b c d f g h j k l m n p r s t v w z br ch cl dr fl gr pl pr sh sk sl sp st th tr")
_VOWELS = _words("a e i o u a e i o ai ea oo ou")
_CODAS = ["", "", "", "n", "r", "l", "s", "t", "m", "d", "k", "p", "nd", "st", "ck"]


def held_out(key: str) -> bool:
    """Returns True if an item is held out for evaluation. A hash of its text decides, so no list is needed."""
    return zlib.crc32(key.encode()) % 100 < HELD_OUT_PERCENT


def made_up_word(rng: random.Random, low: int = 3, high: int = 8) -> str:
    """Invent a pronounceable word, because copying must work for unknown words."""
    while True:
        word = "".join(
            rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.choice((1, 2, 2, 3)))
        )
        if rng.random() < 0.08:
            word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(low, high)))
        if low <= len(word) <= high:
            return word


def any_word(rng: random.Random, low: int = 3, high: int = 8) -> str:
    """A real or an invented word of a given length range."""
    while rng.random() < 0.5:
        word = rng.choice(WORDS)
        if low <= len(word) <= high:
            return word
    return made_up_word(rng, low, high)


def split_word(rng: random.Random, test: bool, low: int = 3, high: int = 8) -> str:
    """A word from the training or from the held-out side."""
    while True:
        word = any_word(rng, low, high)
        if held_out("word " + word) == test:
            return word


def person(rng: random.Random) -> str:
    """A first name, invented in half of the cases."""
    return rng.choice(FIRST_NAMES) if rng.random() < 0.5 else made_up_word(rng, 3, 7).capitalize()


def place(rng: random.Random) -> str:
    """A city, invented in half of the cases."""
    return rng.choice(CITIES) if rng.random() < 0.55 else made_up_word(rng, 4, 8).capitalize()


def content_words() -> set[str]:
    """Lower-case words that are tokenized letter by letter, so that the model can copy, count and reverse them."""
    phrases = [*CAPITALS, *CAPITALS.values(), *CITIES, *FIRST_NAMES, *JOBS, *WORDS, *COLOURS, *SOUNDS, *LANGUAGES]
    words = {word.lower() for phrase in phrases for word in phrase.split()}
    return words - {"the", "a", "an", "new"}
