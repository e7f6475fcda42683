"""`factorpack recipes`."""

from __future__ import annotations

from typing import Annotated

import typer

from factorpack.commands.console import print_json, print_line, print_text
from factorpack.commands.options import Json
from factorpack.planning.families import FAMILIES, family, family_text


def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Print this one.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """List the recipes that come with factorpack, or print one to start from.

    Example:

        factorpack recipes resnet > my.toml
    """
    if name is not None:
        text = family_text(name)
        print_json({"name": name, "text": text}) if as_json else print_text(text)
    elif as_json:
        print_json({"recipes": [{"name": each, "about": family(each).about} for each in sorted(FAMILIES)]})
    else:
        for each in sorted(FAMILIES):
            print_line(f"{each:13} {family(each).about}")
