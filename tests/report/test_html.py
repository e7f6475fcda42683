"""The page as text: nothing a file says becomes markup or code, and nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import factorpack as fp
from factorpack.report.facts import Facts, TensorFacts, gather
from factorpack.report.html import as_data, page, write_page

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "\"'><img src=x onerror=alert(1)>",
    "&lt;b&gt;&amp;",
    "\u2028\u2029\u202eevil\u0000\x1b[31m",
    "${alert(1)} $title {{x}} \\u003c",
    "__proto__",
    "constructor.prototype",
    "\ud800",
    "]]>",
    "ä" * 300,
)


def facts_of(names: tuple[str, ...], file: str = "net.safetensors") -> Facts:
    tensors = tuple(
        TensorFacts(name, name, "scalar", (2, 3), f"4 bits {name}", name, 24, 9, {"latent": 9}, 12.0, 0.5)
        for name in names
    )
    return Facts(file, 9 * len(names), 24 * len(names), 24 * len(names), 6 * len(names), tensors, 0)


class Elements(HTMLParser):
    """Tags with their attributes, and the text of scripts and styles, as a browser would read them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.tags[-1][0] if self.tags else "", data))

    def data(self) -> Any:
        start = next(
            place for place, (_, attributes) in enumerate(self.tags) if attributes.get("id") == "facts"
        )
        scripts = [text for tag, text in self.texts if tag == "script"]
        assert sum(tag == "script" for tag, _ in self.tags[:start]) == 0
        return json.loads(scripts[0])


@pytest.fixture(scope="module")
def plain_tags() -> list[tuple[str, dict[str, str | None]]]:
    return Elements(page(facts_of(("a", "b")))).tags


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_name_adds_no_element_and_no_attribute(
    name: str, plain_tags: list[tuple[str, dict[str, str | None]]]
) -> None:
    found = Elements(page(facts_of((name, "b"), file="net.safetensors")))
    assert found.tags == plain_tags
    assert [tensor["name"] for tensor in found.data()["tensors"]] == [name, "b"]


@pytest.mark.parametrize("name", HOSTILE[:6])
def test_neither_does_the_files_own_name(
    name: str, plain_tags: list[tuple[str, dict[str, str | None]]]
) -> None:
    found = Elements(page(facts_of(("a", "b"), file=name.replace(".", ""))))
    tags = [tag for tag, _ in found.tags if tag != "wbr"]
    assert tags == [tag for tag, _ in plain_tags if tag != "wbr"]
    assert name in "".join(text for tag, text in found.texts if tag in ("strong", "title"))


@given(
    st.recursive(
        st.none() | st.text() | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_data_is_json_in_letters_that_are_no_markup(value: Any) -> None:
    text = as_data(value)
    assert json.loads(text) == value
    assert not set("<>&") & set(text)
    assert text.isascii()


def test_numbers_are_short_and_finite() -> None:
    assert as_data([1 / 3, 2, math.inf, math.nan, 1e-9]) == "[0.333333,2,null,null,1e-09]"


def test_the_policy_allows_this_script_and_this_style_alone() -> None:
    text = page(facts_of(("a",)))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none';")
    assert "unsafe" not in policy[1]
    assert "http" not in policy[1]
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (inner,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy[1]


def test_nothing_is_fetched_and_nothing_is_run_from_text() -> None:
    found = Elements(page(facts_of(("a",))))
    for tag, attributes in found.tags:
        assert not any(name.startswith("on") or name == "style" for name in attributes), tag
        assert tag not in ("img", "iframe", "object", "embed", "form", "base")
        for link in (attributes.get("src"), attributes.get("href")):
            assert link is None or link.startswith(("#", "data:,"))
    for script in (files("factorpack.report") / "template").iterdir():
        text = script.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "fetch(",
                     "XMLHttpRequest", "import(", "https:", "@import", "url(http"):  # fmt: skip
            assert word not in text, (script.name, word)


def test_names_in_a_file_that_would_steer_the_reader_are_shown_as_escapes(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    fp.save(fp.compress({"a\u202e\x1b.weight": torch.ones(2, 2)}, fp.Keep()), path)
    (tensor,) = gather(fp.load(path)).tensors
    assert tensor.name == r"a\u202e\x1b.weight"


def test_the_opening_says_size_and_ratio() -> None:
    facts = replace(facts_of(("a", "b")), file_bytes=2_000_000, original_bytes=25_000_000, numbers=6_250_000)
    text = page(facts)
    assert "holds 6.25 million weights in 2&nbsp;MB: 12.5 times smaller than in FP32." in text
    assert text.count('class="number"') == 4
    assert "<dd>2.56</dd>" in text  # bits per weight


def test_a_file_without_tensors(tmp_path: Path) -> None:
    path = tmp_path / "none.safetensors"
    fp.save(fp.compress({}, fp.Keep()), path)
    assert (
        write_page(gather(fp.load(path)), tmp_path / "none.html") == (tmp_path / "none.html").stat().st_size
    )


def test_a_page_of_many_tensors_sums_up_the_small_ones() -> None:
    """Whatever their number, the page has so many rows, and they add up to the file."""
    pages = {}
    for count in (500, 501, 4000):
        facts = facts_of(tuple(f"layer{number}" for number in range(count)))
        tensors = tuple(
            replace(each, bytes=9 + place % 7, stored_bytes={"latent": 9 + place % 7})
            for place, each in enumerate(facts.tensors)
        )
        problem = replace(tensors[0], problem="kept raw, yet differs")
        facts = replace(
            facts, tensors=(problem, *tensors[1:]), file_bytes=sum(each.bytes for each in tensors)
        )
        pages[count] = page(facts)
        data = Elements(pages[count]).data()
        assert sum(row["bytes"] for row in data["tensors"]) == facts.file_bytes
        assert sum(row["count"] for row in data["tensors"]) == data["count"] == count
        assert sum(row["original_bytes"] for row in data["tensors"]) == 24 * count
        assert data["summed"] == max(count - 500, 0)
        assert len(data["tensors"]) == min(count, 501)
        assert data["tensors"][0]["problem"]
    assert data["tensors"][-1]["name"] == "3,500 smaller tensors (one code per weight)"
    assert len(pages[4000]) < 1.05 * len(pages[501])
    assert "All tensors" in pages[500]
    assert "The 500 largest tensors" in pages[4000]
