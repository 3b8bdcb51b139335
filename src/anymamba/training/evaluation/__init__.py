"""Evaluation of language models during a run.

Read baselines.py (what a byte n-gram and xz reach, computed once with the shards), then held_out.py (the model's bits
per byte, and a sample).

A held-out document: its tokens are read in segments that carry the state on, the ranks divide the documents between
them, and the sum of nats becomes bits per byte next to the baselines.
"""
