"""Ways to damage a file, each described completely by a dict: {"how": "flip", "at": 17, "bit": 3}."""

import hashlib
import json
import pickle
import struct

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

# JSON texts that a field may be replaced by.
VALUES = {
    **{x: x for x in ("null", "true", "false", "0", "1", "-1", "2", "7", "1.5", "-0.0", "[]", "{}", '""', '"x"')},
    **{x: x for x in ("NaN", "Infinity", "-Infinity", "1e308", "1e-320", "2147483647", "2147483648")},
    "2^62": str(2**62),
    "2^64": str(2**64),
    "10^400": str(10**400),
    "-10^400": str(-(10**400)),
    "10^5000": "1" + "0" * 5000,
    "a long text": json.dumps("x" * 10**5),
    "half a character": '"\\ud800"',
    "a zero byte": '"a\\u0000b"',
    "a path": '"../../../etc/passwd"',
    "a list of lists": "[[1, [2]], {}]",
    "a list of 50 levels": "[" * 50 + "]" * 50,
    "a list of 900 levels": "[" * 900 + "]" * 900,
    "a list of 10^5 levels": "[" * 10**5 + "]" * 10**5,
    "a table of 10^5 levels": '{"a":' * 10**5 + "1" + "}" * 10**5,
}
TENSORS = {
    "nan": lambda x: torch.full_like(x, float("nan")) if x.is_floating_point() else x,
    "infinity": lambda x: torch.full_like(x, -float("inf")) if x.is_floating_point() else x,
    "negative": lambda x: -x - 1 if x.dtype != torch.bool else ~x,
    "double": lambda x: x.double(),
    "single": lambda x: x.float(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "whole": lambda x: x.to(torch.int64),
    "byte": lambda x: x.to(torch.int8),
    "bool": lambda x: x > 0,
    "complex": lambda x: x.to(torch.complex64),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "scalar": lambda x: x.reshape(-1)[0] if x.numel() else x,
    "flat": lambda x: x.reshape(-1),
    "narrow": lambda x: x[..., : x.shape[-1] // 2] if x.ndim else x,
    "one row": lambda x: x[:1] if x.ndim else x,
    "no rows": lambda x: x[:0] if x.ndim else x,
    "twice": lambda x: torch.cat([x, x]) if x.ndim else x,
    "one more dimension": lambda x: x.unsqueeze(0),
    "transposed": lambda x: x.transpose(0, -1) if x.ndim else x,
}
PICKLES = {
    "code": lambda tensors, marker: {"a": _Bomb(marker)},
    "a list": lambda tensors, _: list(tensors.values()),
    "numbers for names": lambda tensors, _: dict(enumerate(tensors.values())),
    "numbers for tensors": lambda tensors, _: dict.fromkeys(tensors, 1.5),
    "a table in it": lambda tensors, _: {"state_dict": tensors},
    "sparse": lambda tensors, _: {name: x.to_sparse() for name, x in tensors.items()},
    "meta": lambda tensors, _: {name: x.to("meta") for name, x in tensors.items()},
    "quantized": lambda tensors, _: {
        name: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8) for name, x in tensors.items()
    },
    "expanded": lambda tensors, _: {name: torch.zeros(()).expand(x.shape) for name, x in tensors.items()},
    "parameters": lambda tensors, _: {name: torch.nn.Parameter(x) for name, x in tensors.items()},
}


class _Bomb:
    """An object whose pickle runs code: opening it creates a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (open, (self.marker, "w"))


def draw(rng, content, kind):
    """Draw a mutation of a file of a kind ("json", "safetensors", "pickle" or "bytes"), as a dict."""
    ways = {"json": ["bytes", "json", "json", "json"], "safetensors": ["bytes", "header", "tensor", "tensor"]}
    ways = {**ways, "pickle": ["bytes", "bytes", "pickle"]}.get(kind, ["bytes"])
    way = rng.choice(ways)
    if way == "bytes":
        return _draw_bytes(rng, len(content))
    if way == "pickle":
        return {"how": "pickle", "what": rng.choice(list(PICKLES))}
    if way == "tensor":
        names = sorted(_tensors(content))
        what = rng.choice([*TENSORS, "dropped", "renamed", "added", "swapped"])
        name, other = (rng.choice(names) if names else "x" for _ in range(2))
        return {"how": "tensor", "name": name, "what": what, **({"other": other} if what == "swapped" else {})}
    text = content if way == "json" else _header(content)[0]
    return {**_draw_json(rng, text), "in": way}


def _draw_bytes(rng, size):
    at, length = rng.randrange(size + 1), rng.choice([1, 1, 2, 8, 64, 1000])
    return rng.choice(
        [
            {"how": "flip", "at": at, "bit": rng.randrange(8)},
            {"how": "flip", "at": rng.randrange(min(size + 1, 64)), "bit": rng.randrange(8)},
            {"how": "write", "at": at, "bytes": rng.randbytes(length).hex()},
            {"how": "insert", "at": at, "bytes": rng.randbytes(length).hex()},
            {"how": "fill", "at": at, "length": length, "byte": rng.choice([0, 0x20, 0x7F, 0xFF])},
            {"how": "cut", "at": at, "length": length},
            {"how": "truncate", "at": at},
            {"how": "copy", "at": at, "length": length, "to": rng.randrange(size + 1)},
        ]
    )


def _draw_json(rng, text):
    try:
        value = json.loads(text)
    except ValueError:
        return {"how": "replace", "path": [], "value": rng.choice(list(VALUES))}
    path = []
    while isinstance(value, dict | list) and value and (not path or rng.random() < 0.75):
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        path.append(key)
        value = value[key]
    name = rng.choice(["x", "layer", "kind", "d_state", "vocab_size", "__metadata__"])
    new = rng.choice(list(VALUES))
    return rng.choice(
        [
            *[{"how": "replace", "path": path, "value": new}] * 4,
            {"how": "drop", "path": path},
            {"how": "rename", "path": path, "name": name},
            {"how": "add", "path": path[:-1], "name": name, "value": new},
        ]
    )


def apply(mutation, content, marker):
    """Return the content of a file after a mutation; unchanged where the mutation does not apply."""
    how, at = mutation["how"], mutation.get("at", 0)
    if how == "flip":
        return content[:at] + bytes(x ^ (1 << mutation["bit"]) for x in content[at : at + 1]) + content[at + 1 :]
    if how == "write":
        new = bytes.fromhex(mutation["bytes"])
        return content[:at] + new + content[at + len(new) :]
    if how == "insert":
        return content[:at] + bytes.fromhex(mutation["bytes"]) + content[at:]
    if how == "fill":
        end = min(len(content), at + mutation["length"])
        return content[:at] + bytes([mutation["byte"]]) * (end - at) + content[end:]
    if how == "cut":
        return content[:at] + content[at + mutation["length"] :]
    if how == "truncate":
        return content[:at]
    if how == "copy":
        part = content[at : at + mutation["length"]]
        return content[: mutation["to"]] + part + content[mutation["to"] + len(part) :]
    if how == "pickle":
        try:
            return _pickle(PICKLES[mutation["what"]](_tensors(content), marker))
        except (NotImplementedError, RuntimeError):  # torch has no such tensor of what an earlier change made of these
            return content
    if how == "tensor":
        return _with_tensor(mutation, content)
    if mutation["in"] == "json":
        return _change_json(mutation, content)
    header, data = _header(content)
    header = _change_json(mutation, header)
    return struct.pack("<Q", len(header)) + header + data


def _change_json(mutation, text):
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return text
    path, new = mutation["path"], "@new@"
    if not path and mutation["how"] == "replace":
        return VALUES[mutation["value"]].encode()
    parent = whole
    for key in path if mutation["how"] == "add" else path[:-1]:
        if not _has(parent, key):
            return text
        parent = parent[key]
    if mutation["how"] == "add":
        if not isinstance(parent, dict):
            return text
        parent[mutation["name"]] = new
    elif not path or not _has(parent, path[-1]):
        return text
    elif mutation["how"] == "replace":
        parent[path[-1]] = new
    else:
        value = parent.pop(path[-1])
        if mutation["how"] == "rename" and isinstance(parent, dict):
            parent[mutation["name"]] = value
    return json.dumps(whole).replace('"@new@"', VALUES.get(mutation.get("value"), "0")).encode()


def _has(parent, key):
    if isinstance(parent, dict):
        return key in parent
    return isinstance(parent, list) and isinstance(key, int) and key < len(parent)


def _header(content):
    size = int.from_bytes(content[:8], "little")
    return content[8 : 8 + size], content[8 + size :]


def _tensors(content):
    try:
        return load(content)
    except (SafetensorError, ValueError, RuntimeError, TypeError, KeyError):
        pass
    try:
        import io

        loaded = torch.load(io.BytesIO(content), weights_only=True)
    except Exception:  # damaged already
        return {}
    return {name: x for name, x in loaded.items() if isinstance(x, torch.Tensor)} if isinstance(loaded, dict) else {}


def _with_tensor(mutation, content):
    tensors, name = _tensors(content), mutation["name"]
    if name not in tensors:
        return content
    what, x = mutation["what"], tensors[name]
    if what == "swapped":
        tensors[name], tensors[mutation["other"]] = tensors.get(mutation["other"], x), x
    if what in ("dropped", "renamed"):
        del tensors[name]
    if what in ("added", "renamed"):
        tensors["more"] = x.clone()
    if what in TENSORS:
        try:
            tensors[name] = TENSORS[what](x).contiguous()
        except (RuntimeError, TypeError):  # not for this dtype
            return content
    metadata = json.loads(_header(content)[0]).get("__metadata__")
    return save({key: value.clone() for key, value in tensors.items()}, metadata)


def _pickle(value):
    import io

    file = io.BytesIO()
    try:
        torch.save(value, file)
    except (RuntimeError, pickle.PicklingError):
        return b""
    return file.getvalue()


def sign_state(content):
    """Return a state file with a valid checksum, if it has one."""
    start = content.find(b'"checksum":"') + 12
    if start < 12:
        return content
    content = content[:start] + b"0" * 32 + content[start + 32 :]
    return content[:start] + hashlib.blake2b(content, digest_size=16).hexdigest().encode() + content[start + 32 :]
