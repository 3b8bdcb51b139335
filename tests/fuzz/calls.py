"""Part 2: random calls of the public functions and blocks, compared with the recurrence in float64.

A valid call gives the values of the recurrence, to the floor of its dtype; an invalid one raises ValueError, TypeError,
IndexError or RuntimeError, and never crashes.
"""

import torch
import torch.nn.functional as F

from anymamba import Mamba1, Mamba2, Mamba3, SsdPath, selective_scan, ssd
from anymamba.scan import scan
from tests.fuzz.child import Finding
from tests.support import FLOOR, relative_error

SECONDS = 60.0
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The floor is one rounding; in half precision a block rounds after each of its operations.
HEADROOM = {"float64": 10, "float32": 8, "bfloat16": 8, "float16": 12}
ALGORITHMS = ("fastest", "recurrent", "minimal", "serial", "serial_recalculated", "fused")
BLOCKS = {"Mamba1": Mamba1, "Mamba2": Mamba2, "Mamba3": Mamba3}
REJECTIONS = (ValueError, TypeError, IndexError, RuntimeError)


def prepare(directory):
    """Prepare nothing."""


def make(rng, prepared):
    """Draw a case: a call and its sizes, as a dict."""
    call = rng.choice(["scan", "ssd", "selective_scan", "block", "block", "block"])
    case = {
        "call": call,
        "seed": rng.randrange(10**6),
        "dtype": rng.choice(list(DTYPES)),
        "b": rng.choice([1, 1, 2, 3]),
        "t": rng.choice([1, 2, 3, 5, 8, 13, 31, 33, 64, 70]),
        "bounds": _bounds(rng) if rng.random() < 0.3 else None,
        "state": rng.random() < 0.5,
        "strided": rng.random() < 0.3,
        "algorithm": rng.choice(ALGORITHMS),
        "chunk_len": rng.choice([None, None, 1, 2, 7, 16, 100]),
        "pathway": rng.choice(["single", "double"]),
        "gradients": rng.random() < 0.4,
        "wrong": rng.choice(WRONGS) if rng.random() < 0.2 else None,
    }
    return {**case, **(_block_options(rng) if call == "block" else _sizes(rng))}


def _bounds(rng):
    lengths = [rng.choice([1, 1, 2, 3, 9, 20]) for _ in range(rng.randrange(1, 5))]
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def _sizes(rng):
    g = rng.choice([1, 1, 2, 3])
    return {
        "g": g,
        "h": g * rng.choice([1, 2, 3]),
        "p": rng.choice([1, 3, 4, 8, 17]),
        "n": rng.choice([1, 2, 5, 8, 16, 33]),
        "r": rng.choice([1, 1, 2, 4]),
        "skip": rng.choice([None, "h", "hp"]),
        "decay": rng.choice([0.0, 1e-3, 1.0, 1.0, 30.0]),
    }


def _block_options(rng):
    family = rng.choice(list(BLOCKS))
    headdim, groups = rng.choice([4, 8, 16]), rng.choice([1, 1, 2])
    options = {
        "Mamba1": {
            "d_state": rng.choice([1, 4, 5, 16]),
            "d_conv": rng.choice([1, 2, 3, 4]),
            "dt_rank": rng.choice(["auto", 1, 3]),
            "conv_bias": rng.random() < 0.7,
            "bias": rng.random() < 0.3,
        },
        "Mamba2": {
            "d_state": rng.choice([1, 4, 8, 16]),
            "d_conv": rng.choice([1, 2, 3, 4]),
            "headdim": headdim,
            "ngroups": groups,
            "D_has_hdim": rng.random() < 0.3,
            "rmsnorm": rng.random() < 0.7,
            "norm_before_gate": rng.random() < 0.3,
            "bias": rng.random() < 0.3,
            "chunk_size": rng.choice([None, None, 3, 32]),
            "learnable_init_states": rng.random() < 0.2,
        },
        "Mamba3": {
            "d_state": rng.choice([4, 8, 16]),
            "headdim": headdim,
            "ngroups": groups,
            "rotation": rng.choice(["complex", "complex", "quaternion", "fixed"]),
            "rope_fraction": rng.choice([0, 1, 1]),
            "is_mimo": rng.random() < 0.4,
            "mimo_rank": rng.choice([1, 2, 3, 4]),
            "is_outproj_norm": rng.random() < 0.3,
            "a_activation": rng.choice(["heavy_tail", "softplus"]),
            "bias": rng.random() < 0.3,
            "learnable_init_states": rng.random() < 0.2,
        },
    }[family]
    mask = rng.choice([None, None, "lengths", "holes"])
    how = rng.choice(["prefill", "prefill", "forward", "split", "step"])
    return {"family": family, "options": {"d_model": 16, **options}, "mask": mask, "how": how}


def simpler(case):
    """Yield simpler cases: smaller sizes, and fewer options."""
    least = {"bounds": None, "state": False, "strided": False, "mask": None, "wrong": None, "pathway": "single"}
    least["gradients"] = False
    least |= {"chunk_len": None, "skip": None, "algorithm": "fastest", "dtype": "float64", "how": "prefill"}
    for name, value in least.items():
        if name in case and case[name] != value:
            yield {**case, name: value}
    for name in ("b", "t", "h", "g", "p", "n", "r"):
        for smaller in (1, case.get(name, 0) // 2, case.get(name, 0) - 1):
            fits = 0 < smaller < case.get(name, 0) and (name not in "hg" or _divides({**case, name: smaller}))
            if fits:
                yield {**case, name: smaller}
    for name in case.get("options", {}):
        if name not in ("d_model", "headdim", "d_state"):
            yield {**case, "options": {key: x for key, x in case["options"].items() if key != name}}


def _divides(case):
    return case["h"] % case["g"] == 0


def run(case, prepared, directory):
    """Run a case, and compare its results.

    Returns:
        "right", "rejected", or "as it was" for a call that was spoiled and is still valid.

    Raises:
        Finding: The call gave another value, or another exception.
    """
    torch.manual_seed(case["seed"])
    try:
        return _run_block(case) if case["call"] == "block" else _run_function(case)
    except REJECTIONS as error:
        expected = case["wrong"] or _is_not_offered(case)
        if not expected:
            raise Finding(f"rejected a valid call: {type(error).__name__}: {str(error)[:300]}") from error
        if isinstance(error, RuntimeError) and "no compiled kernel" not in str(error):
            raise  # an error of torch, for input that should have been rejected before
        return "rejected"


def _is_not_offered(case):
    """Return whether the call lacks the algorithm: Mamba-1's scan has fewer, and kernels may be missing."""
    channelwise = case["call"] == "selective_scan" or case.get("family") == "Mamba1"
    if channelwise and case["algorithm"] in ("minimal", "serial"):
        return True
    return case["algorithm"] == "fused" and not _has_kernels(DTYPES[case["dtype"]])


def _has_kernels(dtype):
    x = torch.ones(1, 1, 1, 1, 1, dtype=dtype)
    acc_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    try:
        scan(x, x, x, torch.zeros(1, 1, 1, dtype=acc_dtype), path=SsdPath.fused())
    except RuntimeError:
        return False
    return True


def _path(case):
    return SsdPath(case["algorithm"], case["chunk_len"], case["pathway"])


# Functions


def _inputs(case):
    """Draw the arguments of a function by name, and return them with the form that its recurrence reads."""
    dtype, bounds = DTYPES[case["dtype"]], case["bounds"]
    acc_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    b, t, rows = (1, bounds[-1], len(bounds) - 1) if bounds else (case["b"], case["t"], case["b"])
    h, p, g, n, r = (case[name] for name in "hpgnr")

    def normal(*shape, dtype=dtype):
        x = torch.randn(*shape, dtype=torch.float64).to(dtype)
        return x.transpose(0, 1).contiguous().transpose(0, 1) if case["strided"] and x.ndim > 1 else x

    decay = -case["decay"] * torch.rand(b, t, h, dtype=torch.float64).to(acc_dtype)
    if case["call"] == "scan":
        inputs = {
            "v": normal(b, t, r, h, p),
            "k": normal(b, t, r, g, n),
            "q": normal(b, t, r, g, n),
            "log_decay": decay,
        }
        return inputs, (rows, h, p, n), acc_dtype
    if case["call"] == "ssd":
        skip = {None: None, "h": (h,), "hp": (h, p)}[case["skip"]]
        inputs = {
            "x": normal(b, t, h, p),
            "dt": torch.rand(b, t, h, dtype=acc_dtype),
            "A": -case["decay"] * torch.rand(h, dtype=acc_dtype),
        }
        inputs |= {
            "B": normal(b, t, g, n),
            "C": normal(b, t, g, n),
            "D": None if skip is None else normal(*skip, dtype=acc_dtype),
        }
        return inputs, (rows, h, p, n), acc_dtype
    inputs = {"x": normal(b, t, h), "dt": normal(b, t, h, dtype=acc_dtype), "A": -normal(h, n, dtype=acc_dtype).abs()}
    inputs |= {"B": normal(b, t, n), "C": normal(b, t, n)}
    inputs |= {"D": normal(h, dtype=acc_dtype), "z": normal(b, t, h)} if case["skip"] else {}
    return inputs, (rows, h, n), acc_dtype


def _run_function(case):
    inputs, state_shape, acc_dtype = _inputs(case)
    state = torch.randn(state_shape, dtype=torch.float64).to(acc_dtype) if case["state"] else None
    cu_seqlens = torch.tensor(case["bounds"]) if case["bounds"] else None
    options = {"initial_state": state, "path": _path(case), "cu_seqlens": cu_seqlens}
    function = {"scan": scan, "ssd": ssd, "selective_scan": selective_scan}[case["call"]]
    if case["wrong"]:
        _make_wrong(case["wrong"], inputs, options)
        function(**inputs, **options)
        return "as it was"
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if x is not None}
    y, final = function(**inputs, **options)
    exact = {name: None if x is None else x.detach().double().requires_grad_() for name, x in inputs.items()}
    expected = _by_recurrence(case["call"], exact, state, state_shape, case["bounds"])
    _compare(case, {"y": y, "state": final}, expected)
    _compare_gradients(case, (y, final), leaves, (expected["y"], expected["state"]), exact)
    return "right"


def _by_recurrence(call, inputs, state, state_shape, bounds):
    """Compute the definition step by step in float64, row by row."""
    rows = state_shape[0]
    states = torch.zeros(state_shape, dtype=torch.float64) if state is None else state.double()
    step = {"scan": _scan_step, "ssd": _ssd_step, "selective_scan": _selective_step}[call]
    timed = {"v", "k", "q", "log_decay", "x", "dt", "B", "C", "z"}
    ys, finals = [], []
    for row in range(rows):
        state_row = states[row]
        span = slice(bounds[row], bounds[row + 1]) if bounds else slice(None)
        source = 0 if bounds else row
        of_row = {name: x[source, span] if name in timed and x is not None else x for name, x in inputs.items()}
        length = next(iter(of_row.values())).shape[0]
        outputs = []
        for t in range(length):
            now = {name: x[t] if name in timed and x is not None else x for name, x in of_row.items()}
            y, state_row = step(state_row, **now)
            outputs.append(y)
        ys.append(torch.stack(outputs))
        finals.append(state_row)
    return {"y": torch.cat(ys).unsqueeze(0) if bounds else torch.stack(ys), "state": torch.stack(finals)}


def _scan_step(state, v, k, q, log_decay):
    heads = v.shape[1] // k.shape[1]
    k, q = (m.repeat_interleave(heads, dim=1) for m in (k, q))
    state = log_decay.exp()[:, None, None] * state + torch.einsum("rhp,rhn->hpn", v, k)
    return torch.einsum("hpn,rhn->rhp", state, q), state


def _ssd_step(state, x, dt, A, B, C, D):
    heads = x.shape[0] // B.shape[0]
    B, C = (m.repeat_interleave(heads, dim=0) for m in (B, C))
    state = (dt * A).exp()[:, None, None] * state + torch.einsum("hp,hn->hpn", dt[:, None] * x, B)
    y = torch.einsum("hpn,hn->hp", state, C)
    return y if D is None else y + (D if D.ndim == 2 else D[:, None]) * x, state


def _selective_step(state, x, dt, A, B, C, D=None, z=None):
    size = F.softplus(dt)
    state = (size[:, None] * A).exp() * state + (size * x)[:, None] * B
    y = state @ C
    y = y if D is None else y + D * x
    return (y if z is None else y * F.silu(z)), state


# Blocks


def _run_block(case):
    dtype, bounds = DTYPES[case["dtype"]], case["bounds"] if case["how"] != "step" else None
    block, block64 = _make_block(case, dtype)
    b, t, rows = (1, bounds[-1], len(bounds) - 1) if bounds else (case["b"], case["t"], case["b"])
    x = torch.randn(b, t, 16, dtype=torch.float64).to(dtype)
    x = x.transpose(0, 1).contiguous().transpose(0, 1) if case["strided"] else x
    cache = None
    if case["state"]:
        cache = block64.prefill(torch.randn(rows, 3, 16, dtype=torch.float64))[1].detach().to(dtype)
    mask = None if bounds or case["how"] == "step" else _mask(case["mask"], b, t)
    options = {"path": _path(case), "cu_seqlens": torch.tensor(bounds) if bounds else None, "mask": mask}
    if case["wrong"]:
        arguments = {"x": x, "cache": cache}
        _make_wrong(case["wrong"], arguments, options)
        block.prefill(**arguments, **options)
        block.step(arguments["x"][:, 0], arguments["cache"])
        return "as it was"
    leaves, exact = {"x": x.requires_grad_()}, {"x": x.detach().double().requires_grad_()}
    with torch.set_grad_enabled(case["gradients"]):
        outputs = _call_block(case["how"], block, x, cache, options)
        cache64 = block64.init_cache(rows) if cache is None else cache.to(torch.float64)
        expected = _by_steps(block64, exact["x"], cache64, bounds, mask)
    _compare(case, outputs, expected)
    leaves, exact = leaves | dict(block.named_parameters()), exact | dict(block64.named_parameters())
    _compare_gradients(case, (outputs["y"],), leaves, (expected["y"],), exact)
    return "right"


def _make_block(case, dtype):
    """Return a block whose parameters differ from their initial values, and the same block in float64."""
    kind = BLOCKS[case["family"]]
    block = kind(**case["options"], dtype=dtype)
    for parameter in block.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    block64 = kind(block.config, dtype=torch.float64)
    block64.load_state_dict(block.state_dict())
    return block, block64


def _mask(kind, b, t):
    if kind == "lengths":
        return torch.randint(0, t + 1, (b,))
    return torch.rand(b, t) < 0.6 if kind == "holes" else None


def _call_block(how, block, x, cache, options):
    """Run the block, and return its outputs, and the cache if the call returns one."""
    if how == "forward":
        return {"y": block(x, cache, return_cache=False, **options)}
    if how == "step":
        ys = []
        for t in range(x.shape[1]):
            y, cache = block.step(x[:, t], cache)
            ys.append(y)
        return {"y": torch.stack(ys, 1), "cache": cache}
    if how == "split" and options["mask"] is None and options["cu_seqlens"] is None and x.shape[1] > 1:
        cut = x.shape[1] // 2
        head, cache = block.prefill(x[:, :cut], cache, path=options["path"])
        tail, cache = block.prefill(x[:, cut:], cache, path=options["path"])
        return {"y": torch.cat([head, tail], 1), "cache": cache}
    y, cache = block.prefill(x, cache, **options)
    return {"y": y, "cache": cache}


def _by_steps(block, x, cache, bounds, mask):
    """Run the block token by token in float64, each sequence alone and without its padding."""
    caches, outputs = [], {}
    for row in range(cache.batch_size):
        source, positions = (0, range(bounds[row], bounds[row + 1])) if bounds else (row, range(x.shape[1]))
        if mask is not None:
            real = mask[row] if mask.dtype == torch.bool else torch.arange(x.shape[1]) < mask[row]
            positions = real.nonzero().flatten().tolist()
        row_cache = cache.rows(row)
        for t in positions:
            y, row_cache = block.step(x[source : source + 1, t], row_cache)
            outputs[source, t] = y[0]
        caches.append(row_cache)
    zero = torch.zeros(x.shape[-1], dtype=x.dtype)
    y = [torch.stack([outputs.get((b, t), zero) for t in range(x.shape[1])]) for b in range(x.shape[0])]
    return {"y": torch.stack(y), "cache": type(cache).cat(caches)}


def _compare(case, outputs, expected):
    tolerance = HEADROOM[case["dtype"]] * FLOOR[DTYPES[case["dtype"]]]
    flat_outputs, flat_expected = _flat(outputs), _flat(expected)
    for name, x in flat_outputs.items():
        error = relative_error(x, flat_expected[name], least=1e-6)
        if x.shape != flat_expected[name].shape:
            raise Finding(f"{name} has the shape {tuple(x.shape)}, expected {tuple(flat_expected[name].shape)}")
        if error > tolerance:
            raise Finding(f"{name} is {error:.1e} away from the recurrence in float64, tolerated {tolerance:.0e}")


def _compare_gradients(case, outputs, leaves, expected_outputs, expected_leaves):
    """Compute the gradients of all inputs and parameters under one random loss, if the dtype is precise enough."""
    if not case["gradients"] or case["dtype"] in ("bfloat16", "float16"):
        return
    heads = [torch.randn(x.shape, dtype=torch.float64) for x in outputs]
    pairs = []
    for values, tensors in ((outputs, leaves), (expected_outputs, expected_leaves)):
        named = {name: x for name, x in tensors.items() if x is not None}
        loss = sum((x * head.to(x.dtype)).sum() for x, head in zip(values, heads, strict=True))
        if not loss.requires_grad:  # all is padding
            return
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        pairs.append(
            {
                name: torch.zeros_like(x) if g is None else g
                for (name, x), g in zip(named.items(), gradients, strict=True)
            }
        )
    least = 1e-3 * max(float(x.abs().max()) for x in pairs[1].values())
    tolerance = 4 * HEADROOM[case["dtype"]] * FLOOR[DTYPES[case["dtype"]]]
    for name, x in pairs[0].items():
        if (error := relative_error(x, pairs[1][name], least=least)) > tolerance:
            raise Finding(f"the gradient of {name} is {error:.1e} away from that in float64, tolerated {tolerance:.0e}")


def _flat(results):
    """Return tensors by name; an angle, which is defined modulo a full circle, as its cosine and sine."""
    flat = {name: x for name, x in results.items() if isinstance(x, torch.Tensor)}
    for name, x in results["cache"].tensors().items() if "cache" in results else ():
        flat |= {"cos": x.cos(), "sin": x.sin()} if name == "rotation" and x.ndim == 3 else {name: x}
    return flat


# What is wrong with a call


WRONGS = ("shape", "rank", "dtype", "none", "text", "empty", "bounds", "state", "nan", "device", "mask")


def _make_wrong(what, inputs, options):
    """Spoil one argument, chosen by torch's generator."""
    tensors = [name for name, x in inputs.items() if isinstance(x, torch.Tensor)]
    name = tensors[int(torch.randint(len(tensors), ()))]
    x = inputs[name]
    changes = {
        "shape": lambda: torch.cat([x, x], -1),
        "rank": lambda: x.unsqueeze(0),
        "dtype": lambda: x.to(torch.int32),
        "none": lambda: None,
        "text": lambda: "x",
        "empty": lambda: x[..., :0],
        "nan": lambda: torch.full_like(x, float("nan")),
        "device": lambda: x.to("meta"),
    }
    if what in changes:
        inputs[name] = changes[what]()
    elif what == "bounds":
        wrong = [[0, 5, 3], [1, 2], [0], [], [0, 10**6], [-1, 4], [0, 0, 1]]
        options["cu_seqlens"] = torch.tensor(wrong[int(torch.randint(len(wrong), ()))])
    elif what == "mask" and "mask" in options:
        options["mask"] = torch.ones(1, 10**4, dtype=torch.bool)
    elif "initial_state" in options:
        options["initial_state"] = torch.zeros(1, 1, 1)
    else:
        inputs["cache"] = ("not", "a cache")
