"""Data: text becomes documents, tokens, shards and batches; files of numbers, labels or texts become tables.

Read sources.py (which files), documents.py (texts, the split, their tokens, byte pairs trained on them), baselines.py
(what a byte n-gram and xz reach on the held-out text), shards.py (tokens on the disk), batches.py (what a step reads);
then tables.py for runs on files.

A text, from the disk to a step: `find_text` lists and splits documents, `prepare` tokenizes them once into shards with
checksums, and `Batches.step` maps a seed and a step to rows of these shards.
"""
