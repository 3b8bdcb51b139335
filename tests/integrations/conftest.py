import logging
import warnings

import pytest

pytest.importorskip("transformers")

import transformers

from anymamba.integrations.transformers import disable

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def quiet():
    """Ignore warnings that transformers and related packages raise about themselves."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(transformers|peft|accelerate|torch)\.")
        logging.getLogger("transformers").setLevel(logging.ERROR)
        yield


@pytest.fixture(autouse=True)
def nothing_stays_enabled():
    yield
    disable()
