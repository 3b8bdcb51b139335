"""Peak memory of a process that loads a language model and generates from it, by the format of its weights.

python -m benchmarks.loading

Every figure is from a fresh process: its highest resident set, minus that after `import torch`. So it holds everything
else: this package, the code of the libraries that runs, the weights, the states, the activations and the scratch. The
activations are those of one segment of the prompt at most, whatever its length. Linux only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parent.parent
_WRITE = """
from benchmarks.generation import our_model_with
for weights in {formats!r}:
    our_model_with(weights).save_pretrained({directory!r} + "/" + weights)
"""
_RUN = """
import re, torch
def high_water_mark():  # written here: to import it would be part of what is measured
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
torch.set_num_threads({threads})
before = high_water_mark()
from anymamba import MambaLM
model = MambaLM.from_pretrained({path!r}, weights={weights!r})
loaded = high_water_mark()
model.generate(torch.arange({prompt}).unsqueeze(0) % 256, {tokens})
stored = sum(p.nbytes for p in model.parameters())
states = sum(x.nbytes for x in model.init_cache(1).leaves())
print(stored, states, loaded - before, high_water_mark() - before)
"""
FORMATS = ("float32", "bfloat16", "int8", "int4")
FROM_FLOAT32 = ("bfloat16", "int8", "int4")
PROMPTS = (16, 2048)
TOKENS = 16


class Peaks(NamedTuple):
    """Bytes of the weights, of the states, and of the peaks above `import torch` after loading and generating."""

    stored: int
    states: int
    loading: int
    generating: int


def measure(path: Path, weights: str | None, prompt: int, threads: int) -> Peaks:
    """Load a checkpoint and generate from it, in a fresh process.

    Raises:
        RuntimeError: it failed, with what it wrote.
    """
    code = _RUN.format(path=str(path), weights=weights, prompt=prompt, tokens=TOKENS, threads=threads)
    return Peaks(*map(int, _run(code).split()))


def _run(code: str) -> str:
    child = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        raise RuntimeError(f"exit code {child.returncode}\n{child.stderr}")
    return child.stdout


def row(name: str, peaks_by_prompt: list[Peaks]) -> str:
    """Return a line of the table."""
    stored, states = peaks_by_prompt[0].stored, peaks_by_prompt[0].states
    loading = max(peaks.loading for peaks in peaks_by_prompt)
    cells = [_mib(stored), f"{_mib(loading)} ({loading / stored:.2f}×)"]
    for peaks in peaks_by_prompt:
        cells += [f"{_mib(peaks.generating)} ({peaks.generating / stored:.2f}×)"]
        cells += [_mib(peaks.generating - stored - states)]
    return f"| {name} | {' | '.join(cells)} |"


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f}"


def main() -> int:
    """Run the program, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads that torch computes with (2)")
    options = parser.parse_args()
    prompts = "".join(f" {t} tokens, peak | besides weights and states |" for t in PROMPTS)
    print(f"| MiB | stored | loading, peak |{prompts}")
    print("|---|---:|---:|" + "---:|---:|" * len(PROMPTS))
    with tempfile.TemporaryDirectory() as directory:
        _run(_WRITE.format(formats=FORMATS, directory=directory))
        cases: list[tuple[str, str, str | None]] = [(name, name, None) for name in FORMATS]
        cases += [(f"a float32 file as {name}", "float32", name) for name in FROM_FLOAT32]
        for name, stored, weights in cases:
            peaks_by_prompt = [measure(Path(directory) / stored, weights, t, options.threads) for t in PROMPTS]
            print(row(name, peaks_by_prompt), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
