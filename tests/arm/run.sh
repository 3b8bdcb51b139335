#!/usr/bin/env bash
# Runs tests on an emulated 64-bit Arm processor: tests/arm/run.sh [pytest's arguments]. Everything it needs, some 2 GB,
# goes to build/arm; of the system it asks for two packages, which is why it wants root and Debian's apt.
set -euo pipefail
cd "$(dirname "$0")/../.."
torch=${ARM_TORCH:-2.10.0}  # the newest plain CPU build for Arm on the package index
arm=$PWD/build/arm site=$PWD/build/arm/site-$torch
tests=("$@")
if [ ${#tests[@]} = 0 ]; then
  tests=(tests/kernels tests/scan tests/blocks tests/models/test_lm.py tests/generation/test_decoder.py
         tests/generation/test_generate.py tests/training/test_golden.py tests/training/test_trainer.py)
fi

if ! command -v qemu-aarch64-static aarch64-linux-gnu-g++ > /dev/null || [ ! -x "$arm/python" ]; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null || [ "$(uname -m)" != x86_64 ]; then
    echo "tests/arm/run.sh: expected root, x86-64 and Debian's apt-get, to install qemu-user-static and" \
      "g++-aarch64-linux-gnu and to fetch Python for Arm; got uid $(id -u) on $(uname -m)" >&2
    exit 2
  fi
  apt-get update -qq
  apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends qemu-user-static g++-aarch64-linux-gnu cmake
fi

# Python and its libraries, unpacked and not installed.
if [ ! -x "$arm/python" ]; then
  mkdir -p "$arm"/apt/{lists,cache/archives,state}/partial "$arm/root"
  touch "$arm/apt/status"
  apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Debug::NoLocking=1
       -o Dir::State="$arm/apt/state" -o Dir::State::lists="$arm/apt/lists" -o Dir::State::status="$arm/apt/status"
       -o Dir::Cache="$arm/apt/cache")
  "${apt[@]}" update
  "${apt[@]}" install -y --no-install-recommends --download-only python3 libgomp1 libstdc++6
  for package in "$arm"/apt/cache/archives/*.deb; do dpkg-deb -x "$package" "$arm/root"; done
  # A script, so that Python can start itself again without the kernel knowing Arm's programs.
  cat > "$arm/python.new" <<EOF
#!/bin/bash
export PYTHONHOME=$arm/root/usr
exec qemu-aarch64-static -L $arm/root -0 $arm/python $arm/root/usr/bin/python3 "\$@"
EOF
  chmod +x "$arm/python.new"
  mv "$arm/python.new" "$arm/python"
fi

# torch without what it requires: pip reads the conditions as if for this machine, and would ask for CUDA.
if [ ! -e "$site/.installed" ]; then
  version=$("$arm/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  pip=(env -u PIP_CONSTRAINT "${PYTHON:-python3}" -m pip install --quiet --only-binary=:all: --python-version "$version"
       --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64
       --target "$site")
  "${pip[@]}" --no-deps "torch==$torch"
  "${pip[@]}" filelock fsspec jinja2 networkx sympy typing-extensions \
    numpy safetensors jaxtyping beartype pytest hypothesis huggingface_hub tokenizers matplotlib
  touch "$site/.installed"
fi

cmake -S . -B "$arm/kernels" -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64-linux-gnu.cmake"
cmake --build "$arm/kernels"
export PYTHONPATH=$PWD/src:$PWD:$site ANYMAMBA_LIBRARY=$arm/kernels/libanymamba_cpu.so ANYMAMBA_REQUIRE_KERNELS=1
exec "$arm/python" -m pytest -p no:cacheprovider "${tests[@]}"
