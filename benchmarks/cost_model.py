"""Cost model of a training step on several ranks: operations, bytes sent per rank, and the time for both.

A step reads rows of t tokens on a mesh of `replicate · shard · context` ranks and sums gradients once, however many
microbatches it has. Matmuls, the recurrence of Mamba-1, and messages of more than one number are counted.
docs/scale.md has the formulas.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from anymamba.blocks.mamba1 import Mamba1Config
from anymamba.blocks.mamba2 import Mamba2Config
from anymamba.blocks.mamba3_config import Mamba3Config
from anymamba.checkpoints.empty_model import empty_model
from anymamba.models.config import MambaLMConfig
from anymamba.scan import SsdPath

Shape = tuple[int, ...]
Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "send"]
_WEIGHT = 4  # bytes of a weight: they are kept in float32


class Mesh(NamedTuple):
    """The mesh of ranks."""

    replicate: int = 1
    shard: int = 1
    context: int = 1

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.replicate * self.shard * self.context

    @property
    def copies(self) -> int:
        """Return the number of ranks that have the same weights, or the same shard of them."""
        return self.replicate * self.context


class Sizes(NamedTuple):
    """The sizes that costs depend on, in a model whose layers are alike.

    Attributes:
        layers: Number of layers.
        layer: Shapes of a layer's parameters.
        rest: Shapes of the parameters of embedding, head and last norm.
        carried: Bytes of a layer's cache, for one sequence.
        products: Forward operations per token in matrix products other than those of scans.
        scan: Forward operations per token in the scans of all layers.
        again: Operations that context parallelism adds: the final state of a part is computed before the part itself.
    """

    layers: int
    layer: tuple[Shape, ...]
    rest: tuple[Shape, ...]
    carried: int
    products: int
    scan: int
    again: int

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the model."""
        return self.layers * _numbers(self.layer) + _numbers(self.rest)

    def flops(self, context: int = 1) -> int:
        """Return the operations per token, forward and backward; backward takes twice as many as forward."""
        return 3 * (self.products + self.scan + (self.again if context > 1 else 0))


def sizes_of(config: MambaLMConfig, dtype: torch.dtype = torch.float32) -> Sizes:
    """Return the sizes of a model that computes in `dtype`.

    Raises:
        ValueError: its layers are not alike, or pass more than once.
    """
    if config.stack:
        raise ValueError(f"costs: the layers must be alike and pass once, got stack = {config.stack}")
    model: Any = empty_model(dataclasses.replace(config, n_layer=1))
    layer = model.backbone.layers[0]
    inside = {id(p) for p in layer.parameters()}
    rest = [p for p in model.parameters() if id(p) not in inside]
    matrices = sum(m.weight.numel() for m in layer.modules() if isinstance(m, nn.Linear))
    scan, again = _scan(layer.mixer.config)
    return Sizes(
        config.n_layer,
        tuple(tuple(p.shape) for p in layer.parameters()),
        tuple(tuple(p.shape) for p in rest),
        layer.mixer.init_cache(1, dtype).nbytes,
        2 * (config.n_layer * matrices + model.lm_head.weight.numel()),
        config.n_layer * scan,
        config.n_layer * again,
    )


def _scan(c: Any) -> tuple[int, int]:
    """Return the operations per token of a layer's scan, and those of computing its final state."""
    if isinstance(c, Mamba1Config):
        operations = 7 * c.d_inner * c.d_state  # Δ A, exp, Δ x B, a h + b, h C and its sum
        return operations, operations
    if not isinstance(c, Mamba2Config | Mamba3Config):
        raise ValueError(f"costs: expected Mamba-1, Mamba-2 or Mamba-3, got {type(c).__name__}")
    rank = c.rank if isinstance(c, Mamba3Config) else 1
    chunk = c.chunk_size or SsdPath.optimal_chunk_len(c.d_state, c.headdim, rank)
    width = c.nheads * c.headdim
    if isinstance(c, Mamba2Config):
        inside = 2 * chunk * (c.ngroups * c.d_state + width)
        return inside + 4 * width * c.d_state, 2 * width * c.d_state
    # Keys have a bias and a rotation for each head; the newest token is a separate product, and with several ranks so
    # are its values.
    keys = c.nheads * c.d_state
    inside = 2 * rank**2 * (chunk * (keys + width) + keys + (width if c.is_mimo else 0))
    operations = inside + 4 * rank * width * c.d_state
    return operations, operations


class Message(NamedTuple):
    """A message between ranks.

    Attributes:
        kind: Kind of exchange.
        ranks: Number of ranks that take part.
        size: Bytes of the whole result, or of what is sent to an adjacent rank.
    """

    kind: Kind
    ranks: int
    size: int

    @property
    def sent(self) -> float:
        """Return the bytes that each rank sends, in a ring."""
        if self.kind == "send":
            return float(self.size)
        return (2 if self.kind == "all-reduce" else 1) * self.size * (self.ranks - 1) / self.ranks


def messages(sizes: Sizes, mesh: Mesh, *, parts: int = 1, cp_rank: int = 0, gradient: int = 4) -> list[Message]:
    """Return the messages of a rank in a step of AdamW on packed rows.

    Args:
        sizes: Sizes of the model.
        mesh: Mesh of ranks.
        parts: Number of microbatches (`batch.accumulation`).
        cp_rank: Index of the rank among those that share its rows.
        gradient: Bytes of a number when gradients are reduced (`parallel.reduce`).
    """
    messages = []
    if mesh.shard > 1:
        layers, rest = sizes.layers * _padded_size(sizes.layer, mesh.shard), _padded_size(sizes.rest, mesh.shard)
        # Layers are put together for the forward pass and for the backward pass, the rest stays together between them.
        messages.append(Message("all-gather", mesh.shard, parts * _WEIGHT * (2 * layers + rest)))
        messages.append(Message("reduce-scatter", mesh.shard, parts * gradient * (layers + rest)))
        if mesh.copies > 1:
            messages.append(Message("all-reduce", mesh.copies, gradient * (layers + rest) // mesh.shard))
    elif mesh.copies > 1:
        messages.append(Message("all-reduce", mesh.copies, gradient * sizes.parameters))
    adjacent_ranks = (cp_rank > 0) + (cp_rank + 1 < mesh.context)
    if adjacent_ranks:
        messages.append(Message("send", 2, parts * adjacent_ranks * sizes.layers * sizes.carried))
    return messages


def ring_attention_bytes(layers: int, width: int, length: int, context: int, number: int = 2) -> float:
    """Return the bytes that a rank sends for one row under ring attention.

    Keys and values of all other parts are passed on in the forward pass, and with their gradients in the backward pass.

    Args:
        layers: Number of attention layers.
        width: Width of a token's keys, and of its values.
        length: Tokens of the row.
        context: Number of ranks that share the row.
        number: Bytes of a number.
    """
    return 3 * 2 * layers * width * number * length * (context - 1) / context


class Machine(NamedTuple):
    """The speed and memory of one rank.

    Attributes:
        flops: Operations per second that it achieves.
        bandwidth: Bytes per second that it sends.
        latency: Seconds of the shortest message.
        memory: Memory in bytes.
    """

    flops: float
    bandwidth: float
    latency: float
    memory: float

    def hop(self, sizes: Sizes) -> float:
        """Return the seconds to send a layer's state to the next rank."""
        return self.latency + sizes.carried / self.bandwidth


def step_seconds(sizes: Sizes, mesh: Mesh, rows: int, length: int, machine: Machine) -> float:
    """Return the seconds of a step in which communication and computation do not overlap.

    A rank that shares a row begins a layer when the rank before it has sent what the layer carries, so it follows
    by one hop in all layers. From the first token's first layer to the last token's last layer there is a hop for every
    layer and one for every rank, and as many on the way back.
    """
    rank_tokens = math.ceil(rows / (mesh.replicate * mesh.shard)) * length / mesh.context
    sent = sum(message.sent for message in messages(sizes, mesh) if message.kind != "send")
    hops = 2 * (sizes.layers + mesh.context - 2) if mesh.context > 1 else 0
    return (
        rank_tokens * sizes.flops(mesh.context) / machine.flops + sent / machine.bandwidth + hops * machine.hop(sizes)
    )


def best_context(sizes: Sizes, length: int, machine: Machine) -> float:
    """Return the number of ranks that compute a row in the least time: more of them would wait longer."""
    return math.sqrt(length * sizes.flops(2) / machine.flops / (2 * machine.hop(sizes)))


def fits(sizes: Sizes, mesh: Mesh, machine: Machine) -> bool:
    """Return whether weights, gradients and the two moments of AdamW fit a rank; activations are not counted."""
    return 4 * _WEIGHT * sizes.parameters / mesh.shard <= machine.memory


def _numbers(shapes: tuple[Shape, ...]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _padded_size(shapes: tuple[Shape, ...], shard: int) -> int:
    """Return the size of parameters whose rows are sharded, each padded to the same number of rows on every rank."""
    return sum(-(-shape[0] // shard) * shard * math.prod(shape[1:]) for shape in shapes)
