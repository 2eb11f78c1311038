"""What collectors, loggers and users put before the lines of an engine's log, and the JSON that they wrap them in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from highwater.diagnose.log.messages import LogMatches, LogMessage, recognized
from highwater.diagnose.log.reader import Reader
from highwater.diagnose.log.record import LogLine, Moment
from highwater.diagnose.log.starts import of_one_run

PREFIXES = {
    "none": "",
    "docker compose": "vllm-sm120  | ",
    "kubectl --timestamps": "2026-11-28T01:02:03.123456789Z ",
    "docker, an offset": "2026-11-28T01:02:03.123456789+05:30 ",
    "containerd": "2026-11-28T01:02:03.123456789+01:00 stderr F ",
    "kubectl --prefix": "[pod/vllm-0-abc/vllm] ",
    "kubectl --prefix --timestamps": "[pod/vllm-0-abc/vllm] 2026-11-28T01:02:03.1Z ",
    "journald": "Nov 28 01:02:03 gpu-host vllm[123]: ",
    "journald short-iso": "2026-11-28T01:02:03+0530 gpu-host python3[12]: ",
    "journald short-full": "Sat 2026-11-28 01:02:03 UTC host vllm.service[123]: ",
    "journald short-monotonic": "[ 1234.567890] host vllm[1]: ",
    "syslog, German": "Mär  1 01:02:03 wirt vllm[1]: ",
    "syslog, Russian": "нояб. 28 01:02:03 хост vllm[1]: ",
    "syslog, Chinese": "11月 28 01:02:03 主机 vllm[1]: ",
    "RFC 3164": "<30>Nov 28 01:02:03 host vllm[1]: ",
    "RFC 5424": '<14>1 2026-11-28T01:02:03.123Z host vllm 123 ID47 [ex@32473 iut="3" source="App x"] ',
    "RFC 5424, bare": "<14>1 2026-11-28T01:02:03.123Z host vllm 123 - - \ufeff",
    "Ray": "(RayWorkerWrapper pid=301, ip=10.2.1.15) ",
    "Ray, twice": "\x1b[36m(EngineCore_DP0 pid=1769)\x1b[0m (RayWorkerWrapper pid=301, ip=10.2.1.15) ",
    "VLLM_LOGGING_PREFIX": "[prod] ",
    "VLLM_LOGGING_PREFIX, tight": "prod",
    "Grafana": "2026-11-28 01:02:03.123\t",
    "loguru": "2026-11-28 01:02:03.123 | INFO     | ",
    "a launcher": "2026-11-28 01:02:03,123 - launcher - INFO - ",
    "stern": "vllm-7d9-abc vllm ",
    "Stackdriver": "INFO 2026-11-28T01:02:03Z [resource.labels.containerName: vllm] ",
    "CloudWatch": "2026-11-28T01:02:03.123Z vllm/vllm/0123abc ",
    "logcli": '2026-11-28T01:02:03Z {app="vllm", pod="x-1"} ',
    "mpirun": "[1,0]<stderr>:",
    "compose, a time, a user's": "vllm-1  | 2026-11-28T01:02:03.1Z [prod] ",
}


def _wrapped(**others: object) -> Callable[[str], str]:
    """Put a line under the key whose value is to be filled in."""
    return lambda line: json.dumps({key: line if value is None else value for key, value in others.items()})


WRAPPERS = {
    "docker": lambda line: json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "2026-11-21T14:32:33.1Z"}),
    "fluent-bit": _wrapped(stream="stdout", log=None, kubernetes={"pod_name": "x"}),
    "Stackdriver": _wrapped(textPayload=None, severity="ERROR", resource={"labels": {}}),
    "logstash": _wrapped(version="1", message=None, host="h", level="ERROR"),
    "filebeat": _wrapped(log={"offset": 1, "file": {"path": "/x"}}, message=None),
    "journald": _wrapped(MESSAGE=None, _PID="12", PRIORITY="6"),
    "journald, bytes": lambda line: json.dumps({"MESSAGE": list(line.encode()), "_PID": "12"}),
    "loki": _wrapped(labels={"app": "x"}, line=None),
    "otlp": lambda line: json.dumps({"body": {"stringValue": line}}),
    "nested": lambda line: json.dumps({"jsonPayload": {"log": json.dumps({"message": line})}}),
    "compose of docker": lambda line: "vllm-1  | " + json.dumps({"log": line}),
}


def vllm_json(message: str, process: str, pid: int, *, logger: str, exc_info: str | None = None) -> str:
    """A line as vLLM 0.32's own formatter writes it."""
    said = {
        "asctime": "2026-11-27 17:12:58,104",
        "levelname": "INFO" if exc_info is None else "ERROR",
        "name": logger,
        "processName": "MainProcess",
        "process": pid,
        "message": message,
    }
    return json.dumps(said | ({} if exc_info is None else {"exc_info": exc_info}) | {"vllm_process_name": process})


def match(texts: Iterable[str]) -> tuple[LogMessage, ...]:
    """The known messages among lines, causes before consequences."""
    matches, at = LogMatches(), Moment()
    for _, lines in recognized(texts, Reader()):
        for line, known in lines:
            matches.add(known, line, at)
    return matches.messages(at, 0.0)[0]


def parse(text: str) -> tuple[LogLine, ...]:
    """The lines in one line, of whose log nothing is known."""
    return Reader().read([text])[0][1]


def run_of(texts: Iterable[str], *, begins_ready: bool) -> list[str]:
    """The lines of the engine that ran."""
    return [text for text, _ in of_one_run(list(recognized(texts, Reader())), begins_ready=begins_ready)]
