"""Configs of runs: typed, frozen, read from TOML, overridden by dotted name; imported without torch by the command
line.

Read sections.py (the fields), run_config.py (a whole config), tabular_config.py (runs on files).

A field, from the command line to the loop: `--optimizer.lr 1e-3` is an option because `OptimizerSection` declares `lr`;
`read_config` parses the text by the field's annotation and builds the frozen `TrainingConfig`; `resolve_config`
(api.py) checks the whole; the checkpoint stores it, and a resumed run may change it because the field is
`mutable_on_resume`.
"""
