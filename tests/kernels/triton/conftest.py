"""The kernels run under Triton's interpreter, which is chosen when Triton is imported: `make test-triton`."""

import pytest

from anymamba.core.registry import requested_library
from anymamba.kernels.triton.selection import IS_INTERPRETED


def pytest_collection_modifyitems(items):
    """Skip the tests that are marked as interpreted unless the process interprets."""
    if IS_INTERPRETED and requested_library() == "triton":
        return
    skip = pytest.mark.skip(reason="needs TRITON_INTERPRET=1 ANYMAMBA_KERNELS=triton: make test-triton")
    for item in items:
        if item.get_closest_marker("interpreted"):
            item.add_marker(skip)
