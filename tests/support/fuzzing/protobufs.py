"""Mutations of protocol buffers by field, and of the bytes they are written to."""

from __future__ import annotations

from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.support.fuzzing import values

INTEGER = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def messages(root: Message) -> list[Message]:
    """Return a message and all inside it."""
    found = [root]
    for message in found:
        for field, value in message.ListFields():
            if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
                found += list(value) if repeated(field) else [value]
    return found


def repeated(field: Any) -> bool:
    """Whether a field holds several values."""
    return bool(field.is_repeated)


def scalar(random: Random, field: Any, texts: list[str]) -> Any:
    """Return a value for a field of a scalar type."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return random.choice(field.enum_type.values).number
    if field.cpp_type in INTEGER:
        low, high = INTEGER[field.cpp_type]
        value = random.choice((*values.INTEGERS, random.randint(-3, 30)))
        return min(max(value, low), high)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return random.choice(values.FLOATS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return random.random() < 0.5
    text = (
        random.choice(texts) if texts and random.random() < 0.6 else random.choice(values.STRINGS)
    )
    encoded = text.encode(errors="replace")
    return encoded if field.type == FieldDescriptor.TYPE_BYTES else encoded.decode()


def change(random: Random, root: Message) -> None:
    """Change one field of a message or of one inside it, in place."""
    found = messages(root)
    message = random.choice(found)
    present = message.ListFields()
    texts = [v for m in found for f, v in m.ListFields() if isinstance(v, str)]
    if not present or random.random() < 0.1:
        add(random, message, found, texts)
        return
    field, value = random.choice(present)
    inner = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
    action = random.choice(("set", "set", "set", "clear", "copy", "order", "repeat"))
    if action == "clear":
        message.ClearField(field.name)
    elif repeated(field):
        several(random, field, value, action, found, texts)
    elif inner:
        same = [m for m in found if m.DESCRIPTOR is value.DESCRIPTOR]
        value.CopyFrom(random.choice(same))
    elif field.type == FieldDescriptor.TYPE_BYTES and action != "set":
        setattr(message, field.name, values.raw(random, value))
    else:
        setattr(message, field.name, scalar(random, field, texts))


def several(
    random: Random, field: Any, value: Any, action: str, found: list[Message], texts: list[str]
) -> None:
    """Change a repeated field: delete, copy, reorder or set values."""
    at = random.randrange(len(value))
    inner = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
    if action == "order":
        kept = list(value)
        random.shuffle(kept)
        copies = [type(v).FromString(v.SerializeToString()) if inner else v for v in kept]
        del value[:]
        value.extend(copies)
    elif action in ("copy", "repeat"):
        times = 1 if action == "copy" else random.choice((2, 50))
        for _ in range(times):
            value.append(value[at])
    elif inner:
        same = [m for m in found if m.DESCRIPTOR is value[at].DESCRIPTOR]
        if random.random() < 0.3:
            del value[at]
        else:
            value[at].CopyFrom(random.choice(same))
    else:
        value[at] = scalar(random, field, texts)


def add(random: Random, message: Message, found: list[Message], texts: list[str]) -> None:
    """Give a message a field it did not have."""
    field = random.choice(message.DESCRIPTOR.fields)
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        same = [m for m in found if m.DESCRIPTOR is field.message_type]
        target = getattr(message, field.name)
        source = random.choice(same) if same else None
        # A message inside itself would grow with every copy.
        if source is not None and source is not message and source.ByteSize() < 10_000:
            kept = type(source).FromString(source.SerializeToString())
            (target.add() if repeated(field) else target).CopyFrom(kept)
    elif repeated(field):
        getattr(message, field.name).append(scalar(random, field, texts))
    else:
        setattr(message, field.name, scalar(random, field, texts))


def mutate(random: Random, data: bytes, kind: type[Message]) -> bytes:
    """Change a serialised message: mostly fields, sometimes bytes."""
    if random.random() < 0.15:
        return values.raw(random, data)
    message = kind.FromString(data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        change(random, message)
    return message.SerializePartialToString()
