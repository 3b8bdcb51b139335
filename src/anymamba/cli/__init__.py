"""The command line: each command parses its options, calls the library, and prints.

Files in reading order:

- main.py: the entry point. It parses the arguments, imports the module of the command, and turns a user's mistake into
  one line and exit code 2.
- options.py, serve_options.py: the options of all commands, without importing torch.
- common.py: loading a model, reading text, and a progress bar.
- generate.py, evaluate.py, convert.py (and push), info.py (and inspect), train.py (and predict), serve.py (and
  bench-serve): one function per command.

The token of `anymamba generate MODEL --prompt Once`: `main` parses the arguments and calls `generate.run`, which loads
the model and its tokenizer (`common.load`) and starts a `GrowingText`. Its `take_turn` encodes the prompt and calls
`generation.stream`; each token goes through `CompletionBuilder.add`, and text that can no longer change is printed.
"""
