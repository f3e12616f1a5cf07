"""Signatures of artifacts: ed25519 over the SHA-256 of every file, in ``manifest.json.sig``.

    message = {"artifact": 1, "files": {name: SHA-256 in hexadecimal, ...}}    as JSON, keys sorted,
                                                                               no spaces, ASCII
    manifest.json.sig = {"format": 1, "algorithm": "ed25519", "files": {...}, "key": fingerprint,
                         "signature": base64 of ed25519(private key, message)}

The files are all of the folder but the signature. Verifying needs the public key alone, nothing of
a network: the signature holds if the message does, and the artifact if its files are exactly those.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linexport import manifest as manifests
from linexport.artifact.opening import check_files
from linexport.artifact.write import replace_text
from linexport.errors import EnvironmentProblemError, SignatureError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

SIGNATURE = f"{manifests.MANIFEST}.sig"
FORMAT, ALGORITHM = 1, "ed25519"
PUBLIC = ".pub"
"""Ending of the public key that is written beside a new private one."""

REWRITTEN = {manifests.MANIFEST, manifests.REPORT}
STALE = (
    " The model and all other files are as they were signed; linexport validate --record and bench "
    "write the two others, but so may anybody."
)
"""Added where nothing else changed: who did it cannot be told from the files."""

_LARGEST = 2**20
"""Bytes of a key or a signature file."""


@dataclass(frozen=True)
class Signed:
    """A signature that was made or found to hold.

    Attributes:
        file: where it is.
        key: fingerprint of the public key, ``ed25519:`` and 32 hexadecimal digits.
        files: SHA-256 of every file it covers, by name.
    """

    file: Path
    key: str
    files: Mapping[str, str]


def sign(folder: Path, key: Path) -> Signed:
    """Sign an artifact as it is now; a signature that is there is replaced.

    Args:
        folder: the artifact.
        key: file of an ed25519 private key, PEM without a passphrase.

    Raises:
        UsageError: not an artifact, a damaged one, or not such a key.
        EnvironmentProblemError: ``cryptography`` is not installed, or the folder is read-only.
    """
    private = _private_key(key)
    check_files(folder, manifests.read(folder))
    files = _digests(folder)
    signed = Signed(folder / SIGNATURE, _fingerprint(private.public_key()), files)
    content = {
        "format": FORMAT,
        "algorithm": ALGORITHM,
        "files": files,
        "key": signed.key,
        "signature": base64.b64encode(private.sign(_message(files))).decode(),
    }
    try:
        replace_text(signed.file, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise EnvironmentProblemError(f"Cannot write {signed.file}: {error.strerror}.") from None
    return signed


def verify(folder: Path, key: Path) -> Signed:
    """Check that an artifact is the one that the owner of a key signed.

    Args:
        folder: the artifact.
        key: file of an ed25519 public key, PEM.

    Raises:
        UsageError: not an artifact, or not such a key.
        SignatureError: there is no signature, it is of another key, or a file was changed, added
            or removed since.
        EnvironmentProblemError: ``cryptography`` is not installed.
    """
    public = _public_key(key)
    if not (folder / manifests.MANIFEST).exists():
        manifests.read(folder)  # says what is missing; else nothing is parsed before it is trusted
    signed, signature = _read(folder)
    from cryptography.exceptions import InvalidSignature

    try:
        public.verify(signature, _message(signed.files))
    except InvalidSignature:
        raise SignatureError(
            f"{signed.file} does not hold for the key {key}, {_fingerprint(public)}; it says that "
            f"it was made with {signed.key}. Take the public key of the one who signed, or do not "
            "use the artifact."
        ) from None
    found = _digests(folder)
    changed = [name for name in signed.files if name in found and found[name] != signed.files[name]]
    groups = {
        "changed": changed,
        "missing": sorted(signed.files.keys() - found.keys()),
        "not signed": sorted(found.keys() - signed.files.keys()),
    }
    wrong = [f"{what}: {', '.join(names)}" for what, names in groups.items() if names]
    if wrong:
        written = set(changed) <= REWRITTEN and not groups["missing"] and not groups["not signed"]
        raise SignatureError(
            f"{folder} is not as it was signed ({'; '.join(wrong)}). Take it again from the one "
            f"who signed it, or sign it again if the changes are yours.{STALE * written}"
        )
    return signed


def new_key(path: Path) -> Path:
    """Write a new private key that its owner alone may read, and its public key beside it.

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
    beside = path.with_suffix(PUBLIC)
    for file, content, mode in ((path, secret, 0o600), (beside, public, 0o644)):
        try:
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
                out.write(content)
        except FileExistsError:
            raise UsageError(f"{file} is there already; a key is never replaced.") from None
        except (OSError, ValueError) as error:
            raise EnvironmentProblemError(f"Cannot write {file}: {error}.") from None
    return beside


def _message(files: Mapping[str, str]) -> bytes:
    content = {"artifact": FORMAT, "files": dict(files)}
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")


def _digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file but the signature, by name.

    Raises:
        UsageError: the folder has something else than files in it.
    """
    found = {}
    for path in sorted(folder.iterdir()):
        if path.name == SIGNATURE:
            continue
        if not path.is_file():
            raise UsageError(f"{path} is not a file; an artifact that is signed has nothing else.")
        found[path.name] = manifests.digest(path)
    return found


def _read(folder: Path) -> tuple[Signed, bytes]:
    """Read ``manifest.json.sig``: what it covers, and the signature itself."""
    path = folder / SIGNATURE
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is not a file")
        content: Any = json.loads(_bytes(path))
        files, text, key = content["files"], content["signature"], content["key"]
        if content["format"] != FORMAT or content["algorithm"] != ALGORITHM:
            raise ValueError("it is of another format")
        if not all(isinstance(value, str) for value in (key, text, *files.values())):
            raise ValueError("it has a value that is not text")
        return Signed(path, key, files), base64.b64decode(text, validate=True)
    except FileNotFoundError:
        raise SignatureError(f"{folder} has no {SIGNATURE}: it is not signed.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SignatureError(f"{path} is not a signature of linexport's: {error}.") from None


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


def _key(path: Path, kind: str, parse: Any) -> Any:
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
            "Signatures need the cryptography package: pip install 'linexport[sign]'."
        ) from None
