"""The paper's reshape is an exact inverse, for every shape a layer can have."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from factorpack.errors import PlanError
from factorpack.tiles import Layout, tile_count
from tests.helpers import assert_same_tensor, seeded

sizes = st.integers(1, 6)
tiles = st.integers(1, 40)


def numbered(*shape: int) -> Tensor:
    return torch.arange(float(math.prod(shape))).reshape(shape)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Shapes of linear layers, embeddings, and convolutions, plain and transposed."""
    spatial = draw(st.lists(st.integers(1, 4), max_size=3))
    groups = draw(st.integers(1, 4)) if spatial and draw(st.booleans()) else 0
    leading = draw(sizes) * max(groups, 1)
    return Layout((leading, draw(sizes), *spatial), groups)


@given(layouts(), tiles)
def test_from_tiles_inverts_to_tiles(layout: Layout, tile: int) -> None:
    original = numbered(*layout.shape)
    matrix = layout.to_tiles(original, tile)
    assert matrix.shape == (tile, layout.tile_count(tile)) == (tile, tile_count(original.numel(), tile))
    assert_same_tensor(layout.from_tiles(matrix), original)


@given(layouts())
def test_from_spatial_inverts_to_spatial(layout: Layout) -> None:
    original = numbered(*layout.shape)
    assert_same_tensor(layout.from_spatial(layout.to_spatial(original)), original)


@given(sizes, sizes, sizes, sizes)
def test_a_spatial_matrix_has_rows_of_inputs_and_heights(out: int, inputs: int, h: int, w: int) -> None:
    weight = numbered(out, inputs, h, w)
    matrix = Layout(tuple(weight.shape)).to_spatial(weight)
    assert matrix.shape == (inputs * h, out * w)
    for o, i, y, x in itertools.product(range(out), range(inputs), range(h), range(w)):
        assert matrix[i * h + y, o * w + x] == weight[o, i, y, x]


@given(layouts(), tiles)
def test_column_j_holds_the_jth_run_of_numbers(layout: Layout, tile: int) -> None:
    original = numbered(*layout.shape)
    flat = layout.out_first(original).flatten().tolist()
    for j, column in enumerate(layout.to_tiles(original, tile).T.tolist()):
        run = flat[j * tile : (j + 1) * tile]
        assert column == run + [0.0] * (tile - len(run))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(7, 5),
        nn.Embedding(11, 3),
        nn.Conv1d(4, 6, 3),
        nn.Conv2d(3, 8, 5),
        nn.Conv3d(2, 4, (1, 2, 3)),
        nn.Conv2d(8, 12, 3, groups=4),
        nn.Conv2d(9, 9, 3, groups=9),
        nn.ConvTranspose1d(4, 6, 3),
        nn.ConvTranspose2d(6, 9, 2, groups=3),
        nn.ConvTranspose2d(5, 5, 3, groups=5),
        nn.ConvTranspose3d(4, 6, (1, 2, 3), groups=2),
    ],
    ids=repr,
)
@pytest.mark.parametrize("tile", [1, 4, 7, 64])
def test_real_layers_come_back(layer: nn.Module, tile: int) -> None:
    weight = layer.weight.detach()
    assert isinstance(weight, Tensor)
    groups = layer.groups if isinstance(layer, nn.modules.conv._ConvTransposeNd) else 0
    layout = Layout(tuple(weight.shape), groups)
    assert_same_tensor(layout.from_tiles(layout.to_tiles(weight, tile)), weight)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 3, 2, 2)])
def test_plain_weights_are_read_as_they_lie(shape: tuple[int, ...]) -> None:
    assert Layout(shape).to_tiles(numbered(*shape), 1)[0].tolist() == list(range(math.prod(shape)))


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("spatial", [(3,), (2, 3), (2, 1, 3)])
def test_transposed_weights_by_index(groups: int, spatial: tuple[int, ...]) -> None:
    """Input channel i of group g and its output o are the plain weight's row g*out + o, column i."""
    inputs, outputs = 4, 5  # of one group
    stored = numbered(groups * inputs, outputs, *spatial)
    layout = Layout(tuple(stored.shape), groups)
    read = layout.out_first(stored)
    assert tuple(read.shape) == layout.out_first_shape == (groups * outputs, inputs, *spatial)
    assert layout.outputs == groups * outputs
    for g, i, o in itertools.product(range(groups), range(inputs), range(outputs)):
        assert_same_tensor(read[g * outputs + o, i], stored[g * inputs + i, o])
    assert_same_tensor(layout.from_out_first(read), stored)


@pytest.mark.parametrize("groups", [1, 3])
def test_a_transposed_convolution_is_a_plain_one_of_the_flipped_out_first_weight(groups: int) -> None:
    """What `out` and `in` mean, by arithmetic: at stride 1 the two convolutions are the same map."""
    layer = nn.ConvTranspose2d(6, 9, 3, groups=groups, bias=False).double()
    images = seeded(2, 6, 5, 5, dtype=torch.float64)
    plain = Layout(tuple(layer.weight.shape), groups).out_first(layer.weight.detach()).flip(2, 3)
    expected = nn.functional.conv2d(images, plain, padding=2, groups=groups)
    torch.testing.assert_close(layer(images).detach(), expected)


@pytest.mark.parametrize(("shape", "groups"), [((4, 4), 1), ((5, 2, 3), 2), ((4,), 1)])
def test_no_transposed_convolution(shape: tuple[int, ...], groups: int) -> None:
    with pytest.raises(PlanError, match=f"not a transposed convolution of {groups} groups"):
        Layout(shape, groups).out_first(numbered(*shape))


@given(st.integers(1, 10_000), st.integers(1, 512))
def test_tiles_are_as_few_as_will_do(numel: int, tile: int) -> None:
    count = tile_count(numel, tile)
    assert (count - 1) * tile < numel <= count * tile
