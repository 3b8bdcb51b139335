"""Integrations with other libraries.

- `transformers/`: its Mamba models run on this library's operators;
- `harness.py`: the model type `anymamba` of lm-evaluation-harness.
"""
