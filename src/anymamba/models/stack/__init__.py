"""Stacks of residual layers, from which all models are built.

In reading order: `stack_config.py` (fields, and which layer each pass uses), `residual_layer.py` (norms, the MLP, a
block with its residual connection, and Multi-Gate Residuals), `class_tokens.py` (learned rows among the tokens),
`layer_loop.py` (the loop over the passes), `stack.py` (causal, with caches), `bidirectional.py`.

A batch on its way through `stack.prefill(x, cache)`: `stack.py` checks it; the loop moves the tokens of padded rows
to the front, begins the residual stream, inserts the class tokens before each pass and calls back for the pass, which
runs a `ResidualLayer` from its own cache; the loop adds the result to the stream, or hands it to the gates; after the
last pass, `norm_f` and the padding are applied, and the new block caches and class-token cursors become a `StackCache`.
"""
