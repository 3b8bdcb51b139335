"""Data: files become documents, tokens, shards and batches; tables become padded sequences.

Read sources.py (which files), documents.py (texts, the split, their tokens), run_tokenizer.py (byte pairs of the run's
own text), shards.py (tokens on the disk), batches.py (what a step reads); then tables.py and sequence_batches.py for
runs on files.

A text, from the disk to a step: `find_text` lists and splits documents, `prepare` tokenizes them once into shards with
checksums, and `Batches.step` maps a seed and a step to rows of these shards.
"""
