"""`slipstream models`: what is in the local cache."""

from __future__ import annotations

from typing import Annotated

import typer

from slipstream.backends.files import embedded_model, list_models
from slipstream.cli.common import Json, app, out, write_json


@app.command()
def models(
    fetch: Annotated[bool, typer.Option("--fetch", help="fetch and convert the embedded default model")] = False,
    json_file: Json = None,
) -> None:
    """List the models in the local cache; --fetch gets the embedded default."""
    if fetch:
        embedded_model()
    found = list_models()
    for item in found:
        out.print(f"{item['name']:24} {item['architecture']:28} {item['gigabytes']:.2f} GB  {item['folder']}")
    if not found:
        out.print("no models in the cache; 'slipstream models --fetch' gets the default one")
    write_json(json_file, {"models": found})
