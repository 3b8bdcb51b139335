"""Time this checkout compared with another one, in alternating fresh processes.

    python -m benchmarks.checkouts OTHER [--rounds 4] [--only GLOB ...]

OTHER is the directory of another checkout, whose kernels are built (a library in its `src/anymamba/kernels/cpu`). Both
make the same calls through the public API. Each process measures every case once, and the order of the two checkouts
changes from round to round, so that neither profits from a machine that gets faster or slower. Printed are the medians
over the rounds, their ratio (below 1: this checkout is faster), and the smallest and largest ratio of a single round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

SAMPLE_SECONDS = 0.4  # of one sample; a slower call is a sample of its own
SAMPLES = 5
BLOCK_TOKENS = 2048
TRAINING_TOKENS = 512
DECODED_TOKENS = 32


def measure(source: Path, patterns: list[str]) -> dict[str, float]:
    """Return milliseconds per call of each case, as the package in `source` computes it."""
    # The finder of an editable installation comes before `sys.path`.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
    sys.path.insert(0, str(source))
    import anymamba

    if Path(anymamba.__file__).parent.parent != source.resolve():
        raise RuntimeError(f"expected the package of {source.resolve()}, got {anymamba.__file__}")
    return {
        name: _milliseconds(set_up())
        for name, set_up in _cases().items()
        if not patterns or any(fnmatch(name, pattern) for pattern in patterns)
    }


def _cases() -> dict[str, Callable[[], Callable[[], object]]]:
    """Return a function that sets up a call, by the name of its case."""
    import torch

    from anymamba import Mamba1, Mamba2, Mamba3, MambaLM, generate

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))

    def without_gradients(function: Callable[[], object]) -> Callable[[], object]:
        return torch.no_grad()(function)

    def forward(family: Any) -> Callable[[], object]:
        torch.manual_seed(0)
        block, x = family(d_model=768), torch.randn(1, BLOCK_TOKENS, 768)
        return without_gradients(lambda: block(x))

    def forward_backward(family: Any) -> Callable[[], object]:
        torch.manual_seed(0)
        block, x = family(d_model=768), torch.randn(1, BLOCK_TOKENS, 768, requires_grad=True)
        head = torch.randn(1, BLOCK_TOKENS, 768)
        inputs = [x, *block.parameters()]
        return lambda: torch.autograd.grad(block(x), inputs, head)

    def block_step(family: Any, width: int, rows: int) -> Callable[[], object]:
        torch.manual_seed(0)
        block, x = family(d_model=width), torch.randn(rows, width)
        with torch.no_grad():
            _, cache = block.prefill(torch.randn(rows, 8, width))
        return without_gradients(lambda: block.step(x, cache))

    def small_model() -> Any:
        torch.manual_seed(0)
        return MambaLM(d_model=64, n_layer=2, vocab_size=256, ssm_cfg={"layer": "Mamba2", "headdim": 32}).eval()

    def model_step() -> Callable[[], object]:
        model, ids = small_model(), torch.zeros(1, 8, dtype=torch.long)
        with torch.no_grad():
            cache = model(ids).cache
        return without_gradients(lambda: model.step(ids[:, 0], cache))

    def small_forward() -> Callable[[], object]:
        model, ids = small_model(), torch.zeros(1, 8, dtype=torch.long)
        return without_gradients(lambda: model(ids))

    def large_model() -> Any:
        torch.manual_seed(0)
        return MambaLM(
            d_model=768, n_layer=24, vocab_size=50277, pad_vocab_size_multiple=16, ssm_cfg={"layer": "Mamba2"}
        )

    def decode(rows: int) -> Callable[[], object]:
        model, ids = large_model().eval(), torch.ones(rows, 16, dtype=torch.long)
        return lambda: generate(model, ids, max_new_tokens=DECODED_TOKENS)

    def train() -> Callable[[], object]:
        model, ids = large_model(), torch.randint(0, 50277, (1, TRAINING_TOKENS))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            model(ids, labels=ids, logits="none").loss.backward()
            optimizer.step()

        return step

    families = {"mamba1": Mamba1, "mamba2": Mamba2, "mamba3": Mamba3}
    cases: dict[str, Callable[[], Callable[[], object]]] = {}
    for name, family in families.items():
        cases[f"block/t{BLOCK_TOKENS}/{name}/forward"] = partial(forward, family)
        cases[f"block/t{BLOCK_TOKENS}/{name}/forward-backward"] = partial(forward_backward, family)
        for width, rows in ((64, 1), (768, 1), (768, 8)):
            cases[f"block.step/{name}/d{width}/b{rows}"] = partial(block_step, family, width, rows)
    return {
        **cases,
        "MambaLM.step/d64": model_step,
        "MambaLM.forward/d64/t8": small_forward,
        "generate/mamba2-130m/b1": partial(decode, 1),
        "generate/mamba2-130m/b8": partial(decode, 8),
        f"training/mamba2-130m/t{TRAINING_TOKENS}": train,
    }


def _milliseconds(call: Callable[[], object]) -> float:
    """Return the median time of one call."""
    call()
    start = time.perf_counter()
    call()
    calls = max(1, round(SAMPLE_SECONDS / (time.perf_counter() - start)))
    samples = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) / calls)
    return 1e3 * statistics.median(samples)


def compare(other: Path, rounds: int, patterns: list[str]) -> None:
    """Measure both checkouts in turn and print a table."""
    sources = {"this": Path(__file__).parents[1] / "src", "other": other / "src"}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    for number in range(rounds):
        for name in list(sources) if number % 2 == 0 else reversed(list(sources)):
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            command = [sys.executable, __file__, "--measure", str(sources[name]), "--only", *patterns]
            result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            times[name].append(json.loads(result.stdout))
    print("| case | other ms | this ms | ratio | smallest and largest |\n|---|---:|---:|---:|---:|")
    for case in times["this"][0]:
        this, others = ([measured[case] for measured in times[name]] for name in ("this", "other"))
        ratios = sorted(a / b for a, b in zip(this, others, strict=True))
        before, after = statistics.median(others), statistics.median(this)
        print(f"| {case} | {before:.4g} | {after:.4g} | {after / before:.2f} | {ratios[0]:.2f} – {ratios[-1]:.2f} |")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkouts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("other", type=Path, nargs="?", help="directory of the other checkout")
    parser.add_argument("--rounds", type=int, default=4, help="processes of each checkout (4)")
    parser.add_argument("--only", nargs="*", default=[], metavar="GLOB", help="measure the cases that match any GLOB")
    parser.add_argument("--measure", type=Path, metavar="SRC", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments.measure, arguments.only)))
    elif arguments.other is None or not (arguments.other / "src" / "anymamba").is_dir():
        parser.error(f"expected the directory of another checkout, got {arguments.other}")
    else:
        compare(arguments.other, arguments.rounds, arguments.only)


if __name__ == "__main__":
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch is imported, as in __main__.py
    main()
