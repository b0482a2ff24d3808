"""Tables that the questions of `text_to_sql` are about, and the questions written by hand."""

import random
from dataclasses import dataclass

from examples.data import Example


@dataclass(frozen=True, slots=True)
class Table:
    """A table: a column that names a row, columns of few values, numeric columns, and a date."""

    name: str
    label: str
    categories: dict[str, tuple[str, ...]]
    numbers: dict[str, int]  # the column and about how large its values are
    date: str

    @property
    def words(self) -> str:
        """The table's name as a question says it."""
        return self.name.replace("_", " ")

    @property
    def schema(self) -> str:
        """The table as a prompt shows it."""
        return f"{self.name}({', '.join(('id', self.label, *self.categories, *self.numbers, self.date))})"

    def category(self, rng: random.Random) -> tuple[str, str]:
        """Choose a column of few values, and one of them."""
        column = rng.choice(list(self.categories))
        return column, rng.choice(self.categories[column])

    def number(self, rng: random.Random) -> tuple[str, int]:
        """Choose a numeric column, and a value to compare it with."""
        column = rng.choice(list(self.numbers))
        size = self.numbers[column]
        step = max(1, size // 20)
        return column, step * rng.randint(2, 20)


@dataclass(frozen=True, slots=True)
class Join:
    """Two tables, each row of the child pointing to one of the parent by `key`."""

    parent: str
    parent_columns: tuple[str, ...]
    filter: str
    values: tuple[str, ...]
    child: str
    key: str
    child_columns: tuple[str, ...]

    @property
    def parent_schema(self) -> str:
        """The parent as a prompt shows it."""
        return f"{self.parent}({', '.join(('id', *self.parent_columns))})"

    @property
    def child_schema(self) -> str:
        """The child as a prompt shows it."""
        return f"{self.child}({', '.join(('id', self.key, *self.child_columns))})"


TABLES = (
    Table(
        "orders", "customer", {"status": ("pending", "shipped", "returned")}, {"total": 400, "items": 20}, "created_at"
    ),
    Table("employees", "name", {"department": ("sales", "finance", "legal")}, {"salary": 90000, "age": 60}, "hired_on"),
    Table("books", "title", {"genre": ("crime", "poetry", "history")}, {"pages": 600, "price": 40}, "published_on"),
    Table("movies", "title", {"genre": ("drama", "comedy", "horror")}, {"rating": 10, "minutes": 200}, "released_on"),
    Table("flights", "number", {"airline": ("Condor", "Finnair"), "gate": ("A1", "B4")}, {"seats": 300}, "departs_on"),
    Table("invoices", "client", {"state": ("paid", "open", "overdue")}, {"amount": 5000, "discount": 20}, "issued_on"),
    Table("students", "name", {"major": ("physics", "law", "art")}, {"grade": 100, "credits": 180}, "enrolled_on"),
    Table("houses", "street", {"city": ("Bergen", "Porto", "Graz")}, {"price": 800000, "rooms": 12}, "built_on"),
    Table("tickets", "subject", {"priority": ("low", "high", "urgent")}, {"replies": 30}, "opened_at"),
    Table("songs", "title", {"artist": ("Nina", "Bowie"), "genre": ("jazz", "rock")}, {"plays": 9000}, "released_on"),
    Table("cars", "model", {"brand": ("Volvo", "Fiat"), "color": ("red", "blue")}, {"mileage": 90000}, "registered_on"),
    Table("patients", "name", {"ward": ("north", "surgery")}, {"age": 90, "visits": 20}, "admitted_on"),
    Table("meals", "dish", {"cuisine": ("thai", "greek", "french")}, {"calories": 900, "price": 30}, "added_on"),
    Table("gym_members", "name", {"plan": ("basic", "premium")}, {"visits": 40, "age": 70}, "joined_on"),
    Table(
        "shipments", "destination", {"carrier": ("DHL", "UPS"), "status": ("lost", "sent")}, {"weight": 80}, "sent_at"
    ),
    Table("plants", "species", {"kind": ("tree", "fern", "herb")}, {"height": 200, "price": 60}, "planted_on"),
    Table("payments", "payer", {"method": ("card", "cash", "transfer")}, {"amount": 900}, "paid_at"),
    Table("courses", "title", {"level": ("beginner", "advanced")}, {"hours": 60, "fee": 500}, "starts_on"),
    Table("servers", "hostname", {"region": ("eu-west", "us-east")}, {"memory": 256, "cores": 64}, "installed_on"),
    Table("bakery_sales", "product", {"shop": ("central", "harbor")}, {"quantity": 60, "revenue": 700}, "sold_on"),
    Table("mountains", "name", {"country": ("Peru", "Nepal", "Chile")}, {"height": 8000}, "first_climbed"),
    Table(
        "players", "name", {"team": ("Falcons", "Bears"), "position": ("goalie", "center")}, {"goals": 40}, "born_on"
    ),
    Table("rentals", "tenant", {"type": ("flat", "studio")}, {"rent": 2000, "area": 120}, "signed_on"),
    Table("reviews", "author", {"language": ("english", "german")}, {"stars": 5, "likes": 100}, "written_at"),
    Table("museum_items", "name", {"era": ("roman", "bronze", "modern")}, {"value": 70000}, "found_on"),
    Table("accounts", "owner", {"type": ("savings", "checking")}, {"balance": 20000}, "opened_on"),
    Table("trains", "line", {"operator": ("SBB", "Amtrak")}, {"delay": 60, "cars": 14}, "left_at"),
    Table("subscriptions", "email", {"tier": ("free", "pro", "team")}, {"price": 100, "seats": 50}, "renews_on"),
)

HELD_OUT_TABLES = (
    Table(
        "hotels", "name", {"country": ("Spain", "Kenya"), "category": ("resort", "hostel")}, {"rooms": 300}, "opened_on"
    ),
    Table("donations", "donor", {"campaign": ("spring", "winter")}, {"amount": 1000}, "given_on"),
    Table("laptops", "model", {"maker": ("Lenovo", "Dell")}, {"price": 2000, "weight": 4}, "bought_on"),
    Table("concerts", "band", {"venue": ("arena", "club")}, {"visitors": 5000, "price": 90}, "played_on"),
    Table("farm_animals", "name", {"species": ("goat", "sheep")}, {"weight": 300, "age": 15}, "born_on"),
    Table("parcels", "recipient", {"status": ("delivered", "lost")}, {"weight": 40, "fee": 30}, "posted_on"),
)

JOINS = (
    Join("customers", ("name", "city"), "city", ("Paris", "Oslo"), "orders", "customer_id", ("total", "status")),
    Join("authors", ("name", "country"), "country", ("Ireland", "Japan"), "books", "author_id", ("title", "pages")),
    Join("teachers", ("name", "subject"), "subject", ("math", "music"), "classes", "teacher_id", ("room", "size")),
    Join("teams", ("name", "league"), "league", ("north", "junior"), "players", "team_id", ("name", "goals")),
    Join("doctors", ("name", "ward"), "ward", ("surgery", "eye"), "visits", "doctor_id", ("patient", "cost")),
    Join("artists", ("name", "genre"), "genre", ("soul", "folk"), "albums", "artist_id", ("title", "year")),
    Join("suppliers", ("name", "region"), "region", ("south", "asia"), "parts", "supplier_id", ("code", "price")),
)

HELD_OUT_JOINS = (
    Join("owners", ("name", "city"), "city", ("Lyon", "Quito"), "dogs", "owner_id", ("name", "age")),
    Join("stores", ("name", "state"), "state", ("Ohio", "Texas"), "sales", "store_id", ("amount", "item")),
)

_SHOP = "orders(id, customer, status, total, created_at)"
_STAFF = "employees(id, name, department, salary, hired_on)"
_FILMS = "movies(id, title, genre, rating, minutes)"

HANDWRITTEN = (
    Example(f"{_SHOP}\nWho are our three biggest spenders?",
            "SELECT customer, SUM(total) FROM orders GROUP BY customer ORDER BY SUM(total) DESC LIMIT 3;"),
    Example(f"{_SHOP}\nHow much money did we make from shipped orders?",
            "SELECT SUM(total) FROM orders WHERE status = 'shipped';"),
    Example(f"{_SHOP}\nIs there any order above 1000?", "SELECT COUNT(*) FROM orders WHERE total > 1000;"),
    Example(f"{_SHOP}\nWhich customers have placed more than 5 orders?",
            "SELECT customer FROM orders GROUP BY customer HAVING COUNT(*) > 5;"),
    Example(f"{_SHOP}\nWhen was the most recent order placed?", "SELECT MAX(created_at) FROM orders;"),
    Example(f"{_SHOP}\nEverything that was not returned, please.", "SELECT * FROM orders WHERE status != 'returned';"),
    Example(f"{_STAFF}\nWho earns the most?", "SELECT name FROM employees ORDER BY salary DESC LIMIT 1;"),
    Example(f"{_STAFF}\nHow many people work in each department?",
            "SELECT department, COUNT(*) FROM employees GROUP BY department;"),
    Example(f"{_STAFF}\nWho works in sales or marketing?",
            "SELECT name FROM employees WHERE department IN ('sales', 'marketing');"),
    Example(f"{_STAFF}\nWhich departments pay more than 50000 on average?",
            "SELECT department FROM employees GROUP BY department HAVING AVG(salary) > 50000;"),
    Example(f"{_STAFF}\nWho has been with us the longest?",
            "SELECT name FROM employees ORDER BY hired_on ASC LIMIT 1;"),
    Example(f"{_STAFF}\nWho earns between 30000 and 40000?",
            "SELECT name FROM employees WHERE salary BETWEEN 30000 AND 40000;"),
    Example(f"{_FILMS}\nWhat is the best rated comedy?",
            "SELECT title FROM movies WHERE genre = 'comedy' ORDER BY rating DESC LIMIT 1;"),
    Example(f"{_FILMS}\nWhich movies run longer than two hours?", "SELECT title FROM movies WHERE minutes > 120;"),
    Example(f"{_FILMS}\nDo we have a movie called Jaws?", "SELECT COUNT(*) FROM movies WHERE title = 'Jaws';"),
    Example(f"{_FILMS}\nWhich titles contain the word love?", "SELECT title FROM movies WHERE title LIKE '%love%';"),
    Example(f"{_FILMS}\nHow good are horror movies on average?",
            "SELECT AVG(rating) FROM movies WHERE genre = 'horror';"),
    Example(f"{_FILMS}\nHow many genres do we have?", "SELECT COUNT(DISTINCT genre) FROM movies;"),
)  # fmt: skip
