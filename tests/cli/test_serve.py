import socket

import pytest

pytest.importorskip("uvicorn")


def error_of(run, *options):
    """Return the one line with which `anymamba serve` ends before it looks for the model."""
    code, out, err = run("serve", "nowhere", *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_busy_port_is_one_line_that_names_the_option(run, host):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        err = error_of(run, "--host", host, "--port", port)
    assert f"--port {port}: the server cannot listen there (Address already in use)" in err
    assert "choose another one, or 0 for any free port" in err


@pytest.mark.parametrize("host", ["198.51.100.7", "no-such-host.invalid", "::g"])
def test_a_host_of_another_machine_is_one_line_that_names_the_option(run, host):
    assert f"--host {host}: not an address of this machine" in error_of(run, "--host", host, "--port", 0)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_is_rejected(run, port):
    assert "--port must be between 0 and 65535" in error_of(run, "--port", port)
