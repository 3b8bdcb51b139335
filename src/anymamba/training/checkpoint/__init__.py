"""Checkpoints: saved while training goes on, complete or absent, and read by any number of ranks.

Read manifest.py (the directory), sharded_tensors.py (the files of tensors), saver.py (saving), resume.py
(opening).

A tensor, from the model to a resumed run: `Trainer.save` copies this rank's rows, `Part.write` writes them to a
numbered file, `_complete` signs, syncs and renames the directory; `load_latest` checks every byte, and `StoredTensor`
reads the rows that a rank of another mesh needs.
"""
