"""Generated tables for benchmarks: reviews, and joins whose columns repeat. Seeded.

Every table is columns: name → one text for each row.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

Columns = dict[str, list[str]]

PRODUCTS = {
    "kettle": ("lid", "handle", "heating plate", "spout", "switch"),
    "desk lamp": ("arm", "dimmer", "base", "bulb socket", "shade"),
    "backpack": ("zipper", "shoulder strap", "rain cover", "laptop sleeve", "buckle"),
    "headphones": ("ear cushion", "battery", "microphone", "headband", "charging port"),
    "coffee grinder": ("burr set", "hopper", "motor", "dial", "catch cup"),
    "hiking boots": ("sole", "lace hook", "lining", "toe cap", "insole"),
    "vacuum cleaner": ("dust bin", "brush roll", "hose", "filter", "cable"),
    "office chair": ("armrest", "gas lift", "backrest", "caster", "seat foam"),
    "tent": ("fly sheet", "pole", "ground sheet", "guy line", "vent"),
    "keyboard": ("space bar", "key cap", "hinge", "cable", "back light"),
    "blender": ("jug", "blade", "seal", "button panel", "lid"),
    "bicycle pump": ("gauge", "valve head", "hose", "foot plate", "piston"),
}
ADJECTIVES = ("Compact", "Classic", "Nordic", "Urban", "Alpine", "Silent", "Prime", "Basic")
PLACES = (
    "in our small kitchen", "on a long train journey", "during a wet week in the hills",
    "in the office every day", "at my parents' house", "in a shared flat", "on the balcony",
    "for a weekend away", "in a cold garage", "between two moves",
)  # fmt: skip
TIMES = ("two days", "a week", "a month", "half a year", "one winter", "a year", "three summers")
GOOD = (
    "The {part} feels solid and does exactly what it should.",
    "I was surprised how well the {part} is made at this price.",
    "After {time} the {part} still works like on the first day.",
    "The {part} was easy to clean and easy to put back.",
    "My neighbour borrowed it {place} and ordered one the same evening.",
    "Whoever designed the {part} has clearly used a {product} before.",
    "It arrived early, well packed, and the {part} was set up in minutes.",
)
BAD = (
    "The {part} came loose after {time} and nobody answered my letters.",
    "The {part} is thin, it creaks, and I no longer trust it.",
    "When I used it {place}, the {part} simply stopped working.",
    "The replacement {part} has the same fault as the first one.",
    "I had to tape the {part} together to get through {time}.",
    "The {part} smells of glue, and airing it for {time} did not help.",
    "For this money I expected a {part} that survives {time}.",
)
PLAIN = (
    "I have used this {product} {place} for {time} now.",
    "The parcel held the {product}, a spare {part} and a short manual.",
    "It is about as large as the old {product} that it replaces.",
    "The {part} can be taken off with a small screwdriver.",
    "I bought it because the {part} of the last one was worn out.",
    "Delivery took {time}, as the shop had said.",
)
ENDINGS = (
    "Order {number} was the one I mean.",
    "The label on the box says lot {number}.",
    "I paid with voucher {number}, in case that matters.",
    "My customer number is {number}.",
)
MOODS = {1: (0, 5, 1), 2: (1, 4, 2), 3: (2, 2, 3), 4: (4, 1, 2), 5: (5, 0, 1)}


def reviews(num_rows: int, seed: int = 0) -> Columns:
    """Columns review_id, product, stars, review: texts of 40 to 200 tokens, each another one."""
    rng = random.Random(seed)
    products = [f"{a} {name}" for name in PRODUCTS for a in ADJECTIVES]
    found: Columns = {"review_id": [], "product": [], "stars": [], "review": []}
    for row in range(num_rows):
        product = zipf(rng, products)
        stars = rng.choice((1, 1, 2, 3, 3, 4, 4, 5, 5, 5))
        found["review_id"].append(f"r{row:06d}")
        found["product"].append(product)
        found["stars"].append(str(stars))
        found["review"].append(_review(rng, product, stars, 100_000 + row))
    return found


def _review(rng: random.Random, product: str, stars: int, number: int) -> str:
    noun = product.partition(" ")[2]
    kinds = rng.choices((GOOD, BAD, PLAIN), weights=MOODS[stars], k=64)
    num_words = rng.randint(34, 138)
    sentences: list[str] = []
    used: set[str] = set()
    for kind in kinds:
        pattern = rng.choice(kind)
        sentence = pattern.format(
            part=rng.choice(PRODUCTS[noun]), product=noun, place=rng.choice(PLACES),
            time=rng.choice(TIMES),
        )  # fmt: skip
        if sentence not in used:
            used.add(sentence)
            sentences.append(sentence)
        if sum(len(s.split()) for s in sentences) >= num_words:
            break
    sentences.append(rng.choice(ENDINGS).format(number=number))
    return " ".join(sentences)


def zipf(rng: random.Random, values: Sequence[str], exponent: float = 1.0) -> str:
    """One of them; the k-th is drawn in proportion to 1 / k ** exponent."""
    weights = [1 / (k + 1) ** exponent for k in range(len(values))]
    return rng.choices(values, weights)[0]


def _sentence(rng: random.Random, words: Sequence[str], num_words: int) -> str:
    return " ".join(rng.choice(words) for _ in range(num_words)).capitalize() + "."


WORDS = (
    "story", "sisters", "harbour", "winter", "sea", "road", "map", "coast", "wall", "stove", "name",
    "stranger", "room", "coin", "quiet", "hard", "old", "foreign", "inn", "town", "letter", "train",
)  # fmt: skip
GENRES = ("drama", "comedy", "crime", "family", "science fiction", "documentary")
CRITICS = (
    "warm",
    "slow",
    "clever",
    "thin",
    "honest",
    "loud",
    "careful",
    "uneven",
    "bright",
    "dull",
)


def movies(num_rows: int, seed: int = 0) -> Columns:
    """Reviews joined with films: what is new in each row comes first, films repeat."""
    rng = random.Random(seed)
    films = [
        {
            "title": f"{_sentence(rng, WORDS, 3)[:-1]} {i}",
            "genre": rng.choice(GENRES),
            "plot": " ".join(_sentence(rng, WORDS, rng.randint(10, 18)) for _ in range(4)),
            "studio": f"{rng.choice(ADJECTIVES)} Pictures",
            "year": str(rng.randint(1970, 2024)),
        }
        for i in range(max(4, num_rows // 20))
    ]
    critics = [f"Critic {i} of the {rng.choice(ADJECTIVES)} Paper" for i in range(60)]
    rows = []
    ranks = [str(i) for i in range(len(films))]
    for row in range(num_rows):
        words = [rng.choice(CRITICS) for _ in range(rng.randint(6, 16))]
        film = films[int(zipf(rng, ranks))]
        review = f"Note {row}: {', '.join(words)}."
        rows.append({"review": review, "critic": zipf(rng, critics), **film})
    return _columns(rows)


def goods(num_rows: int, seed: int = 0) -> Columns:
    """Products joined with reviews: what repeats comes first, in no order."""
    rng = random.Random(seed)
    names = [f"{a} {name}" for name in PRODUCTS for a in ADJECTIVES]
    products = {
        name: {
            "product": name,
            "category": name.partition(" ")[2],
            "description": " ".join(
                rng.choice(PLAIN + GOOD).format(
                    part=rng.choice(PRODUCTS[name.partition(" ")[2]]),
                    product=name,
                    place=rng.choice(PLACES),
                    time=rng.choice(TIMES),
                )
                for _ in range(6)
            ),
        }
        for name in names
    }
    rows = []
    for row in range(num_rows):
        name = zipf(rng, names)
        stars = rng.randint(1, 5)
        text = _review(rng, name, stars, 500_000 + row)
        rows.append({**products[name], "order": f"o{row:06d}", "stars": str(stars), "review": text})
    return _columns(rows)


def orders(num_rows: int, seed: int = 0) -> Columns:
    """Order lines joined with customers, shops, carriers and products: 17 columns."""
    rng = random.Random(seed)
    cities = [f"{_sentence(rng, WORDS, 1)[:-1]} {kind}" for kind in ("Bay", "Hill", "Ford", "Mill")]
    shops = [
        {"shop": f"{rng.choice(ADJECTIVES)} Store {i}", "shop_city": rng.choice(cities),
         "shop_note": _sentence(rng, WORDS, 12)}
        for i in range(12)
    ]  # fmt: skip
    carriers = [
        {"carrier": f"{a} Freight", "carrier_terms": _sentence(rng, WORDS, 20)} for a in ADJECTIVES
    ]
    products = [
        {"product": f"{a} {name}", "category": name, "part": rng.choice(PRODUCTS[name]),
         "manual": _sentence(rng, WORDS, 25)}
        for name in PRODUCTS for a in ADJECTIVES[:4]
    ]  # fmt: skip
    customers = [
        {"customer": f"Customer {i}", "city": rng.choice(cities),
         "segment": rng.choice(("private", "trade", "school"))}
        for i in range(max(4, num_rows // 8))
    ]  # fmt: skip
    return _columns(
        [
            {
                "line": f"L{row:07d}",
                "placed": f"2024-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}",
                "pieces": str(rng.randint(1, 9)),
                **_drawn(rng, customers),
                "status": rng.choice(("sent", "held", "returned")),
                **_drawn(rng, products),
                **_drawn(rng, carriers),
                "comment": f"{_sentence(rng, CRITICS, rng.randint(2, 6))} Ticket {row}.",
                **_drawn(rng, shops),
            }
            for row in range(num_rows)
        ]
    )


def _drawn(rng: random.Random, rows: Sequence[dict[str, str]]) -> dict[str, str]:
    return rows[int(zipf(rng, [str(i) for i in range(len(rows))]))]


def _columns(rows: Sequence[dict[str, str]]) -> Columns:
    return {name: [row[name] for row in rows] for name in rows[0]}
