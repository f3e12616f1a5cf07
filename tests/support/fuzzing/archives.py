"""Mutations of zip archives, NumPy arrays and safetensors that stay consistent elsewhere."""

from __future__ import annotations

import io
import json
import struct
import warnings
import zipfile
from random import Random
from typing import Any

import numpy as np

from tests.support.fuzzing import values
from tests.support.fuzzing.pickles import mutate as mutate_pickle

HUGE = (2**31, 2**32 - 1, 2**40, 2**62)


def members(data: bytes) -> list[tuple[str, bytes]]:
    """Return names and contents of a zip archive, in order."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(i.filename, archive.read(i)) for i in archive.infolist()]


def written(content: list[tuple[str, bytes]], packed: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip archive of these members, with right checksums and in this order."""
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w", packed) as archive:
        warnings.simplefilter("ignore")  # of two members of one name
        for name, data in content:
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, packed)
    return stream.getvalue()


def member(random: Random, name: str, data: bytes) -> bytes:
    """Change the content of a member as its name says what it is."""
    if random.random() < 0.1:
        return values.raw(random, data)
    if name.endswith((".json", ".jsonl")):
        return values.json_bytes(random, data)
    if name.endswith((".pkl", ".pt")):
        return mutate_pickle(random, data)
    if name.endswith(".npy"):
        return array(random, data)
    return values.raw(random, data)


def zipped(random: Random, data: bytes) -> bytes:
    """Change a zip archive: a member, the table of members, or its bytes."""
    if random.random() < 0.15:
        return values.raw(random, data)
    content = members(data)
    at = random.randrange(len(content))
    # Documents are few beside tensors, and more can be wrong in them.
    documents = [i for i, (n, _) in enumerate(content) if n.endswith((".json", ".pkl", ".npy"))]
    if documents and random.random() < 0.6:
        at = random.choice(documents)
    name, inside = content[at]
    packed = zipfile.ZIP_STORED
    match random.choice(
        ("content",) * 10 + ("delete", "rename", "twice", "add", "order", "packed", "directory")
    ):
        case "content":
            content[at] = (name, member(random, name, inside))
        case "delete":
            del content[at]
        case "rename":
            other = random.choice(
                [n for n, _ in content] + [f"../{name}", "/x", "a\\b", name + "x"]
            )
            content[at] = (other, inside)
        case "twice":
            content.append((name, values.raw(random, inside)))
        case "add":
            folder = name.partition("/")[0]
            content.append((f"{folder}/extra{random.choice(('.json', '.pkl', '', '.so'))}", inside))
        case "order":
            random.shuffle(content)
        case "packed":
            packed = zipfile.ZIP_DEFLATED
        case "directory":
            return directory(random, written(content))
    return written(content, packed)


def directory(random: Random, data: bytes) -> bytes:
    """Change a field of the central directory: sizes, offsets, method, checksum."""
    start = data.rfind(b"PK\x01\x02")
    end = data.rfind(b"PK\x05\x06")
    entries = [i for i in range(len(data) - 4) if data[i : i + 4] == b"PK\x01\x02"] or [start]
    base, offsets = (
        (random.choice(entries), (8, 10, 16, 20, 24, 28, 30, 42))
        if random.random() < 0.7
        else (end, (8, 10, 12, 16, 20))
    )
    at = base + random.choice(offsets)
    value = random.choice((0, 1, 0xFFFF, 0xFFFFFFFF, 0x7FFFFFFF, random.randrange(2**32)))
    width = random.choice((2, 4))
    return data[:at] + (value % 2 ** (8 * width)).to_bytes(width, "little") + data[at + width :]


def array(random: Random, data: bytes) -> bytes:
    """Change an ``.npy`` file: its header, its values, its dtype."""
    match random.choice(("header", "header", "values", "dtype", "length", "shape")):
        case "header":
            return header(random, data)
        case "values":
            found = np.load(io.BytesIO(data)).copy()
            if found.dtype.kind == "f" and found.size:
                found.flat[random.randrange(found.size)] = random.choice(values.FLOATS[3:])
            return saved(found)
        case "dtype":
            found = np.load(io.BytesIO(data))
            kind = random.choice(("float64", "int8", "complex64", "bool", "S3", "U2"))
            with np.errstate(all="ignore"):
                return (
                    saved(found.astype(kind)) if found.dtype.kind == "f" else saved(np.array([1.0]))
                )
        case "length":
            return data[:8] + struct.pack("<H", random.choice((0, 1, 65535))) + data[10:]
        case _:
            found = np.load(io.BytesIO(data))
            return saved(
                random.choice((found[None], found.reshape(-1), found[:0] if found.ndim else found))
            )


def saved(array: Any) -> bytes:
    """Return the ``.npy`` file of an array."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def header(random: Random, data: bytes) -> bytes:
    """Change what an ``.npy`` file says of its dtype, order and shape."""
    start = 10
    length = struct.unpack("<H", data[8:start])[0]
    body = data[start + length :]
    shape = random.choice(
        ("()", "(2,)", f"({random.choice(HUGE)},)", "(-1,)", "(1, " * 30, "'x'", "(0,)")
    )
    kind = random.choice(
        ("<f4", "<f8", "|O", "<U1000000", "|V0", "[('a', '|O')]", "<M8[ns]", "x" * 99)
    )
    text = random.choice(
        (
            f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}",
            f"{{'descr': {kind!r}, 'fortran_order': True, 'shape': (2,), }}",
            "{'descr': '<f4'}",
            "(" * 3000,
            "__import__('os').system('true')",
            "{" + "'a': 1, " * 5000 + "}",
        )
    )
    kept = text.encode()[:60000]
    return data[:8] + struct.pack("<H", len(kept)) + kept + body


def safetensors(random: Random, data: bytes) -> bytes:
    """Change a safetensors file: its header as JSON, the header's length, or bytes."""
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    match random.choice(("json",) * 6 + ("length", "raw", "body", "offsets", "dtype")):
        case "json":
            header = values.json_bytes(random, header)
        case "length":
            size = random.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1))
            return size.to_bytes(8, "little") + data[8:]
        case "raw":
            return values.raw(random, data)
        case "body":
            body = values.raw(random, body)
        case "offsets":
            header = tensor(
                random,
                header,
                data_offsets=[random.choice(values.INTEGERS), random.choice(values.INTEGERS)],
            )
        case _:
            kind = random.choice(("F64", "F16", "I64", "F8_E4M3", "BOOL", "X", "BF16"))
            header = tensor(random, header, dtype=kind)
    return len(header).to_bytes(8, "little") + header + body


def tensor(random: Random, header: bytes, **changes: Any) -> bytes:
    """Change the entry of one tensor in a safetensors header."""
    document = json.loads(header)
    name = random.choice([n for n in document if n != "__metadata__"])
    document[name].update(changes)
    return json.dumps(document).encode()
