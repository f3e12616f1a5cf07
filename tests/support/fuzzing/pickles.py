"""Mutations of pickles by opcode; nothing is ever unpickled here."""

from __future__ import annotations

import pickletools
from random import Random

from tests.support.fuzzing import values

NAMES = (
    b"os\nsystem\n",
    b"builtins\neval\n",
    b"torch\nload\n",
    b"torch._utils\n_rebuild_tensor_v2\n",
    b"collections\nOrderedDict\n",
    b"torch\nFloatStorage\n",
    b"torch\nSize\n",
    b"torch._utils\n_rebuild_parameter\n",
    b"torch.serialization\n_get_layout\n",
    b"torch\ndevice\n",
)
OPCODES = (
    b"(",
    b"0",
    b"1",
    b"2",
    b")",
    b"]",
    b"}",
    b"N",
    b"\x88",
    b"R",
    b"b",
    b"s",
    b"u",
    b"a",
    b"e",
    b"t",
    b"\x85",
    b"\x86",
    b"\x87",
    b"Q",
    b"\x81",
    b"\x93",
    b"\x94",
    b"h\0",
    b"q\0",
    b"j\xff\xff\xff\x7f",
    b"r\xff\xff\xff\x7f",
    b"J\xff\xff\xff\x7f",
    b"\x8a\xff" + b"\x7f" * 255,
    b"X\xff\xff\xff\x7f",
    b"\x8e" + b"\xff" * 8,
    b".",
)


def pieces(data: bytes) -> list[bytes]:
    """Return the opcodes of a pickle with their arguments."""
    starts = [at for _, _, at in pickletools.genops(data) if at is not None]
    return [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]


def argument(random: Random, piece: bytes) -> bytes:
    """Change the argument of an opcode, its length consistent where it has one."""
    if piece[:1] == b"X":
        text = random.choice(values.STRINGS).encode(errors="replace")
        return b"X" + len(text).to_bytes(4, "little") + text
    if piece[:1] == b"c":
        return b"c" + random.choice(NAMES)
    if piece[:1] in b"KMJ" and piece:
        value = random.choice((*values.INTEGERS[:10], -1))
        return b"J" + (value % 2**32).to_bytes(4, "little")
    return piece[:1] + values.raw(random, piece[1:])


def mutate(random: Random, data: bytes) -> bytes:
    """Change a pickle: opcodes, their arguments and order, nesting."""
    try:
        parts = pieces(data)
    except Exception:
        return values.raw(random, data)
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(len(parts))
        match random.choice(
            ("argument",) * 4 + ("delete", "copy", "swap", "insert", "nest", "global")
        ):
            case "argument":
                parts[at] = argument(random, parts[at])
            case "delete" if len(parts) > 1:
                del parts[at]
            case "copy":
                parts.insert(at, parts[random.randrange(len(parts))])
            case "swap":
                other = random.randrange(len(parts))
                parts[at], parts[other] = parts[other], parts[at]
            case "nest":
                depth = random.choice((100, 5000, 200_000))
                parts.insert(
                    at, b"]" * depth + b"a" * (depth - 1) if random.random() < 0.5 else b"(" * depth
                )
            case "global":
                found = [i for i, p in enumerate(parts) if p[:1] == b"c"]
                parts[random.choice(found or [at])] = b"c" + random.choice(NAMES)
            case _:
                parts.insert(at, random.choice(OPCODES))
    return b"".join(parts)
