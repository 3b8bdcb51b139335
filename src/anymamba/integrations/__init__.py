"""Integrations with other libraries: so far `transformers/`, whose Mamba models run on this library's operators."""
