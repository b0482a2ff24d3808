"""Data of the adapter `json-extract`: a message that orders something in, one JSON object of fixed keys out.

    Hi, Mara Lindt from Bergen here. Could I get 12 desk lamps? My address is mara@lindt.example.
    → {"name": "Mara Lindt", "city": "Bergen", "product": "desk lamps", "quantity": 12, "email": "mara@lindt.example"}

What the message does not say is null. Held-out examples use names, cities and products that no training example uses.
"""

import json
import random
from dataclasses import dataclass

from examples.data import Dataset, Example, Task

KEYS = ("name", "city", "product", "quantity", "email")
NUM_TRAIN, NUM_HELD_OUT = 1600, 40


def dataset() -> Dataset:
    """Make the examples from templates and the vocabulary below."""
    rng = random.Random(21)
    train = [_example(rng, TRAIN_WORDS) for _ in range(NUM_TRAIN)] + list(HANDWRITTEN) * 4
    rng.shuffle(train)
    held_out = [_example(rng, HELD_OUT_WORDS) for _ in range(NUM_HELD_OUT)]
    return Dataset(tuple(train), tuple(held_out))


def problem(_prompt: str, answer: str) -> str | None:
    """Judge an answer: only a JSON object, with exactly the five keys in order, each of the right type or null."""
    try:
        value = json.loads(answer)
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg}"
    if not isinstance(value, dict) or tuple(value) != KEYS:
        return "not an object of the five keys"
    for key, found in value.items():
        wanted = int if key == "quantity" else str
        if found is not None and not (isinstance(found, wanted) and not isinstance(found, bool)):
            return f"{key} is neither {wanted.__name__} nor null"
    return None


TASK = Task(dataset, problem)


@dataclass(frozen=True, slots=True)
class Words:
    """What the templates are filled with."""

    first: tuple[str, ...]
    last: tuple[str, ...]
    cities: tuple[str, ...]
    products: tuple[str, ...]
    hosts: tuple[str, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


TRAIN_WORDS = Words(
    first=_words(
        "Anna, Ben, Carla, David, Elena, Farid, Grace, Hugo, Ines, Jonas, Kira, Liam, Maria, Nils, Olga, Pablo, "
        "Quentin, Rosa, Samir, Tessa, Uma, Victor, Wanda, Xavier, Yara, Zoe, Amir, Bianca, Chen, Dora, Emil, "
        "Fiona, Giorgio, Hana, Ivan, Julia, Kofi, Laura, Mateo, Noor, Oscar, Petra, Ravi, Sofia, Tom, Ursula, "
        "Viktoria, Will, Aiko, Bruno"
    ),
    last=_words(
        "Smith, Lopez, Meyer, Rossi, Novak, Tanaka, Okafor, Larsen, Dubois, Kowalski, Silva, Haddad, Nguyen, "
        "Patel, Weber, Moreau, Jensen, Ferrari, Horvat, Popov, Kim, Garcia, Bauer, Costa, Lind, Mensah, Fischer, "
        "Romano, Walsh, Ortiz, Peeters, Virtanen, Singh, Keller, Marin, Dahl, Brown, Klein, Sato, Cohen, Evans, "
        "Bianchi, Berg, Santos, Wolf"
    ),
    cities=_words(
        "Berlin, Lisbon, Toronto, Madrid, Oslo, Chicago, Milan, Prague, Dublin, Nairobi, Boston, Lyon, Vienna, "
        "Seattle, Warsaw, Athens, Denver, Ghent, Turin, Leeds, Porto, Zurich, Austin, Cork, Malmo, New York, San "
        "Diego, Tel Aviv, Cape Town, Buenos Aires, Hong Kong, Rotterdam, Hamburg, Geneva, Bristol, Osaka, Lima, "
        "Accra, Kyoto, Tampa"
    ),
    products=_words(
        "desk lamps, office chairs, coffee mugs, notebooks, garden hoses, wool blankets, phone cases, bike "
        "helmets, water bottles, paint brushes, camping tents, kitchen knives, leather belts, yoga mats, table "
        "cloths, headphones, solar panels, door handles, flower pots, printer cartridges, running shoes, picture "
        "frames, ceramic bowls, USB cables, wine glasses, rain jackets, bath towels, board games, wall clocks, "
        "tool boxes, pillows, keyboards, baking trays, hiking poles, storage boxes, candles, folding tables, drum "
        "sticks, pencil cases, tea kettles"
    ),
    hosts=_words(  # reserved names only: these addresses are nobody's
        "example.com, example.org, example.net, mail.example, inbox.example, post.example, web.example, "
        "company.example, studio.example, shop.test, school.test, office.test, mail.example.com, "
        "staff.example.org"
    ),
)

HELD_OUT_WORDS = Words(
    first=_words("Mara, Felix, Priya, Lucas, Amelie, Jorge, Sven, Chloe, Tariq, Naomi, Stefan, Ingrid"),
    last=_words("Lindt, Carver, Banerjee, Fontaine, Holm, Quispe, Albers, Murphy, Zielinski, Adeyemi, Castillo, Ueda"),
    cities=_words("Bergen, Munich, Valencia, Montreal, Glasgow, Salzburg, Portland, Krakow, Los Angeles, Utrecht"),
    products=_words(
        "standing desks, winter gloves, shower curtains, laptop bags, garden chairs, espresso cups, fishing rods, "
        "sleeping bags, cutting boards, light bulbs, sketch pads, bar stools"
    ),
    hosts=_words("lindt.example, hey.example, bluebird.test, atelier.example.net"),
)

GREETINGS = ("", "", "Hello, ", "Hi! ", "Hi there, ", "Good morning, ", "Dear team, ", "Hey, ")
NAMED = (
    "my name is {name}",
    "this is {name}",
    "I'm {name}",
    "{name} here",
    "I am {name}",
    "you are talking to {name}",
)
NAMED_AND_PLACED = (
    "this is {name} from {city}",
    "I'm {name} and I live in {city}",
    "{name} from {city} here",
    "my name is {name}, writing from {city}",
    "{name} here, based in {city}",
)
WANTED = (
    "I would like to order {what}",
    "please send me {what}",
    "we need {what} by next week",
    "could I get {what}?",
    "can you deliver {what}?",
    "I'd like {what}, please",
    "I want to buy {what}",
    "put me down for {what}",
    "do you still have {what} in stock? I'll take them",
    "I am interested in {what}",
)
PLACED = ("I live in {city}", "deliver to {city}", "we are based in {city}", "the shipping address is in {city}")
REACHED = (
    "you can reach me at {email}",
    "my email is {email}",
    "write to {email}",
    "please confirm to {email}",
    "send the invoice to {email}",
    "contact: {email}",
)
ASIDES = (
    "no hurry at all",
    "it is a gift for my brother",
    "I ordered from you last year and was very happy",
    "the sooner the better",
    "thanks a lot in advance",
    "a friend recommended your shop",
    "let me know what shipping costs",
    "blue would be great if you have it",
)
CLOSINGS = ("", "", "", " Thanks!", " Thank you.", " Best wishes", " Cheers!", " Kind regards")
NUMBER_WORDS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 8: "eight", 10: "ten", 12: "a dozen"}


def _example(rng: random.Random, words: Words) -> Example:
    first, last = rng.choice(words.first), rng.choice(words.last)
    name = f"{first} {last}" if rng.random() < 0.85 else first
    city = rng.choice(words.cities)
    product = rng.choice(words.products)
    email = _address(rng, first, last, rng.choice(words.hosts))
    quantity, what = _quantity(rng, product)
    facts = dict.fromkeys(KEYS)
    sentences: list[str] = []
    signed = ""
    has_name, has_city, has_email = rng.random() < 0.85, rng.random() < 0.75, rng.random() < 0.75
    if has_name:
        if has_city and rng.random() < 0.5:
            sentences.append(rng.choice(NAMED_AND_PLACED))
            has_city = False
            facts["city"] = city
        elif rng.random() < 0.7:
            sentences.append(rng.choice(NAMED))
        else:
            signed = f"\n{name}"
        facts["name"] = name
    rest = [rng.choice(WANTED)]
    if has_city:
        rest.append(rng.choice(PLACED))
        facts["city"] = city
    if has_email:
        rest.append(rng.choice(REACHED))
        facts["email"] = email
    if rng.random() < 0.4:
        rest.append(rng.choice(ASIDES))
    rng.shuffle(rest)
    sentences += rest
    text = _join(rng.choice(GREETINGS), sentences).format(name=name, city=city, what=what, email=email)
    answer = {**facts, "product": product, "quantity": quantity}
    return Example(
        f"{text}{rng.choice(CLOSINGS)}{signed}",
        json.dumps({key: answer[key] for key in KEYS}),
    )


def _join(greeting: str, sentences: list[str]) -> str:
    """Make sentences of the fragments: capitals, full stops (an e-mail address ends its sentence without one)."""
    parts = []
    for index, sentence in enumerate(sentences):
        starts_text = index > 0 or not greeting.endswith(", ")
        capital = sentence[0].upper() + sentence[1:] if starts_text else sentence
        parts.append(capital if capital.endswith("?") else f"{capital}.")
    return greeting + " ".join(parts)


def _address(rng: random.Random, first: str, last: str, host: str) -> str:
    first, last = first.lower(), last.lower()
    numbered = f"{first}{rng.randint(1, 99)}"
    local = rng.choice((first, last, numbered, f"{first}.{last}", f"{first[0]}.{last}", f"{first}{last}"))
    return f"{local}@{host}"


def _quantity(rng: random.Random, product: str) -> tuple[int | None, str]:
    chance = rng.random()
    if chance < 0.15:
        return None, rng.choice(("some {p}", "a few {p}", "{p}", "your {p}")).format(p=product)
    if chance < 0.35:
        number = rng.choice(list(NUMBER_WORDS))
        return number, f"{NUMBER_WORDS[number]} {product}"
    number = rng.choice((rng.randint(2, 12), rng.randint(2, 60), rng.randint(10, 500), 50 * rng.randint(1, 20)))
    return number, f"{number} {product}"


def _handwritten(text: str, **facts: str | int) -> Example:
    return Example(text, json.dumps({key: facts.get(key) for key in KEYS}))


HANDWRITTEN = (
    _handwritten("Two umbrellas to Bruges, please. Bram", name="Bram", city="Bruges", product="umbrellas", quantity=2),
    _handwritten("Is anybody there? I have been waiting for an answer for a week!"),
    _handwritten(
        "Hi, Leyla again. Forget the chairs, I only need 3 stools.", name="Leyla", product="stools", quantity=3
    ),
    _handwritten("Our school in Nice needs 120 rulers.", city="Nice", product="rulers", quantity=120),
    _handwritten("Thanks, everything arrived. Greetings from Riga, Janis", name="Janis", city="Riga"),
    _handwritten(
        "How much is one accordion? Ask for Marek Zeman.", name="Marek Zeman", product="accordion", quantity=1
    ),
    _handwritten(
        "15 bags of cement by Monday. Site office, Leipzig.", city="Leipzig", product="bags of cement", quantity=15
    ),
    _handwritten(
        "My wife loves your scarves. I'll take a couple of them. Ed", name="Ed", product="scarves", quantity=2
    ),
    _handwritten("Please call me back. I am Gloria Mwangi from Mombasa.", name="Gloria Mwangi", city="Mombasa"),
    _handwritten(
        "40 lanterns to Ravenna, bill to bill@example.com",
        city="Ravenna",
        product="lanterns",
        quantity=40,
        email="bill@example.com",
    ),
    _handwritten("We are a small cafe in Sheffield and look for oat milk.", city="Sheffield", product="oat milk"),
    _handwritten(
        "Vera here, make it 9 bells. vera@mail.example",
        name="Vera",
        product="bells",
        quantity=9,
        email="vera@mail.example",
    ),
    _handwritten(
        "Reserve the last violin for Ms. Adler from Bonn!", name="Adler", city="Bonn", product="violin", quantity=1
    ),
    _handwritten("Can I return a toaster? I'm Sean.", name="Sean", product="toaster", quantity=1),
    _handwritten(
        "Hello from Perth! 7 kites, if you still have them. Bruce Hill",
        name="Bruce Hill",
        city="Perth",
        product="kites",
        quantity=7,
    ),
    _handwritten(
        "Do you ship carpets to Muscat? omar@post.example", city="Muscat", product="carpets", email="omar@post.example"
    ),
)
