"""What `--model` names: `module:callable`, and models of timm and torchvision."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from factorpack.errors import SourceError
from factorpack.model_reference import import_model


def test_an_installed_module_comes_before_one_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "this", raising=False)
    (tmp_path / "this.py").write_text("from pathlib import Path\nPath('ran').touch()\ns = None\n")
    with pytest.raises(SourceError, match="returns a str, expected a torch module"):
        import_model("this:s")
    assert not (tmp_path / "ran").exists()


def test_a_module_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net_of_mine.py").write_text("from torch.nn import Identity\n")
    before = list(sys.path)
    assert isinstance(import_model("net_of_mine:Identity"), nn.Identity)
    assert sys.path == before
    with pytest.raises(SourceError, match="there is no 'net_of_nobody:a'"):
        import_model("net_of_nobody:a")
    assert sys.path == before


FAKES = {
    "timm/__init__.py": """
from torch import nn
def create_model(name, pretrained=True):
    if name != "resnet18.a1":
        raise RuntimeError(f"Unknown model ({name})")
    return nn.Linear(1, 2 if pretrained else 1)
def tiny():
    return nn.Identity()
""",
    "torchvision/__init__.py": "",
    "torchvision/models/__init__.py": """
from torch import nn
def get_model(name, weights="DEFAULT"):
    return {"resnet18": nn.Linear(1, 2 if weights else 1)}[name]
def resnet18():
    return nn.Linear(3, 3)
""",
}


@pytest.fixture
def collections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packages with the functions of timm and torchvision, and none of either when the test is over."""
    for name, content in FAKES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    names = ("timm", "torchvision", "torchvision.models")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.mark.usefixtures("collections")
@pytest.mark.parametrize(
    ("reference", "outputs"),
    [
        ("timm:resnet18.a1", 1),
        ("torchvision:resnet18", 1),
        ("torchvision.models:resnet18", 3),
        ("torchvision:models.resnet18", 1),
    ],
)
def test_a_model_by_the_name_its_package_has_for_it(reference: str, outputs: int) -> None:
    if reference == "torchvision:models.resnet18":
        import_model("torchvision.models:resnet18")  # so that the package has the attribute
        outputs = 3
    model = import_model(reference)
    assert isinstance(model, nn.Linear)
    assert model.out_features == outputs


@pytest.mark.usefixtures("collections")
def test_a_callable_comes_before_a_name() -> None:
    assert isinstance(import_model("timm:tiny"), nn.Identity)
    with pytest.raises(SourceError, match=r"'timm:resnet99' fails to build .* Unknown model \(resnet99\)"):
        import_model("timm:resnet99")


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_a_package_that_is_not_installed(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        SourceError, match=f"'{package}:a': {package} is not installed: pip install {package}$"
    ):
        import_model(f"{package}:a")


@pytest.mark.parametrize("reference", ["", "timm", "timm:", ":resnet18"])
def test_what_names_no_model(reference: str) -> None:
    with pytest.raises(SourceError, match="expected module:callable, timm:NAME or torchvision:NAME"):
        import_model(reference)
