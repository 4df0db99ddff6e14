import contextlib
import dataclasses
import socket
import subprocess
import sys

import pytest
import torch
from torch import nn

from patrickstar import RankFailure
from patrickstar.checkpoint import CheckpointError
from patrickstar.checkpoint.plain_state import read_plain_state, write_plain_state
from patrickstar.elastic import (
    ElasticSampler,
    Orders,
    Rendezvous,
    ResizeError,
    ResizePhase,
    SecretError,
    serve_rendezvous,
)
from patrickstar.ranks.addresses import AllowedHosts
from patrickstar.ranks.authenticated_store import _pack, _Request
from patrickstar.ranks.run_secret import write_secret
from patrickstar.resize.joining import read_invitation
from patrickstar.resize.plan import ResizePlan
from patrickstar.resize.shards import STATE_NAME
from patrickstar.runtime import initialize_engine
from tests.elastic.runs import NUM_SAMPLES, build
from tests.ranks.test_run_secret import mode
from tests.training import make_config

# Orders.


def test_nobody_without_the_secret_gives_orders(tmp_path):
    served = serve_rendezvous()
    orders = Orders(served)
    forged = _pack([bytes([_Request.SET]), b"patrickstar/orders/order/1", b'{"kind": "stop"}'])
    with socket.create_connection((served.host, served.port), 10) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(forged * 10)
        assert stranger.recv(1) == b""
    write_secret(tmp_path / "other")
    with pytest.raises(RankFailure, match=f"no rendezvous of this run is reached at {served.address} .*another secret"):
        Rendezvous.at(served.address, secret_file=tmp_path / "other")
    with pytest.raises(SecretError, match="there is no file"):
        Rendezvous.at(served.address, secret_file=tmp_path / "missing")
    assert served.num_keys() == 0
    assert Orders(Rendezvous.at(served.address).store).stop() == 1
    assert orders.outcome(1) is None


@pytest.mark.usefixtures("open_umask")
def test_the_secret_of_a_run_ends_with_its_rendezvous(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    served = serve_rendezvous()
    secret_file = served.secret_file
    assert secret_file.is_relative_to(tmp_path)
    assert (mode(secret_file), mode(secret_file.parent)) == (0o600, 0o700)
    assert served.environment == {"PATRICKSTAR_ELASTIC": served.address, "PATRICKSTAR_ELASTIC_SECRET": str(secret_file)}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", served.port), 1)  # of this machine, and not where it listens
    del served
    assert not secret_file.exists()
    given = tmp_path / "given"
    write_secret(given)
    served = serve_rendezvous(secret_file=given)
    Rendezvous.at(served.address, secret_file=given)
    del served
    assert given.exists()
    given.chmod(0o644)
    with pytest.raises(SecretError, match="open to other users"):
        serve_rendezvous(secret_file=given)


@pytest.mark.parametrize("host", ["0.0.0.0", "no such host"])
def test_a_rendezvous_is_not_served_everywhere_or_nowhere(host):
    with pytest.raises(ValueError, match="stands for all interfaces|no address, name or interface"):
        serve_rendezvous(host)


# Invitations.

PLAN = ResizePlan(
    token="0123456789abcdef" * 2,
    num_old=1,
    former=[0, None],
    joiners=[7],
    hosts=["here", "there"],
    host="10.0.0.1",
    port=4000,
    chunk_numel=1024,
    micro_batches={"sampler": 3},
    accumulation=None,
    step_counts=[1, 0],
    num_chunks=2,
    timeline="",
)


def invite(changes, addresses=("10.0.0.1:4001",), networks=("10.0.0.0/8",)):
    said = {"plan": {**dataclasses.asdict(PLAN), **changes}, "addresses": list(addresses)}
    return read_invitation(said, 7, AllowedHosts(networks))


def test_an_invitation_is_read():
    assert invite({}).plan == PLAN
    assert invite({}, ("[fe80::1]:1",), ("10.0.0.0/8", "fe80::/10")).addresses == ["[fe80::1]:1"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"token": "../../etc/cron.d/x"}, "token is '../../etc/cron.d/x'"),
        ({"token": "/" * 32}, "token is"),
        ({"folder": "/resting_tier/user/.ssh"}, "unknown or missing fields: folder"),
        ({"host": "198.51.100.7"}, "the host 198.51.100.7 is not in the run's networks"),
        ({"host": "evil.example"}, "'evil.example' is no IP address"),
        ({"port": 0}, "port is 0"),
        ({"port": "4000"}, "port is '4000'"),
        ({"port": True}, "port is True"),
        ({"secret": "00" * 32}, "secret is"),
        ({"joiners": [8]}, "join"),
        ({"hosts": ["here"]}, "on 1 hosts"),
        ({"former": [0, 0]}, "join"),
        ({"former": [5, None]}, "former ranks are"),
        ({"former": "ab"}, "former is"),
        ({"chunk_numel": -1}, "chunk_numel is -1"),
        ({"step_counts": [1, 2**70]}, "step_counts is"),
        ({"timeline": None}, "timeline is None"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_invitation_that_is_wrong_is_refused(changes, why):
    with pytest.raises(ResizeError, match="the invitation is refused.*" + why):
        invite(changes)


@pytest.mark.parametrize(
    "addresses", [["198.51.100.7:1"], ["10.0.0.1"], ["/etc/passwd:1"], [], ["10.0.0.1:1"] * 2, [None]], ids=str
)
def test_servers_of_files_lie_in_the_runs_networks(addresses):
    with pytest.raises(ResizeError, match="the invitation is refused"):
        invite({}, addresses)


def test_a_refusal_is_passed_on():
    with pytest.raises(ResizeError, match="did not join: no room"):
        read_invitation({"refusal": "no room"}, 7, AllowedHosts([]))
    with pytest.raises(ResizeError, match="KeyError: 'plan'"):
        read_invitation({}, 7, AllowedHosts([]))


# A process that joins.


def test_a_process_that_joins_waits_as_long_as_any_rank():
    config = make_config(rank_timeout_seconds=0.5)
    engine, _ = initialize_engine(lambda: nn.Linear(2, 2), 0, config)
    served = serve_rendezvous()
    with engine:
        with pytest.raises(ResizeError, match=r"the ranks that train: no word within 0.5 s"):
            engine.join(rendezvous=served.address)
        with pytest.raises(ValueError, match="at most rank_timeout_seconds, 0.5"):
            engine.join(rendezvous=served.address, timeout_seconds=600)
        with pytest.raises(SecretError, match="there is no file"):
            engine.join(rendezvous="127.0.0.1:1")


_events: list[str] | None = None


def _note_event(name, _):
    if _events is not None and name in ("os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"):
        _events.append(name)


def test_a_resize_forks_nothing(tmp_path, monkeypatch):
    """A process that uses CUDA could not go on in a fork."""
    sys.addaudithook(_note_event)  # for good
    monkeypatch.setattr(sys.modules[__name__], "_events", [])
    engine, _ = initialize_engine(build, 0, make_config(default_chunk_size=16384))
    with engine:
        engine.resize(1, folder=str(tmp_path))
    assert _events == []
    subprocess.run(["true"], check=True)
    assert _events == ["subprocess.Popen"]


# Files.


@pytest.mark.usefixtures("open_umask")
def test_files_of_a_resize_are_the_users_alone(tmp_path):
    found = {}

    def note(phase):
        if phase is ResizePhase.DECIDE:
            found.update({path.relative_to(tmp_path): mode(path) for path in tmp_path.rglob("*")})

    engine, _ = initialize_engine(build, 0, make_config(default_chunk_size=16384))
    with engine:
        engine.resize(
            1, user_state={"sampler": ElasticSampler(NUM_SAMPLES, 12, 3)}, folder=str(tmp_path), note_phase=note
        )
    folder, file = sorted(found)
    assert (found[folder], found[file]) == (0o700, 0o600)
    assert (len(folder.name), file.name) == (len("patrickstar-") + 32, STATE_NAME)
    assert not list(tmp_path.iterdir())


def test_state_comes_back_without_pickle(tmp_path):
    state = {
        "a": [1, (2.5, None), {"b": float("inf"), 3: True}],
        "tensors": {"w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "empty": torch.empty(0, 2)},
        "scalar": torch.tensor(3, dtype=torch.int64),
    }
    path = tmp_path / "state"
    with path.open("wb") as file:
        write_plain_state(file, state, "the state")
    with path.open("rb") as file:
        found = read_plain_state(file, "the state")
    assert found["a"] == state["a"]
    for name, tensor in {**state["tensors"], "scalar": state["scalar"]}.items():
        other = found["tensors"].get(name, found["scalar"])
        assert torch.equal(other, tensor) and other.dtype is tensor.dtype and other.shape == tensor.shape
    with (
        path.open("wb") as file,
        pytest.raises(CheckpointError, match="the state.*is a torch.nn.modules.linear.Linear"),
    ):
        write_plain_state(file, {"module": nn.Linear(1, 1)}, "the state")
    torch.save(state, path)
    with path.open("rb") as file, pytest.raises(CheckpointError, match="nothing that was written"):
        read_plain_state(file, "the state")
