"""Signatures of artifacts: ed25519 over what an artifact is and the SHA-256 of every file.

    message = {"artifact": 2, "name": ..., "version": ..., "time": ...,      as JSON, keys sorted,
               "files": {name: {"bytes": ..., "sha256": ...}, ...}}          no spaces, ASCII
    manifest.json.sig = {"format": 2, "algorithm": "ed25519", "name", "version", "time", "files",
                         "signature": base64 of ed25519(private key, message)}

The files are all of the folder but the signature. Verifying needs public keys alone, nothing of a
network: the signature holds if the message does, and the artifact if its files are exactly those.
Nothing of the file is shown before it holds, and the key that is shown is the one it holds for.
The time lets a user refuse an older artifact of the same signer, which holds as well.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linexport import manifest as manifests
from linexport.artifact import opening
from linexport.artifact.folder_files import FolderFiles
from linexport.artifact.write import replace_text
from linexport.errors import EnvironmentProblemError, SignatureError, UsageError
from linexport.system.install import pip_install_here
from linexport.system.json_object import JsonObject

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

SIGNATURE = f"{manifests.MANIFEST}.sig"
FORMAT, ALGORITHM = 2, "ed25519"
PUBLIC = ".pub"
"""Suffix of the public key that is written with a new private one, and of the keys that a folder
of trusted ones holds."""

REWRITTEN = {manifests.MANIFEST, manifests.REPORT}
STALE = (
    " The model and all other files are as they were signed; linexport validate --record and bench "
    "write the two others, but so may anybody."
)
"""Added where nothing else changed: the files do not show who changed them."""

_LARGEST = 2**20
"""Bytes of a key or a signature file."""

_LONGEST = 200
"""Characters of the name and the version of an artifact."""


@dataclass(frozen=True)
class SignedFile:
    """A file that a signature covers: its size, and its digest in hexadecimal."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class SignedMessage:
    """The content that is signed.

    Attributes:
        name: of the artifact, as its signer calls it.
        version: of it, likewise; "" for none.
        time: when it was signed, UTC, ISO 8601.
        files: every file of the folder but the signature, by name.
    """

    name: str
    version: str
    time: str
    files: Mapping[str, SignedFile]

    def encoded(self) -> bytes:
        """Return the bytes that are signed."""
        content = {"artifact": FORMAT, **asdict(self)}
        return json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")

    @property
    def moment(self) -> datetime.datetime:
        """Return the time.

        Raises:
            ValueError: it is not one of UTC.
        """
        found = datetime.datetime.fromisoformat(self.time)
        if found.utcoffset() != datetime.timedelta(0):
            raise ValueError(f"the time {self.time!r} is not UTC")
        return found


@dataclass(frozen=True)
class Signed(SignedMessage):
    """A signature that was made or found to hold.

    Attributes:
        file: where it is.
        key: fingerprint of the public key that it holds for, ``ed25519:`` and 32 hexadecimal
            digits, computed from that key.
        key_file: of the public key; None for a signature that was made.
    """

    file: Path
    key: str
    key_file: Path | None = None

    def described(self) -> str:
        """Return name, version and time for people."""
        version = f" {self.version}" if self.version else ""
        return f"{self.name}{version}, {self.moment:%Y-%m-%d %H:%M:%S} UTC"

    def record(self) -> JsonObject:
        """Return what is signed, and the key, as JSON."""
        files = {name: file.sha256 for name, file in self.files.items()}
        return {
            "key": self.key,
            "name": self.name,
            "version": self.version,
            "time": self.time,
            "files": files,
        }


@dataclass(frozen=True)
class Trust:
    """Whose artifacts are used.

    Attributes:
        key: file of an ed25519 public key, PEM, or a folder of such files that end in ``.pub``: one
            of their owners must have signed the artifact.
        newer_than: a time, ISO 8601, before which nothing may be signed; None for no such time.
    """

    key: Path
    newer_than: str | None = None


def sign(folder: Path, key: Path, *, name: str | None = None, version: str = "") -> Signed:
    """Sign an artifact as it is now; a signature that is there is replaced.

    Args:
        folder: the artifact.
        key: file of an ed25519 private key, PEM without a passphrase.
        name: of the artifact; None for that of its folder.
        version: of it.

    Raises:
        UsageError: not an artifact, a damaged one, not such a key, or a name or version that is
            not one line of text.
        EnvironmentProblemError: ``cryptography`` is not installed, or the folder is read-only.
    """
    private, files = _private_key(key), FolderFiles(folder)
    opening.check_files(files, opening.read_manifest(files))
    called = folder.resolve().name if name is None else name
    for what, text in (("name", called), ("version", version)):
        if not text.isprintable() or len(text) > _LONGEST:
            raise UsageError(
                f"The {what} {text[:_LONGEST]!r} is not one line of {_LONGEST} characters at most. "
                f"Pass --{what}."
            )
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    covered = {n: SignedFile(files.size(n), files.digest(n)) for n in _names(files)}
    message = SignedMessage(called, version, now, covered)
    content = {
        "format": FORMAT,
        "algorithm": ALGORITHM,
        **asdict(message),
        "signature": base64.b64encode(private.sign(message.encoded())).decode(),
    }
    place = folder / SIGNATURE
    try:
        replace_text(place, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise EnvironmentProblemError(f"Cannot write {place}: {error.strerror}.") from None
    return Signed(**_shallow(message), file=place, key=_fingerprint(private.public_key()))


def verify(folder: Path, key: Path, newer_than: str | None = None) -> Signed:
    """Check that an artifact is the one that the owner of a key signed.

    Args:
        folder: the artifact.
        key: see ``Trust``.
        newer_than: see there.

    Raises:
        UsageError: not an artifact, not such a key, or not a time.
        SignatureError: the signature is missing, or holds for none of the keys, it is too old, or a
            file was changed, added or removed since.
        EnvironmentProblemError: ``cryptography`` is not installed.
    """
    return check(FolderFiles(folder), Trust(key, newer_than))


def check(files: FolderFiles, trust: Trust) -> Signed:
    """Check the files of an artifact that is being opened, which are then those that were hashed.

    Errors are those of ``verify``.
    """
    keys, oldest = _public_keys(trust.key), _moment(trust.newer_than)
    folder = files.folder
    if not (folder / manifests.MANIFEST).exists():
        manifests.read(folder)  # says what is missing; else nothing is parsed before it is trusted
    message, signature = _read(folder)
    place, public = _holding(folder, keys, trust.key, message, signature)
    if oldest is not None and message.moment <= oldest:
        raise SignatureError(
            f"{folder} was signed at {message.time}, not after {trust.newer_than}: an older "
            "artifact of the same signer may have taken the place of a newer one. Take the newer "
            "one, or name an earlier time."
        )
    _check_covered(files, message)
    return Signed(
        **_shallow(message), file=folder / SIGNATURE, key=_fingerprint(public), key_file=place
    )


def _shallow(message: SignedMessage) -> JsonObject:
    return {field.name: getattr(message, field.name) for field in fields(SignedMessage)}


def _moment(text: str | None) -> datetime.datetime | None:
    """Return a time that a user names; one without a zone is of UTC.

    Raises:
        UsageError: it is not one.
    """
    if text is None:
        return None
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"{text!r} is not a time; expected ISO 8601, such as 2026-11-28 or "
            "2026-11-28T12:00:00+00:00."
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)


def _holding(
    folder: Path,
    keys: Mapping[Path, Ed25519PublicKey],
    given: Path,
    message: SignedMessage,
    signature: bytes,
) -> tuple[Path, Ed25519PublicKey]:
    """Return the key that a signature holds for, and its file."""
    from cryptography.exceptions import InvalidSignature

    for place, public in keys.items():
        try:
            public.verify(signature, message.encoded())
            return place, public
        except InvalidSignature:
            continue
    known = ", ".join(map(_fingerprint, keys.values()))
    which = f"the key {given}, {known}" if len(keys) == 1 else f"any key of {given}: {known}"
    raise SignatureError(
        f"{folder / SIGNATURE} does not hold for {which}. Take the public key of the one who "
        "signed, or do not use the artifact."
    )


def _check_covered(files: FolderFiles, message: SignedMessage) -> None:
    """Check that the files are exactly those of a message; sizes first, which cost nothing."""
    there, signed = set(_names(files)), message.files
    both = sorted(there & signed.keys())
    changed = [name for name in both if files.size(name) != signed[name].bytes]
    changed += [
        name for name in both if name not in changed and files.digest(name) != signed[name].sha256
    ]
    groups = {
        "changed": sorted(changed),
        "missing": sorted(signed.keys() - there),
        "not signed": sorted(there - signed.keys()),
    }
    wrong = [f"{what}: {', '.join(names)}" for what, names in groups.items() if names]
    if wrong:
        written = set(changed) <= REWRITTEN and not groups["missing"] and not groups["not signed"]
        raise SignatureError(
            f"{files.folder} is not as it was signed ({'; '.join(wrong)}). Take it again from the "
            f"one who signed it, or sign it again if the changes are yours.{STALE * written}"
        )


def _names(files: FolderFiles) -> list[str]:
    """Return the names of all files but the signature.

    Raises:
        UsageError: the folder has something else than files in it.
    """
    found = [name for name in files.names() if name != SIGNATURE]
    for name in found:
        if not (files.folder / name).is_file():
            raise UsageError(
                f"{files.folder / name} is not a file; an artifact that is signed has nothing else."
            )
    return found


def new_key(path: Path) -> Path:
    """Write a new private key that its owner alone may read, and its public key next to it.

    Returns:
        The file of the public key.

    Raises:
        UsageError: one of the files is there already.
        EnvironmentProblemError: they cannot be written, or ``cryptography`` is not installed.
    """
    _require()
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.generate()
    secret = private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    public = private.public_key().public_bytes(
        form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo
    )
    public_path = path.with_suffix(PUBLIC)
    for file, content, mode in ((path, secret, 0o600), (public_path, public, 0o644)):
        try:
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
                out.write(content)
        except FileExistsError:
            raise UsageError(f"{file} is there already; a key is never replaced.") from None
        except (OSError, ValueError) as error:
            raise EnvironmentProblemError(f"Cannot write {file}: {error}.") from None
    return public_path


def _read(folder: Path) -> tuple[SignedMessage, bytes]:
    """Read ``manifest.json.sig``: what it says, and the signature itself."""
    path = folder / SIGNATURE
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is not a file")
        content: Any = json.loads(_bytes(path))
        form = content.pop("format"), content.pop("algorithm")
        if form != (FORMAT, ALGORITHM):
            raise ValueError("it is of another format; this version makes and reads format 2")
        expected = {"signature", *(field.name for field in fields(SignedMessage))}
        if content.keys() != expected:
            odd = ", ".join(sorted(content.keys() ^ expected))
            raise ValueError(f"it lacks a field, or has one that is not signed: {odd}")
        text, listed = content.pop("signature"), content.pop("files")
        files = {name: SignedFile(**file) for name, file in listed.items()}
        message = SignedMessage(**content, files=files)
        if not all(isinstance(s, str) for s in (text, message.name, message.version, message.time)):
            raise ValueError("it has a value that is not text")
        if not all(type(f.bytes) is int and type(f.sha256) is str for f in files.values()):
            raise ValueError("it has a file without a size and a digest")
        message.moment  # noqa: B018 that there is one
        return message, base64.b64decode(text, validate=True)
    except FileNotFoundError:
        raise SignatureError(f"{folder} has no {SIGNATURE}: it is not signed.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SignatureError(f"{path} is not a signature of linexport's: {error}.") from None


def _public_keys(path: Path) -> dict[Path, Ed25519PublicKey]:
    """Return the keys that are trusted by their files.

    Raises:
        UsageError: there is none, or a file is not one.
    """
    _require()
    if not path.is_dir():
        return {path: _public_key(path)}
    found = {place: _public_key(place) for place in sorted(path.glob(f"*{PUBLIC}"))}
    if not found:
        raise UsageError(
            f"{path} has no public key; expected files that end in {PUBLIC}, as linexport sign "
            "--new-key writes them."
        )
    return found


def _private_key(path: Path) -> Ed25519PrivateKey:
    _require()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = _key(path, "private", lambda pem: load_pem_private_key(pem, None))
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} is a {type(key).__name__}; expected an ed25519 private key.")
    return key


def _public_key(path: Path) -> Ed25519PublicKey:
    _require()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    key = _key(path, "public", load_pem_public_key)
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"{path} is a {type(key).__name__}; expected an ed25519 public key.")
    return key


def _key(path: Path, kind: str, parse: Callable[..., object]) -> object:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return parse(_bytes(path))
    except FileNotFoundError:
        advice = " Pass --new-key to make one." if kind == "private" else ""
        raise UsageError(f"There is no key {path}.{advice}") from None
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm):
        raise UsageError(
            f"{path} is not an ed25519 {kind} key: expected PEM without a passphrase, as "
            "linexport sign --new-key or openssl genpkey -algorithm ed25519 write it."
        ) from None


def _bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST:,} bytes")
    return content


def _fingerprint(public: Ed25519PublicKey) -> str:
    return f"{ALGORITHM}:{hashlib.sha256(public.public_bytes_raw()).hexdigest()[:32]}"


def _require() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise EnvironmentProblemError(
            f"Signatures need the cryptography package: {pip_install_here('sign')}."
        ) from None
