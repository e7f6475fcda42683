"""Recipes: a table of settings becomes a method, or says what it could have been."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from factorpack.errors import PlanError
from factorpack.methods import METHODS, QSPCA, Keep, Method, Scalar, from_fields


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"method": "qspca", "rank": 64, "latent_bits": 3}, QSPCA(64, 3)),
        (
            {"method": "qspca", "rank": 8, "latent_bits": 2, "sparsity": 0, "center": False, "tile": 16},
            QSPCA(8, 2, 0.0, tile=16, center=False),
        ),
        ({"method": "scalar"}, Scalar()),
        ({"method": "scalar", "bits": 3, "clip": "minmax"}, Scalar(3, "minmax")),
        ({"method": "keep", "dtype": "float16"}, Keep("float16")),
    ],
)
def test_tables_become_methods(fields: dict[str, Any], expected: Method) -> None:
    before = dict(fields)
    assert from_fields(METHODS, fields) == expected
    assert fields == before


@pytest.mark.parametrize("name", ["QSPCA", "", "os.system", None, 3, ["qspca"]])
def test_an_unknown_method_lists_the_known_ones(name: object) -> None:
    known = ", ".join(METHODS)
    assert known.startswith("qspca, scalar, second_order, lsq")
    with pytest.raises(PlanError, match=f"unknown method .*, known are {known}$"):
        from_fields(METHODS, {"method": name})


def test_the_old_name_of_a_method_says_the_new_one() -> None:
    with pytest.raises(PlanError, match=r"unknown method 'nncodec', .*; nncodec is called rdoq now"):
        from_fields(METHODS, {"method": "nncodec"})


def test_no_method_at_all() -> None:
    with pytest.raises(PlanError, match="unknown method None"):
        from_fields(METHODS, {"rank": 3})


@pytest.mark.parametrize("name", METHODS)
def test_an_unknown_setting_lists_the_known_ones(name: str) -> None:
    known = ", ".join(field.name for field in dataclasses.fields(METHODS[name]))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=f"unknown setting 'rnak' for method '{name}', known are {known}"):
        from_fields(METHODS, {"method": name, "rnak": 3})


@pytest.mark.parametrize("setting", ["name", "encode", "__class__"])
def test_what_is_no_field_cannot_be_set(setting: str) -> None:
    with pytest.raises(PlanError, match=f"unknown setting '{setting}'"):
        from_fields(METHODS, {"method": "scalar", setting: "x"})


def test_a_setting_that_is_needed() -> None:
    with pytest.raises(PlanError, match="method 'qspca' needs the setting 'latent_bits'"):
        from_fields(METHODS, {"method": "qspca", "rank": 3})


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "qspca", "rank": True, "latent_bits": 3},
        {"method": "qspca", "rank": 3, "latent_bits": True},
        {"method": "qspca", "rank": 3, "latent_bits": 3, "sparsity": True},
        {"method": "scalar", "bits": True},
    ],
)
def test_true_is_no_number(fields: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="is True, a bool; expected"):
        from_fields(METHODS, fields)


@pytest.mark.parametrize(("name", "cls"), METHODS.items())
def test_methods_are_frozen_and_know_their_name(name: str, cls: type[Method]) -> None:
    assert cls.name == name
    needed: dict[str, dict[str, Any]] = {
        "qspca": {"rank": 4, "latent_bits": 4},
        "second_order": {"bits": 4},
        "rdoq": {"step": 0.5},
        "svd": {"rank": 4},
        "spatial_svd": {"rank": 4},
    }
    fields = needed.get(name, {})
    method = cls(**fields)
    first = dataclasses.fields(method)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(method, first, 5)
    assert hash(method) == hash(cls(**fields))
