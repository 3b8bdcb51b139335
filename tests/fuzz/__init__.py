"""A fuzzer that stays: `make fuzz SEED=7 SECONDS=600`. It is no part of `make test`.

Three parts: `files` opens damaged and forged files, `calls` holds random calls against the recurrence in float64, and
`runs` kills training and lets its writes fail. A case is a table that can be printed and repeated, drawn from the seed
and its number; it runs in a child process, so that a crash, a hang or a hunger for memory is seen and survived.
"""
