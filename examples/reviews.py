"""Reads a table of product reviews with a language model, by SQL and with pandas.

    pip install 'anaphora[sql]' pandas
    python examples/reviews.py

The reviews are generated here, so the example needs no data, and the default model is small: the
labels are of the right form, and often not those that you would give.
"""

from __future__ import annotations

import argparse
import random

import duckdb
import pandas as pd
from rich.console import Console
from rich.table import Table

from anaphora import Client, sql
from anaphora.functions import Usage, ai_analyze_sentiment, ai_similarity

PRODUCTS = ("Aster kettle", "Birch toaster", "Cedar lamp")
OPENINGS = (
    "I bought this in spring and use it every day.",
    "A present from my sister.",
    "My third one from this maker.",
    "Ordered on Monday, here on Thursday.",
)
VERDICTS = (
    "It works just as it should and looks good.",
    "The switch broke after two weeks and nobody answers the phone.",
    "It arrived with a dent, but the shop sent a new one the next day.",
    "Far too expensive for what it does.",
    "The best one I have had, I would buy it again.",
)
INSTRUCTIONS = """\
You sort reviews for the makers of household goods. Read the whole review before you decide.
- quality: something is said about how the thing is made, how well it works or how long it lasts.
- delivery: the parcel, the time it took, damage on the way.
- service: what people of the shop or the maker did or failed to do.
- price: the money, whatever is said about it.
If several fit, take the one on which most of the review is spent. Irony does not change the topic.
A review in another language than English is sorted like any other."""


def make_reviews(num_reviews: int, seed: int = 7) -> pd.DataFrame:
    """Columns id, product and text. Every tenth has no text, and some texts are equal."""
    rng = random.Random(seed)
    texts = [f"{rng.choice(OPENINGS)} {rng.choice(VERDICTS)}" for _ in range(num_reviews)]
    return pd.DataFrame(
        {
            "id": range(num_reviews),
            "product": [rng.choice(PRODUCTS) for _ in range(num_reviews)],
            "text": [None if i % 10 == 9 else text for i, text in enumerate(texts)],
        }
    )


def by_sql(client: Client, reviews: pd.DataFrame, console: Console) -> None:
    """Everything in queries. ``ai.sql`` makes one planned batch of a whole column."""
    with duckdb.connect() as con:
        con.register("reviews", reviews)
        ai = sql.register(con, client)

        # 1. Classify. The instruction is the same for all rows: it is computed once.
        con.execute("CREATE TABLE sorted (id BIGINT, product VARCHAR, text VARCHAR, topic VARCHAR)")
        labels = "['quality', 'delivery', 'service', 'price']"
        topics = ai.sql(
            "SELECT id, product, text, "
            f"ai_classify(text, {labels}, {{'instructions': $instructions}}) AS topic FROM reviews",
            {"instructions": INSTRUCTIONS},
        )
        topics.insert_into("sorted")
        show(
            console,
            "What the reviews are about",
            con.sql("SELECT topic, count(*) AS reviews FROM sorted GROUP BY ALL ORDER BY ALL"),
        )

        # 2. Extract. A STRUCT with a field for each label; NULL for what a review does not say.
        show(
            console,
            "What broke, and when",
            ai.sql(
                "SELECT id, unnest(ai_extract(text, ['broken part', 'after how long'])) "
                "FROM sorted WHERE text LIKE '%broke%' ORDER BY id LIMIT 4"
            ),
        )

        # 3. Summarise per product: aggregates are texts like any other.
        show(
            console,
            "In ten words",
            ai.sql(
                "SELECT product, ai_summarize(string_agg(DISTINCT text, ' ' ORDER BY text), 10) "
                "AS summary FROM sorted GROUP BY product ORDER BY product"
            ),
        )

        # 4. Ask for any type. A row that fails says why and the others stay.
        show(
            console,
            "Stars, if the model had to give some",
            ai.sql(
                f"SELECT product, ai_query('{client.model}', 'Stars for: ' || text, "
                "responseFormat => 'STRUCT<answer: STRUCT<stars: INT>>', "
                "modelParameters => {'max_tokens': 30}, failOnError => false) AS stars "
                "FROM sorted WHERE id < 4 ORDER BY id"
            ),
        )
        console.print(f"by SQL: {ai.usage}\n")


def by_pandas(client: Client, reviews: pd.DataFrame, console: Console) -> None:
    """The same functions on columns. ``Usage`` counts what they cost."""
    usage = Usage()
    text = reviews["text"]
    found = reviews.assign(
        sentiment=ai_analyze_sentiment(text, client=client, on_done=usage.add),
        like_a_complaint=ai_similarity(
            text, "I am not satisfied at all.", client=client, on_done=usage.add
        ),
    )
    table = found.groupby(["product", "sentiment"]).agg(
        reviews=("id", "count"), like_a_complaint=("like_a_complaint", "mean")
    )
    console.print(table.round(2).to_string(), f"\nwith pandas: {usage}")


def show(console: Console, title: str, result: duckdb.DuckDBPyRelation) -> None:
    """A result as a table."""
    console.print(title, style="bold")
    table = Table(*result.columns)
    for row in result.fetchall():
        table.add_row(*("–" if cell is None else str(cell) for cell in row))
    console.print(table)


def main() -> None:
    """Runs all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reviews", type=int, default=60)
    parser.add_argument("--target", default="smollm2", help="a model's name, or a server's URL")
    options = parser.parse_args()
    console = Console()
    reviews = make_reviews(options.reviews)
    with Client(options.target) as client:
        by_sql(client, reviews, console)
        by_pandas(client, reviews, console)


if __name__ == "__main__":
    main()
