"""One code per weight."""

from __future__ import annotations

import pytest
import torch

from factorpack.decoding import check, specs
from factorpack.errors import FormatError
from factorpack.record import Encoded


@pytest.mark.parametrize(("bits", "dtype"), [(8, torch.int16), (9, torch.int8), (9, torch.int32)])
def test_codes_of_another_type_are_refused(bits: int, dtype: torch.dtype) -> None:
    parts = {"codes": torch.zeros(3, 5, dtype=dtype), "scale": torch.ones(1, 1)}
    encoded = Encoded("scalar", (3, 5), torch.float32, parts, {"codes": bits})
    with pytest.raises(FormatError, match=f"part 'codes' is {dtype}, codes of {bits} bits are"):
        check("scalar", encoded.layout, torch.float32, specs(encoded))
