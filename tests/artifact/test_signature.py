"""Signed artifacts: what holds, and one sentence for each way in which it does not."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.serialization import load_pem_public_key

import linexport
from linexport.artifact import opening, signature, write
from linexport.errors import EnvironmentProblemError, SignatureError, UsageError
from linexport.package import package
from linexport.package.onnx import DESTINATION as ONNX

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
    assert held.key.startswith("ed25519:") and held.name == signed.name


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
        (lambda f: edit(f, format=1), "another format"),
        (lambda f: edit(f, files={"model.onnx": "0" * 64}), "not a signature"),
        (lambda f: edit(f, name="another"), "does not hold for the key"),
        (lambda f: edit(f, version="9"), "does not hold for the key"),
        (lambda f: edit(f, time="2100-01-01T00:00:00+00:00"), "does not hold for the key"),
        (lambda f: edit(f, time="2026-11-28T00:00:00"), "not UTC"),
        (lambda f: edit(f, time="yesterday"), "not a signature"),
        (lambda f: edit(f, key="ed25519:000 (Example Corp.)"), "one that is not signed: key"),
        (lambda f: edit(f, name=["a"]), "not text"),
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


# What is shown, and what is too old


def test_the_key_that_is_shown_is_the_one_that_was_given(
    signed: Path, keys: Keys, cli: Callable[..., Any]
) -> None:
    """Of a file of a stranger nothing is shown that is not signed."""
    public = load_pem_public_key(keys[1].read_bytes())
    assert isinstance(public, Ed25519PublicKey)
    fingerprint = f"ed25519:{hashlib.sha256(public.public_bytes_raw()).hexdigest()[:32]}"
    assert signature.verify(signed, keys[1]).key == fingerprint
    shown = cli("verify", signed, "--key", keys[1])
    assert fingerprint in shown.out and str(keys[1]) in shown.out
    edit(signed, key="ed25519:000 (Example Corp.)\x1b]0;title\x07")
    refused = cli("verify", signed, "--key", keys[1])
    assert refused.code == 3
    assert "Example" not in refused.out + refused.err and "\x1b]0" not in refused.err


def test_name_version_and_time_are_signed(
    artifact: Path, keys: Keys, cli: Callable[..., Any]
) -> None:
    before = datetime.datetime.now(datetime.UTC)
    done = cli("sign", artifact, "--key", keys[0], "--name", "small", "--version", "1.4")
    assert "small 1.4, " in done.out
    held = signature.verify(artifact, keys[1])
    assert (held.name, held.version) == ("small", "1.4")
    assert before <= held.moment <= datetime.datetime.now(datetime.UTC)
    found = cli("verify", artifact, "--key", keys[1], "--json").json()
    assert (found["name"], found["version"], found["time"]) == ("small", "1.4", held.time)
    for text in ("a\nb", "\x1b[2J", "x" * 201):
        with pytest.raises(UsageError, match="not one line"):
            signature.sign(artifact, keys[0], name=text)


def test_an_older_artifact_of_the_same_signer_is_refused(
    signed: Path, keys: Keys, cli: Callable[..., Any], tmp_path: Path
) -> None:
    older = Path(shutil.copytree(signed, tmp_path / "older"))
    first = signature.verify(older, keys[1]).time
    signature.sign(signed, keys[0])
    assert signature.verify(signed, keys[1], newer_than=first).moment
    with pytest.raises(SignatureError, match=r"was signed at .*, not after"):
        signature.verify(older, keys[1], newer_than=first)
    with pytest.raises(SignatureError, match="not after"):
        linexport.load(older, key=keys[1], newer_than=first)
    assert cli("verify", older, "--key", keys[1], "--newer-than", first).code == 3
    assert cli("verify", older, "--key", keys[1], "--newer-than", "2026-01-01").code == 0
    assert cli("verify", older, "--key", keys[1], "--newer-than", "lately").code == 2
    assert cli("generate", older, "--prompt", "a", "--newer-than", first).code == 2


def test_any_of_several_trusted_keys_may_have_signed(
    signed: Path, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    folder = tmp_path / "trusted"
    folder.mkdir()
    with pytest.raises(UsageError, match=r"no public key; expected files that end in \.pub"):
        signature.verify(signed, folder)
    signature.new_key(folder / "other.pem")
    (folder / "other.pem").unlink()
    with pytest.raises(SignatureError, match="does not hold for the key"):
        signature.verify(signed, folder)
    shutil.copy(keys[1], folder / "ours.pub")
    held = signature.verify(signed, folder)
    assert held.key_file == folder / "ours.pub"
    assert linexport.load(signed, key=folder, threads=1).verified
    monkeypatch.setenv("LINEXPORT_TRUSTED_KEYS", str(folder))
    assert cli("verify", signed).code == 0
    (folder / "ours.pub").unlink()
    assert cli("verify", signed).code == 3
    assert cli("inspect", signed).code == 3


# Commands that use an artifact


COMMANDS = {
    "generate": ("--prompt", "a"),
    "serve": ("--port", "0"),
    "bench": (),
    "validate": (),
    "debug": (),
    "inspect": (),
    "quantize": ("--output", "OUT"),
    "package": ("--for", "onnx", "--output", "OUT"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_uses_an_artifact_takes_a_key(
    signed: Path, keys: Keys, cli: Callable[..., Any], tmp_path: Path, command: str
) -> None:
    """A file is added: nothing else of the folder tells that it is not the one that was signed."""
    (signed / "tokenizer.json").write_text("{}")
    options = [str(tmp_path / "out") if o == "OUT" else o for o in COMMANDS[command]]
    refused = cli(command, signed, *options, "--key", keys[1])
    assert refused.code == 3 and "not signed: tokenizer.json" in refused.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["inspect", "package"])
def test_a_command_goes_on_with_a_key_that_holds(
    signed: Path, keys: Keys, cli: Callable[..., Any], tmp_path: Path, command: str
) -> None:
    options = [str(tmp_path / "out") if o == "OUT" else o for o in COMMANDS[command]]
    assert cli(command, signed, *options, "--key", keys[1]).code == 0


# The bytes that were hashed are those that run


@pytest.fixture
def beside(factories: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact with its weights in a file beside the model."""
    monkeypatch.setattr(write, "EXTERNAL_ABOVE", 0)
    monkeypatch.setattr(write, "SMALLEST", 64)
    place = tmp_path / "beside"
    linexport.convert(factories.source("small"), place, bench=False, threads=1)
    assert (place / "model.onnx.data").exists()
    return place


def test_a_model_is_read_once(signed: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is rewritten in place as soon as it was hashed, by one who knows when."""
    x = np.ones((1, 3, 8), np.float32)
    expected = linexport.load(signed, key=keys[1], threads=1).run(x)["output"]
    model = signed / "model.onnx"
    good, real = model.read_bytes(), opening.check_files

    def rewriting(*given: Any) -> Any:
        found = real(*given)
        model.write_bytes(bytes(len(good)))
        return found

    monkeypatch.setattr(opening, "check_files", rewriting)
    found = linexport.load(signed, key=keys[1], threads=1).run(x)["output"]
    np.testing.assert_array_equal(found, expected)


def test_a_manifest_that_changes_once_its_signature_holds_is_not_read(
    signed: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, real = signed / "manifest.json", signature.check

    def rewriting(*given: Any) -> Any:
        found = real(*given)
        place.write_text(place.read_text().replace('"status": "ok"', '"status":"ok" '))
        return found

    monkeypatch.setattr(signature, "check", rewriting)
    with pytest.raises(UsageError, match=r"manifest\.json was changed while it was used"):
        linexport.load(signed, key=keys[1], threads=1)


@pytest.mark.parametrize("how", ["in place", "and back", "replaced"])
def test_weights_that_change_while_they_are_opened_are_not_used(
    beside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Also where size, content and the time of the last change are as before in the end."""
    public = signature.new_key(tmp_path / "key.pem")
    signature.sign(beside, tmp_path / "key.pem")
    data = beside / "model.onnx.data"
    good, times, real = data.read_bytes(), data.stat(), opening.check_files

    def rewriting(files: Any, manifest: Any) -> Any:
        found = real(files, manifest)
        if how == "replaced":
            shutil.copy2(data, tmp_path / "copy")
            (tmp_path / "copy").replace(data)
            return found
        with data.open("r+b") as file:
            file.write(bytes(len(good)))
            if how == "and back":
                file.seek(0)
                file.write(good)
        os.utime(data, ns=(times.st_atime_ns, times.st_mtime_ns))
        return found

    monkeypatch.setattr(opening, "check_files", rewriting)
    with pytest.raises((UsageError, SignatureError), match=r"model\.onnx\.data|replaced over"):
        linexport.load(beside, key=public, threads=1)
    monkeypatch.undo()
    data.write_bytes(good)
    assert linexport.load(beside, key=public, threads=1)


def test_what_was_changed_meanwhile_is_not_packaged(
    signed: Path, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = signed / "model.onnx"

    def write_it(job: Any) -> Any:
        made = ONNX.write(job)
        model.write_bytes(model.read_bytes())
        return made

    with pytest.raises(UsageError, match=r"model\.onnx was changed while it was used"):
        package(
            signed,
            replace(ONNX, write=write_it),
            tmp_path / "out",
            trust=signature.Trust(keys[1]),
        )
    assert not (tmp_path / "out").exists()


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
        with pytest.raises(EnvironmentProblemError, match=r"pip install '\.\[sign\]'"):
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
