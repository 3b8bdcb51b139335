"""Tasks: what a run learns, which is all that the trainer does not know.

Read task.py (the interface), language_model.py (text), tabular.py and tabular_tasks.py (files), predict.py (a trained
model on other files).

A step, seen from a task: `batches(step)` returns its microbatches, `loss(model, batch, carried, dtype)` their summed
loss and the state to carry on, and `evaluate(model, step, dtype)` scores the held-out data.
"""
