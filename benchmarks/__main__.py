"""Entry point: `python -m benchmarks`."""

import os
import sys

# Before torch is imported: some virtual machines describe AMX wrongly and oneDNN's bfloat16 matmul dies of it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

from benchmarks.cli import main

if __name__ == "__main__":
    sys.exit(main())
