"""Foundations that know no model: operators and their implementations, checks, layouts of batches, caches, files.

Reading order:

- `operators.py` and `registry.py`: one operator per computation, which implementation runs, and whether anything
  (a tracer, autograd, a hook) observes a call;
- `checks.py`, `config_fields.py`: errors about tensors, and about names and values of config fields;
- `dtypes.py`, `linear.py`, `recompute.py`: dtypes of computations, products with weights, backward passes that keep
  only their inputs;
- `layout.py`, `context_parallel.py`: padded and packed batches, and sequences that several ranks share;
- `cache_tree.py`, `growing_buffer.py`, `cache_io.py`: caches as values, those that grow, and their files;
- `weight_formats.py`: formats of quantized weights;
- `io.py`, `anomaly.py`, `process.py`: files, a guard against NaN, settings of the process;
- `available_cores.py`, `threads.py`: how many cores the process may use, and how torch's threads are set.

One call: a block calls `causal_conv(x, window, weight, ...)`. `check_annotated_shapes` compares the tensors with the
annotations; the operator asks the registry for the first implementation that covers the inputs, and calls it directly,
or, if autograd or a tracer follows, as the node `anymamba::causal_conv`. The block's new cache is a `Tree`, which can
be sliced, concatenated, and written to a state file.
"""
