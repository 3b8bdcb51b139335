"""Several processes that train one model, as torchrun starts them: their places, and their messages.

The workers are a mesh of `replicate · shard · context`, the last of which is the innermost: workers of consecutive
ranks share a sequence. Rows of a step are divided over `replicate · shard`, the weights over `shard`.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from time import monotonic, sleep
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from anymamba.core.context_parallel import ContextParallelGroup
from anymamba.training.config.sections import ParallelSection

T = TypeVar("T")
_TURNS = itertools.count()
_EVER = timedelta(days=365)  # as long as it may take to tokenize a text
_ANSWERS = 5.0  # seconds in which all live workers have noticed that one is not
_DROPS = 0.3  # seconds in which a thread of gloo drops the last message
_LOOKS = 5.0  # seconds between two checks whether torchrun is alive


class SharedError(ValueError):
    """An error that every worker raises, and the first one reports."""

    is_shared = True


class Workers:
    """All processes of a run, and the place of this one. A single process is a mesh of one.

    Attributes:
        rank: of this process.
        size: how many there are.
        shard: workers over which the weights are divided.
        context: workers that share a sequence.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        """One of `size` processes, without a mesh yet."""
        self.rank, self.size, self.shard, self.context = rank, size, 1, 1
        self.cp_group: ContextParallelGroup | None = None
        self._mesh: DeviceMesh | None = None
        self._doing, self._seconds, self._looked = "to begin", 600, monotonic()

    @property
    def leads(self) -> bool:
        """Whether this is the process that reports and writes."""
        return self.rank == 0

    @property
    def readers(self) -> int:
        """How many parts the rows of a step are divided into."""
        return self.size // self.context

    @property
    def reader(self) -> int:
        """Which of these parts is read here."""
        return self.rank // self.context

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh over whose last dimension the weights are divided; None if they are the same on all workers."""
        return self._mesh

    def arrange(self, section: ParallelSection, device: torch.device) -> None:
        """Take the places that a config asks for.

        Raises:
            ValueError: it asks for more or fewer workers than there are.
        """
        fixed = section.shard * section.context
        wanted = fixed * (section.replicate or max(1, self.size // fixed))
        if wanted != self.size:
            replicate = section.replicate or "(what is left)"
            raise ValueError(
                f"parallel: replicate · shard · context = {replicate} · {section.shard} · {section.context} must be "
                f"the number of workers, got {self.size}; torchrun --nproc-per-node and --nnodes say how many there are"
            )
        self.shard, self.context, self._seconds = section.shard, section.context, section.timeout
        if self.size == 1:
            return
        limit = timedelta(seconds=section.timeout)
        dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)
        ranks = torch.arange(self.size).view(-1, self.shard, self.context)
        if self.shard > 1:
            places = ranks.transpose(1, 2).reshape(-1, self.shard)
            whole = len(places) == 1
            names = ("shard",) if whole else ("replicate", "shard")
            self._mesh = DeviceMesh(device.type, places[0] if whole else places, mesh_dim_names=names)
        if self.context > 1:
            for row in ranks.view(-1, self.context).tolist():
                group = dist.new_group(row, timeout=limit)
                if self.rank in row:
                    self.cp_group = ContextParallelGroup(row, self.rank, group)

    def require_single_process(self) -> None:
        """Refuse several workers, for a task of one process.

        Raises:
            ValueError: there are several.
        """
        if self.size > 1:
            raise ValueError(
                f"several workers train language models on text; this task needs one process, got {self.size}"
            )

    def together(self, function: Callable[[], T]) -> T:
        """What `function` returns here; an error on one worker is raised on all of them.

        Raises:
            SharedError: there was an error on some worker.
        """
        if self.size == 1:
            return function()
        mistake, result = "", None
        try:
            result = function()
        except (ValueError, TypeError, OSError) as error:
            mistake = str(error) or type(error).__name__
        if not self.any(bool(mistake)):
            return result  # type: ignore[return-value]
        found = self._said(mistake)
        first = next(rank for rank, text in enumerate(found) if text)
        raise SharedError(found[0] if first == 0 else f"worker {first} of {self.size}: {found[first]}")

    def first(self, function: Callable[[], str]) -> str:
        """What `function` returns on the first worker, for all of them; the others wait as long as it takes.

        Raises:
            SharedError: the first worker raised.
        """
        if self.size == 1:
            return function()
        store, key = _store(), _key()
        if self.leads:
            try:
                store.set(key, "+" + function())
            except (ValueError, TypeError, OSError) as error:
                store.set(key, "-" + (str(error) or type(error).__name__))
        store.wait([key], _EVER)
        found: str = store.get(key).decode()
        self.any(False)
        if found[0] == "-":
            raise SharedError(found[1:])
        return found[1:]

    def sum(self, values: Tensor, doing: str = "to add up numbers", group: Any = None) -> Tensor:
        """The sum over all workers, or those of a group; computed in place."""
        if self.size > 1:
            self._doing = doing
            dist.all_reduce(values, group=group)
        return values

    def any(self, here: bool) -> bool:
        """Whether `here` is true on some worker."""
        return bool(self.sum(torch.tensor(float(here)), "to agree").item()) if self.size > 1 else here

    def told(self, here: str) -> str:
        """What one worker says, for all of them: the first that says anything, and its rank."""
        if self.size == 1:
            return here
        said = self._said(here)
        rank = next((rank for rank, text in enumerate(said) if text), 0)
        return f"{said[rank]} (worker {rank} of {self.size})"

    def _said(self, here: str) -> list[str]:
        """What every worker says."""
        store, key = _store(), _key()
        store.set(f"{key}/{self.rank}", "+" + here)
        said = [store.get(f"{key}/{rank}").decode()[1:] for rank in range(self.size)]
        self.any(False)  # nobody leaves before all have read
        return said

    def mailbox(self) -> tuple[Any, str]:
        """A separate connection to the store for a thread, and a name for its messages."""
        return _store().clone(), _key()

    @property
    def writes(self) -> bool:
        """Whether this worker writes its rows of the weights: of several with the same rows, one does."""
        return self.rank < self.shard * self.context and self.rank % self.context == 0

    @property
    def place(self) -> int:
        """Which rows of the weights are here, counted from 0, where they are divided."""
        return self.rank // self.context % self.shard

    def device_name(self, name: str) -> str:
        """The device of this worker, if a config names a kind of devices."""
        return f"{name}:{os.environ.get('LOCAL_RANK', '0')}" if self.size > 1 and name == "cuda" else name

    def share_group(self) -> Any:
        """The group of workers that divide the weights with this one."""
        return None if self._mesh is None else self._mesh.get_group("shard")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Replace errors of the connection by one that says who did not answer in time or is gone.

        Raises:
            TimeoutError: a worker did not answer.
            ConnectionError: a worker or torchrun is gone.
        """
        try:
            yield
        except RuntimeError as error:
            reason = re.sub(r"^\[[^]]*\] *", "", str(error)).partition("\n")[0].partition(". ")[0]  # without its source
            if self.size == 1 or not _is_of_connection(error):
                raise
            if "time" in reason.lower() and self._is_launched():
                raise TimeoutError(self._missing(reason)) from error
            raise ConnectionError(self._lost(reason)) from error

    def check_launcher(self) -> None:
        """Refuse to continue without torchrun, as nothing would restart a failed worker; checks every few seconds.

        Raises:
            ConnectionError: torchrun is gone.
        """
        if self.size > 1 and monotonic() - self._looked > _LOOKS:
            self._looked = monotonic()
            if not self._is_launched():
                raise ConnectionError(self._lost("the store does not answer"))

    def _is_launched(self) -> bool:
        """Whether the store answers, which belongs to torchrun or the first worker."""
        try:
            _store().check(["launched"])
        except RuntimeError:
            return False
        return True

    def _lost(self, reason: str) -> str:
        who = "another worker" if self._is_launched() else "torchrun, or the worker or machine that has its store,"
        return f"worker {self.rank} of {self.size}: {who} is gone, while this one waited {self._doing} ({reason})"

    def doing(self, what: str) -> None:
        """Note what is about to be exchanged, for the error if that fails."""
        self._doing = what

    def _missing(self, reason: str) -> str:
        """Who does not answer: all live workers run into the same limit, and report it."""
        store = _store()
        keys = [f"alive/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], self._doing)
        end = monotonic() + _ANSWERS
        while monotonic() < end and not store.check(keys):
            sleep(0.1)
        silent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        who = f"worker {', '.join(silent)}" if silent else "a worker"
        return (
            f"worker {self.rank} of {self.size} waited {self._seconds} s {self._doing} (parallel.timeout); "
            f"no answer from {who} ({reason})"
        )


def joined() -> Workers:
    """Connect to the processes that torchrun has started; without torchrun, this process alone.

    Messages go through gloo, and those between GPUs through nccl.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Workers()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if not dist.is_initialized():
        # Its default arguments hold the group that exists when it is imported. If that were ours, its threads would
        # outlive `_leave`, and abort the process if they are not idle yet.
        import_module("torch.distributed.nn.functional")
        store, rank, size = next(rendezvous("env://"))
        store = PrefixStore(f"anymamba/{_start(store, rank, size)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        atexit.register(_leave)  # not before: a process may train again, and a group cannot be made twice
    return Workers(dist.get_rank(), size)


def _start(store: Any, rank: int, size: int) -> str:
    """A name for this start of the workers: torchrun may have started them before, with the same store.

    Every worker publishes a token. The first worker publishes a list of all tokens until every other worker has found
    its own there and has answered; the token of the first worker is the name. The store still holds messages from
    before a restart, so an answer names the first worker's token.
    """
    token = secrets.token_hex(8)
    store.set(f"anymamba/hello/{rank}", token)
    while True:
        if rank == 0:
            tokens = [store.get(f"anymamba/hello/{other}").decode() for other in range(size)]
            store.set("anymamba/tokens", " ".join(tokens))
            if store.check([f"anymamba/here/{token}/{other}" for other in tokens[1:]]):
                return token
        else:
            tokens = store.get("anymamba/tokens").decode().split()
            if tokens[rank : rank + 1] == [token]:
                store.set(f"anymamba/here/{tokens[0]}/{token}", "")
                return str(tokens[0])
        sleep(0.02)


def _leave() -> None:
    """Leave the process group and end gloo's threads: one that is busy while the interpreter exits would abort it.

    A group joins its threads when nothing refers to it any more, and divided models refer to theirs in cycles. If
    something still holds a group, its threads get a moment to drop what they have sent.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
        sleep(_DROPS)


def _is_of_connection(error: RuntimeError) -> bool:
    """Whether an error is about messages between processes: gloo and nccl have no types for them."""
    words = ("gloo", "nccl", "connection", "timed out", "timeout", "peer", "socket", "broken pipe")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)


def is_restarted() -> bool:
    """Whether torchrun has restarted the processes because one of them was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _key() -> str:
    """A name in the store for the next message; all workers send the same number of messages."""
    return f"said/{next(_TURNS)}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
