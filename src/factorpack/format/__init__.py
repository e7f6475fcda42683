"""The file: bit packing, entropy coding, schema and container. docs/format.md is its specification."""
