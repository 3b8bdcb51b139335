"""`python -m anymamba.compat SCRIPT ...`: run a script, or with `-m` a module, that imports the official packages."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from anymamba.compat.install import install

_USAGE = "usage: python -m anymamba.compat (SCRIPT | -m MODULE) [ARGUMENT ...]"


def main(arguments: list[str]) -> int:
    """Run the script or module that the arguments name, with the remaining ones as its own; return the exit code."""
    is_module, names = arguments[:1] == ["-m"], arguments[1:] if arguments[:1] == ["-m"] else arguments
    if not names or names[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stdout if names else sys.stderr)
        return 0 if names else 2
    if not is_module and not Path(names[0]).is_file():
        print(f"anymamba.compat: {names[0]}: no such script", file=sys.stderr)
        return 2
    try:
        install()
    except RuntimeError as error:
        print(f"anymamba.compat: {error}", file=sys.stderr)
        return 2
    sys.argv = names
    if is_module:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(names[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(names[0]).resolve().parent)
        runpy.run_path(names[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
