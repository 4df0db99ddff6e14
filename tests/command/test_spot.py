import enum
import http.server
import json
import signal
import subprocess
import sys
import threading

import pytest

from patrickstar.command import spot
from patrickstar.machine.spot_notices import Cloud, MetadataService

TRAINS = """
import signal, sys, time, urllib.request
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
urllib.request.urlopen(sys.argv[1] + "/trains")
time.sleep(60)
"""


class State(enum.Enum):
    AWAY = enum.auto()
    CALM = enum.auto()
    CALM_UNTIL_TRAINING = enum.auto()
    CALM_ONCE = enum.auto()
    TAKES_BACK = enum.auto()


class Metadata(http.server.BaseHTTPRequestHandler):
    """Answers as the three clouds do, by ``server.state``."""

    def do_PUT(self):
        is_right = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.answer(200 if is_right else 400, "a token")

    def do_GET(self):
        if self.path == "/trains":
            self.server.trains.set()
            if self.server.state is State.CALM_UNTIL_TRAINING:
                self.server.state = State.TAKES_BACK
        self.answer(*self.found(self.server.state is State.TAKES_BACK))
        if self.server.state is State.CALM_ONCE:
            self.server.state = State.AWAY

    def found(self, is_told):
        path, headers = self.path, self.headers
        if self.server.state is State.AWAY:
            return 503, ""
        if path == "/latest/meta-data/spot/instance-action" and headers["X-aws-ec2-metadata-token"] == "a token":
            return (200, '{"action": "terminate", "time": "2026-12-01T00:00:00Z"}') if is_told else (404, "none")
        if path.startswith("/metadata/instance/compute/name") and headers["Metadata"] == "true":
            return 200, "mine"
        if path.startswith("/metadata/scheduledevents") and headers["Metadata"] == "true":
            others = [{"EventType": "Reboot", "Resources": ["mine"]}, {"EventType": "Preempt", "Resources": ["other"]}]
            own = [{"EventType": "Preempt", "Resources": ["mine"]}] if is_told else []
            return 200, json.dumps({"Events": others + own})
        if path == "/computeMetadata/v1/instance/preempted" and headers["Metadata-Flavor"] == "Google":
            return 200, "TRUE" if is_told else "FALSE"
        return (200 if path == "/trains" else 400), ""

    def answer(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def service():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.state, server.trains = State.CALM, threading.Event()
    yield server
    server.shutdown()
    server.server_close()


def run(service, cloud, *command):
    return spot.main(["--seconds", "0.05", "--metadata", service.url, cloud, *command], prog="patrickstar spot")


@pytest.mark.parametrize("cloud", [cloud.value for cloud in Cloud])
def test_a_command_is_ended_when_its_machine_is_taken_back(service, cloud, capfd):
    service.state = State.CALM_UNTIL_TRAINING
    assert run(service, cloud, sys.executable, "-c", TRAINS, service.url) == 75
    assert "takes this machine back" in capfd.readouterr().err


def test_the_status_is_the_commands(service, capfd):
    assert run(service, "aws", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)") == 128 + 9
    service.state = State.CALM_ONCE
    status = run(service, "google", sys.executable, "-c", "import sys, time; time.sleep(0.5); sys.exit(3)")
    assert status == 3
    assert capfd.readouterr().err.count("does not answer") == 1


def test_signals_reach_the_command(service):
    words = ["--seconds", "60", "--metadata", service.url, "google", sys.executable, "-c", TRAINS, service.url]
    with subprocess.Popen([sys.executable, "-m", "patrickstar", "spot", *words]) as process:
        assert service.trains.wait(60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75


def test_what_cannot_be_watched_is_said_before_the_command_runs(service, capfd, tmp_path):
    made = tmp_path / "made"
    touch = [sys.executable, "-c", f"open({str(made)!r}, 'w')"]
    service.state = State.AWAY
    for words, said in [
        (["--metadata", service.url, "google", *touch], f"no metadata service of google at {service.url}"),
        (["--metadata", "http://127.0.0.1:9", "aws", *touch], "no metadata service of aws"),
        (["aws"], "give a command"),
        (["--seconds", "0", "aws", *touch], "--seconds is 0"),
        (["oracle", *touch], "invalid choice"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            spot.main(words, prog="patrickstar spot")
        assert said in capfd.readouterr().err
    assert not made.exists()
    service.state = State.CALM
    with pytest.raises(SystemExit, match="2"):
        run(service, "google", str(tmp_path / "missing"))
    assert "cannot be run" in capfd.readouterr().err


def test_answers_of_other_services_are_errors(service):
    for cloud in Cloud:
        with pytest.raises((OSError, ValueError)):
            MetadataService(cloud, service.url + "/trains?").takes_back()
