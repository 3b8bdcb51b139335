"""Tasks: what a run learns, which is all that the trainer does not know.

Read task.py (the interface), language_model.py (text), tabular_base.py (what all tasks on files share),
tabular_tasks.py (these tasks), predict.py (a trained model on other files).

A step, seen from a task: `batches(step)` returns its microbatches, `loss(model, batch, carried, dtype)` their summed
loss and the state to carry on, and `evaluate(model, step, dtype)` scores the held-out data.
"""
