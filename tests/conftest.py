import os
import shutil
from contextlib import nullcontext

# Before torch is imported: some virtual machines describe AMX wrongly and oneDNN's bfloat16 matmul dies of it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import hypothesis
import jaxtyping
import pytest
import torch

from anymamba.core.registry import kernels_off
from anymamba.kernels.cpu import bindings
from tests.support import chromium

# The suite works on small tensors, where threads only wait for each other; tests/processors.py asks for more.
torch.set_num_threads(int(os.environ.get("ANYMAMBA_TEST_THREADS", "1")))

# No test may fail because a machine is slow, busy or emulated.
patient = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("patient", **patient)
hypothesis.settings.load_profile("patient")


def pytest_sessionstart():
    """Raise if required kernels were not built, or a required browser is missing, instead of skipping their tests."""
    if os.environ.get("ANYMAMBA_REQUIRE_BROWSER") == "1" and chromium() is None:
        raise pytest.UsageError("expected a browser, as ANYMAMBA_REQUIRE_BROWSER asks for one, got none")
    if os.environ.get("ANYMAMBA_REQUIRE_KERNELS") != "1" or os.environ.get("ANYMAMBA_KERNELS") == "off":
        return
    names = (os.environ.get("CXX") or "c++", "g++", "clang++")
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler and bindings.LIBRARY.handle is None:
        raise pytest.UsageError(
            f"expected compiled kernels, as there is {compiler}, got none: {bindings.LIBRARY.reason}"
        )


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill what `torch.empty` returns with NaN, so that a value that was never written is seen."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def unchecked():
    """Switch the checks of annotations off: for invalid input, which must meet our own errors, and for tracing."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(params=["compiled", "portable"])
def each_implementation(request):
    """Run a test on the compiled kernels and again on the portable implementations."""
    if request.param == "compiled" and bindings.LIBRARY.handle is None:
        pytest.skip(bindings.LIBRARY.reason)
    with kernels_off() if request.param == "portable" else nullcontext():
        yield
