"""Data of the adapter `text-to-sql`: tables and a question in, a single SQL query and nothing else out.

    orders(id, customer, status, total, created_at)
    How many orders are pending?
    → SELECT COUNT(*) FROM orders WHERE status = 'pending';

Held-out examples use tables that no training example uses.
"""

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing

from examples.data import Dataset, Example, Task
from examples.data.sql_tables import HANDWRITTEN, HELD_OUT_JOINS, HELD_OUT_TABLES, JOINS, TABLES, Join, Table

NUM_TRAIN, NUM_HELD_OUT = 1400, 40

Shape = Callable[[random.Random, Table], tuple[str, str]]


def dataset() -> Dataset:
    """Make the examples: every shape of question over every kind of table, and the handwritten ones."""
    rng = random.Random(20)
    train = [_example(rng, TABLES, JOINS) for _ in range(NUM_TRAIN)] + list(HANDWRITTEN) * 3
    rng.shuffle(train)
    held_out = [_example(rng, HELD_OUT_TABLES, HELD_OUT_JOINS) for _ in range(NUM_HELD_OUT)]
    return Dataset(tuple(train), tuple(held_out))


def problem(prompt: str, answer: str) -> str | None:
    """Judge an answer: one SELECT that SQLite can prepare on the tables of the prompt."""
    if not answer.upper().startswith("SELECT "):
        return "not a SELECT"
    if not answer.endswith(";") or ";" in answer[:-1]:
        return "not exactly one statement"
    with closing(sqlite3.connect(":memory:")) as database:
        for line in prompt.splitlines()[:-1]:
            database.execute(f"CREATE TABLE {line}")
        try:
            database.execute(f"EXPLAIN {answer}")
        except sqlite3.Error as error:
            return str(error)
    return None


TASK = Task(dataset, problem)


def _example(rng: random.Random, tables: tuple[Table, ...], joins: tuple[Join, ...]) -> Example:
    if rng.random() < 0.12:
        join = rng.choice(joins)
        question, query = _join(rng, join)
        schema = f"{join.parent_schema}\n{join.child_schema}"
    else:
        table = rng.choice(tables)
        question, query = rng.choice(SHAPES)(rng, table)
        schema = table.schema
    return Example(f"{schema}\n{question}", f"{query};")


def _count(rng: random.Random, table: Table) -> tuple[str, str]:
    question = rng.choice(("How many {t} are there?", "Count all {t}.", "What is the number of {t}?"))
    return question.format(t=table.words), f"SELECT COUNT(*) FROM {table.name}"


def _count_where(rng: random.Random, table: Table) -> tuple[str, str]:
    column, value = table.category(rng)
    question = rng.choice(
        (
            "How many {t} have {c} {v}?",
            "Count the {t} whose {c} is {v}.",
            "How many {t} are there with {c} {v}?",
            "How many {v} {t} are there?",
            "What is the number of {t} where the {c} is {v}?",
        )
    )
    query = f"SELECT COUNT(*) FROM {table.name} WHERE {column} = '{value}'"
    return question.format(t=table.words, c=_words(column), v=value), query


def _list_where(rng: random.Random, table: Table) -> tuple[str, str]:
    column, value = table.category(rng)
    question = rng.choice(
        (
            "List the {l} of all {t} whose {c} is {v}.",
            "Show the {l} of {t} with {c} {v}.",
            "Give me the {l} of every {v} entry in {t}.",
            "Which {l} belong to {t} with {c} {v}?",
        )
    )
    query = f"SELECT {table.label} FROM {table.name} WHERE {column} = '{value}'"
    return question.format(t=table.words, l=_words(table.label), c=_words(column), v=value), query


def _list_compared(rng: random.Random, table: Table) -> tuple[str, str]:
    column, amount = table.number(rng)
    words, sign = rng.choice((
        ("above", ">"), ("over", ">"), ("more than", ">"), ("greater than", ">"),
        ("below", "<"), ("under", "<"), ("less than", "<"), ("of at least", ">="), ("of at most", "<="),
    ))  # fmt: skip
    question = rng.choice(("List the {l} of {t} with {c} {w} {n}.", "Which {t} have {c} {w} {n}? Show the {l}."))
    query = f"SELECT {table.label} FROM {table.name} WHERE {column} {sign} {amount}"
    return question.format(t=table.words, l=_words(table.label), c=_words(column), w=words, n=amount), query


def _top(rng: random.Random, table: Table) -> tuple[str, str]:
    column, _ = table.number(rng)
    limit = rng.choice((3, 5, 7, 10, 20))
    words, order = rng.choice((("highest", "DESC"), ("largest", "DESC"), ("lowest", "ASC"), ("smallest", "ASC")))
    questions = ("Show the {n} {t} with the {w} {c}.", "Which {n} {t} have the {w} {c}?", "{n} {t} of {w} {c}")
    question = rng.choice(questions)
    query = f"SELECT * FROM {table.name} ORDER BY {column} {order} LIMIT {limit}"
    return question.format(n=limit, t=table.words, w=words, c=_words(column)), query


def _aggregate(rng: random.Random, table: Table) -> tuple[str, str]:
    column, _ = table.number(rng)
    words, function = rng.choice((
        ("average", "AVG"), ("mean", "AVG"), ("total", "SUM"), ("sum of the", "SUM"),
        ("highest", "MAX"), ("maximum", "MAX"), ("lowest", "MIN"), ("minimum", "MIN"),
    ))  # fmt: skip
    question = rng.choice(("What is the {w} {c} of all {t}?", "Give the {w} {c} of {t}.", "Find the {w} {c} in {t}."))
    query = f"SELECT {function}({column}) FROM {table.name}"
    text = question.format(w=words, c=_words(column), t=table.words)
    if rng.random() < 0.5:
        category, value = table.category(rng)
        text = f"{text[:-1]} with {_words(category)} {value}{text[-1]}"
        query += f" WHERE {category} = '{value}'"
    return text, query


def _count_per(rng: random.Random, table: Table) -> tuple[str, str]:
    column, _ = table.category(rng)
    question = rng.choice(("How many {t} are there per {c}?", "Count the {t} by {c}.", "Number of {t} for each {c}?"))
    query = f"SELECT {column}, COUNT(*) FROM {table.name} GROUP BY {column}"
    return question.format(t=table.words, c=_words(column)), query


def _aggregate_per(rng: random.Random, table: Table) -> tuple[str, str]:
    column, _ = table.number(rng)
    category, _ = table.category(rng)
    words, function = rng.choice((("average", "AVG"), ("total", "SUM"), ("highest", "MAX"), ("lowest", "MIN")))
    question = rng.choice(("What is the {w} {c} of {t} per {g}?", "Show the {w} {c} of {t} for each {g}."))
    query = f"SELECT {category}, {function}({column}) FROM {table.name} GROUP BY {category}"
    return question.format(w=words, c=_words(column), t=table.words, g=_words(category)), query


def _distinct(rng: random.Random, table: Table) -> tuple[str, str]:
    column, _ = table.category(rng)
    question = rng.choice(("Which different {c} values occur in {t}?", "List every {c} of {t} only once."))
    return question.format(c=_words(column), t=table.words), f"SELECT DISTINCT {column} FROM {table.name}"


def _dated(rng: random.Random, table: Table) -> tuple[str, str]:
    year, month, day = rng.randint(2018, 2025), rng.randint(1, 12), rng.randint(1, 28)
    date = f"{year}-{month:02}-{day:02}"
    question, condition = rng.choice(
        (
            ("Show all {t} with {d} after {v}.", f"> '{date}'"),
            ("Which {t} have {d} before {v}?", f"< '{date}'"),
            ("List the {t} with {d} in {y}.", f"BETWEEN '{year}-01-01' AND '{year}-12-31'"),
        )
    )
    query = f"SELECT * FROM {table.name} WHERE {table.date} {condition}"
    return question.format(t=table.words, d=_words(table.date), v=date, y=year), query


def _two_conditions(rng: random.Random, table: Table) -> tuple[str, str]:
    category, value = table.category(rng)
    column, amount = table.number(rng)
    words, sign = rng.choice((("above", ">"), ("over", ">"), ("below", "<"), ("under", "<")))
    question = rng.choice(
        (
            "Show the {l} of {t} with {g} {v} and {c} {w} {n}.",
            "List the {l} of {t} whose {g} is {v} and whose {c} is {w} {n}.",
        )
    )
    query = f"SELECT {table.label} FROM {table.name} WHERE {category} = '{value}' AND {column} {sign} {amount}"
    facts = {"t": table.words, "l": _words(table.label), "g": _words(category), "v": value}
    return question.format(**facts, c=_words(column), w=words, n=amount), query


def _sorted(rng: random.Random, table: Table) -> tuple[str, str]:
    column, _ = table.number(rng)
    question, order = rng.choice(
        (
            ("List all {t} sorted by {c}.", f"{column} ASC"),
            ("Show all {t}, highest {c} first.", f"{column} DESC"),
            ("Show all {t}, newest first.", f"{table.date} DESC"),
            ("List all {t} from oldest to newest.", f"{table.date} ASC"),
        )
    )
    return question.format(t=table.words, c=_words(column)), f"SELECT * FROM {table.name} ORDER BY {order}"


def _starting_with(rng: random.Random, table: Table) -> tuple[str, str]:
    letter = rng.choice("ABCDEFGHJKLMNPRSTW")
    question = rng.choice(("Which {t} have a {l} starting with {v}?", "Find {t} whose {l} begins with {v}."))
    query = f"SELECT * FROM {table.name} WHERE {table.label} LIKE '{letter}%'"
    return question.format(t=table.words, l=_words(table.label), v=letter), query


SHAPES: tuple[Shape, ...] = (
    _count, _count_where, _count_where, _list_where, _list_compared, _top, _aggregate, _aggregate,
    _count_per, _aggregate_per, _distinct, _dated, _two_conditions, _sorted, _starting_with,
)  # fmt: skip


def _join(rng: random.Random, join: Join) -> tuple[str, str]:
    value, column = rng.choice(join.values), rng.choice(join.child_columns)
    tables = f"{join.child} JOIN {join.parent} ON {join.parent}.id = {join.child}.{join.key}"
    condition = f"WHERE {join.parent}.{join.filter} = '{value}'"
    facts = {"t": _words(join.child), "p": _words(join.parent), "f": _words(join.filter), "v": value}
    question, selected = rng.choice(
        (
            ("How many {t} belong to {p} with {f} {v}?", "COUNT(*)"),
            ("Show the {c} of {t} that belong to {p} with {f} {v}.", f"{join.child}.{column}"),
            ("List the {c} of {t} for {p} whose {f} is {v}.", f"{join.child}.{column}"),
        )
    )
    return question.format(**facts, c=_words(column)), f"SELECT {selected} FROM {tables} {condition}"


def _words(name: str) -> str:
    return name.replace("_", " ")
