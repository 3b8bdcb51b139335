"""The fuzzer: `make fuzz SEED=7 SECONDS=600`. It is not part of `make test`.

Three parts: `files` opens damaged and forged files, `calls` compares random calls with the recurrence in float64, and
`runs` kills training and makes its writes fail. A case is a table that can be printed and repeated, drawn from the
seed and its number. It runs in a child process, which survives a crash, a hang or an excess of memory.
"""
