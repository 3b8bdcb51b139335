import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "anymamba"

# Top to bottom: a room imports only from itself and from those below it.
ROOMS = ["cli", "training", "generation", "models", "blocks", "scan", "ops", "kernels", "ground"]

# `MambaLM.generate` is a door to the room above, opened when it is called.
DOORS = {("models/lm.py", "generation")}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_from_rooms_below(room):
    for file in (SOURCE / room).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            names = [module] if module else [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                parts = name.split(".")
                if parts[0] != "anymamba" or len(parts) < 2 or parts[1] not in ROOMS:
                    continue
                where = file.relative_to(SOURCE).as_posix()
                allowed = ROOMS.index(parts[1]) >= ROOMS.index(room) or (where, parts[1]) in DOORS
                assert allowed, f"{where} imports {name}"
