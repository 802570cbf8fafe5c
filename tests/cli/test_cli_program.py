"""The command as a whole: exit codes, hostile input, pipes and terminals."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import msgspec
import pytest
from cli_runs import COMMAND, Run
from cli_stores import make_layout, make_object, put, put_blocks, put_manifest

import kvformat
from kvformat.cli.render import printable
from kvformat.fingerprint import manifest
from kvformat.key import layout_namespace, namespace_prefix
from kvformat.stores import Store
from kvformat.stores.memory import MemoryStore

LAYOUT = make_layout()
#: What no output may hold, except line ends: C0, DEL, C1, and marks that reorder text.
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")
HOSTILE = "\x1b]0;owned\x07\x1b[31m\x9b2J\x7f\u202eevil\r\n"


def test_version(run_process: Run) -> None:
    """--version tells the library's version and the format's."""
    outcome = run_process("--version")
    assert outcome == (0, f"kvformat {kvformat.__version__} (format 1.0)\n", "")


@pytest.mark.parametrize("command", ["describe", "diff", "doctor", "inspect", "ls", "verify"])
def test_help(run_process: Run, command: str) -> None:
    """Each command's help has an example and its exit codes."""
    outcome = run_process(command, "--help")
    assert f"kvformat {command} " in outcome.stdout
    assert "Exit status:" in outcome.stdout
    assert "--json" in outcome.stdout
    assert outcome.code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("unknown",),
        ("ls",),
        ("ls", "memory://", "--unknown"),
        ("describe",),
        ("inspect", "memory://"),
        ("verify", "memory://", "--examples", "-1"),
        ("verify", "memory://", "--examples", "many"),
    ],
)
def test_wrong_usage(run: Run, arguments: tuple[str, ...]) -> None:
    """Wrong usage is exit code 2 with a usage line, on standard error only."""
    outcome = run(*arguments)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert outcome.stderr.startswith("Usage: ")


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("nothing://x", "config_value"),
        ("/a/path", "config_value"),
        ("memory://x?max_nbytes=1", "config_unknown"),
        ("file:///nowhere/at/all", "store_unavailable"),
        ("file:///dev/null", "store_unavailable"),
        ("file://relative", "config_value"),
        (f"file:///{HOSTILE}", "store_unavailable"),
        (f"{HOSTILE}://", "config_value"),
    ],
)
def test_unusable_store(run: Run, uri: str, reason: str) -> None:
    """A store that can't be opened is exit code 2 and its error's reason, whatever the command."""
    key = make_object(LAYOUT)[0]
    for arguments in (
        ("ls", uri),
        ("inspect", uri, key),
        ("describe", key, "--store", uri),
        ("diff", "--store", uri),
        ("verify", uri),
    ):
        outcome = run(*arguments, "--json")
        assert outcome.json["error"]["reason"] == reason
        assert f"[{reason}]" in outcome.stderr
        assert not CONTROL.search(outcome.stderr)
        assert outcome.code == 2


def test_asking_makes_no_folder(run_process: Run, tmp_path: Path) -> None:
    """A mistyped path is an error and leaves no folder behind."""
    assert run_process("ls", f"file://{tmp_path}/typo").code == 2
    assert list(tmp_path.iterdir()) == []


def test_store_package_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store whose package can't be imported is out of reach, not a traceback."""

    def fail(uri: str) -> Store:
        raise ModuleNotFoundError("No module named 'somewhere'")

    monkeypatch.setattr("kvformat.cli.sources.open_store", fail)
    outcome = run("ls", "memory://", "--json")
    assert (outcome.json["error"]["reason"], outcome.code) == ("store_unavailable", 2)


@pytest.mark.parametrize("method", ["get_start", "object_nbytes", "get_ranges"])
def test_store_goes_away(run: Run, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """A store that stops answering is exit code 2, not a finding about the key."""
    store = MemoryStore(f"memory://cli-gone-{method}")
    [key] = put_blocks(store, LAYOUT, 1)
    answer = -8 if method == "object_nbytes" else [-8]
    monkeypatch.setattr(MemoryStore, method, lambda *_: answer)
    outcome = run("inspect", store.uri, key, "--json")
    assert (outcome.json["error"]["reason"], outcome.code) == ("unavailable", 2)


@pytest.mark.parametrize(
    "arguments",
    [
        ("describe", HOSTILE),
        ("describe", f"kvformat1/{HOSTILE}/m/00"),
        ("describe", f"kvformat2/{HOSTILE}"),
        ("describe", "x", "--layout", HOSTILE),
        ("diff", HOSTILE, HOSTILE),
        ("diff", "--store", "memory://", HOSTILE, "x"),
        ("inspect", "memory://", HOSTILE),
        ("ls", "memory://", HOSTILE),
        ("verify", "memory://", HOSTILE),
        (HOSTILE,),
        ("ls", "memory://", f"--{HOSTILE}"),
        ("verify", "memory://", "--examples", HOSTILE),
        ("describe", "\udcff\udcfe\x1b[31m"),
        ("describe", "kvformat1/\udcff/m/00"),
        ("ls", "memory://\udcff"),
        ("ls", "memory://", "\udcff"),
    ],
)
def test_hostile_arguments(run: Run, arguments: tuple[str, ...]) -> None:
    """No argument reaches the terminal raw, or ends in anything but an exit code."""
    for outcome in (run(*arguments), run(*arguments, "--json")):
        assert not CONTROL.search(outcome.stdout + outcome.stderr)
        assert outcome.code in (0, 1, 2)


@pytest.mark.parametrize(
    "arguments", [("describe", b"\xff\x1b[31m"), ("verify", b"file:///\xff"), ("ls", HOSTILE)]
)
def test_hostile_arguments_of_a_process(
    run_process: Run, arguments: tuple[str | bytes, ...]
) -> None:
    """The same from a shell, whose arguments need not even be text."""
    outcome = run_process(*arguments)
    assert not CONTROL.search(outcome.stdout + outcome.stderr)
    assert "Traceback" not in outcome.stderr
    assert outcome.code in (1, 2)


def test_hostile_store(run: Run, store: Store, tmp_path: Path) -> None:
    """Names that a hostile writer chose are shown escaped by every command."""
    layout = make_layout(
        tenant=HOSTILE, model=HOSTILE, weights=HOSTILE, layer_name=HOSTILE + "[bold]{}"
    )
    [key] = put_blocks(store, layout, 1)
    put(store, HOSTILE, b"x")
    put(store, f"kvformat1/{HOSTILE}", b"x")
    put_manifest(store, LAYOUT)
    file = tmp_path / "manifest"
    file.write_bytes(manifest(layout))
    for arguments in (
        ("ls", store.uri),
        ("ls", store.uri, "--keys"),
        ("describe", key, "--store", store.uri),
        ("describe", str(file)),
        ("inspect", store.uri, key, "--verify"),
        ("diff", "--store", store.uri),
        ("verify", store.uri),
    ):
        for outcome in (run(*arguments), run(*arguments, "--json")):
            assert not CONTROL.search(outcome.stdout + outcome.stderr), arguments
            assert outcome.code in (0, 1)
    assert run("describe", key, "--store", store.uri, "--json").json["tenant"] == HOSTILE
    assert "[bold]0" in run("describe", key, "--store", store.uri).stdout


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 模型", "plain é 模型"),
        ("\x1b[0m", r"\x1b[0m"),
        ("a\nb\tc", r"a\nb\tc"),
        ("\u202e\u200b\u2028", r"\u202e\u200b\u2028"),
        ("\udc80\U000e0001", r"\udc80\U000e0001"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    """Text stays as it is, but for what can't be seen or acts on a terminal."""
    assert printable(text) == shown


def test_piped_output_is_whole(run_process: Run, file_store: Store) -> None:
    """Without a terminal nothing is coloured, folded, cut or filled up with spaces."""
    layout = make_layout(model="m" * 300, layer_name="l" * 200 + ".{}")
    [key] = put_blocks(file_store, layout, 1)
    outcome = run_process(
        "describe", key, "--store", file_store.uri, COLUMNS="40", TERM="xterm-256color"
    )
    lines = outcome.stdout.splitlines()
    assert f"Key of an object: {key}" in lines
    assert any(line.split() == ["model", "m" * 300] for line in lines)
    assert any("l" * 200 + ".0" in line.split() for line in lines)
    assert not any(line.endswith(" ") for line in lines)
    listed = run_process("ls", file_store.uri).stdout
    assert layout_namespace(layout).fingerprint.hex() in listed.split()


@pytest.mark.parametrize("columns", [30, 50, 80, 200])
def test_terminal_widths(run_terminal: Run, file_store: Store, columns: int) -> None:
    """However narrow the terminal, lines fit it and keys and digests can be read whole."""
    [key] = put_blocks(file_store, LAYOUT, 1)
    put_manifest(file_store, make_layout(tenant="zeta"))
    digest = layout_namespace(LAYOUT).fingerprint.hex()
    for arguments, wanted in (
        (("describe", key, "--store", file_store.uri), key),
        (("inspect", file_store.uri, key, "--verify"), key),
        (("ls", file_store.uri), digest),
        (("diff", "--store", file_store.uri), digest),
        (("verify", file_store.uri), "nothingiswrong."),
    ):
        outcome = run_terminal(*arguments, columns=columns, NO_COLOR="1")
        assert max(map(len, outcome.stdout.splitlines())) <= columns
        assert wanted.lower() in "".join(outcome.stdout.lower().split())
        assert "\u2026" not in outcome.stdout


def test_colours(run_terminal: Run, file_store: Store) -> None:
    """A terminal gets colours; NO_COLOR and a dumb terminal get no escape at all."""
    put_blocks(file_store, LAYOUT, 1)
    arguments = ("ls", file_store.uri)
    assert "\x1b[" in run_terminal(*arguments).stdout
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        outcome = run_terminal(*arguments, **environment)
        assert "\x1b" not in outcome.stdout
        assert outcome.code == 0
    assert "\x1b" not in run_terminal("ls", file_store.uri, "--json").stdout


def test_terminal_without_unicode(run_process: Run, file_store: Store) -> None:
    """An ASCII terminal gets escapes for what it can't show."""
    put_manifest(file_store, make_layout(model="模型"))
    outcome = run_process("ls", file_store.uri, PYTHONIOENCODING="ascii")
    assert r"\u6a21\u578b" in outcome.stdout.split()
    assert outcome.code == 0


@pytest.mark.parametrize("arguments", [("--keys",), ("--json",), ()])
def test_reader_goes_away(file_store: Store, arguments: tuple[str, ...]) -> None:
    """A closed pipe ends the command quietly, with the exit code a shell gives for it."""
    for number in range(300):  # more than a pipe holds
        put_manifest(file_store, make_layout(tenant=f"{number:0500}"))
    process = subprocess.Popen(
        [*COMMAND, "ls", file_store.uri, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141


def test_exit_codes_of_processes(run_process: Run, file_store: Store, tmp_path: Path) -> None:
    """A shell sees 0, 1 and 2 as documented."""
    [key] = put_blocks(file_store, LAYOUT, 1)
    changed, data = make_object(LAYOUT)
    put(file_store, changed, data[:-1] + bytes([data[-1] ^ 1]))
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(manifest(LAYOUT))
    b.write_bytes(manifest(make_layout(seed="ff")))
    for arguments, code in (
        (("ls", file_store.uri), 0),
        (("describe", key), 0),
        (("inspect", file_store.uri, key, "--verify"), 0),
        (("inspect", file_store.uri, changed, "--verify"), 1),
        (("verify", file_store.uri), 1),
        (("diff", str(a), str(a)), 0),
        (("diff", str(a), str(b)), 1),
        (("diff", str(a), str(tmp_path / "c")), 2),
    ):
        outcome = run_process(*arguments)
        assert (outcome.code, outcome.stderr == "") == (code, code < 2), arguments


def test_json_is_ascii(run_process: Run, file_store: Store) -> None:
    """JSON survives any pipe: it is ASCII and gives the text back exactly."""
    model = "模型\x7f\u202e"
    layout = make_layout(model=model)
    put_manifest(file_store, layout)
    outcome = run_process("ls", file_store.uri, "--json")
    assert outcome.stdout.isascii()
    assert outcome.json["namespaces"][0]["model"] == model


def test_large_layout(run_process: Run, file_store: Store) -> None:
    """A model of 128 layers is described whole."""
    group = LAYOUT.groups[0]
    layers = tuple(msgspec.structs.replace(group.layers[0], name=f"l.{n}") for n in range(128))
    layout = msgspec.structs.replace(
        LAYOUT, groups=(msgspec.structs.replace(group, layers=layers), LAYOUT.groups[1])
    )
    [key] = put_blocks(file_store, layout, 1)
    document = json.loads(run_process("describe", key, "--store", file_store.uri, "--json").stdout)
    ranges = document["object"]["ranges"]
    assert len(ranges) == 256
    assert ranges[-1]["offset"] + ranges[-1]["nbytes"] == document["object"]["nbytes"]
    prefix = namespace_prefix(layout_namespace(layout)).removesuffix("/")
    assert document["manifest_key"] == f"{prefix}/manifest"


def test_a_file_that_is_too_long_for_a_manifest(run: Run, tmp_path: Path) -> None:
    """A file of any size in place of a manifest is refused after a manifest's worth of bytes."""
    path = tmp_path / "long.json"
    path.write_bytes(b"{")
    os.truncate(path, 1 << 40)
    for arguments in (
        ("describe", str(path)),
        ("describe", "kvformat1/t/m/" + "0" * 32, "--layout", str(path)),
        ("diff", str(path), str(path)),
        ("diff", "/dev/zero", "/dev/zero"),
    ):
        outcome = run(*arguments, "--json")
        assert (outcome.json["error"]["reason"], outcome.code) == ("manifest_json", 1)


def test_a_pipe_that_nobody_writes_to(run_process: Run, tmp_path: Path) -> None:
    """A pipe can't be an object's file, and the command doesn't wait for it."""
    os.mkfifo(tmp_path / "pipe")
    outcome = run_process("describe", str(tmp_path / "pipe"), "--json")
    assert (outcome.json["error"]["reason"], outcome.code) == ("config_value", 2)


def test_manifests_from_other_commands(run: Run) -> None:
    """A manifest can come through a pipe, as a shell's ``<(command)`` gives it."""
    paths = []
    for layout in (LAYOUT, make_layout(tenant="other")):
        reader, writer = os.pipe()
        with os.fdopen(writer, "wb") as file:
            file.write(manifest(layout))
        paths.append(f"/dev/fd/{reader}")
    outcome = run("diff", *paths, "--json")
    assert [row["field"] for row in outcome.json["differences"]] == ["identity.tenant"]
    assert outcome.code == 1
