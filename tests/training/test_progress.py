import io
import os
import re
import struct
import sys
import threading

import pytest

from anymamba.training.metrics.loggers import StepMetrics
from anymamba.training.metrics.progress import ProgressDisplay, _History

fcntl, pty, termios = (pytest.importorskip(name) for name in ("fcntl", "pty", "termios"))


def show(steps):
    """Show what a run shows."""
    display = ProgressDisplay(steps=40, done=0, every=10)
    for step in range(1, steps + 1):
        display.at(StepMetrics(step, 64 * step, 4.0 / step, 1e-3, 0.1, 0.5, {}), 64)
        display._shown = 0.0
        if step == 20:
            display.report("step 20: a sample\n  | of\x1b[2J two\rlines\udc80")
            display.score({"held_out_bits_per_byte": 2.5})
    display.close()
    print("the end", file=sys.stderr)


def screen(written, width):
    """Return the lines that a terminal shows after what was written to it."""
    lines, y, x = [""], 0, 0
    for token in re.findall(r"\x1b\[\d*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", written):
        if token == "\r":
            x = 0
        elif token == "\n":
            y += 1
            lines += [""] * (y == len(lines))
        elif token == "\x1b[K":
            lines[y] = lines[y][:x]
        elif token == "\x1b[1A":
            y -= 1
        elif not token.startswith("\x1b"):
            lines[y] = lines[y][:x].ljust(x) + token + lines[y][x + len(token) :]
            x += len(token)
            assert x <= width, "a line that wraps cannot be erased"
    return [line.rstrip() for line in lines]


@pytest.fixture
def terminal(monkeypatch):
    """Show a display on a pseudo-terminal; return what it wrote."""

    def run(steps=40, width=100, encoding="utf-8", **environment):
        for name in ("NO_COLOR", "TERM"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        main, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("4H", 24, width, 0, 0))
        written = []

        def read():
            try:
                while part := os.read(main, 65536):
                    written.append(part)
            except OSError:  # how Linux reports that the other side is closed
                pass

        reader = threading.Thread(target=read)
        reader.start()
        with os.fdopen(other, "w", encoding=encoding) as stream:
            monkeypatch.setattr(sys, "stderr", stream)
            show(steps)
            monkeypatch.undo()
        reader.join()
        os.close(main)
        return b"".join(written).decode()

    return run


def test_a_terminal_shows_two_live_lines_below_what_was_reported(terminal):
    written = terminal(steps=30)
    lines = screen(written, 100)
    assert lines[:2] == ["step 20: a sample", "  | of?[2J two?lines?"]
    assert re.fullmatch(r"━+╸?─+  step 30/40   0:\d\d left", lines[2])
    assert re.fullmatch(
        r"loss 0\.1333 [▁▂▃▄▅▆▇█]{15}   held out bits per byte 2\.5000   128 tokens/s   [\d,]+ MiB", lines[3]
    )
    assert lines[4:] == ["the end", ""]
    assert "\x1b[36m" in written


@pytest.mark.parametrize("width", [12, 40, 200])
def test_lines_are_never_wider_than_the_terminal(terminal, width):
    lines = screen(terminal(width=width), max(width, 32))
    assert lines[-2:] == ["the end", ""]
    assert any(line.startswith("loss 0.1") for line in lines)


def test_colors_and_blocks_can_be_switched_off(terminal):
    written = terminal(NO_COLOR="1", encoding="ascii")
    assert not re.search(r"\x1b\[\d+m", written)
    assert written.isascii()
    assert "####" in written


@pytest.mark.parametrize("dumb", [True, False])
def test_elsewhere_there_are_plain_lines(terminal, dumb, monkeypatch):
    if dumb:
        written = terminal(TERM="dumb").replace("\r\n", "\n")
    else:
        monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
        show(40)
        written = stream.getvalue()
    assert "\x1b" not in written
    assert "\r" not in written
    lines = written.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step") and "loss" in line] == [
        "10/40",
        "20/40",
        "30/40",
        "40/40",
    ]
    assert re.fullmatch(r"step 40/40  loss 0\.1000  128 tokens/s  0:00 left  [\d,]+ MiB", lines[-2])
    assert "step 20: a sample" in lines


def test_an_evaluation_is_shown_in_place_of_the_time_left(terminal, monkeypatch):
    def look(steps):
        display = ProgressDisplay(steps=40, done=0, every=10)
        display.begin_evaluation()  # nothing, before there is a step
        display.at(StepMetrics(40, 64, 4.0, 1e-3, 0.1, 0.5, {}), 64)
        display.begin_evaluation()

    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    look(40)
    assert stream.getvalue().splitlines()[1:] == ["step 40: evaluating"]
    monkeypatch.undo()
    monkeypatch.setattr(sys.modules[__name__], "show", look)
    lines = screen(terminal(), 100)
    assert re.fullmatch(r"━+  step 40/40   evaluating", lines[0])


def test_a_run_without_a_step_leaves_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    ProgressDisplay(steps=3, done=3, every=1).close()
    assert stream.getvalue() == ""


def test_the_time_left_is_that_of_the_steps_since_the_start(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    now = [0.0]
    monkeypatch.setattr("anymamba.training.metrics.progress.perf_counter", lambda: now[0])
    display = ProgressDisplay(steps=10_000, done=1_000, every=1)
    now[0] = 20.0
    display.at(StepMetrics(1_010, 0, 1.0, 1.0, 1.0, 1.5, {}), 300)
    assert "200 tokens/s  4:59:40 left" in stream.getvalue()


def test_a_long_series_is_kept_in_few_values():
    history = _History()
    for i in range(5_000):
        history.add(float(i))
    values = history.values(16)
    assert len(history._means) <= 512
    assert len(values) <= 16
    assert values == sorted(values)
    assert values[0] < 400
    assert values[-1] > 4_500
