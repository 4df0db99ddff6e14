import contextlib
import os
import socket
import struct
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from patrickstar import RankFailure
from patrickstar.ranks import authenticated, authenticated_server
from patrickstar.ranks.addresses import listen
from patrickstar.ranks.authenticated import HELLO_BYTES, MAGIC, AuthenticationError, connect
from patrickstar.ranks.authenticated_server import MOST_STRANGERS
from patrickstar.ranks.authenticated_store import MOST_BYTES, AuthenticatedStore, ServedStore
from patrickstar.ranks.world_store import reach_world

KEY, WRONG = bytes(32), bytes([1] * 32)


@pytest.fixture
def served():
    store = ServedStore(listen("127.0.0.1", 0), KEY, timeout_seconds=10)
    yield store
    store.close()


def client_of(store, key=KEY):
    return AuthenticatedStore(store.host, store.port, key, timeout_seconds=10)


def stranger_at(store):
    connection = socket.create_connection((store.host, store.port), 10)
    connection.settimeout(10)
    return connection


def is_told(connection):
    told = b""
    with contextlib.suppress(ConnectionError), connection:
        while more := connection.recv(4096):
            told += more
    return told


class Recorder:
    """A proxy between client and store that keeps their messages and may answer the client itself."""

    def __init__(self, store):
        self._listening, self._store = listen("127.0.0.1", 0), (store.host, store.port)
        self.port = self._listening.getsockname()[1]
        self.up, self.down = bytearray(), bytearray()
        self.reflects = False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        client, _ = self._listening.accept()
        server = socket.create_connection(self._store)
        self.server = server
        threading.Thread(target=self._pass_on, args=(server, client, self.down), daemon=True).start()
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                self.up += data  # before the other end can answer
                (client if self.reflects else server).sendall(data)

    @staticmethod
    def _pass_on(source, target, kept):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                kept += data
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


def test_a_store_does_what_a_tcp_store_does(served):
    def use(store):
        found = [store.add("n", 3), store.add("n", -1), store.get("n")]
        store.set("a", b"\x00\xff")
        found += [store.get("a"), store.check(["a", "n"]), store.check(["a", "b"]), store.check([])]
        found += [store.compare_set("c", "", "x"), store.compare_set("c", "y", "z"), store.compare_set("c", "x", "z")]
        found += [store.compare_set("d", "u", "z"), store.check(["d"]), store.delete_key("a"), store.delete_key("a")]
        prefixed = dist.PrefixStore("p", store)
        prefixed.set("k", "v")
        found += [prefixed.get("k"), store.get("p/k")]
        with pytest.raises(dist.DistStoreError):
            prefixed.wait(["never"], timedelta(seconds=0.1))
        return found

    theirs = use(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    client = client_of(served)
    assert use(client) == theirs
    threading.Timer(0.05, lambda: served.set("late", b"1")).start()
    assert client.get("late") == b"1"


def test_a_key_is_set_when_a_process_is_killed(served):
    first = client_of(served)
    first.set_at_end("ended", "b")
    first.set_at_end("taken back", "b")
    first.set_at_end("there", "b")
    first.set_at_end("taken back", "")
    served.set("there", b"a")
    assert not served.check(["ended"])
    first._connection.interrupt()  # as the system does for a killed process
    assert served.get("ended") == b"b"
    assert (served.get("there"), served.check(["taken back"])) == (b"a", False)


def test_waits_end_with_the_reason_for_which_a_key_will_never_come(served):
    first, second = client_of(served), AuthenticatedStore(served.host, served.port, KEY, timeout_seconds=3600)
    second.end_waits_at("given up")
    second.set("there", "1")
    second.wait(["there"])
    first.set_at_end("given up", "the process of rank 0 has ended")
    threading.Timer(0.05, first._connection.interrupt).start()
    with pytest.raises(dist.DistStoreError, match="the process of rank 0 has ended"):
        second.get("never")
    second.wait(["there"])  # what is there counts more than a reason


def test_a_store_that_was_there_is_not_awaited(served, monkeypatch):
    attempts, connect_once = [], authenticated._connect_once

    def counted(*arguments):
        attempts.append(arguments)
        return connect_once(*arguments)

    client = AuthenticatedStore(served.host, served.port, KEY, timeout_seconds=3600)
    served.close()
    monkeypatch.setattr(authenticated, "_connect_once", counted)
    with pytest.raises(ConnectionRefusedError):
        client.other_connection(3600)
    with pytest.raises(RankFailure, match="the store of the new ranks at .* is not reached"):
        reach_world(served.host, served.port, KEY, 3600, "rank 1")
    assert len(attempts) == 2


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(lambda: b"", id="nothing"),
        pytest.param(lambda: os.urandom(HELLO_BYTES), id="garbage"),
        pytest.param(lambda: os.urandom(10 * HELLO_BYTES), id="more garbage"),
        pytest.param(lambda: MAGIC + bytes(HELLO_BYTES), id="a hello without the key"),
        pytest.param(lambda: struct.pack(">I", 2**31) + bytes(HELLO_BYTES), id="a length"),
        pytest.param(lambda: b"\x00" * 7 + b"GET / HTTP/1.1\r\n\r\n" * 20, id="a browser"),
    ],
)
def test_strangers_are_told_nothing(served, sent, monkeypatch):
    monkeypatch.setattr(authenticated_server, "HANDSHAKE_SECONDS", 0.2)
    stranger = stranger_at(served)
    with contextlib.suppress(ConnectionError):
        stranger.sendall(sent())
    assert is_told(stranger) == b""
    assert client_of(served).num_keys() == 0


def test_another_secret_is_refused_by_both_sides(served):
    with pytest.raises(AuthenticationError, match="this process has another secret than the run"):
        client_of(served, WRONG)
    listening = listen("127.0.0.1", 0)  # somebody who listens in the store's place and echoes

    def echo():
        connection, _ = listening.accept()
        connection.sendall(connection.recv(HELLO_BYTES)[len(MAGIC) :])

    threading.Thread(target=echo, daemon=True).start()
    with pytest.raises(AuthenticationError, match="does not know the run's secret"):
        connect("127.0.0.1", listening.getsockname()[1], KEY, timeout_seconds=10, most_bytes=100)
    assert served.num_keys() == 0


def test_what_was_recorded_cannot_be_played_again(served):
    """Another connection has other nonces; on the same one messages are numbered."""
    recorder = Recorder(served)
    store = AuthenticatedStore("127.0.0.1", recorder.port, KEY, timeout_seconds=10)
    assert store.add("orders", 1) == 1
    again = stranger_at(served)
    again.sendall(recorder.up)
    assert is_told(again) == b""  # not even the server's part of the handshake
    assert served.get("orders") == b"1"
    recorder.server.sendall(recorder.up[HELLO_BYTES:])
    with pytest.raises(dist.DistNetworkError, match="cannot be reached"):
        for _ in range(100):
            store.check(["orders"])
            time.sleep(0.01)
    assert served.get("orders") == b"1"


def test_what_was_sent_back_is_refused(served):
    recorder = Recorder(served)
    store = AuthenticatedStore("127.0.0.1", recorder.port, KEY, timeout_seconds=10)
    store.set("a", "b")
    recorder.reflects = True
    with pytest.raises(dist.DistNetworkError, match="that the other side of this connection has not sent"):
        store.get("a")


def test_a_changed_message_is_refused(served):
    recorder = Recorder(served)
    AuthenticatedStore("127.0.0.1", recorder.port, KEY, timeout_seconds=10).set("a", "b")
    frame = bytes(recorder.up[HELLO_BYTES:])
    for at in (3, 10, len(frame) - 1):
        client = connect(served.host, served.port, KEY, timeout_seconds=10, most_bytes=MOST_BYTES)
        changed = bytearray(frame)
        changed[at] ^= 1
        client._socket.sendall(changed + bytes(1000))
        with pytest.raises(OSError):
            client.receive(10)
    assert served.get("a") == b"b"


def test_oversized_messages_are_refused_before_memory_is_taken(served):
    client = connect(served.host, served.port, KEY, timeout_seconds=10, most_bytes=MOST_BYTES)
    with pytest.raises(ValueError, match=f"the limit is {MOST_BYTES}"):
        client.send(bytes(MOST_BYTES + 1))
    client._socket.sendall(struct.pack(">I", MOST_BYTES + 1) + bytes(32))
    with pytest.raises(ConnectionError):
        client.receive(10)
    assert served.num_keys() == 0


def test_slow_and_many_strangers_keep_nobody_out(served, monkeypatch):
    monkeypatch.setattr(authenticated_server, "HANDSHAKE_SECONDS", 1.0)
    threads, begun = threading.active_count(), time.monotonic()
    strangers = [stranger_at(served) for _ in range(2 * MOST_STRANGERS)]
    for stranger in strangers:
        with contextlib.suppress(OSError):
            stranger.sendall(MAGIC)
    store = client_of(served)
    store.set("a", "b")
    assert threading.active_count() <= threads + MOST_STRANGERS + MOST_STRANGERS // 2
    while any(not _is_closed(stranger) for stranger in strangers):
        assert time.monotonic() < begun + 30  # each is ended, however long it goes on
        for stranger in strangers:
            with contextlib.suppress(OSError):
                stranger.sendall(b"\x00")
        time.sleep(0.05)
    assert store.get("a") == b"b"


def _is_closed(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_an_interrupted_request_does_not_shift_the_answers_of_later_ones(served):
    def interrupted(*_):
        raise KeyboardInterrupt

    store = client_of(served)
    store.set("a", "first")
    store._connection.receive = interrupted
    with pytest.raises(KeyboardInterrupt):
        store.num_keys()
    assert store.get("a") == b"first"


def test_a_signals_handler_may_ask_in_the_middle_of_a_request(served):
    store, found = client_of(served), []
    receive = store._connection.receive

    def interrupted(*arguments):
        found.append(store.add("n", 1))
        return receive(*arguments)

    store._connection.receive = interrupted
    assert store.num_keys() in (0, 1)
    assert found == [1]
