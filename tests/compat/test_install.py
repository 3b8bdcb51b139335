"""The stand-in as a package: its names and signatures, when it raises, and scripts that are unaware of it."""

import importlib
import inspect
import json
import os
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anymamba
from anymamba import compat
from anymamba.compat.__main__ import main
from anymamba.compat.install import TABLE
from tests.support import MODEL_FLOOR, assert_near, in_another_process

SIGNATURES = json.loads((Path(__file__).parents[1] / "golden" / "functions" / "signatures.json").read_text())
SCRIPTS = Path(__file__).parent / "scripts"
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}  # tensors are so small that threads would only wait for each other
VIM = [("bimamba_type", "none"), ("if_divide_out", False), ("init_layer_scale", None)]  # which follow in Vim's version
KNOWN = {"F": F, "nn": nn, "float": float, "dict": dict, "list": list}


@pytest.fixture
def stand_in():
    compat.install()
    yield
    compat.uninstall()


def resolve(path):
    """Return the object at an official path, whose last parts are attributes."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        name = ".".join(parts[:cut])
        if name in TABLE:
            there = importlib.import_module(name)
            for part in parts[cut:]:
                there = getattr(there, part)
            return there
    raise AssertionError(path)


def described(parameter):
    kinds = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
    name = kinds.get(parameter.kind, "") + parameter.name
    return (name,) if parameter.default is inspect.Parameter.empty else (name, parameter.default)


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures_are_the_official_ones(stand_in, path):
    expected = [
        (name, *(eval(text, KNOWN) for text in default if not text.startswith("field(")))
        for name, *default in SIGNATURES[path]
    ]
    if path.endswith(" (fields)"):
        there = resolve(path.removesuffix(" (fields)"))
        actual = [(f.name, *([] if f.default is MISSING else [f.default])) for f in fields(there)]
        factories = [text for _, *default in SIGNATURES[path] for text in default if text.startswith("field(")]
        kinds = [f.default_factory for f in fields(there) if f.default_factory is not MISSING]
        assert [f"field(default_factory={kind.__name__})" for kind in kinds] == factories
    else:
        there = resolve(path)
        parameters = list(inspect.signature(there).parameters.values())
        actual = [described(p) for p in parameters if p.name != "self"]
        assert all(p.kind is not inspect.Parameter.KEYWORD_ONLY for p in parameters)
    assert actual == expected + (VIM if path.endswith("Mamba.__init__") else [])


def test_names_that_are_not_there_say_so(stand_in):
    import mamba_ssm

    for code, name in (
        ("from mamba_ssm.utils.determinism import autotune_configs", "mamba_ssm.utils.determinism"),
        ("from mamba_ssm.ops.triton.ssd_combined import ssd_selective_scan", "mamba_ssm.ops.triton.ssd_combined.ssd_s"),
        ("import mamba_ssm.distributed", "mamba_ssm.distributed"),
        ("from causal_conv1d import cpp_functions", "causal_conv1d.cpp_functions"),
    ):
        with pytest.raises(NotImplementedError, match=rf"{name}.*: anymamba's stand-in has no such") as error:
            exec(code)
        assert isinstance(error.value, ImportError)  # for code that has a plan without it
    with pytest.raises(NotImplementedError, match=r"mamba_ssm\.mamba_chunk_scan_combined: anymamba's stand-in"):
        _ = mamba_ssm.mamba_chunk_scan_combined
    assert getattr(mamba_ssm, "mamba_chunk_scan_combined", None) is None
    assert inspect.getmodule(torch.nn.Linear) is torch.nn.modules.linear  # which looks at every module there is


def test_it_comes_and_goes():
    compat.install()
    compat.install()
    import mamba_ssm

    assert mamba_ssm.__version__
    compat.uninstall()
    assert "mamba_ssm" not in sys.modules
    assert importlib.util.find_spec("mamba_ssm") is None
    compat.uninstall()


def test_an_installed_or_imported_package_is_not_covered(tmp_path):
    (tmp_path / "causal_conv1d.py").write_text("REAL = True\n")
    code = """
import sys
import anymamba
from anymamba import compat
from anymamba.compat.__main__ import main
sys.stderr = sys.stdout
assert main([__import__("anymamba").__file__]) == 2
import causal_conv1d
assert causal_conv1d.REAL and "mamba_ssm" not in sys.modules
try:
    compat.install()
except RuntimeError as error:
    print(error)
"""
    lines = in_another_process(code, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path])).splitlines()
    prefix = "anymamba.compat.install: causal_conv1d"
    assert lines == [
        f"anymamba.compat: {prefix} is installed, and the stand-in never hides it; uninstall it first",
        f"{prefix} has already been imported; call it before that import",
    ]


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_scripts_written_for_mamba_ssm_run_unchanged(script, tmp_path):
    assert "anymamba" not in script.read_text()
    command = [sys.executable, "-W", "error", "-m", "anymamba.compat", str(script), str(tmp_path), "--quiet"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=ONE_THREAD)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("done\n")


def test_models_of_transformers_pick_it_up_and_compute_the_same():
    script = Path(__file__).parent / "pickup.py"
    command = [sys.executable, str(script)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=ONE_THREAD)
    assert result.returncode == 0, result.stderr
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(reports) == 9
    for model in reports:
        assert {"causal_conv1d_fn", "causal_conv1d_update", "selective_state_update"} < set(model["called"])
        assert {"selective_scan_fn", "mamba_chunk_scan_combined"} & set(model["called"])
        assert max(model["errors"].values()) <= 1e-5, model


def test_an_activation_can_be_set_for_code_that_cannot_name_it(tmp_path):
    compat.install(a_activation="softplus")
    try:
        import mamba_ssm

        block = mamba_ssm.Mamba3(32, d_state=16, headdim=16)
        ours = anymamba.Mamba3(32, d_state=16, headdim=16, a_activation="softplus")
        ours.load_state_dict(block.state_dict())
        x = torch.randn(2, 5, 32)
        assert torch.equal(block(x), ours(x))
        named = mamba_ssm.Mamba3(32, d_state=16, headdim=16, a_activation="heavy_tail")
        assert named.config.a_activation == "heavy_tail"
        from mamba_ssm.models.mixer_seq_simple import MambaConfig

        sizes = {"layer": "Mamba3", "d_state": 16, "headdim": 16}
        model = mamba_ssm.MambaLMHeadModel(MambaConfig(32, 0, 2, 40, sizes))
    finally:
        compat.uninstall()
    assert mamba_ssm.Mamba3(32).config.a_activation == "heavy_tail"
    ids = torch.randint(40, (1, 7))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["ssm_cfg"]["a_activation"] == "softplus"
    loaded = anymamba.MambaLM.from_pretrained(tmp_path)
    assert_near(loaded(ids).logits, model(ids).logits, MODEL_FLOOR)
    with pytest.raises(ValueError, match="a_activation must be one of heavy_tail, softplus, got 'relu'"):
        compat.install(a_activation="relu")


def test_options_of_the_command_come_before_the_script(tmp_path):
    (tmp_path / "script.py").write_text(
        "import sys\nfrom mamba_ssm import Mamba3\nprint(Mamba3(32).config.a_activation, *sys.argv[1:])\n"
    )
    (tmp_path / "mamba_ssm").mkdir()  # in the working directory, which a script does not see
    (tmp_path / "mamba_ssm" / "__init__.py").touch()
    script = tmp_path / "scripts" / "script.py"
    script.parent.mkdir()
    (tmp_path / "script.py").rename(script)
    command = [
        sys.executable,
        "-m",
        "anymamba.compat",
        "--a-activation",
        "softplus",
        str(script),
        "--cuda-as-cpu",
        "-m",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=ONE_THREAD, cwd=tmp_path)
    assert result.stdout == "softplus --cuda-as-cpu -m\n", result.stderr
    module = [*command[:3], "-m", "scripts.script", "--a-activation", "relu"]
    (tmp_path / "mamba_ssm" / "__init__.py").unlink()
    (tmp_path / "mamba_ssm").rmdir()
    result = subprocess.run(module, capture_output=True, text=True, check=False, env=ONE_THREAD, cwd=tmp_path)
    assert result.stdout == "heavy_tail --a-activation relu\n", result.stderr


def test_mistakes_in_the_command_are_one_line(capsys):
    assert main(["no_such_script.py"]) == 2
    assert capsys.readouterr().err == "anymamba.compat: no_such_script.py: no such script\n"
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("anymamba.compat: no script; usage: python -m anymamba.compat")
    assert main(["--a-activation", "relu", "script.py"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["--help"]) == 0
    assert "usage: python -m anymamba.compat" in capsys.readouterr().out
