import os
import subprocess
import sys

import pytest

from anymamba.checkpoints.formats import FORMATS, READ_ONLY
from anymamba.cli import main, options
from anymamba.cli.common import DTYPES
from anymamba.core.config_fields import suggest
from tests.support import in_another_process

COMMANDS = ("train", "generate", "eval", "inspect", "convert", "push", "info", "serve", "bench-serve")


@pytest.mark.parametrize(
    "arguments", [["--help"], *([name, "--help"] for name in COMMANDS), ["generat"], ["info", "--dtype", "int8"]]
)
def test_help_and_mistakes_do_not_wait_for_torch(arguments):
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "anymamba", *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == (0 if "--help" in arguments else 2)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "anymamba.cli.options" in imported
    assert not {"torch", "numpy"} & imported


def test_importing_the_package_registers_its_operators():
    code = "import anymamba, torch; print(any('anymamba::' in x for x in torch._C._dispatch_get_all_op_names()))"
    assert in_another_process(code) == "True"


def test_the_names_that_options_list_are_those_of_the_library():
    assert set(options.DTYPES) == set(DTYPES)
    assert set(options.FORMATS) == set(FORMATS) - READ_ONLY


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generat"], "generat: no such command; did you mean generate?"),
        (["--verbose", "generat"], "generat: no such command; did you mean generate?"),
        (["toast"], "toast: no such command; known are train, predict, generate, eval, inspect, convert, push, info"),
        (["--quiet"], "--quiet: no such option; known are -h, --help, --version"),
        ([], "the following arguments are required: COMMAND (anymamba --help lists the options)"),
        (
            ["generate", "m", "--dtype", "int8"],
            "argument --dtype: expected one of float32, bfloat16, float16, float64, got 'int8' "
            "(anymamba generate --help lists the options)",
        ),
        (
            ["convert", "a", "b", "--format", "hf"],
            "expected one of official, transformers, bamba, granitemoehybrid, codestral, anymamba, got 'hf'",
        ),
        (["generate", "m", "--top-k", "two"], "argument --top-k: expected an integer, got 'two'"),
        (["generate", "m", "--temperatur=0.8", "--toplevel", "x"], "--toplevel: no such option; anymamba generate"),
        (["generate", "m", "--max-tokens", "3"], "--max-tokens: no such option; did you mean --max-new-tokens?"),
        (["generate", "m", "--Top-P", "3"], "--Top-P: no such option; did you mean --top-p?"),
        (["generate"], "the following arguments are required: MODEL (anymamba generate --help lists the options)"),
        (["generate", "m", "--prompt", "a", "--file", "b"], "argument --file: not allowed with argument --prompt"),
        (["info", "a", "b"], "b: unexpected argument"),
        (["train", "--sources", "a"], "--sources: no such option; did you mean --data.sources?"),
        (["train", "--wandb", "a"], "--wandb: no such option; did you mean --evaluation.wandb?"),
        (["train", "--quantum", "a"], "--quantum: no such option; anymamba train --help lists the options"),
        (["train", "--data.sources", "a", "b", "c.toml"], "put the config first: anymamba train c.toml --data.sources"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("anymamba: ")
    assert message in err


@pytest.mark.parametrize("name", ["--mlflow", "--gpu", "--verbose", "--epochs", "--output"])
def test_unlike_words_are_not_suggested(name):
    assert suggest(name, main.build_parser()[1]["train"]._option_string_actions) in ("", "; did you mean --out?")


def test_help_shows_what_a_field_is_where_nothing_is_given(run):
    _, out, _ = run("train", "--help")
    out = " ".join(out.split())
    assert "none" not in out.replace("0: none", "")
    for text in (
        "family of the blocks: Mamba1, Mamba2, Mamba3 or a registered one (default: Mamba3)",
        'or "stdlib" (default: stdlib)',
        "{true,false} use the embedding as the head as well (default: true)",
        "(default: data/ in the run's directory)",
    ):
        assert text in out


def test_version(run):
    assert run("--version")[1].startswith("anymamba ")
