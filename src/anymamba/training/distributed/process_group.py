"""The processes of a run, as torchrun starts them: the mesh of their ranks, and the messages between them.

The ranks are a mesh of `replicate · shard · context`, the last of which is the innermost: consecutive ranks share a
sequence. The rows of a step are divided over `replicate · shard`, the weights over `shard`.

Tensors are sent through collectives. Text messages, which may take long to come (the main rank tokenizes a corpus) or
report an error, are sent through torchrun's key-value store, where waiting has no time limit.
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
from anymamba.core.dtypes import resolve_device
from anymamba.training.config.sections import ParallelSection

T = TypeVar("T")
_MESSAGE_NUMBERS = itertools.count()
_NO_TIMEOUT = timedelta(days=365)  # tokenizing a text may take any time
_TIMEOUT_REPORT_S = 5.0  # seconds in which all live ranks have noticed that one is not
_GLOO_DRAIN_S = 0.3  # seconds in which a thread of gloo drops the last message
_LAUNCHER_CHECK_S = 5.0  # seconds between two checks whether torchrun is alive


class AllRanksError(ValueError):
    """An error that every rank raises, and the main rank reports."""

    is_shared = True


class World:
    """All processes of a run, seen from one of them. A single process is a mesh of one.

    Attributes:
        rank: Rank of this process.
        size: Number of processes.
        shard_size: Number of ranks over which the weights are divided.
        context_size: Number of ranks that share a sequence.
        cp_group: The ranks that share sequences with this one; None if there are no others.
        mesh: Mesh over whose last dimension the weights are divided; None if all ranks hold all of them.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        """Describe one of `size` processes, without a mesh yet."""
        self.rank = rank
        self.size = size
        self.shard_size = 1
        self.context_size = 1
        self.cp_group: ContextParallelGroup | None = None
        self.mesh: DeviceMesh | None = None
        self._activity = "to begin"  # what this rank waits for, for the error if that does not come
        self._timeout_s = 600
        self._launcher_checked = monotonic()

    @property
    def is_main(self) -> bool:
        """Return whether this is the rank that reports and writes."""
        return self.rank == 0

    @property
    def dp_size(self) -> int:
        """Number of parts into which the rows of a step are divided."""
        return self.size // self.context_size

    @property
    def dp_rank(self) -> int:
        """Which of these parts this rank reads."""
        return self.rank // self.context_size

    @property
    def shard_rank(self) -> int:
        """Which part of the weights this rank holds."""
        return self.rank // self.context_size % self.shard_size

    @property
    def is_writer(self) -> bool:
        """Return whether this rank writes its part of the weights: of several ranks with the same part, one does."""
        return self.rank < self.shard_size * self.context_size and self.rank % self.context_size == 0

    @property
    def shard_group(self) -> Any:
        """Return the process group of the ranks that divide the weights with this one."""
        return None if self.mesh is None else self.mesh.get_group("shard")

    def local_device(self, name: str) -> str:
        """Return the device of this rank, given that of the config, which may name a kind of devices, or be "auto"."""
        name = resolve_device(name).type if name == "auto" else name
        return f"{name}:{os.environ.get('LOCAL_RANK', '0')}" if self.size > 1 and name == "cuda" else name

    def set_mesh(self, section: ParallelSection, device: torch.device) -> None:
        """Arrange the ranks in the mesh of a config; raise `ValueError` if there are more or fewer."""
        fixed = section.shard * section.context
        expected_size = fixed * (section.replicate or max(1, self.size // fixed))
        if expected_size != self.size:
            replicate = section.replicate or "(what is left)"
            raise ValueError(
                f"parallel: replicate · shard · context = {replicate} · {section.shard} · {section.context} must be "
                f"the number of ranks, got {self.size}; torchrun --nproc-per-node and --nnodes set how many there are"
            )
        self.shard_size = section.shard
        self.context_size = section.context
        self._timeout_s = section.timeout
        if self.size == 1:
            return
        timeout = timedelta(seconds=section.timeout)
        dist.distributed_c10d._set_pg_timeout(timeout, dist.group.WORLD)
        ranks = torch.arange(self.size).view(-1, self.shard_size, self.context_size)
        if self.shard_size > 1:
            rows = ranks.transpose(1, 2).reshape(-1, self.shard_size)
            if len(rows) == 1:
                self.mesh = DeviceMesh(device.type, rows[0], mesh_dim_names=("shard",))
            else:
                self.mesh = DeviceMesh(device.type, rows, mesh_dim_names=("replicate", "shard"))
        if self.context_size > 1:
            for row in ranks.view(-1, self.context_size).tolist():
                group = dist.new_group(row, timeout=timeout)
                if self.rank in row:
                    self.cp_group = ContextParallelGroup(row, self.rank, group)

    def require_single_process(self) -> None:
        """Raise `ValueError` if there are several processes, for tasks that cannot use them."""
        if self.size > 1:
            raise ValueError(
                f"only language models on text train on several ranks; this task needs one process, got {self.size}"
            )

    def run_checked(self, function: Callable[[], T]) -> T:
        """Run a function on every rank and return this rank's result; all raise `AllRanksError` if one has an error."""
        if self.size == 1:
            return function()
        message, result = "", None
        try:
            result = function()
        except (ValueError, TypeError, OSError) as error:
            message = str(error) or type(error).__name__
        if not self.any_rank(bool(message)):
            return result  # type: ignore[return-value]
        messages = self._exchange_messages(message)
        first = next(rank for rank, text in enumerate(messages) if text)
        raise AllRanksError(messages[0] if first == 0 else f"rank {first} of {self.size}: {messages[first]}")

    def run_on_main(self, function: Callable[[], str]) -> str:
        """Run a function on the main rank and return its result on all of them, which wait as long as it takes.

        An error of the function is raised on all of them, as `AllRanksError`.
        """
        if self.size == 1:
            return function()
        store, key = _store(), _next_key()
        if self.is_main:
            try:
                store.set(key, "+" + function())
            except (ValueError, TypeError, OSError) as error:
                store.set(key, "-" + (str(error) or type(error).__name__))
        store.wait([key], _NO_TIMEOUT)
        message: str = store.get(key).decode()
        self.any_rank(False)
        if message[0] == "-":
            raise AllRanksError(message[1:])
        return message[1:]

    def all_reduce_sum(self, values: Tensor, activity: str = "to add up numbers", group: Any = None) -> Tensor:
        """Add up values over all ranks, or those of a group, in place."""
        if self.size > 1:
            self.set_activity(activity)
            dist.all_reduce(values, group=group)
        return values

    def any_rank(self, flag: bool) -> bool:
        """Return whether a flag is set on some rank."""
        return flag if self.size == 1 else bool(self.all_reduce_sum(torch.tensor(float(flag)), "to agree").item())

    def first_message(self, message: str) -> str:
        """Broadcast the first non-empty message and the rank it came from."""
        if self.size == 1:
            return message
        messages = self._exchange_messages(message)
        rank = next((rank for rank, text in enumerate(messages) if text), 0)
        return f"{messages[rank]} (rank {rank} of {self.size})"

    def _exchange_messages(self, message: str) -> list[str]:
        """Return the messages of all ranks."""
        store, key = _store(), _next_key()
        store.set(f"{key}/{self.rank}", "+" + message)
        messages = [store.get(f"{key}/{rank}").decode()[1:] for rank in range(self.size)]
        self.any_rank(False)  # no rank leaves before all have read
        return messages

    def store_channel(self) -> tuple[Any, str]:
        """Return a separate connection to the store, for a thread, and a key for its messages."""
        return _store().clone(), _next_key()

    def set_activity(self, activity: str) -> None:
        """Note what this rank is about to wait for, for the error if it does not come."""
        self._activity = activity

    @contextmanager
    def translate_comm_errors(self) -> Iterator[None]:
        """Turn errors of gloo and nccl into `TimeoutError` (a rank is silent) or `ConnectionError` (it is lost)."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not _is_comm_error(error):
                raise
            # The first sentence, without the line of C++ that it comes from.
            reason = re.sub(r"^\[[^]]*\] *", "", str(error)).partition("\n")[0].partition(". ")[0]
            if "time" in reason.lower() and self._is_launcher_alive():
                raise TimeoutError(self._describe_timeout(reason)) from error
            raise ConnectionError(self._describe_loss(reason)) from error

    def check_launcher(self) -> None:
        """Raise `ConnectionError` if torchrun, which restarts failed ranks, is not alive; check every few seconds."""
        if self.size > 1 and monotonic() - self._launcher_checked > _LAUNCHER_CHECK_S:
            self._launcher_checked = monotonic()
            if not self._is_launcher_alive():
                raise ConnectionError(self._describe_loss("the store does not answer"))

    def _is_launcher_alive(self) -> bool:
        """Return whether the store answers, which belongs to torchrun or to the main rank."""
        try:
            _store().check(["launched"])
        except RuntimeError:
            return False
        return True

    def _describe_loss(self, reason: str) -> str:
        if self._is_launcher_alive():
            lost = "lost connection to another rank"
        else:
            lost = "lost connection to the torchrun store (torchrun ended, or its host is down?)"
        return f"rank {self.rank} of {self.size}: {lost} while waiting {self._activity} ({reason})"

    def _describe_timeout(self, reason: str) -> str:
        """Name the ranks that do not answer: all live ranks run into the same timeout, and report to the store."""
        store = _store()
        keys = [f"alive/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], self._activity)
        end = monotonic() + _TIMEOUT_REPORT_S
        while monotonic() < end and not store.check(keys):
            sleep(0.1)
        silent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        names = f"rank {', '.join(silent)}" if silent else "a rank"
        return (
            f"rank {self.rank} of {self.size} waited {self._timeout_s} s {self._activity} (parallel.timeout); "
            f"no answer from {names} ({reason})"
        )


def init_distributed() -> World:
    """Connect to the processes that torchrun has started; without torchrun, return a world of this process alone.

    Messages go through gloo, and those between GPUs through nccl.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if not dist.is_initialized():
        # The default arguments of this module hold the group that exists when it is imported. If that were ours, its
        # threads would outlive `_leave`, and abort the process if they are not idle yet.
        import_module("torch.distributed.nn.functional")
        store, rank, size = next(rendezvous("env://"))
        store = PrefixStore(f"anymamba/{_agree_on_launch_id(store, rank, size)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        atexit.register(_leave)  # not before: a process may train again, and a group cannot be made twice
    return World(dist.get_rank(), size)


def _agree_on_launch_id(store: Any, rank: int, size: int) -> str:
    """Agree on an id of this launch of the ranks: torchrun may have started them before, with the same store.

    Every rank publishes a token. The main rank publishes a list of all tokens until every other rank has found its own
    there and has answered; the token of the main rank is the id. The store still holds messages from before a
    restart, so an answer names the main rank's token.
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

    A group joins its threads when nothing refers to it any more, and sharded models refer to theirs in cycles. If
    something still holds a group, its threads get a moment to drop what they have sent.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
        sleep(_GLOO_DRAIN_S)


def is_restarted() -> bool:
    """Return whether torchrun has restarted the processes because one of them was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _is_comm_error(error: RuntimeError) -> bool:
    """Return whether an error is about messages between processes: gloo and nccl have no types for them."""
    words = ("gloo", "nccl", "connection", "timed out", "timeout", "peer", "socket", "broken pipe")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)


def _next_key() -> str:
    """Return a key in the store for the next message; all ranks send the same number of messages."""
    return f"message/{next(_MESSAGE_NUMBERS)}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
