"""Signed seals: each attack of who can write the root and knows every key but the private one.

Keys come from `ssh-keygen` and `openssl`, as people make them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from command_line import run_ckptctl

import ckptctl
from ckptctl import Report, Severity, UsageError
from ckptctl.errors import CkptctlError
from ckptctl.formats.own.files import canonical, digest_of
from ckptctl.formats.own.seals import SEAL, parse_seal, seal_bytes
from ckptctl.signatures import public_key, sign
from ckptctl.train import resolve

torch = pytest.importorskip("torch")
pytest.importorskip("cryptography")
for program in ("ssh-keygen", "openssl"):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed", allow_module_level=True)

pytestmark = pytest.mark.torch

KEY = b"a key of thirty-two bytes or so."


def make_key(path: Path, kind: str = "ed25519", password: str = "") -> Path:
    """A private key of OpenSSH or PEM at `path`, its public key beside it."""
    if kind.endswith("-pem"):
        how = {"ed25519-pem": "-algorithm ed25519", "p256-pem": "-algorithm EC"}[kind]
        curve = "-pkeyopt ec_paramgen_curve:P-256" if kind == "p256-pem" else ""
        cipher = f"-aes-256-cbc -pass pass:{password}" if password else ""
        commands = [
            f"openssl genpkey {how} {curve} {cipher} -out {path}",
            f"openssl pkey -in {path} -passin pass:{password} -pubout -out {path}.pub",
        ]
        argvs = [command.split() for command in commands]
    else:
        argvs = [["ssh-keygen", "-q", "-t", kind, "-N", password, "-C", "a comment", "-f", path]]
    for argv in argvs:
        subprocess.run(argv, check=True, capture_output=True)
    path.chmod(0o600)
    return path


UNSIGNED = ("digest", "hmac", "signature")
KINDS = ("ed25519", "ed25519-pem", "ecdsa", "p256-pem")


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("keys")
    folder.chmod(0o755)
    return {kind: make_key(folder / kind, kind) for kind in (*KINDS, "rsa")} | {
        "another": make_key(folder / "another")
    }


def public(key: Path) -> bytes:
    return Path(f"{key}.pub").read_bytes()


@pytest.fixture(scope="module")
def signed_once(checkpoints: Path, keys: dict[str, Path], tmp_path_factory) -> Path:
    """Steps 300 to 500, signed in their order."""
    root = tmp_path_factory.mktemp("signed") / "run"
    shutil.copytree(checkpoints / "run_fsdp4", root)
    for number in (300, 400, 500):
        ckptctl.seal(f"{root}@{number}", signing_key=keys["ed25519"].read_bytes())
    return root


@pytest.fixture
def signed(signed_once: Path, copy_of: Callable[[Path], Path]) -> Path:
    return copy_of(signed_once)


@pytest.fixture
def asked(keys: dict[str, Path]) -> dict[str, Any]:
    return {"require_signature": [public(keys["ed25519"])]}


def document(root: Path, number: int = 500) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads((root / f"step_{number}" / SEAL).read_text()))


def put(root: Path, fields: dict[str, Any], number: int = 500) -> None:
    (root / f"step_{number}" / SEAL).write_bytes(canonical(fields) + b"\n")


def put_resealed(root: Path, number: int = 500, **changed: object) -> None:
    """Change fields of a seal, and make its digest match, as anybody can."""
    fields = document(root, number) | changed
    signature = fields.pop("signature", None)
    digest = digest_of({name: fields[name] for name in fields if name not in UNSIGNED})
    seal = parse_seal(canonical(fields | {"digest": digest}))
    made = json.loads(seal_bytes(seal, None)) | ({"signature": signature} if signature else {})
    put(root, made, number)


def flip(path: Path) -> None:
    about, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def faults(report: Report) -> set[str]:
    return {one.code for one in report.with_severity(Severity.FAULT)}


def refused(root: Path, asked: dict[str, Any], *codes: str, number: int = 500) -> Report:
    """The step is unverifiable with a finding of each code, and no command takes it."""
    report = ckptctl.verify(f"{root}@{number}", **asked)
    assert report.exit_code == 22
    assert {*codes, "seal.required"} <= {one.code for one in report.findings}
    (required,) = (one for one in report.findings if one.code == "seal.required")
    assert all(code in required.message for code in codes)
    if not set(codes) & {"seal.other-run", "seal.rolled-back"}:
        assert not report.seal_signer_verified
    chosen = ckptctl.pick(str(root), accept_unverifiable=True, **asked).chosen
    assert chosen is None or chosen.number != number
    with pytest.raises(CkptctlError):
        resolve(number, str(root), **asked)
    return report


# A sound root


@pytest.mark.parametrize("kind", KINDS)
def test_a_signed_step_is_taken_by_every_command(root, keys, kind):
    signing_key = keys[kind].read_bytes()
    sealed = ckptctl.seal(f"{root}@500", signing_key=signing_key)
    asked = {"require_signature": [public(keys[kind])]}
    report = ckptctl.verify(f"{root}@500", **asked)
    assert (report.exit_code, report.level, report.seal_signer_verified) == (0, "content", True)
    assert report.seal_signer == sealed.signer == public_key(public(keys[kind])).fingerprint
    assert sealed.kind == report.seal == "sha256 with a signature"
    assert ckptctl.pick(str(root), **asked).step == 500
    assert ckptctl.preflight(str(root), **asked).exit_code == 0
    usable = [one.number for one in ckptctl.scan(str(root), **asked).reports if one.usable]
    assert usable == [500]
    assert resolve("auto", str(root), **asked) == str(root / "step_500")
    unchecked = ckptctl.verify(f"{root}@500")
    assert (unchecked.exit_code, unchecked.seal_signer_verified) == (0, False)
    assert unchecked.seal_signer == sealed.signer


def test_the_fingerprint_is_that_of_ssh_keygen(keys):
    for kind in ("ed25519", "ecdsa"):
        listed = subprocess.run(
            ["ssh-keygen", "-lf", f"{keys[kind]}.pub"], check=True, capture_output=True, text=True
        )
        assert listed.stdout.split()[1] == public_key(public(keys[kind])).fingerprint


@pytest.mark.parametrize("kind", ["ed25519-pem", "p256-pem"])
def test_openssl_verifies_the_signature_over_the_canonical_fields(root, keys, tmp_path, kind):
    ckptctl.seal(f"{root}@500", signing_key=keys[kind].read_bytes())
    fields = document(root)
    (tmp_path / "signature").write_bytes(bytes.fromhex(fields["signature"]["value"]))
    signed = {k: v for k, v in fields.items() if k not in UNSIGNED}
    text = json.dumps(signed, sort_keys=True, separators=(",", ":"))
    (tmp_path / "seal").write_text(text)
    digest = ["-digest", "sha256"] if kind == "p256-pem" else []
    done = subprocess.run(
        [
            *("openssl", "pkeyutl", "-verify", "-rawin", *digest, "-pubin"),
            *("-inkey", f"{keys[kind]}.pub", "-sigfile", "signature", "-in", "seal"),
        ],
        cwd=tmp_path,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_step_may_have_a_key_and_a_signature_and_each_is_checked_alone(root, keys, asked):
    ckptctl.seal(f"{root}@500", key=KEY, signing_key=keys["ed25519"].read_bytes())
    for given in (asked, asked | {"key": KEY}, {"require_seal": True, "key": KEY}):
        report = ckptctl.verify(f"{root}@500", **given)
        assert (report.exit_code, report.seal) == (0, "sha256 with a key and a signature")
    assert ckptctl.verify(f"{root}@500", require_seal=True).exit_code == 22  # seal.no-key
    refused(root, asked | {"key": KEY[::-1]}, "seal.bad-signature")


def test_a_seal_with_a_signature_alone_has_no_key(signed, asked):
    report = ckptctl.verify(f"{signed}@500", require_seal=True, key=KEY)
    assert (report.exit_code, faults(report)) == (22, {"seal.required"})
    assert "seal.unkeyed" in {one.code for one in report.findings}
    assert ckptctl.verify(f"{signed}@500", require_seal=True).exit_code == 0


def test_any_of_several_keys_is_enough(signed, keys, asked):
    several = [public(keys["another"]), *asked["require_signature"], public(keys["ecdsa"])]
    assert ckptctl.pick(str(signed), require_signature=several).step == 500


def test_a_changed_signer_signs_from_the_first_place_and_both_are_taken(signed, keys, asked):
    ckptctl.seal(f"{signed}@400", replace=True, signing_key=keys["another"].read_bytes())
    both = {"require_signature": [*asked["require_signature"], public(keys["another"])]}
    for given in ({"level": "content"}, both):
        report = ckptctl.verify(f"{signed}@400", **given)
        assert report.exit_code == 0
        assert not report.with_severity(Severity.WARNING)
    refused(signed, asked, "seal.other-signer", number=400)


# Attacks


def test_a_changed_byte_of_a_file_is_found(signed, asked):
    flip(signed / "step_500" / "__1_0.distcp")
    assert ckptctl.verify(f"{signed}@500", **asked).exit_code == 21
    assert ckptctl.pick(str(signed), **asked).step == 400


def test_a_seal_that_was_made_to_fit_another_file_does_not_match_its_signature(signed, asked):
    """The attack on a seal with a key by somebody who verifies with it."""
    (signed / "step_500" / "config.json").write_text('{"lr": 1e9}')
    signature = document(signed)["signature"]
    ckptctl.seal(f"{signed}@500", replace=True, key=KEY)
    fields = document(signed)
    assert fields["signature"] is None
    put(signed, fields | {"signature": signature})
    refused(signed, asked, "seal.bad-signature")
    refused(signed, asked | {"key": KEY}, "seal.bad-signature")


@pytest.mark.parametrize(
    "changed",
    [{"sequence": 9}, {"run": "0" * 32}, {"sealed_at": "2020-01-01T00:00:00Z"}, {"earlier": []}],
    ids=lambda changed: next(iter(changed)),
)
def test_a_changed_field_of_the_seal_does_not_match_its_signature(signed, asked, changed):
    put_resealed(signed, **changed)
    refused(signed, asked, "seal.bad-signature")


def test_who_knows_the_key_of_seals_makes_no_signature(root, asked):
    ckptctl.seal(f"{root}@500", key=KEY)
    refused(root, asked, "seal.unsigned")
    refused(root, asked | {"key": KEY}, "seal.unsigned")


def test_a_removed_signature_is_missed(signed, asked):
    fields = document(signed)
    del fields["signature"]
    put(signed, fields)
    report = refused(signed, asked, "seal.unsigned")
    assert any("the signature was removed" in one.message for one in report.findings)


def test_a_removed_seal_is_missed(signed, asked):
    (signed / "step_500" / SEAL).unlink()
    refused(signed, asked)


def test_a_signature_by_another_key_is_refused_whatever_name_it_has(signed, keys, asked):
    ckptctl.seal(f"{signed}@500", replace=True, signing_key=keys["another"].read_bytes())
    refused(signed, asked, "seal.other-signer")
    fields = document(signed)
    fields["signature"]["signer"] = public_key(asked["require_signature"][0]).fingerprint
    put(signed, fields)
    refused(signed, asked, "seal.bad-signature")


@pytest.mark.parametrize(
    "changed",
    [
        {"algorithm": "none"},
        {"algorithm": "ecdsa-p256-sha256"},
        {"value": ""},
        {"value": "0"},
        {"value": "00" * 64},
    ],
    ids=str,
)
def test_the_key_states_the_algorithm_and_not_the_signature(signed, asked, changed):
    fields = document(signed)
    fields["signature"] |= changed
    put(signed, fields)
    refused(signed, asked, "seal.bad-signature")


@pytest.mark.parametrize(
    "signature",
    [
        *(7, "x", [], {}, {"algorithm": "ed25519", "signer": "x", "value": "0" * 10_000}),
        {"algorithm": "ed25519", "signer": "SHA256:\x1b[31m", "value": "00"},
    ],
)
def test_a_signature_of_another_form_makes_the_seal_unreadable(signed, asked, signature):
    put(signed, document(signed) | {"signature": signature})
    refused(signed, asked, "seal.invalid")


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 100, b"{" * 5_000_000, b" " * (33 << 20)], ids=len
)
def test_a_file_of_garbage_in_the_place_of_the_seal_is_refused(signed, asked, content):
    (signed / "step_500" / SEAL).write_bytes(content)
    refused(signed, asked, "seal.invalid")


def test_a_signature_over_weak_digests_is_no_signature(root, keys, asked):
    """xxh3-128: other bytes with the same digest can be made on purpose."""
    ckptctl.seal(f"{root}@500")
    fields = document(root)
    unsigned = {name: value for name, value in fields.items() if name not in UNSIGNED}
    ckptctl.seal(f"{root}@400", signing_key=keys["ed25519-pem"].read_bytes())
    made = sign(canonical(unsigned), keys["ed25519-pem"].read_bytes())
    signature = {name: getattr(made, name) for name in ("algorithm", "signer", "value")}
    put(root, fields | {"signature": signature})
    refused(root, {"require_signature": [public(keys["ed25519-pem"])]}, "seal.invalid")


@pytest.mark.parametrize(
    "name", ["model (1).pt", "._model.safetensors", "lost+found/model.pt", "._0_0 (1).distcp"]
)
def test_a_file_that_looks_as_if_a_tool_had_left_it_is_found_where_it_may_be_loaded(
    signed, asked, name
):
    """A program that loads every `*.pt` of a folder would load it."""
    (signed / "step_500" / name).parent.mkdir(exist_ok=True)
    (signed / "step_500" / name).write_bytes(b"weights")
    report = ckptctl.verify(f"{signed}@500", **asked)
    assert report.exit_code == 22
    assert "seal.extra" in {one.code for one in report.findings}
    assert ckptctl.pick(str(signed), **asked).step == 400
    assert ckptctl.verify(f"{signed}@500", require_seal=True).exit_code == 0


@pytest.mark.parametrize("name", [".DS_Store", ".nfs0000000000ab12", "Thumbs.db"])
def test_what_a_system_leaves_in_a_folder_does_not_matter(signed, asked, name):
    (signed / "step_500" / name).write_bytes(b"left")
    assert ckptctl.verify(f"{signed}@500", **asked).exit_code == 0


def copy_step(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


def test_a_signed_seal_of_another_step_proves_nothing(signed, asked):
    shutil.copy(signed / "step_400" / SEAL, signed / "step_500" / SEAL)
    refused(signed, asked, "seal.foreign")


@pytest.mark.parametrize(
    ("name", "code"), [("step_600", "step.foreign"), ("iter_0000500", "seal.renamed")]
)
def test_a_signed_step_under_another_name_is_refused(signed, asked, name, code):
    copy_step(signed / "step_500", signed / name)
    if code == "seal.renamed":
        shutil.rmtree(signed / "step_500")
    report = ckptctl.verify(str(signed / name), **asked)
    assert report.exit_code != 0
    assert code in {one.code for one in report.findings}
    chosen = ckptctl.pick(str(signed), **asked).chosen
    assert chosen is None or not chosen.url.endswith(name)


def test_a_signed_step_of_another_run_is_refused(signed, checkpoints, copy_of, keys, asked):
    other = copy_of(checkpoints / "run_fsdp4")
    ckptctl.seal(f"{other}@500", signing_key=keys["ed25519"].read_bytes())
    copy_step(other / "step_500", signed / "step_500")
    refused(signed, asked, "seal.other-run")


def test_an_older_signed_save_in_the_place_of_a_newer_one_is_refused(signed, keys, asked, tmp_path):
    old = shutil.copytree(signed / "step_400", tmp_path / "step_400")
    (signed / "step_400" / "config.json").write_text('{"save": 2}')
    for number in (400, 500):
        again = {"replace": True, "signing_key": keys["ed25519"].read_bytes()}
        ckptctl.seal(f"{signed}@{number}", **again)
    assert ckptctl.verify(f"{signed}@400", **asked).exit_code == 0
    copy_step(old, signed / "step_400")
    refused(signed, asked, "seal.rolled-back", number=400)


def test_an_invented_signature_does_not_hide_from_a_key_that_a_save_is_older(root, tmp_path):
    for number in (400, 500):
        ckptctl.seal(f"{root}@{number}", key=KEY)
    old = shutil.copytree(root / "step_400", tmp_path / "step_400")
    (root / "step_400" / "config.json").write_text('{"save": 2}')
    for number in (400, 500):
        ckptctl.seal(f"{root}@{number}", key=KEY, replace=True)
    copy_step(old, root / "step_400")
    invented = {"algorithm": "ed25519", "signer": "SHA256:nobody", "value": "00"}
    put(root, document(root, 400) | {"signature": invented}, 400)
    refused(root, {"require_seal": True, "key": KEY}, "seal.rolled-back", number=400)


def test_seals_of_others_do_not_count_in_the_order_of_a_signer(signed, keys, asked):
    """Else whoever writes one seal could have the signer state that a good step is an old one."""
    put_resealed(signed, 300, sequence=2**53 - 1)
    sealed = ckptctl.seal(f"{signed}@200", signing_key=keys["ed25519"].read_bytes())
    assert sealed.sequence == 4
    assert ckptctl.verify(f"{signed}@200", **asked).exit_code == 0


@pytest.mark.parametrize("level", ["listing", "structure"])
def test_a_level_that_compares_no_bytes_does_not_answer_for_a_signature(signed, asked, level):
    report = ckptctl.verify(f"{signed}@500", level=level, **asked)
    assert (report.exit_code, faults(report)) == (22, {"seal.not-compared"})


# Keys


def certificate(keys: dict[str, Path]) -> bytes:
    """A certificate of OpenSSH, expired, by a key that nobody trusts."""
    key, path = keys["ed25519"], keys["another"].parent
    argv = ["ssh-keygen", "-q", "-s", keys["another"], "-I", "id", "-V", "20200101:20200102"]
    subprocess.run([*argv, f"{key}.pub"], check=True, capture_output=True)
    return (path / "ed25519-cert.pub").read_bytes()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda keys: public(keys["rsa"]), "is a key of another kind"),
        (lambda keys: keys["ed25519"].read_bytes(), "is not one public key"),
        (lambda keys: public(keys["ed25519"]) * 2, "is not one public key"),
        (lambda keys: public(keys["ed25519"]) + public(keys["p256-pem"]), "is not one public key"),
        (lambda _: b"-----BEGIN PUBLIC KEY-----\n\0", "is not one public key"),
        (lambda _: b"ssh-ed25519 AAAA", "is not one public key"),
        (certificate, "is not one public key"),
        (lambda _: b"", "is not one public key"),
    ],
)
def test_a_file_without_one_known_public_key_is_an_error_before_anything_is_read(
    tmp_path, keys, made, message
):
    file = tmp_path / "signer.pub"
    file.write_bytes(made(keys))
    with pytest.raises(UsageError, match=message):
        ckptctl.pick(str(tmp_path), require_signature=[made(keys).strip()])
    if made(keys):
        done = run_ckptctl("pick", str(tmp_path), "--require-signature", str(file))
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr


@pytest.mark.parametrize("kind", ["ed25519", "p256-pem"])
def test_a_password_comes_from_its_variable_and_is_never_shown(root, tmp_path, kind):
    if kind == "ed25519":
        pytest.importorskip("bcrypt")
    tmp_path.chmod(0o755)
    key = make_key(tmp_path / "key", kind, "correct-horse-battery")
    seal = ("seal", f"{root}@500", "--sign", str(key))
    missing = run_ckptctl(*seal)
    assert missing.returncode == 2
    assert "CKPTCTL_SIGN_PASSWORD is not set" in missing.stderr
    wrong = run_ckptctl(*seal, env={"CKPTCTL_SIGN_PASSWORD": "wrong-horse-battery"})
    assert wrong.returncode == 2
    assert "its password is another" in wrong.stderr
    assert "horse" not in wrong.stdout + wrong.stderr
    assert (
        run_ckptctl(*seal, env={"CKPTCTL_SIGN_PASSWORD": "correct-horse-battery"}).returncode == 0
    )
    verify = ("verify", f"{root}@500", "--require-signature", f"{key}.pub")
    assert run_ckptctl(*verify).returncode == 0


def test_a_password_for_a_key_that_has_none_is_no_error(root, keys):
    env = {"CKPTCTL_SIGN_PASSWORD": "correct-horse-battery"}
    for kind in ("ed25519", "p256-pem"):
        seal = ("seal", f"{root}@500", "--replace", "--sign", str(keys[kind]))
        assert run_ckptctl(*seal, env=env).returncode == 0


def test_a_private_key_that_others_can_read_signs_nothing(root, tmp_path):
    tmp_path.chmod(0o755)
    key = make_key(tmp_path / "key")
    key.chmod(0o644)
    done = run_ckptctl("seal", f"{root}@500", "--sign", str(key))
    assert done.returncode == 2
    assert not (root / "step_500" / SEAL).exists()


@pytest.mark.parametrize("way", ["settings", "variable"])
def test_the_public_key_is_stated_once(root, keys, tmp_path, way):
    ckptctl.seal(f"{root}@400", signing_key=keys["ed25519"].read_bytes())
    env = {}
    if way == "settings":
        shutil.copy(f"{keys['ed25519']}.pub", root / "signer.pub")
        (root / "ckptctl.toml").write_text('require_signature = ["signer.pub"]\n')
    else:
        env = {"CKPTCTL_REQUIRE_SIGNATURE": f"{keys['ed25519']}.pub"}
    done = run_ckptctl("pick", ".", cwd=root, env=env)
    assert (done.returncode, done.stdout) == (0, "step_400\n"), done.stderr
    assert run_ckptctl("verify", ".@500", cwd=root, env=env).returncode == 22
    assert run_ckptctl("verify", ".@400", cwd=root, env=env).returncode == 0


def test_without_the_package_a_required_signature_is_an_error_and_not_left_out(
    root, keys, tmp_path
):
    absent = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: (\n"
        "    None if name.startswith('cryptography') else find(name, *rest))\n"
        "from ckptctl.cli.main import main\n"
        "sys.exit(main())\n"
    )
    pick = [sys.executable, "-c", absent, "pick", str(root)]
    done = subprocess.run(
        [*pick, "--require-signature", f"{keys['ed25519']}.pub"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'ckptctl[sign]'" in done.stderr
    assert subprocess.run(pick, capture_output=True).returncode == 0


def test_a_path_in_the_place_of_a_key_is_an_error_of_the_function_too(tmp_path):
    for given in ("signer.pub", ["signer.pub"]):
        with pytest.raises(UsageError, match="as bytes"):
            ckptctl.pick(str(tmp_path), require_signature=given)


# Who signs


def test_watch_signs_what_it_seals(root, keys, asked):
    for _ in range(2):  # two equal listings
        [*ckptctl.watch(str(root), once=True, grace_s=0, signing_key=keys["ed25519"].read_bytes())]
    assert ckptctl.pick(str(root), **asked).step == 500


def test_verify_shows_who_signed(signed, keys):
    fingerprint = public_key(public(keys["ed25519"])).fingerprint
    plain = run_ckptctl("verify", f"{signed}@500")
    assert f"signed by {fingerprint}; not checked" in plain.stdout
    required = ("verify", f"{signed}@500", "--require-signature", f"{keys['ed25519']}.pub")
    assert f"signed by {fingerprint}; verified" in run_ckptctl(*required).stdout
    report = json.loads(run_ckptctl(*required, "--json").stdout)
    report = report.get("report", report)
    assert (report["seal_signer"], report["seal_signer_verified"]) == (fingerprint, True)


@pytest.mark.parametrize("way", ["option", "settings"])
def test_prune_keeps_what_a_job_that_requires_a_signature_takes(signed, keys, way):
    """Else newer steps that anybody sealed would have all those removed that the job accepts."""
    ckptctl.seal(f"{signed}@500", replace=True)
    options = ["--require-signature", f"{keys['ed25519']}.pub"]
    if way == "settings":
        shutil.copy(f"{keys['ed25519']}.pub", signed / "signer.pub")
        (signed / "ckptctl.toml").write_text('require_signature = ["signer.pub"]\n')
        options = []
    done = run_ckptctl("prune", ".", "--keep", "1", *options, "--apply", cwd=signed)
    assert done.returncode == 0, done.stderr
    assert "seal.unsigned" in done.stdout
    left = {path.name for path in signed.glob("step_*")}
    assert left == {"step_500", "step_400", "step_200", "step_100"}  # what nobody signed stays


def test_a_mark_of_acceptance_does_not_stand_for_a_signature(root, asked):
    ckptctl.seal(f"{root}@500")
    ckptctl.mark(f"{root}@500", "accepted", reason="it is good")
    refused(root, asked, "seal.unsigned")


@pytest.mark.parametrize("way", ["keyword", "settings"])
def test_no_public_key_at_all_does_not_lift_the_requirement(root, way):
    """As a pattern of files gives that matches none."""
    if way == "keyword":
        with pytest.raises(UsageError, match="has no public key"):
            ckptctl.pick(str(root), require_signature=[])
        return
    (root / "ckptctl.toml").write_text("require_signature = []\n")
    done = run_ckptctl("pick", ".", cwd=root)
    assert (done.returncode, done.stdout) == (2, "")
    assert "require_signature is an empty list" in done.stderr
