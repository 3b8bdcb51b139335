"""Time against the length of the sequence, as a picture, from the JSON of a run of `kernels/growth`.

python -m benchmarks --only kernels/growth --json growth.json
python -m benchmarks.growth growth.json docs/growth.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from anymamba.core.io import atomic_write

CASE = "kernels/growth"
BAND = 0.1  # around the time per token at the baseline's length


def read_growth(path: Path) -> tuple[dict[int, float], int]:
    """Return milliseconds by number of tokens, and the number of tokens of the baseline.

    Raises:
        ValueError: the file is not a result of the benchmarks, or has no such case.
    """
    try:
        case = next(case for case in json.loads(path.read_text())["cases"] if case["case"] == CASE)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected the JSON of a run of the benchmarks, got {error!r}") from error
    except StopIteration:
        raise ValueError(f"{path}: expected the case {CASE}, which this run did not measure") from None
    times = {int(contender["contender"][1:]): contender["median_ms"] for contender in case["contenders"]}
    return times, int(case["baseline"][1:])


def plot_growth(times: dict[int, float], baseline: int, target: Path) -> None:
    """Draw the total time, and microseconds per token with the band that counts as linear."""
    import matplotlib.pyplot as plt  # slow, and an extra

    lengths = sorted(times)
    per_token = [times[t] / t * 1e3 for t in lengths]
    level = times[baseline] / baseline * 1e3
    figure, (total, rate) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    total.loglog(lengths, [times[t] for t in lengths], "o-", base=2)
    total.set(xlabel="tokens", ylabel="milliseconds", title="a block, forward")
    rate.semilogx(lengths, per_token, "o-", base=2)
    rate.axhspan((1 - BAND) * level, (1 + BAND) * level, alpha=0.2, label=f"±{BAND:.0%} of {baseline} tokens")
    rate.set(xlabel="tokens", ylabel="microseconds per token", ylim=(0, 1.6 * max(per_token)), title="of that, a token")
    rate.legend()
    with atomic_write(target) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    plt.close(figure)


def main() -> int:
    """Run the program, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.split("\n", 1)[0])
    parser.add_argument("results", type=Path, help="JSON file of a run that measured kernels/growth")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    options = parser.parse_args()
    try:
        times, baseline = read_growth(options.results)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    plot_growth(times, baseline, options.picture)
    level = times[baseline] / baseline
    for t, ms in sorted(times.items()):
        print(f"{t:8} tokens {ms:10.1f} ms {ms / t / level:6.2f} of the time per token at {baseline}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
