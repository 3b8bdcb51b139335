"""Build the files of a release and try them as a user would.

    python -m tests.release [--out dist]

Builds the source distribution, and from it the wheels for x86-64 and, where g++-aarch64-linux-gnu is installed, for
64-bit Arm. A wheel gets the manylinux tag that its symbols allow. The wheel that this machine can run is installed into
a fresh environment and tried from a directory outside the repository. See docs/releasing.md.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLCHAIN = ROOT / "cmake" / "aarch64-linux-gnu.cmake"

# Libraries that every Linux has (PEP 600), and libgomp.so.1: torch, which is loaded first, brings one of that name.
ALLOWED_LIBRARIES = re.compile(r"(libstdc\+\+\.so\.6|lib(m|c|gcc_s|gomp|pthread)\.so\.\d|ld-linux-[\w-]+\.so\.\d)")
# The newest symbols that a distribution with such a glibc has: those of GCC 8, the compiler of manylinux_2_28.
NEWEST_GLIBCXX = (3, 4, 25)

SMOKE_TEST = """
import pathlib, sys
import torch, anymamba
from anymamba import MambaLM, Mamba1, Mamba2, Mamba3, SsdPath

assert anymamba.__version__ == "{version}", anymamba.__version__
assert pathlib.Path(anymamba.__file__).is_relative_to(sys.prefix), anymamba.__file__
x = torch.randn(2, 70, 64)
for family in (Mamba1, Mamba2, Mamba3):
    block = family(d_model=64)
    block(x).sum().backward()
    with torch.no_grad():
        y, cache = block.prefill(x[:, :69])
        last, _ = block.step(x[:, 69], cache)
        torch.testing.assert_close(last, block(x)[:, 69], rtol=1e-4, atol=1e-5)
        if family is not Mamba1:  # raises where the kernels are missing
            y_fused, y_minimal = (block(x, path=path) for path in (SsdPath.fused(), SsdPath.minimal(16)))
            torch.testing.assert_close(y_fused, y_minimal, rtol=1e-4, atol=1e-5)
model = MambaLM(d_model=64, n_layer=2, vocab_size=256)
ids = torch.tensor([list(b"a text")])
tokens = model.generate(ids, 8).tokens
model.save_pretrained("model")
assert torch.equal(MambaLM.from_pretrained("model").generate(ids, 8).tokens, tokens)
"""


def run(*command, **options):
    """Run a command, which must succeed."""
    print("$", *(str(word) for word in command if "\n" not in str(word)), flush=True)
    return subprocess.run([str(word) for word in command], check=True, **options)


def required_versions(version_info):
    """Return the newest version of each symbol family that a library needs, from the output of `readelf -V`."""
    newest = {}
    for family, digits in re.findall(r"Name: (\w+?)_([\d.]+)", version_info):
        version = tuple(map(int, digits.split(".")))
        newest[family] = max(newest.get(family, version), version)
    return newest


def platform_tag(version_info, dynamic_section, machine):
    """Return the manylinux tag that a library's symbols allow.

    Raises:
        ValueError: The library needs something that a system of that tag need not have.
    """
    versions = required_versions(version_info)
    if versions.get("GLIBCXX", (0,)) > NEWEST_GLIBCXX:
        raise ValueError(f"expected symbols of libstdc++ up to {NEWEST_GLIBCXX}, got {versions['GLIBCXX']}")
    for library in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic_section):
        if not ALLOWED_LIBRARIES.fullmatch(library):
            raise ValueError(f"expected libraries that every Linux has, got {library}")
    major, minor = max(versions["GLIBC"], (2, 17))[:2]
    return f"manylinux_{major}_{minor}_{machine}"


def tag_wheel(wheel, machine):
    """Rename a wheel to the platform that its library needs, and return its new path."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as directory:
        names = [name for name in archive.namelist() if name.endswith("libanymamba_cpu.so")]
        if len(names) != 1:
            raise ValueError(f"{wheel.name}: expected one library of kernels, got {names}: is there a C++ compiler?")
        library = archive.extract(names[0], directory)
        outputs = [
            subprocess.run(["readelf", flag, library], check=True, capture_output=True, text=True).stdout
            for flag in ("-V", "-d")
        ]
    tag = platform_tag(*outputs, machine)
    run(sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, wheel)
    return next(wheel.parent.glob(f"*-{tag}.whl"))


def build(out):
    """Build the source distribution and the wheels, and return the paths of the wheels by machine."""
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", out, ROOT)
    (source,) = out.glob("*.tar.gz")
    environments = {platform.machine(): {}}
    if platform.machine() == "x86_64" and shutil.which("aarch64-linux-gnu-g++"):
        environments["aarch64"] = {
            "_PYTHON_HOST_PLATFORM": "linux-aarch64",
            "CMAKE_TOOLCHAIN_FILE": str(TOOLCHAIN),
        }
    else:
        print("no wheel for 64-bit Arm: g++-aarch64-linux-gnu is not installed", flush=True)
    wheels = {}
    for machine, variables in environments.items():
        with tempfile.TemporaryDirectory() as directory:
            command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", directory, source)
            run(*command, env={**os.environ, **variables})
            (wheel,) = Path(directory).glob("*.whl")
            wheels[machine] = shutil.copy(tag_wheel(wheel, machine), out)
    return wheels


def try_wheel(wheel, directory):
    """Install a wheel into a fresh environment in a directory and use it from there."""
    venv.create(directory / "environment", with_pip=True)
    programs = directory / "environment" / "bin"
    run(programs / "pip", "install", "--quiet", wheel)
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("ANYMAMBA_", "PYTHON"))}
    options = {"cwd": directory, "env": {**variables, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}}
    version = Path(wheel).name.split("-")[1]
    run(programs / "python", "-W", "error", "-c", SMOKE_TEST.format(version=version), **options)
    run(programs / "anymamba", "info", **options)
    run(programs / "anymamba", "generate", "model", "--prompt", "a text", "--max-new-tokens", "8", **options)
    (directory / "notes.txt").write_text("A line to learn from.\n" * 200)
    sizes = ("--model.d_model", "16", "--model.n_layer", "1", "--batch.tokens", "64", "--batch.length", "32")
    steps = ("--schedule.steps", "2", "--schedule.warmup", "1", "--data.held_out_bytes", "200")
    run(programs / "anymamba", "train", "--out", "run", "--data.sources", "notes.txt", *sizes, *steps, **options)


def main(arguments=None):
    """Build, tag and try the files of a release."""
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory of the files (default: %(default)s)")
    options = parser.parse_args(arguments)
    wheels = build(options.out.resolve())
    with tempfile.TemporaryDirectory() as directory:
        try_wheel(wheels[platform.machine()], Path(directory))
    for path in sorted(options.out.iterdir()):
        print(f"{path.name}  {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
