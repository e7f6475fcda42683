"""How a tensor can be stored: one object per kind, in one file each."""

from __future__ import annotations

from factorpack.kinds.base import Kind
from factorpack.kinds.codewords import Codewords
from factorpack.kinds.constant import Constant
from factorpack.kinds.factors import Factors
from factorpack.kinds.kept import Kept
from factorpack.kinds.levels import Levels
from factorpack.kinds.scalar_codes import ScalarCodes
from factorpack.kinds.spatial import Spatial

KINDS: dict[str, Kind] = {
    "factors": Factors(),
    "spatial": Spatial(),
    "scalar": ScalarCodes(),
    "levels": Levels(),
    "codewords": Codewords(),
    "keep": Kept(),
    "constant": Constant(),
}
"""Every kind, by the name that files use. A new kind needs its own file and one line here."""
