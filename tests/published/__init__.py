"""Published weights and figures of other people, run through anymamba from clones of their repositories.

    python -m tests.published DIR                      every row whose repository is cloned somewhere below DIR
    python -m tests.published DIR --only prices        one row
    python -m tests.published DIR --kernels off        the portable code; also baseline, avx2, avx512, or all of them
    python -m tests.published DIR --dtype float32      another precision than the one that was published
    python -m tests.published DIR --quick              one of the models that were trained alike

A row is a published thing: a repository at a commit, a reader of its files, and the figures that it states. The readers
define models around anymamba's public blocks, and open files of the clone by path; nothing of the repositories is
stored here. Every row prints the published figure, ours, what counts as agreement, and whether they agree.
`docs/evidence.md` has the results. Reading order:

1. `clone.py`: clones, and their files as text, arrays and weights.
2. `row.py`: what a row is, and its figures.
3. `motion.py`, `prices.py`, `proteins.py`, `captures.py`, `interpreted.py`: one published thing
   each.
4. `__main__.py`: the command.

A new row is a file with a `Row`, an entry in `ROWS` of `__main__.py`, and a test on a tiny clone in `test_readers.py`.
"""
