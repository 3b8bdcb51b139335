"""Power cuts: a run and a server's sessions are traced, and continued from what a disk may hold after a cut.

strace records the system calls of a process. For a cut after any of them, the disk is as harsh as POSIX allows: of a
file, what was written since its last fsync may be there, cut short, zeros or absent; of a directory, the latest changes
of its names may be undone, back to its last fsync.

    python -m tests.power_cuts --cuts 100 --seed 1
"""

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from tests.fuzz.child import Finding, run_in_child
from tests.serving.test_sessions import same, state, store, turn
from tests.training.cases import draw_nothing, write_corpus
from tests.training.killing import trainer_for
from tests.training.kills import check_same

_ACKNOWLEDGED = "acknowledged-"
_NAMES = "openat,lseek,write,ftruncate,rename,link,unlink,unlinkat,mkdir,rmdir,fsync"
_OTHERS = "pwrite64,writev,pwritev,renameat,renameat2,mkdirat,linkat,symlink,truncate,fallocate"  # unknown to `Disk`
_CALL = re.compile(r"^(\d+) +(\w+)\((.*)\) += (-?\d+)")
_UNFINISHED = re.compile(r"^(\d+) +(\w+\(.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"^(\d+) +<\.\.\. \w+ resumed>(.*)$")
_TEXT = r"(?:\\x[0-9a-f]{2})*"


def trace(command, root, log):
    """Run a command, and return its successful calls below `root` in order: name, arguments, result."""
    options = ["-f", "-y", "-xx", "-s", str(2**26), "-e", f"trace={_NAMES},{_OTHERS}", "-o", str(log)]
    subprocess.run(["strace", *options, *map(str, command)], check=True, stdout=subprocess.DEVNULL)
    calls, pending, concerned = [], {}, "".join(f"\\x{byte:02x}" for byte in str(root).encode())
    with log.open() as lines:
        for line in lines:
            if match := _UNFINISHED.match(line):
                pending[match[1]] = match[2]
                continue
            if match := _RESUMED.match(line):
                line = f"{match[1]} {pending.pop(match[1])}{match[2]}"
            if concerned in line and (match := _CALL.match(line)) and int(match[4]) >= 0:
                calls.append((match[2], match[3], int(match[4])))
    return calls


def _decode(text):
    return bytes.fromhex(text.replace("\\x", ""))


class File:
    """A file: its content, and what has certainly reached the disk."""

    def __init__(self):
        self.content = bytearray()
        self.synced = b""

    def after_cut(self, chance):
        """Return a content that the disk may have."""
        content = bytes(self.content)
        if content == self.synced:
            return content
        kept = len(self.synced) if content.startswith(self.synced) else 0
        cut = chance.randrange(kept, len(content) + 1)
        return chance.choice([content, content[:kept], content[:cut], content[:kept] + bytes(len(content) - kept)])


class Directory:
    """A directory: its names, their changes in order, and how many of these have certainly reached the disk."""

    def __init__(self):
        self.names = {}
        self._changes = []
        self._synced = 0

    def change(self, names):
        """Give names to nodes, or take away those of None, in one step."""
        self._changes.append(names)
        self._apply(self.names, names)

    def sync(self):
        """Put all names on the disk."""
        self._synced = len(self._changes)

    def after_cut(self, chance):
        """Return names that the disk may have."""
        names, last = {}, len(self._changes)
        for change in self._changes[: chance.choice([self._synced, last, chance.randint(self._synced, last)])]:
            self._apply(names, change)
        return names

    @staticmethod
    def _apply(names, change):
        for name, node in change.items():
            names.pop(name, None)
            if node is not None:
                names[name] = node


class Disk:
    """What the calls of a process leave below one directory."""

    def __init__(self, root):
        self._root = str(root)
        self._tree = Directory()
        self._open = {}  # file and position (None: the end) of each descriptor

    def apply(self, name, arguments, result):
        """Apply a call if it concerns the directory; raise `ValueError` for one that is not modeled."""
        paths = [_decode(text).decode("utf-8", "replace") for text in re.findall(rf'"({_TEXT})"', arguments[:20000])]
        descriptor = re.match(rf"(\w+)<({_TEXT})>", arguments)
        of = _decode(descriptor[2]).decode("utf-8", "replace") if descriptor else ""
        if name == "unlinkat" and not paths[0].startswith("/"):
            paths = [f"{of}/{paths[0]}"]
        if not any(path == self._root or path.startswith(f"{self._root}/") for path in (of, *paths)):
            return
        if name == "openat":
            self._open_file(paths[0], arguments, result)
        elif name == "write":
            self._write(int(descriptor[1]), _decode(re.search(rf', "({_TEXT})"', arguments)[1])[:result])
        elif name == "lseek":
            self._seek(int(descriptor[1]), result)
        elif name == "ftruncate":
            del self._open[int(descriptor[1])][0].content[int(arguments.rpartition(", ")[2]) :]
        elif name == "fsync":
            self._sync(of)
        elif name == "mkdir":
            self._change(paths[0], Directory())
        elif name in ("unlink", "unlinkat", "rmdir"):
            self._change(paths[0], None)
        elif name in ("rename", "link"):
            (source, old), (target, new) = map(self._locate, paths)
            if source is not target:
                raise ValueError(f"renamed to another directory: {paths}")
            node = source.names[old]
            source.change({new: node} if name == "link" else {old: None, new: node})
        else:
            raise ValueError(f"a call that is not modeled: {name}")

    def write_after_cut(self, target, chance):
        """Write what the disk may hold after a cut into a new directory."""
        self._write_directory(self._tree, target, chance)

    def _write_directory(self, directory, target, chance):
        target.mkdir()
        for name, node in directory.after_cut(chance).items():
            if isinstance(node, Directory):
                self._write_directory(node, target / name, chance)
            else:
                (target / name).write_bytes(node.after_cut(chance))

    def _locate(self, path):
        *parents, name = path.removeprefix(f"{self._root}/").split("/")
        directory = self._tree
        for parent in parents:
            directory = directory.names[parent]
        return directory, name

    def _change(self, path, node):
        if path != self._root:
            directory, name = self._locate(path)
            directory.change({name: node})

    def _open_file(self, path, arguments, descriptor):
        self._open.pop(descriptor, None)
        if "O_WRONLY" not in arguments and "O_RDWR" not in arguments:
            return
        directory, name = self._locate(path)
        if name not in directory.names:
            directory.change({name: File()})
        file = directory.names[name]
        if "O_TRUNC" in arguments:
            file.content.clear()
        self._open[descriptor] = [file, None if "O_APPEND" in arguments else 0]

    def _write(self, descriptor, content):
        file, position = self._open[descriptor]
        begin = len(file.content) if position is None else position
        file.content[begin : begin + len(content)] = content
        if position is not None:
            self._open[descriptor][1] = begin + len(content)

    def _seek(self, descriptor, position):
        entry = self._open.get(descriptor)
        if entry is not None and entry[1] is not None:
            entry[1] = position

    def _sync(self, path):
        if path == self._root:
            self._tree.sync()
            return
        directory, name = self._locate(path)
        node = directory.names.get(name)
        if isinstance(node, Directory):
            node.sync()
        elif node is not None:
            node.synced = bytes(node.content)


def train(directory, mode):
    """Begin a run, or continue it, to its end."""
    assert trainer_for(directory, mode).run()


def check_run(cut, whole, mode, acknowledged):
    """Continue a run after a cut, and compare it with an undisturbed one."""
    run_in_child(train, cut, mode, seconds=300.0)
    check_same(cut, whole)
    left = [path.name for path in cut.rglob("*.tmp")]
    assert not left, f"files are left over: {left}"


def serve(directory, _):
    """Change sessions, and acknowledge each change by a directory."""
    sessions = store(directory)
    for number, (name, tokens) in enumerate(changes(), 1):
        if tokens:
            turn(sessions, name, tokens, tokens)
        else:
            sessions.delete(name)
        (directory / f"{_ACKNOWLEDGED}{number}").mkdir()


def changes():
    """Return what `serve` does: the name of a session, and its tokens from then on; 0 if it is deleted."""
    chance = random.Random(0)
    return [(chance.choice("ab"), chance.choice([0, *range(4 * i, 4 * i + 4)])) for i in range(1, 15)]


def check_sessions(cut, whole, mode, acknowledged):
    """Open the sessions after a cut: each is as acknowledged last, or as the change after that leaves it."""
    expected = [dict.fromkeys("ab", 0) | dict(changes()[:number]) for number in (acknowledged, acknowledged + 1)]
    sessions = store(cut)
    for name in "ab":
        session = sessions.find(name)
        tokens = 0 if session is None else session.tokens
        assert tokens in [table[name] for table in expected], f"{name} has {tokens} tokens, expected {expected}"
        assert session is None or same(session.state, state(tokens)), f"{name} has another state"
        turn(sessions, name, 999)


# Each part: what is traced, and what continues from the disk.
PARTS = {
    "packed": (train, check_run),
    "stream": (train, check_run),
    "sessions": (serve, check_sessions),
}


def main(cuts, seed):
    """Cut as often as asked for, and report every cut that did harm."""
    chance, outcomes = random.Random(seed), Counter()
    draw_nothing()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_corpus(work / "corpus")
        traces = {}
        for part in PARTS:
            command = [sys.executable, "-m", "tests.power_cuts", "--part", part, "--directory", work / part]
            traces[part] = trace(command, work / part, work / "log")
            print(f"{part}: {len(traces[part])} calls", flush=True)
        for number in range(cuts):
            part = chance.choice(list(PARTS))
            outcome = try_cut(work, part, traces[part], random.Random(f"{seed} {number}"))
            if outcome:
                print(f"FOUND at cut {number} of seed {seed}, in {part}: {outcome}", flush=True)
            outcomes["found" if outcome else "no harm"] += 1
    print(f"seed {seed}: {dict(outcomes)}")
    return 1 if outcomes["found"] else 0


def try_cut(work, part, calls, chance):
    """Cut a traced process at a random call; return what went wrong afterwards, empty if nothing did."""
    count = chance.randrange(len(calls) + 1)
    disk, acknowledged = Disk(work / part), 0
    for name, arguments, result in calls[:count]:
        disk.apply(name, arguments, result)
        acknowledged += name == "mkdir" and _ACKNOWLEDGED.encode().hex() in arguments.replace("\\x", "")
    cut = work / "cut" / "run"
    cut.parent.mkdir()
    (cut.parent / "corpus").symlink_to(work / "corpus")
    try:
        disk.write_after_cut(cut, chance)
        files = sorted(f"{path.relative_to(cut)} {path.stat().st_size}" for path in cut.rglob("*") if path.is_file())
        PARTS[part][1](cut, work / part, part, acknowledged)
    except (AssertionError, Finding, ValueError, OSError) as error:
        return f"after {count} calls: {type(error).__name__}: {str(error)[:500]}\n    {files}"
    finally:
        shutil.rmtree(cut.parent)
    return ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    if options.part:
        draw_nothing()
        PARTS[options.part][0](options.directory, options.part)
    else:
        sys.exit(main(options.cuts, random.randrange(10**6) if options.seed is None else options.seed))
