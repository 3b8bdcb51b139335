"""Random JSON schemas, and what constrained rows make of them: python -m tests.generation.schemas --seconds 600

Every reply that ends by itself must be JSON that follows its schema; a schema may be rejected, with an error of one
line.
"""

import argparse
import json
import random
import re
import sys
import time
from collections import Counter

from anymamba.generation import ByteTokenizer, GrammarError, Pipeline
from tests.models.cases import small_lm

WORDS = ["a", "né", 'q"', "日本", "\\", "x y", ""]


def draw_schema(rng, depth=0):
    """Draw a JSON schema, now and then one that no value follows."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kind = rng.choice(kinds + (["array", "object", "object", "anyOf"] if depth < 3 else []))
    low, high = sorted(rng.choices(range(-5, 120), k=2))
    few, many = sorted(rng.choices(range(4), k=2))
    if rng.random() < 0.05:
        low, high, few, many = high, low, many, few
    if kind == "enum":
        return {"enum": rng.sample([*WORDS, 1, -2.5, None, True, [1], {"a": 1}], rng.randrange(1, 4))}
    if kind == "const":
        return {"const": rng.choice([*WORDS, 7, None, False])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-c]{2,3}$", "^(x|yy)*z$", "^[^a]$", r"^\d{4}-\d\d$"])}
    if kind == "string":
        return {"type": "string", "minLength": few, "maxLength": many}
    if kind in ("integer", "number"):
        return {"type": kind, **rng.choice([{}, {"minimum": low}, {"minimum": low, "maximum": high}])}
    if kind == "array":
        return {"type": "array", "items": draw_schema(rng, depth + 1), "minItems": few, "maxItems": many}
    if kind == "anyOf":
        return {"anyOf": [draw_schema(rng, depth + 1) for _ in range(rng.randrange(1, 4))]}
    if kind == "object":
        names = rng.sample(WORDS, rng.randrange(4))
        properties = {name: draw_schema(rng, depth + 1) for name in names}
        required = rng.sample(names, rng.randrange(len(names) + 1))
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind}


def follows(value, schema):
    """Return whether a value follows a schema of `draw_schema`."""
    if "enum" in schema:
        return any(value == choice and type(value) is type(choice) for choice in schema["enum"])
    if "const" in schema:
        return value == schema["const"] and type(value) is type(schema["const"])
    if "anyOf" in schema:
        return any(follows(value, choice) for choice in schema["anyOf"])
    kind = schema["type"]
    if kind == "string":
        pattern = schema.get("pattern", "")
        return (
            isinstance(value, str)
            and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 99)
            and re.search(pattern, value, re.ASCII) is not None
        )
    if kind in ("integer", "number"):
        types = int if kind == "integer" else int | float
        in_range = schema.get("minimum", -float("inf")) <= value if isinstance(value, types) else False
        return in_range and not isinstance(value, bool) and value <= schema.get("maximum", float("inf"))
    if kind == "array":
        in_range = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return in_range and all(follows(item, schema["items"]) for item in value)
    if kind == "object":
        names = set(schema["properties"])
        if not isinstance(value, dict) or not set(schema["required"]) <= set(value) <= names:
            return False
        return all(follows(value[name], schema["properties"][name]) for name in value)
    return value is None if kind == "null" else isinstance(value, bool)


def check_schema(text, seed):
    """Return what became of a random schema: it was followed, cut off or rejected."""
    rng = random.Random(seed)
    schema = draw_schema(rng)
    try:
        completion = text("a", 120, schema=schema, seed=rng.randrange(2**31), temperature=rng.choice([0.0, 1.0, 3.0]))
    except GrammarError:
        return "rejected"
    if completion.reason != "end":
        return "cut off"
    value = json.loads(completion.text)
    assert follows(value, schema), f"seed {seed}: {json.dumps(schema)} has the reply {completion.text!r}"
    return "followed"


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.generation.schemas", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="default: drawn from the clock")
    parser.add_argument("--seconds", type=float, default=120.0, help="default: 120")
    args = parser.parse_args()
    text = Pipeline(small_lm(vocab_size=256, pad_vocab_size_multiple=1), ByteTokenizer())
    outcomes = Counter()
    start = time.monotonic()
    while time.monotonic() - start < args.seconds:
        outcomes[check_schema(text, f"{args.seed} {sum(outcomes.values())}")] += 1
    print(f"seed {args.seed}: {sum(outcomes.values())} schemas: {dict(outcomes)}")


if __name__ == "__main__":
    sys.exit(main())
