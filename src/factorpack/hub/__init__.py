"""Hugging Face model folders: read, packed into a folder, and opened again with transformers.

Importing this package does not import transformers; opening a model does.
"""

from factorpack.hub.load import from_pretrained
from factorpack.hub.quantizer import register
from factorpack.hub.save import save_pretrained

__all__ = ["from_pretrained", "register", "save_pretrained"]
