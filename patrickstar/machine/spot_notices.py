"""Notices of a cloud that it takes a spot machine back, as its metadata service gives them."""

from __future__ import annotations

import dataclasses
import enum
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would ask about its own machine


class Cloud(enum.Enum):
    """A cloud whose notices are known."""

    AWS = "aws"
    AZURE = "azure"
    GOOGLE = "google"


@dataclasses.dataclass(frozen=True)
class MetadataService:
    """The metadata service of this machine.

    Args:
        cloud: decides its paths and headers.
        address: ``http://host[:port]``; empty: the cloud's.
    """

    cloud: Cloud
    address: str = ""

    @property
    def url(self) -> str:
        """The address that is asked."""
        return self.address or _SERVICES[self.cloud].url

    def takes_back(self) -> bool:
        """True if the cloud has said that it takes the machine back.

        Raises:
            OSError: the service does not answer.
            ValueError: its answer is not the cloud's.
        """
        return _SERVICES[self.cloud].takes_back(self._ask)

    def _ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str:
        """The answer's text; empty for status 404."""
        request = urllib.request.Request(self.url + path, headers=dict(headers), method=method)
        try:
            with _DIRECT.open(request, timeout=_SERVICES[self.cloud].timeout_seconds) as answer:
                return answer.read().decode().strip()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return ""
            raise
        except http.client.HTTPException as error:
            raise OSError(f"no answer in HTTP: {error!r}") from error


_Ask = Callable[..., str]


def _aws(ask: _Ask) -> bool:
    """The path exists from two minutes before the end on."""
    token = ask("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    if not token:
        raise ValueError("it gives no token")
    return bool(ask("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}))


def _azure(ask: _Ask) -> bool:
    """Events may be of other machines of a scale set."""
    headers = {"Metadata": "true"}
    name = ask("/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers)
    found = json.loads(ask("/metadata/scheduledevents?api-version=2020-07-01", headers))
    try:
        return any(event["EventType"] == "Preempt" and name in event["Resources"] for event in found["Events"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"it gives no list of events: {error!r}") from error


def _google(ask: _Ask) -> bool:
    answer = ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    if answer not in ("TRUE", "FALSE"):
        raise ValueError(f"it says {answer[:40]!r} instead of TRUE or FALSE")
    return answer == "TRUE"


@dataclasses.dataclass(frozen=True)
class _Service:
    url: str
    timeout_seconds: float
    takes_back: Callable[[_Ask], bool]


_SERVICES = {
    Cloud.AWS: _Service("http://169.254.169.254", 10.0, _aws),
    Cloud.AZURE: _Service("http://169.254.169.254", 130.0, _azure),  # the first answer may take two minutes
    Cloud.GOOGLE: _Service("http://metadata.google.internal", 10.0, _google),
}
