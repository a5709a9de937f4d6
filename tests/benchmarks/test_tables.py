"""The benchmarks' generated tables: what they promise about their rows."""

from __future__ import annotations

import pytest
import tables

from anaphora.batch.columns import propose


@pytest.mark.parametrize("make", [tables.reviews, tables.movies, tables.goods, tables.orders])
def test_a_seed_gives_one_table_of_whole_rows(make):
    table = make(120, seed=3)
    assert make(120, seed=3) == table
    assert make(120, seed=4) != table
    assert {len(column) for column in table.values()} == {120}
    assert all(cell for column in table.values() for cell in column)


def test_no_two_reviews_are_equal_and_products_repeat():
    table = tables.reviews(2000)
    assert len(set(table["review"])) == 2000
    assert len(set(table["product"])) < 100
    assert set(table["stars"]) == set("12345")
    num_words = [len(text.split()) for text in table["review"]]
    assert set(num_words) <= set(range(30, 171))


def test_more_rows_begin_with_fewer():
    few, many = tables.reviews(50), tables.reviews(80)
    assert {name: column[:50] for name, column in many.items()} == few


@pytest.mark.parametrize("make", [tables.movies, tables.goods, tables.orders])
def test_joins_have_columns_worth_ordering(make):
    found = propose(make(300))
    assert found.hit_after > 0.3
    assert found.hit_after > found.hit_before
