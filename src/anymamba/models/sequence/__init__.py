"""Models around a stack that do not generate text.

In reading order: `sequence_model.py` (config, inputs, stack and files of all of them), `classifier.py` (one class per
sequence), `regression.py` (values per sequence or per step), `masked_lm.py` (masked tokens, and text embeddings).

A batch on its way through a classifier: `embed_inputs` checks it and embeds the ids, or projects the vectors; the stack
runs over it; `pool` reduces the outputs of each sequence to one vector; the head maps it to logits, and the labels give
the loss.
"""
