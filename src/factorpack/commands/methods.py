"""`factorpack methods`."""

from __future__ import annotations

import dataclasses
from inspect import getdoc
from typing import Any

from factorpack.commands.console import print_json, print_line
from factorpack.commands.method_options import Setting, known_settings
from factorpack.commands.options import Json
from factorpack.methods import METHODS


def methods(as_json: Json = False) -> None:
    """List the methods of compression with their settings and defaults.

    Every setting can be given to `compress` and `plan` with --set.

    Example:

        factorpack compress model.pt -o small.safetensors --method rdoq --set qp=-20
    """
    if as_json:
        print_json({"methods": [_as_json(name) for name in METHODS]})
        return
    for name in METHODS:
        print_line(name, style="bold")
        print_line(f"  {_summary(name)}")
        print_line(f"  {', '.join(map(str, known_settings(name).values()))}", style="dim")


def _summary(name: str) -> str:
    return (getdoc(METHODS[name]) or "").partition("\n")[0]


def _as_json(name: str) -> dict[str, Any]:
    settings = {setting.key: _setting_json(setting) for setting in known_settings(name).values()}
    return {"name": name, "about": _summary(name), "settings": settings}


def _setting_json(setting: Setting) -> dict[str, Any]:
    required = setting.default is dataclasses.MISSING
    default = None if required else setting.default
    return {"expected": setting.expected, "required": required, "default": default}
