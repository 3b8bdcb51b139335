"""The ranks of a run, as torchrun starts them.

Read process_group.py (the mesh and the messages between ranks), then fsdp.py (weights and gradients).

A gradient of a replicated parameter: every rank divides its loss by the targets of all ranks, and `all_reduce_grads`
sums the gradients over ranks, in buckets. Of a sharded parameter: FSDP2 sums in the backward pass, and leaves each rank
its rows.
"""
