"""`loraplex key`: add, list, rm."""

from __future__ import annotations

from typing import Annotated

import typer

from loraplex.cli import output
from loraplex.cli.app import new_group
from loraplex.cli.options import REGISTRY, Json, Registry
from loraplex.client import Client
from loraplex.errors import NotFound

app = new_group("Make and revoke the API keys of the routers' clients.")


@app.command()
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What people call it.", show_default=False)],
    registry: Registry = REGISTRY,
    as_json: Json = False,
) -> None:
    """Make a key and print it: now, and never again.

    Once a key exists, the routers ask every client for one.
    """
    with Client(registry=registry) as client:
        made = client.add_key(name)
    if as_json:
        output.print_json(made)
        return
    print(made.key, flush=True)
    output.note(f"this is the key {name}, id {made.api_key.key_id}; keep it, for it is not shown again")
    output.note("clients send it as `Authorization: Bearer …`; loraplex reads $LORAPLEX_API_KEY")


@app.command("list")
def list_(registry: Registry = REGISTRY, as_json: Json = False) -> None:
    """List the keys; the keys themselves are known to their owners only."""
    with Client(registry=registry) as client:
        keys = list(client.list_keys())
    if as_json:
        output.print_json({"api_keys": keys})
        return
    output.print_table(
        ["id", "name", "tenant", "made"],
        [(key.key_id, key.name, key.tenant, output.when(key.create_time)) for key in keys],
        empty="there is no key, and routers on 127.0.0.1 ask for none; make one with: loraplex key add NAME",
    )


@app.command()
def rm(
    key: Annotated[str, typer.Argument(metavar="ID|NAME", help="The key's id or name.", show_default=False)],
    registry: Registry = REGISTRY,
    as_json: Json = False,
) -> None:
    """Revoke a key. Routers refuse it at once; requests in flight finish."""
    with Client(registry=registry) as client:
        keys = list(client.list_keys())
        found = next((entry for entry in keys if entry.key_id == key), None) or next(
            (entry for entry in keys if entry.name == key), None
        )
        if found is None:
            raise NotFound("no key has this id or name; `loraplex key list` tells which exist", field="key")
        revision = client.remove_key(found.key_id)
    if as_json:
        output.print_json({"api_key": found, "revision": revision})
        return
    output.stdout().print(f"[bold]{found.name}[/] ({found.key_id}) is revoked")
    if len(keys) == 1:
        output.note("no key is left: routers on 127.0.0.1 now ask for none, others let nobody in")
