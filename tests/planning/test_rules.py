"""The default plan, rule by rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from factorpack.errors import PlanError
from factorpack.methods import AQ, BGD, LSQ, PQF, QSPCA, RDOQ, TTQ, VQ, ABCNet, Keep, Method, Prune, Scalar
from factorpack.planning.rules import (
    CLASSIFIER,
    DEPTHWISE,
    Choice,
    Rules,
    classifier_of,
    first_convolution,
    matches,
)
from factorpack.source import Source, open_source

METHOD = QSPCA(64, 4)


def source(**shapes: tuple[int, ...]) -> Source:
    """Tensors of these shapes; a double underscore stands for a dot."""
    return open_source({name.replace("__", "."): torch.ones(shape) for name, shape in shapes.items()})


CONVNET = source(
    conv1__weight=(64, 3, 7, 7),
    bn1__weight=(64,),
    bn1__bias=(64,),
    layer1__conv__weight=(64, 64, 3, 3),
    layer1__depthwise__weight=(64, 1, 3, 3),
    layer2__conv__weight=(128, 64, 1, 1),
    fc__weight=(10, 128),
    fc__bias=(10,),
)


def choices(rules: Rules, of: Source = CONVNET) -> dict[str, Choice]:
    return rules.plan(of)


def test_the_papers_habits() -> None:
    vector = Choice(Keep(), "vector")
    assert choices(Rules(METHOD)) == {
        "conv1.weight": Choice(Keep(), "first convolution"),
        "bn1.weight": vector,
        "bn1.bias": vector,
        "layer1.conv.weight": Choice(METHOD),
        "layer1.depthwise.weight": Choice(DEPTHWISE, "depthwise convolution"),
        "layer2.conv.weight": Choice(METHOD),
        "fc.weight": Choice(CLASSIFIER, "classifier"),
        "fc.bias": vector,
    }


@pytest.mark.parametrize("method", [VQ(512), BGD(512, regime="large"), PQF(512, tile=6, seed=3)])
def test_codewords_code_the_classifier_as_their_papers_do(method: VQ | BGD | PQF) -> None:
    plan = choices(Rules(method))
    assert plan["conv1.weight"] == Choice(Keep(), "first convolution")
    assert plan["layer1.depthwise.weight"] == Choice(DEPTHWISE, "depthwise convolution")
    assert plan["layer2.conv.weight"] == Choice(method)
    assert plan["fc.weight"] == Choice(replace(method, codewords=2048, tile=4), "classifier")


def test_sums_of_codewords_code_the_classifier_as_any_weight() -> None:
    assert choices(Rules(AQ(3)))["fc.weight"] == Choice(AQ(3), "classifier")


@pytest.mark.parametrize("method", [TTQ(), ABCNet(3)])
def test_methods_that_keep_both_ends(method: Method) -> None:
    plan = choices(Rules(method))
    assert plan["conv1.weight"] == Choice(Keep(), "first convolution")
    assert plan["fc.weight"] == Choice(Keep(), "classifier")
    assert plan["layer1.depthwise.weight"] == Choice(DEPTHWISE, "depthwise convolution")
    assert plan["layer1.conv.weight"] == plan["layer2.conv.weight"] == Choice(method)


@pytest.mark.parametrize("method", [Scalar(3), Keep("float16"), LSQ(3), Prune(), RDOQ(0.5)])
def test_methods_that_suit_anything_get_every_weight(method: Method) -> None:
    plan = choices(Rules(method))
    assert [choice.method for name, choice in plan.items() if len(CONVNET.entries[name].shape) > 1] == [
        method
    ] * 5
    assert plan["fc.bias"] == Choice(Keep(), "vector")


def test_the_plan_keeps_the_sources_order() -> None:
    assert list(choices(Rules(METHOD))) == list(CONVNET.entries)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.tensor(3.0), "vector"),
        (torch.ones(7), "vector"),
        (torch.ones(4, 0), "empty"),
        (torch.ones(1, 50, 8), "one output channel"),
        (torch.ones(4, 4, dtype=torch.int64), "int64 values"),
        (torch.ones(4, 4, dtype=torch.bool), "bool values"),
        (torch.ones(4, 4, dtype=torch.complex64), "complex64 values"),
        (torch.ones(4, 4).to(torch.float8_e5m2), "float8_e5m2 values"),
    ],
)
def test_what_is_no_weight_is_kept_whatever_was_asked(tensor: Tensor, reason: str) -> None:
    plan = Rules(METHOD, {"*": Scalar(2)}).plan(open_source({"x": tensor}))
    assert plan == {"x": Choice(Keep(), reason)}


def test_exclude_comes_before_layers_and_layers_before_the_habits() -> None:
    rules = Rules(METHOD, {"conv1.*": Scalar(5), "*.conv.weight": Scalar(6)}, ["layer2.*"])
    plan = choices(rules)
    assert plan["conv1.weight"] == Choice(Scalar(5), "chosen by 'conv1.*'", by_caller=True)
    assert plan["layer1.conv.weight"] == Choice(Scalar(6), "chosen by '*.conv.weight'", by_caller=True)
    assert plan["layer2.conv.weight"] == Choice(Keep(), "excluded by 'layer2.*'", by_caller=True)
    assert plan["fc.weight"].method == CLASSIFIER


def test_the_first_pattern_that_matches_wins() -> None:
    plan = choices(Rules(METHOD, {"layer1.*": Scalar(5), "layer*": Scalar(6)}))
    assert plan["layer1.conv.weight"].method == Scalar(5)
    assert plan["layer2.conv.weight"].method == Scalar(6)


def test_vectors_may_be_kept_smaller_but_not_coded() -> None:
    plan = choices(Rules(METHOD, {"bn1.weight": Keep("float16"), "bn1.*": Scalar(4)}))
    assert plan["bn1.weight"] == Choice(Keep("float16"), "chosen by 'bn1.weight'", by_caller=True)
    assert plan["bn1.bias"] == Choice(Keep(), "vector")


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layer1.*", "layer1.0.weight", True),
        ("layer1.*", "layer10.weight", False),
        ("layer1", "layer1.weight", False),  # whole names
        ("layer?.weight", "layer3.weight", True),
        ("layer[12].weight", "layer3.weight", False),
        ("LAYER*", "layer1", False),
        ("re:layer[0-9]+", "layer12", True),
        ("re:layer[0-9]", "layer12", False),
        (r"re:.*\.(fc1|fc2)\.weight", "block.3.fc2.weight", True),
        ("re:", "", True),
    ],
)
def test_patterns(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


@pytest.mark.parametrize("pattern", ["layer9.*", "re:layer9.*", "conv1"])
def test_a_pattern_that_matches_nothing_is_an_error(pattern: str) -> None:
    message = "the pattern .* matches no tensor; there are conv1.weight, bn1.weight, bn1.bias"
    with pytest.raises(PlanError, match=message):
        choices(Rules(METHOD, {pattern: Scalar(4)}))
    with pytest.raises(PlanError, match=message):
        choices(Rules(METHOD, exclude=[pattern]))


@pytest.mark.parametrize("pattern", ["re:(", "re:[", "re:*"])
def test_an_invalid_regular_expression(pattern: str) -> None:
    with pytest.raises(PlanError, match="is not a regular expression"):
        choices(Rules(METHOD, exclude=[pattern]))


def test_one_text_is_no_list_of_patterns() -> None:
    with pytest.raises(PlanError, match=r"exclude is the text 'fc\.\*', expected a list of patterns"):
        choices(Rules(METHOD, exclude="fc.*"))


@pytest.mark.parametrize("names", [("embed.weight", "lm_head.weight"), ("lm_head.weight", "embed.weight")])
def test_a_tied_tensor_answers_to_each_of_its_names(names: tuple[str, str]) -> None:
    weight = torch.ones(50, 8)
    tied = open_source(dict.fromkeys(names, weight))
    assert dict(tied.aliases) == {names[1]: names[0]}
    for pattern in names:
        assert Rules(METHOD, exclude=[pattern]).plan(tied)[names[0]].method == Keep()
        assert Rules(METHOD, {pattern: Scalar(3)}).plan(tied)[names[0]].method == Scalar(3)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (CONVNET, "conv1.weight"),
        (source(a__weight=(32, 16, 3, 3), stem__weight=(32, 3, 3, 3)), "stem.weight"),
        (source(a__weight=(32, 4, 3, 3), b__weight=(32, 3, 3, 3)), "a.weight"),
        (source(a__weight=(32, 1, 3), b__weight=(32, 32, 3)), "a.weight"),  # sound: one input channel
        (source(pos=(1, 3, 64), patch__weight=(64, 3, 8, 8)), "patch.weight"),
        (source(fc__weight=(10, 20)), None),
    ],
)
def test_the_first_convolution(tensors: Source, expected: str | None) -> None:
    assert first_convolution(tensors) == expected


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (CONVNET, "fc.weight"),
        (
            source(conv__weight=(8, 3, 3, 3), classifier__0__weight=(9, 8), classifier__10__weight=(9, 9)),
            "classifier.10.weight",
        ),
        (source(classifier__9__weight=(9, 8), classifier__10__weight=(9, 9)), "classifier.10.weight"),
        (source(conv__weight=(8, 3, 3, 3), a__weight=(9, 8), b__weight=(9, 8)), "b.weight"),
        (source(a__weight=(9, 8), b__weight=(9, 8)), None),  # no head by name, and no convolutional net
        (source(h__0__fc__weight=(9, 8), lm_head__weight=(50, 8)), "lm_head.weight"),
        (source(conv__weight=(8, 3, 3, 3), head__bias=(9,)), None),
        (source(headless__weight=(9, 8)), None),
    ],
)
def test_the_classifier(tensors: Source, expected: str | None) -> None:
    assert classifier_of(tensors) == expected
