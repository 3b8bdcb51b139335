"""The cases of generation: whole models of the mamba2-130m and mamba3-187m shapes with random weights.

Mamba-2 stands beside transformers on the same weights; Mamba-3, which transformers has not, beside our Mamba-2.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from anymamba.generation.prefill import prefill
from anymamba.models import MambaLM, MambaLMConfig
from benchmarks.harness import Call, Case, Contender, forward

MAMBA2_130M = MambaLMConfig(
    d_model=768, n_layer=24, vocab_size=50277, pad_vocab_size_multiple=16, ssm_cfg={"layer": "Mamba2"}
)
MAMBA3_SISO_187M = MambaLMConfig(
    d_model=768, n_layer=12, vocab_size=128256, d_intermediate=1536, ssm_cfg={"layer": "Mamba3"}
)
MAMBA3_MIMO_187M = dataclasses.replace(
    MAMBA3_SISO_187M, d_intermediate=1264, ssm_cfg={"layer": "Mamba3", "is_mimo": True, "mimo_rank": 4}
)
CONFIGS = {"mamba2-130m": MAMBA2_130M, "mamba3-siso-187m": MAMBA3_SISO_187M, "mamba3-mimo-187m": MAMBA3_MIMO_187M}


def tiny(config: MambaLMConfig) -> MambaLMConfig:
    """The same model with one layer and few tokens."""
    return dataclasses.replace(config, n_layer=1, vocab_size=256, d_model=128)


@cache
def our_model(config: str, small: bool = False) -> MambaLM:
    """Our model with random weights, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MambaLM(tiny(CONFIGS[config]) if small else CONFIGS[config]).eval()


@cache
def transformers_model(config: str, small: bool = False) -> Any:
    """The model of transformers with the weights of ours, through its own files."""
    with tempfile.TemporaryDirectory() as directory:
        our_model(config, small).save_pretrained(directory, format="transformers")
        return import_module("transformers").Mamba2ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def prompt(batch: int, t: int) -> Tensor:
    """Random token ids (b, t)."""
    return torch.randint(256, (batch, t), generator=torch.Generator().manual_seed(2))


def set_up_prefill(config: str, library: str, batch: int, t: int, small: bool = False) -> Call:
    """A prompt into the logits of the next token and a cache, in segments where ours does so."""
    ids_bt = prompt(batch, t)
    if library == "transformers":
        theirs = transformers_model(config, small)
        return forward(lambda: {"logits": theirs(ids_bt, use_cache=True, logits_to_keep=1).logits[:, -1]})
    model, rows = our_model(config, small), list(ids_bt)
    return forward(lambda: {"logits": prefill(model, rows)[0]})


def set_up_decode(config: str, library: str, batch: int, t: int, small: bool = False) -> Call:
    """One token a row after a prompt; each call goes on from the cache that the one before it left."""
    ids_bt, ids_b = prompt(batch, t), prompt(batch, 1)[:, 0]
    with torch.no_grad():
        if library == "transformers":
            theirs = transformers_model(config, small)
            past = theirs(ids_bt, use_cache=True).cache_params

            def their_step() -> dict[str, Tensor]:
                out = theirs(ids_b.unsqueeze(1), cache_params=past, use_cache=True)
                return {"logits": out.logits[:, -1]}

            return forward(their_step)
        model = our_model(config, small)
        _, state = prefill(model, list(ids_bt))

    def step() -> dict[str, Tensor]:
        nonlocal state
        logits, state = model.step(ids_b, state)
        return {"logits": logits}

    return forward(step)


def set_up_reading(config: str, small: bool = False) -> Call:
    """Every weight read from memory once, as a sum over each parameter: the least a token can cost."""
    parameters = list(our_model(config, small).parameters())
    return forward(lambda: {"sums": torch.stack([p.view(-1).sum() for p in parameters])})


def contender(name: str, set_up: Callable[..., Call], *arguments: Any, **options: Any) -> Contender:
    """One library on one workload."""
    config = arguments[0]
    return Contender(
        name=name,
        setup=partial(set_up, *arguments),
        tiny=partial(set_up, *arguments[:2], 1, 16, True) if len(arguments) > 2 else partial(set_up, config, True),
        **options,
    )


def against_transformers(name: str, set_up: Callable[..., Call], batch: int, t: int, *, read: bool = False) -> Case:
    """Mamba-2, ours and transformers', on the same weights."""
    config = "mamba2-130m"
    contenders = tuple(
        contender(library, set_up, config, library, batch, t, computes=name, library=library, heavy=t > 2048)
        for library in ("anymamba", "transformers")
    )
    if read:
        contenders = (*contenders, contender("reading all weights once", set_up_reading, config, computes="reading"))
    return Case(name=f"generation/{name}", contenders=contenders, baseline="anymamba", tolerance=1e-4)


def by_family(name: str, set_up: Callable[..., Call], batch: int, t: int) -> Case:
    """The families side by side."""
    contenders = tuple(contender(c, set_up, c, "anymamba", batch, t, computes=c) for c in CONFIGS)
    return Case(name=f"generation/{name}", contenders=contenders, baseline="mamba2-130m")


CASES: tuple[Case, ...] = (
    *(against_transformers(f"prefill/t{t}", set_up_prefill, 1, t) for t in (512, 2048, 8192)),
    against_transformers("decode/b1", set_up_decode, 1, 64, read=True),
    against_transformers("decode/b8", set_up_decode, 8, 64),
    by_family("families/prefill/t2048", set_up_prefill, 1, 2048),
    by_family("families/decode/b1", set_up_decode, 1, 64),
    by_family("families/decode/b8", set_up_decode, 8, 64),
)
