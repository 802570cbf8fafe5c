"""``kvformat doctor``: would a server start here, reach its store, and share with another one?"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Outcome, Run
from cli_stores import make_layout, put_manifest

from kvformat.fingerprint import manifest
from kvformat.stores import Store, open_store
from kvformat_connector import diagnosis
from kvformat_connector.store.mooncake_services import MooncakeServices

EXAMPLES = Path(__file__).parents[2] / "connector" / "examples"

CONFIG: dict[str, Any] = {
    "kv_connector": "KVFormatConnector",
    "kv_connector_module_path": "kvformat_connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"store": "memory://doctor"},
}


def config(path: Path, extra: dict[str, Any] | None = None, **fields: Any) -> str:
    document = {**CONFIG, **fields}
    if extra is not None:
        document["kv_connector_extra_config"] = extra
    path.write_text(json.dumps(document))
    return str(path)


def statuses(outcome: Outcome, name: str) -> list[str]:
    return [c["status"] for c in outcome.json["checks"] if c["name"].startswith(name)]


def check(outcome: Outcome, name: str) -> dict[str, Any]:
    (found,) = (c for c in outcome.json["checks"] if c["name"] == name)
    return dict(found)


def test_a_configuration_that_works(run: Run, tmp_path: Path) -> None:
    """Versions, block hashes, options and the store are all looked at, and nothing is wrong."""
    outcome = run("doctor", "--config", config(tmp_path / "a"), "--json")
    assert outcome.code == 0
    assert outcome.json["problems"] == []
    names = [c["name"] for c in outcome.json["checks"]]
    assert {"kvformat", "python", "engine", "mooncake client", "block hashes", "store"} <= {*names}
    assert check(outcome, "store")["status"] == "ok"
    assert statuses(outcome, "config") == ["ok"]


@pytest.mark.parametrize(
    ("extra", "fields", "reason"),
    [
        ({"store": "memory://", "tenants": "a"}, {}, "config_unknown"),
        ({"store": "memory://", "lookup_window": "3"}, {}, "config_value"),
        ({"store": "file:///a", "backend": "mooncake"}, {}, "config_conflict"),
        ({}, {}, "config_missing"),
        ({"store": "memory://"}, {"kv_role": "both"}, "config_value"),
        ({"store": "memory://"}, {"kv_connector": "Other"}, "config_value"),
        ({"store": "memory://"}, {"kv_rool": "kv_both"}, "config_unknown"),
        ({"store": "memory://"}, {"kv_load_failure_policy": "recomptue"}, "config_value"),
        ({"store": "memory://"}, {"kv_load_failure_policy": None}, "config_value"),
        (
            {"store": "memory://", "consumer_is_to_load": False},
            {"kv_role": "kv_consumer"},
            "config_conflict",
        ),
    ],
)
def test_what_a_start_would_refuse(
    run: Run, tmp_path: Path, extra: dict[str, Any], fields: dict[str, Any], reason: str
) -> None:
    """Case 37 before the start: exit 1, with the reason that the start would give."""
    outcome = run("doctor", "--config", config(tmp_path / "a", extra, **fields), "--json")
    assert outcome.code == 1
    assert [problem["reason"] for problem in outcome.json["problems"]] == [reason]
    assert "notice" not in statuses(outcome, "config")


@pytest.mark.parametrize("is_installed", [True, False])
def test_every_field_of_vllm_is_known(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    """Those of the installed vLLM, and where there is none those that are written down."""
    if not is_installed:
        monkeypatch.setattr(diagnosis, "find_spec", lambda name: None)
    fields = {"engine_id": "a", "kv_port": 14579, "enable_permute_local_kv": False}
    assert run("doctor", "--config", config(tmp_path / "a", **fields)).code == 0
    refused = run("doctor", "--config", config(tmp_path / "a", kv_rool="a"), "--json")
    assert "'kv_role'" in refused.json["problems"][0]["detail"]


def test_the_written_fields_are_those_of_vllm() -> None:
    """None of the installed version's is missing; they are read without importing it."""
    found = {*diagnosis.transfer_fields()}
    assert {"kv_role", "kv_connector_extra_config", "kv_load_failure_policy"} <= found
    assert found <= {*diagnosis.TRANSFER_FIELDS}


def test_what_a_start_would_warn_of(run: Run, tmp_path: Path) -> None:
    """vLLM's default policy, and options without an effect: notices, which are not findings."""
    extra = {"store": "memory://doctor", "lookup_rpc_port": 0}
    path = config(tmp_path / "a", extra, kv_load_failure_policy="fail")
    outcome = run("doctor", "--config", path, "--json")
    assert outcome.code == 0
    assert statuses(outcome, "config") == ["ok", "notice", "notice"]


def test_a_store_out_of_reach(run: Run) -> None:
    """Exit 2, the port is named, and what could be checked is told all the same."""
    outcome = run("doctor", "--store", "mooncake://127.0.0.1:1", "--json")
    assert outcome.code == 2
    assert check(outcome, "master port")["status"] == "unreachable"
    assert "127.0.0.1:1" in outcome.json["problems"][0]["detail"]
    assert check(outcome, "kvformat")["status"] == "ok"


def test_asking_makes_no_folder(run: Run, tmp_path: Path) -> None:
    """A file store whose folder isn't there is told, and still isn't there."""
    outcome = run("doctor", "--store", f"file://{tmp_path}/none", "--json")
    assert (outcome.code, check(outcome, "store")["status"]) == (0, "skipped")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("below", ["", "/kv", "/kv/deeper"])
def test_a_folder_that_no_server_can_make(run: Run, tmp_path: Path, below: str) -> None:
    """A file where the folder or one above it should be is what a start would end at."""
    (tmp_path / "file").write_bytes(b"")
    outcome = run("doctor", "--store", f"file://{tmp_path}/file{below}", "--json")
    assert (outcome.code, check(outcome, "store")["reason"]) == (2, "store_unavailable")


def test_a_folder_that_nobody_may_write_to(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest folder that is there decides; a store that is only read isn't made at all."""
    asked: list[object] = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append(path))
    for options in ("", "?readonly=true"):
        outcome = run("doctor", "--store", f"file://{tmp_path}/a/b{options}", "--json")
        assert (outcome.code, check(outcome, "store")["reason"]) == (2, "store_unavailable")
    assert asked == [str(tmp_path)]


@pytest.mark.parametrize("uri", ["file://host/none/kv", "file:///none/kv?max_byte=1"])
def test_a_wrong_uri_of_a_folder_that_is_not_there(run: Run, uri: str) -> None:
    """A wrong option is told before there is a folder."""
    outcome = run("doctor", "--store", uri, "--json")
    assert (outcome.code, check(outcome, "store")["status"]) == (1, "failed")


def test_a_store_that_names_no_master(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told once."""
    for variable in ("MOONCAKE_CONFIG_PATH", "MOONCAKE_MASTER"):
        monkeypatch.delenv(variable, raising=False)
    outcome = run("doctor", "--store", "mooncake://", "--json")
    assert [p["reason"] for p in outcome.json["problems"]] == ["config_missing"]
    assert outcome.code == 1


def test_a_test_object_is_gone_afterwards(run: Run, tmp_path: Path) -> None:
    """The self-test leaves nothing behind."""
    (tmp_path / "store").mkdir()
    uri = f"file://{tmp_path}/store"
    outcome = run("doctor", "--store", uri, "--json")
    assert check(outcome, "store")["status"] == "ok"
    store = open_store(uri)
    assert list(store.list()) == []
    store.close()


def test_a_store_without_room(run: Run, tmp_path: Path) -> None:
    """A server starts on it, so it's no failure, and is told."""
    (tmp_path / "store").mkdir()
    outcome = run("doctor", "--store", f"file://{tmp_path}/store?max_nbytes=1000", "--json")
    assert (outcome.code, check(outcome, "store")["status"]) == (0, "notice")


@pytest.mark.mooncake
def test_a_real_mooncake(run: Run, mooncake: MooncakeServices) -> None:
    """Both ports answer, the client has the session methods, and an object makes the round."""
    outcome = run("doctor", "--store", mooncake.uri, "--json")
    assert outcome.code == 0
    for name in ("mooncake client", "master port", "metrics port", "store"):
        assert check(outcome, name)["status"] == "ok"


def test_two_configurations_that_would_not_share(run: Run, tmp_path: Path) -> None:
    """Exit 1 with each option that keeps them apart; options that don't matter aren't named."""
    a = config(tmp_path / "a", {"store": "memory://doctor", "tenant": "x", "lookup_window": 8})
    b = config(tmp_path / "b", {"store": "memory://doctor", "tenant": "y", "lookup_window": 9})
    outcome = run("doctor", "--config", a, "--config", b, "--json")
    assert outcome.code == 1
    assert outcome.json["option_differences"] == [{"option": "tenant", "a": "x", "b": "y"}]
    same = run("doctor", "--config", a, "--config", a, "--json")
    assert (same.code, same.json["option_differences"]) == (0, [])


def test_our_examples_of_prefill_and_decode_share() -> None:
    """Where a prefill server puts copies is no matter of the decode server."""
    prefill, decode = (
        json.loads((EXAMPLES / f"vllm-{name}.json").read_text()) for name in ("prefill", "decode")
    )
    assert diagnosis.option_differences(prefill, decode) == []


@pytest.mark.parametrize(
    ("a", "b", "is_one"),
    [
        ("file:////kv", "file:///x/..//kv/?max_nbytes=1G", True),
        ("file:///kv", "file:///kv2", False),
        ("file:///kv", "memory://kv", False),
        ("memory://a", "memory://b", False),
        ("mooncake://", "mooncake://Host:1?replica_num=2", True),
        ("mooncake://", "mooncake://host:2", False),
        ("mooncake://host:1?metrics=host:3", "mooncake://host:1?metrics=host:4", True),
    ],
)
def test_stores_are_compared_by_where_they_are(
    monkeypatch: pytest.MonkeyPatch, a: str, b: str, is_one: bool
) -> None:
    """Scheme, host and folder, or Mooncake's master; options of a server's own don't count."""
    monkeypatch.setenv("MOONCAKE_MASTER", "host:1")
    documents = [{**CONFIG, "kv_connector_extra_config": {"store": uri}} for uri in (a, b)]
    found = diagnosis.option_differences(*documents)
    assert found is not None
    assert [name for name, _, _ in found] == ([] if is_one else ["store"])


def test_weights_that_a_file_names_are_compared_by_its_text(run: Run, tmp_path: Path) -> None:
    """A file and an option that say the same share, whatever the path; a file that says nothing is
    what a start would refuse."""
    file = tmp_path / "identity"
    file.write_text("step 7\n")
    store = {"store": "memory://doctor"}
    a = config(tmp_path / "a", {**store, "model_identity": "step 7"})
    b = config(tmp_path / "b", {**store, "model_identity_file": str(file)})
    same = run("doctor", "--config", a, "--config", b, "--json")
    assert (same.code, same.json["option_differences"]) == (0, [])
    file.write_text("step 8")
    other = run("doctor", "--config", a, "--config", b, "--json")
    assert other.json["option_differences"] == [
        {"option": "model_identity", "a": "step 7", "b": "step 8"}
    ]
    file.unlink()
    outcome = run("doctor", "--config", b, "--json")
    assert outcome.code == 1
    assert check(outcome, f"config {b}")["reason"] == "config_value"


def test_two_manifests(run: Run, tmp_path: Path, store: Store) -> None:
    """Case 36: the layouts of two servers, from files or from the store, differ in named fields."""
    a, b = make_layout(), make_layout(tenant="other")
    for name, layout in (("a", a), ("b", b)):
        (tmp_path / name).write_bytes(manifest(layout))
        put_manifest(store, layout)
    files = run("doctor", str(tmp_path / "a"), str(tmp_path / "b"), "--json")
    stored = run("doctor", "acme", "other", "--store", store.uri, "--json")
    for outcome in (files, stored):
        assert outcome.code == 1
        fields = [d["field"] for d in outcome.json["layouts"]["differences"]]
        assert fields == ["identity.tenant"]
    same = run("doctor", str(tmp_path / "a"), str(tmp_path / "a"), "--json")
    assert (same.code, same.json["layouts"]["is_equal"]) == (0, True)


def test_the_environment_counts(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A seed of block hashes is told with what follows from it; a wrong switch is a failure."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setenv("KVFORMAT_RANGE_DEBUG", "1")
    outcome = run("doctor", "--json")
    assert outcome.code == 0
    assert check(outcome, "block hashes")["status"] == "notice"
    assert "PYTHONHASHSEED=7" in check(outcome, "block hashes")["advice"]
    assert check(outcome, "trace")["status"] == "notice"
    monkeypatch.setenv("KVFORMAT_RANGE_DEBUG", "yes")
    assert run("doctor", "--json").json["problems"][0]["reason"] == "config_value"


def test_without_the_connector(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The format layer alone says what it can; a store or configuration is wrong usage then."""
    monkeypatch.setitem(sys.modules, "kvformat_connector.diagnosis", None)
    outcome = run("doctor", "--json")
    assert (outcome.code, check(outcome, "connector")["status"]) == (0, "skipped")
    assert run("doctor", "--store", "memory://").code == 2


@pytest.mark.parametrize("arguments", [("a",), ("--config", "/nowhere"), ("--config", __file__)])
def test_wrong_usage(run: Run, arguments: tuple[str, ...]) -> None:
    """One manifest without a store, a file that isn't there, a file that holds no JSON."""
    assert run("doctor", *arguments).code == 2


def test_people_see_a_table(run: Run, tmp_path: Path) -> None:
    """Every check is a line, and a difference between two servers is in words."""
    a = config(tmp_path / "a", {"store": "memory://doctor"})
    b = config(tmp_path / "b", {"store": "memory://doctor", "tenant": "y"})
    text = run("doctor", "--config", a, "--config", b).stdout
    assert "block hashes" in text
    assert "these servers share nothing" in text
    assert "fine" not in text
    assert "fine" in run("doctor", "--config", a).stdout
