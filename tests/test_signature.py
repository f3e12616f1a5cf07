"""Signed artifacts: what holds, and one sentence for each way in which it does not."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from linexport.artifact import signature
from linexport.errors import EnvironmentProblemError, SignatureError, UsageError

pytestmark = pytest.mark.usefixtures("one_thread")

Keys = tuple[Path, Path]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    private = tmp_path / "private.pem"
    return private, signature.new_key(private)


@pytest.fixture
def signed(artifact: Path, keys: Keys) -> Path:
    signature.sign(artifact, keys[0])
    return artifact


def test_an_artifact_is_as_it_was_signed(signed: Path, keys: Keys) -> None:
    held = signature.verify(signed, keys[1])
    assert set(held.files) == {p.name for p in signed.iterdir()} - {"manifest.json.sig"}
    assert held.key.startswith("ed25519:")


def test_signing_again_covers_what_changed(signed: Path, keys: Keys) -> None:
    (signed / "tokenizer.json").write_text("{}")
    signature.sign(signed, keys[0])
    assert "tokenizer.json" in signature.verify(signed, keys[1]).files


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda f: flip(f / "model.onnx"), "not as it was signed.*changed: model.onnx"),
        (lambda f: flip(f / "manifest.json"), "changed: manifest.json"),
        (lambda f: flip(f / "report.html"), "changed: report.html"),
        (lambda f: (f / "report.html").unlink(), "missing: report.html"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "not signed: tokenizer.json"),
        (lambda f: (f / "manifest.json.sig").unlink(), r"has no manifest\.json\.sig: it is not"),
        (lambda f: edit(f, files={}), "does not hold for the key"),
        (lambda f: edit(f, signature="AAAA"), "does not hold for the key"),
        (lambda f: edit(f, signature="@"), "not a signature of linexport's"),
        (lambda f: edit(f, signature=None), "not a signature"),
        (lambda f: edit(f, files=[]), "not a signature"),
        (lambda f: edit(f, format=2), "another format"),
        (lambda f: edit(f, algorithm="none"), "another format"),
        (lambda f: (f / "manifest.json.sig").write_text("[" * 10**5), "not a signature"),
        (lambda f: (f / "manifest.json.sig").write_bytes(b"\xff" * 2**21), "more than"),
    ],
)
def test_what_was_changed_does_not_verify(
    signed: Path, keys: Keys, change: Callable[[Path], object], match: str
) -> None:
    change(signed)
    with pytest.raises(SignatureError, match=match):
        signature.verify(signed, keys[1])


@pytest.mark.parametrize(
    ("names", "stale"),
    [(["manifest.json", "report.html"], True), (["manifest.json", "model.onnx"], False)],
)
def test_a_signature_that_validate_may_have_made_stale_says_so(
    signed: Path, keys: Keys, names: list[str], stale: bool
) -> None:
    for name in names:
        flip(signed / name)
    with pytest.raises(SignatureError) as error:
        signature.verify(signed, keys[1])
    assert ("but so may anybody" in str(error.value)) == stale


def test_validate_warns_that_a_signature_no_longer_holds(
    signed: Path, keys: Keys, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The CPU library's errors have other last digits; a manifest says which of both was checked.
    monkeypatch.setenv("LINEXPORT_CPU_LIBRARY", "0")
    source = json.loads((signed / "manifest.json").read_text())["source"]["location"]
    given = (signed, "--source", source, "--threads", "1", "--record")
    assert cli("validate", *given).code == 0
    signature.sign(signed, keys[0])
    result = cli("validate", *given)
    assert result.code == 0 and "no longer holds" not in result.err, "nothing has changed"
    assert cli("verify", signed, "--key", keys[1]).code == 0
    result = cli("validate", *given, "--seed", "7")
    assert result.code == 0
    told = " ".join(result.err.split())
    assert "manifest.json.sig no longer holds" in told and "linexport sign" in told
    assert cli("verify", signed, "--key", keys[1]).code == 3


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json.sig"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_damaged_artifact_is_not_signed(artifact: Path, keys: Keys) -> None:
    flip(artifact / "model.onnx")
    with pytest.raises(UsageError, match=r"model\.onnx is damaged"):
        signature.sign(artifact, keys[0])


def test_the_key_of_somebody_else_does_not_verify(signed: Path, tmp_path: Path) -> None:
    other = signature.new_key(tmp_path / "other.pem")
    with pytest.raises(SignatureError, match=r"does not hold for the key .*other.pub"):
        signature.verify(signed, other)


def test_a_signature_by_another_key_with_the_name_of_ours_does_not_verify(
    signed: Path, keys: Keys, tmp_path: Path
) -> None:
    ours = json.loads((signed / "manifest.json.sig").read_text())["key"]
    signature.new_key(tmp_path / "other.pem")
    signature.sign(signed, tmp_path / "other.pem")
    edit(signed, key=ours)
    with pytest.raises(SignatureError, match="does not hold"):
        signature.verify(signed, keys[1])


def test_a_private_key_is_for_its_owner_alone_and_never_replaced(keys: Keys) -> None:
    assert stat.S_IMODE(keys[0].stat().st_mode) == 0o600
    before = keys[0].read_bytes()
    with pytest.raises(UsageError, match="never replaced"):
        signature.new_key(keys[0])
    assert keys[0].read_bytes() == before


def elliptic() -> bytes:
    return generate_private_key(SECP256R1()).private_bytes(
        form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()
    )


def with_passphrase() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes(
        form.Encoding.PEM, form.PrivateFormat.PKCS8, form.BestAvailableEncryption(b"secret")
    )


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "There is no key .*--new-key"),
        (lambda: b"junk", "not an ed25519 private key"),
        (lambda: b"\0" * 2**21, "not an ed25519 private key"),
        (elliptic, "expected an ed25519 private key"),
        (with_passphrase, "without a passphrase"),
    ],
)
def test_a_file_that_is_not_a_key_is_refused(
    artifact: Path, tmp_path: Path, content: Callable[[], bytes] | None, match: str
) -> None:
    path = tmp_path / "key.pem"
    if content:
        path.write_bytes(content())
    with pytest.raises(UsageError, match=match):
        signature.sign(artifact, path)
    assert not (artifact / "manifest.json.sig").exists()


def test_keys_are_not_exchanged(signed: Path, keys: Keys) -> None:
    with pytest.raises(UsageError, match="not an ed25519 public key"):
        signature.verify(signed, keys[0])
    with pytest.raises(UsageError, match="not an ed25519 private key"):
        signature.sign(signed, keys[1])


def test_without_the_library_it_says_what_to_install(
    artifact: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for call, key in ((signature.sign, keys[0]), (signature.verify, keys[1])):
        with pytest.raises(EnvironmentProblemError, match=r"pip install 'linexport\[sign\]'"):
            call(artifact, key)


def test_the_commands(cli: Callable[..., Any], artifact: Path, tmp_path: Path) -> None:
    key = tmp_path / "k.pem"
    assert cli("verify", artifact, "--key", key, "--json").code == 2
    made = cli("sign", artifact, "--key", key, "--new-key", "--json")
    assert made.code == 0
    public = made.json()["public_key"]
    verified = cli("verify", artifact, "--key", public, "--json")
    assert (verified.code, verified.json()["status"]) == (0, "ok")
    assert verified.json()["files"] == made.json()["files"]
    flip(artifact / "model.onnx")
    refused = cli("verify", artifact, "--key", public, "--json")
    assert (refused.code, refused.json()["exit_code"]) == (3, 3)
    assert "changed: model.onnx" in refused.json()["message"]
    flip(artifact / "model.onnx")  # as it was
    assert "files, ed25519:" in cli("sign", artifact, "--key", key).out
    assert "signed it" in cli("verify", artifact, "--key", public).out
