"""The tag of a wheel follows from the symbols that its library needs."""

import pytest

from tests.release import platform_tag, required_versions

SYMBOLS = """
  000000: Version: 1  File: libm.so.6  Cnt: 2
  0x0010:   Name: GLIBC_2.27  Flags: none  Version: 9
  0x0020:   Name: GLIBC_2.2.5  Flags: none  Version: 8
  0x0030: Version: 1  File: libstdc++.so.6  Cnt: 2
  0x0040:   Name: CXXABI_1.3  Flags: none  Version: 5
  0x0050:   Name: GLIBCXX_3.4.19  Flags: none  Version: 4
"""
LIBRARIES = "0x01 (NEEDED)  Shared library: [libm.so.6]\n0x01 (NEEDED)  Shared library: [libgomp.so.1]\n"


def test_the_tag_is_that_of_the_newest_symbol_of_glibc():
    assert required_versions(SYMBOLS) == {"GLIBC": (2, 27), "CXXABI": (1, 3), "GLIBCXX": (3, 4, 19)}
    assert platform_tag(SYMBOLS, LIBRARIES, "x86_64") == "manylinux_2_27_x86_64"
    newer = SYMBOLS.replace("GLIBC_2.27", "GLIBC_2.34")
    assert platform_tag(newer, LIBRARIES, "aarch64") == "manylinux_2_34_aarch64"
    older = SYMBOLS.replace("GLIBC_2.27", "GLIBC_2.4")
    assert platform_tag(older, LIBRARIES, "x86_64") == "manylinux_2_17_x86_64"


def test_a_library_that_not_every_linux_has_is_an_error():
    with pytest.raises(ValueError, match=r"expected libraries that every Linux has, got libomp\.so\.5"):
        platform_tag(SYMBOLS, LIBRARIES.replace("libgomp.so.1", "libomp.so.5"), "x86_64")
    with pytest.raises(ValueError, match=r"up to \(3, 4, 25\), got \(3, 4, 30\)"):
        platform_tag(SYMBOLS.replace("3.4.19", "3.4.30"), LIBRARIES, "x86_64")
