"""The recipes that come with the package: each knows its family by the names its models really have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import factorpack as fp
from factorpack.checkpoints.entry import Entry
from factorpack.errors import PlanError
from factorpack.methods import Keep, Scalar
from factorpack.planning.families import (
    DEFAULT_METHOD,
    FAMILIES,
    family,
    family_text,
    named_recipe,
    recognised,
    resolve_rules,
)
from factorpack.planning.rules import Rules, is_depthwise, not_a_weight
from factorpack.source import Source, open_source
from tests.helpers import seeded, shared_weights

Shapes = dict[str, tuple[int, ...]]


def _bottleneck(stage: int, block: int) -> Shapes:
    at = f"layer{stage}.{block}"
    return {
        f"{at}.conv1.weight": (64, 64, 1, 1),
        f"{at}.bn1.weight": (64,),
        f"{at}.conv2.weight": (64, 64, 3, 3),
        f"{at}.conv3.weight": (256, 64, 1, 1),
    }


def _bert(prefix: str) -> Shapes:
    layer = f"{prefix}encoder.layer.0"
    return {
        f"{prefix}embeddings.word_embeddings.weight": (300, 16),
        f"{prefix}embeddings.position_embeddings.weight": (32, 16),
        f"{prefix}embeddings.token_type_embeddings.weight": (2, 16),
        f"{prefix}embeddings.LayerNorm.weight": (16,),
        f"{layer}.attention.self.query.weight": (16, 16),
        f"{layer}.attention.self.key.weight": (16, 16),
        f"{layer}.attention.output.dense.weight": (16, 16),
        f"{layer}.intermediate.dense.weight": (64, 16),
        f"{layer}.output.dense.weight": (16, 64),
    }


def _llama(prefix: str, mlp: Shapes) -> Shapes:
    layer = f"{prefix}layers.0"
    return {
        f"{prefix}embed_tokens.weight": (300, 16),
        f"{layer}.self_attn.q_proj.weight": (16, 16),
        f"{layer}.self_attn.k_proj.weight": (8, 16),
        f"{layer}.self_attn.v_proj.weight": (8, 16),
        f"{layer}.self_attn.o_proj.weight": (16, 16),
        **{f"{layer}.{name}": shape for name, shape in mlp.items()},
        f"{layer}.input_layernorm.weight": (16,),
        f"{prefix}norm.weight": (16,),
    }


GATED = {"mlp.gate_proj.weight": (48, 16), "mlp.up_proj.weight": (48, 16), "mlp.down_proj.weight": (16, 48)}
EXPERTS = {"block_sparse_moe.gate.weight": (8, 16), "block_sparse_moe.experts.0.w1.weight": (48, 16)}

MODELS: dict[str, tuple[str, Shapes]] = {
    "torchvision resnet18": (
        "resnet",
        {
            "conv1.weight": (64, 3, 7, 7),
            "bn1.weight": (64,),
            "layer1.0.conv1.weight": (64, 64, 3, 3),
            "layer1.0.conv2.weight": (64, 64, 3, 3),
            "layer2.0.downsample.0.weight": (128, 64, 1, 1),
            "layer4.1.conv2.weight": (512, 512, 3, 3),
            "fc.weight": (1000, 512),
            "fc.bias": (1000,),
        },
    ),
    "torchvision and timm resnet50": (
        "resnet",
        {"conv1.weight": (64, 3, 7, 7), **_bottleneck(1, 0), **_bottleneck(4, 2), "fc.weight": (10, 64)},
    ),
    "timm resnet50d, of three stem convolutions": (
        "resnet",
        {
            "conv1.0.weight": (32, 3, 3, 3),
            "conv1.3.weight": (32, 32, 3, 3),
            "conv1.6.weight": (64, 32, 3, 3),
            **_bottleneck(1, 0),
            **_bottleneck(4, 2),
            "fc.weight": (10, 64),
        },
    ),
    "a resnet as the backbone of another model": (
        "resnet",
        {f"backbone.body.{name}": shape for name, shape in (_bottleneck(1, 0) | _bottleneck(4, 0)).items()}
        | {"backbone.body.conv1.weight": (64, 3, 7, 7)},
    ),
    "torchvision mobilenet_v2": (
        "mobilenet",
        {
            "features.0.0.weight": (32, 3, 3, 3),
            "features.1.conv.0.0.weight": (32, 1, 3, 3),
            "features.1.conv.1.weight": (16, 32, 1, 1),
            "features.2.conv.0.0.weight": (96, 16, 1, 1),
            "features.2.conv.1.0.weight": (96, 1, 3, 3),
            "features.2.conv.2.weight": (24, 96, 1, 1),
            "features.18.0.weight": (1280, 320, 1, 1),
            "classifier.1.weight": (1000, 1280),
        },
    ),
    "torchvision mobilenet_v3_large": (
        "mobilenet",
        {
            "features.0.0.weight": (16, 3, 3, 3),
            "features.1.block.0.0.weight": (16, 1, 3, 3),
            "features.1.block.1.0.weight": (16, 16, 1, 1),
            "features.4.block.2.fc1.weight": (24, 72, 1, 1),
            "classifier.0.weight": (1280, 960),
            "classifier.3.weight": (1000, 1280),
        },
    ),
    "timm mobilenetv2_100": (
        "mobilenet",
        {
            "conv_stem.weight": (32, 3, 3, 3),
            "blocks.0.0.conv_dw.weight": (32, 1, 3, 3),
            "blocks.0.0.conv_pw.weight": (16, 32, 1, 1),
            "blocks.1.0.conv_pw.weight": (96, 16, 1, 1),
            "blocks.1.0.conv_dw.weight": (96, 1, 3, 3),
            "blocks.1.0.conv_pwl.weight": (24, 96, 1, 1),
            "blocks.5.2.conv_pwl.weight": (160, 960, 1, 1),
            "conv_head.weight": (1280, 320, 1, 1),
            "classifier.weight": (1000, 1280),
        },
    ),
    "torchvision efficientnet_b0": (
        "efficientnet",
        {
            "features.0.0.weight": (32, 3, 3, 3),
            "features.1.0.block.0.0.weight": (32, 1, 3, 3),
            "features.1.0.block.1.fc1.weight": (8, 32, 1, 1),
            "features.1.0.block.1.fc2.weight": (32, 8, 1, 1),
            "features.1.0.block.2.0.weight": (16, 32, 1, 1),
            "features.2.0.block.1.0.weight": (96, 1, 3, 3),
            "features.8.0.weight": (1280, 320, 1, 1),
            "classifier.1.weight": (1000, 1280),
        },
    ),
    "timm efficientnet_b0": (
        "efficientnet",
        {
            "conv_stem.weight": (32, 3, 3, 3),
            "blocks.0.0.conv_dw.weight": (32, 1, 3, 3),
            "blocks.0.0.se.conv_reduce.weight": (8, 32, 1, 1),
            "blocks.0.0.se.conv_expand.weight": (32, 8, 1, 1),
            "blocks.1.0.conv_pwl.weight": (24, 96, 1, 1),
            "blocks.5.3.conv_pw.weight": (1152, 192, 1, 1),
            "conv_head.weight": (1280, 320, 1, 1),
            "classifier.weight": (1000, 1280),
        },
    ),
    "efficientnet-pytorch": (
        "efficientnet",
        {
            "_conv_stem.weight": (32, 3, 3, 3),
            "_blocks.0._depthwise_conv.weight": (32, 1, 3, 3),
            "_blocks.0._se_reduce.weight": (8, 32, 1, 1),
            "_blocks.1._expand_conv.weight": (96, 16, 1, 1),
            "_conv_head.weight": (1280, 320, 1, 1),
            "_fc.weight": (1000, 1280),
        },
    ),
    "torchvision vit_b_16": (
        "vit",
        {
            "class_token": (1, 1, 768),
            "conv_proj.weight": (768, 3, 16, 16),
            "encoder.pos_embedding": (1, 197, 768),
            "encoder.layers.encoder_layer_0.ln_1.weight": (768,),
            "encoder.layers.encoder_layer_0.self_attention.in_proj_weight": (2304, 768),
            "encoder.layers.encoder_layer_0.self_attention.out_proj.weight": (768, 768),
            "encoder.layers.encoder_layer_0.mlp.0.weight": (3072, 768),
            "heads.head.weight": (1000, 768),
        },
    ),
    "timm vit_base_patch16_224": (
        "vit",
        {
            "cls_token": (1, 1, 768),
            "pos_embed": (1, 197, 768),
            "patch_embed.proj.weight": (768, 3, 16, 16),
            "blocks.0.attn.qkv.weight": (2304, 768),
            "blocks.0.attn.proj.weight": (768, 768),
            "blocks.0.mlp.fc1.weight": (3072, 768),
            "head.weight": (1000, 768),
        },
    ),
    "Hugging Face vit": (
        "vit",
        {
            "vit.embeddings.cls_token": (1, 1, 768),
            "vit.embeddings.position_embeddings": (1, 197, 768),
            "vit.embeddings.patch_embeddings.projection.weight": (768, 3, 16, 16),
            "vit.encoder.layer.0.attention.attention.query.weight": (768, 768),
            "vit.encoder.layer.0.attention.output.dense.weight": (768, 768),
            "vit.encoder.layer.0.intermediate.dense.weight": (3072, 768),
            "classifier.weight": (1000, 768),
        },
    ),
    "bert": ("bert", _bert("bert.") | {"bert.pooler.dense.weight": (16, 16), "classifier.weight": (2, 16)}),
    "a sentence transformer": ("bert", _bert("") | {"pooler.dense.weight": (16, 16)}),
    "a sentence transformer with its module": ("bert", _bert("0.auto_model.")),
    "roberta": ("bert", _bert("roberta.") | {"lm_head.dense.weight": (16, 16)}),
    "llama": ("llama", _llama("model.", GATED) | {"lm_head.weight": (300, 16)}),
    "llama without a head": ("llama", _llama("", GATED)),
    "mixtral": ("llama", _llama("model.", EXPERTS) | {"lm_head.weight": (300, 16)}),
}

STRANGERS: dict[str, Shapes] = {
    "a small net": {"conv1.weight": (8, 3, 3, 3), "fc.weight": (10, 8)},
    "torchvision vgg": {"features.0.weight": (64, 3, 3, 3), "classifier.0.weight": (10, 64)},
    "torchvision convnext": {
        "features.0.0.weight": (96, 3, 4, 4),
        "features.1.0.block.0.weight": (96, 1, 7, 7),
        "classifier.2.weight": (10, 96),
    },
    "gpt2": {"wte.weight": (300, 16), "h.0.attn.c_attn.weight": (16, 48)},
    "nothing": {},
}


def source(shapes: Shapes) -> Source:
    """Tensors that have names and shapes, and that no one may read."""
    return Source({name: Entry(shape, torch.float32, _unread) for name, shape in shapes.items()})


def _unread() -> torch.Tensor:
    raise AssertionError("a plan looks at names and shapes alone")


@pytest.mark.parametrize("model", MODELS)
def test_a_family_is_known_by_its_names(model: str) -> None:
    expected, shapes = MODELS[model]
    assert recognised(source(shapes)) == expected


@pytest.mark.parametrize("model", STRANGERS)
def test_other_models_are_of_no_family(model: str) -> None:
    assert recognised(source(STRANGERS[model])) is None


@pytest.mark.parametrize("model", MODELS)
def test_every_pattern_of_a_recipe_is_of_use_and_none_is_in_the_way(model: str) -> None:
    """Layers that a model lacks are no error, and what is no weight is kept as ever."""
    name, shapes = MODELS[model]
    opened = source(shapes)
    plan = family(name).rules_for(opened).plan(opened)
    for tensor, choice in plan.items():
        if not_a_weight(opened.entries[tensor]):
            assert isinstance(choice.method, Keep), tensor


@pytest.mark.parametrize("name", FAMILIES)
def test_each_pattern_finds_something_in_some_model(name: str) -> None:
    rules = [family(name).rules_for(source(shapes)) for of, shapes in MODELS.values() if of == name]
    used = {pattern for one in rules for pattern in (*one.layers, *one.exclude)}
    assert used == {*family(name).rules.layers, *family(name).rules.exclude}


@pytest.mark.parametrize("model", [name for name, (of, _) in MODELS.items() if of.endswith("net")])
def test_stems_are_raw_depthwise_convolutions_halved_and_the_rest_coded(model: str) -> None:
    name, shapes = MODELS[model]
    opened = source(shapes)
    plan = family(name).rules_for(opened).plan(opened)
    for tensor, entry in opened.entries.items():
        stem = "conv1." in tensor and "layer" not in tensor
        if stem or (len(entry.shape) == 4 and entry.shape[1] == 3):
            assert plan[tensor].method == Keep(), tensor
        elif is_depthwise(entry):
            assert plan[tensor].method == Keep("float16"), tensor
        elif not not_a_weight(entry):
            assert not isinstance(plan[tensor].method, Keep), tensor


def test_a_recipe_that_is_not_for_a_family_must_find_all_it_names(tmp_path: Path) -> None:
    strict, loose = tmp_path / "strict.toml", tmp_path / "loose.toml"
    strict.write_text('exclude = ["absent"]\n')
    loose.write_text('match = ["fc.*"]\nexclude = ["absent"]\n')
    state = {"fc.weight": seeded(8, 8)}
    with pytest.raises(PlanError, match="'absent' matches no tensor"):
        fp.compress(state, recipe=strict)
    assert fp.compress(state, recipe=loose)["fc.weight"].kind == "scalar"


def test_the_callers_word_comes_first() -> None:
    opened = source(MODELS["torchvision resnet18"][1])
    layers = {"conv1.weight": Scalar(7), "layer4.*": Scalar(3)}
    name, rules = resolve_rules("auto", opened, None, layers, ["fc.weight"], DEFAULT_METHOD)
    plan = rules.plan(opened)
    assert name == "resnet"
    assert plan["conv1.weight"].method == Scalar(7)
    assert plan["layer4.1.conv2.weight"].method == Scalar(3)
    assert plan["fc.weight"].method == Keep()
    assert plan["layer1.0.conv1.weight"].method == family("resnet").rules.method


def test_a_budget_takes_what_is_kept_and_no_other_method() -> None:
    opened = source(MODELS["timm efficientnet_b0"][1])
    _, rules = resolve_rules("auto", opened, None, {}, [], DEFAULT_METHOD, budget=True)
    assert list(rules.exclude) == list(family("efficientnet").rules.exclude)
    kept = {name for name, choice in rules.plan(opened).items() if choice.note.startswith("chosen by")}
    assert kept == {"blocks.0.0.conv_dw.weight"}
    assert set(rules.layers.values()) == {Keep("float16")}


def test_names_that_can_be_given(tmp_path: Path) -> None:
    opened = source(MODELS["bert"][1])
    assert named_recipe("none", opened, DEFAULT_METHOD) is None
    assert named_recipe("auto", source({}), DEFAULT_METHOD) is None
    found = named_recipe("llama", opened, DEFAULT_METHOD)
    assert found is not None
    assert found[0] == "llama"
    with pytest.raises(PlanError, match=r"is none of auto, none, bert, .*, and no file of that name"):
        named_recipe(tmp_path / "absent.toml", opened, DEFAULT_METHOD)
    with pytest.raises(PlanError, match="unknown recipe 'vgg', known are bert"):
        family_text("vgg")


def test_without_a_recipe_nothing_is_recognised() -> None:
    """In Python a recipe is asked for: the same call makes the same bytes as before there were any."""
    opened = source(MODELS["torchvision resnet18"][1])
    assert resolve_rules(None, opened, None, {}, [], DEFAULT_METHOD) == (
        "",
        Rules(DEFAULT_METHOD, exclude=[]),
    )
    with pytest.raises(PlanError, match="a recipe states methods"):
        fp.compress({"w": seeded(4, 4)}, fp.Scalar(4), recipe="bert")


@pytest.mark.parametrize(("model", "name"), [("resnet18", "resnet"), ("mobilenet_v2", "mobilenet")])
def test_the_real_models(model: str, name: str) -> None:
    assert recognised(open_source(shared_weights(model))) == name
