"""scripts/fuzz_server: requests made from the served OpenAPI document, half of them against it; none may be a 5xx."""

import argparse
import json
import logging
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck
from hypothesis.errors import HypothesisWarning, Unsatisfiable, UnsatisfiedAssumption
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from scripts.lib.server_process import ServerProcess, running_or_serving, settled

# Few and small programs: what is tried here is what comes before them.
_FLAGS = ["--model", "digits", "--max-model-len", "128", "--max-seqs", "4", "--prefill-tokens", "64"]
_FLAGS += ["--mm-process-config", '{"image": {"max_image_tokens": 16}}']
_PLAIN_CASES = 20  # of an operation that takes nothing: more would be the same request again
_BATCH = 100
_SECONDS = 60.0
_SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.large_base_example]
# The last one reads a stream as objects, which OpenAPI before 3.2 cannot describe.
_CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]
_COMPILES = 'compiles_total{stage="after_ready"}'

console = Console(highlight=False, stderr=True)


@dataclass
class Findings:
    """cases: sent, an operation. statuses: what came back. failures: text -> how often. examples: one a failure."""

    cases: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    slowest: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, text: str, example: str) -> None:
        with self.lock:
            self.failures[text] += 1
            self.examples.setdefault(text, example[:3000])


class Fuzzer:
    """Makes cases in the calling thread, since Hypothesis is at home in one, and sends them in others."""

    def __init__(self, url: str, schema: schemathesis.BaseSchema, threads: int, bar: Progress, task: Any):
        self._url, self._schema, self._bar, self._task = url, schema, bar, task
        self._pool, self._places = ThreadPoolExecutor(threads), threading.Semaphore(2 * threads)
        self._local = threading.local()
        self.findings, self.made = Findings(), 0

    def operations(self) -> list[schemathesis.APIOperation]:
        found = []
        for result in self._schema.get_all_operations():
            if isinstance(result, Ok):
                found.append(result.ok())
            else:
                self.findings.fail(f"the document cannot be read: {result.err()}", "")
        return found

    def batch(
        self, operation: schemathesis.APIOperation, mode: schemathesis.GenerationMode, size: int, seed: int
    ) -> None:
        """`size` cases, or fewer where there are no more different ones."""

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=size,
            deadline=None,
            database=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=_SLOW,
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def send(case: schemathesis.Case) -> None:
            self._places.acquire()
            self.made += 1
            self._pool.submit(self._send, case, mode).add_done_callback(self._sent)

        try:
            send()
        except (Unsatisfiable, UnsatisfiedAssumption):
            return

    def close(self) -> None:
        """Waits for what was sent."""
        self._pool.shutdown(wait=True)

    def _sent(self, done: Future[None]) -> None:
        self._places.release()
        self._bar.advance(self._task)
        if (error := done.exception()) is not None:
            self.findings.fail(f"this script failed: {error!r}", "")

    def _send(self, case: schemathesis.Case, mode: schemathesis.GenerationMode) -> None:
        name = f"{case.method} {case.operation.path}"
        found, began = self.findings, time.monotonic()
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
        try:
            response = case.call(base_url=self._url, session=self._local.session, timeout=_SECONDS)
        except requests.Timeout:
            found.fail(f"{name}: no answer within {_SECONDS:g} s", case.as_curl_command())
            return
        except requests.ConnectionError as error:
            found.fail(f"{name}: connection lost ({type(error).__name__})", case.as_curl_command())
            return
        finally:
            with found.lock:
                found.cases[name] += 1
                found.slowest = max(found.slowest, time.monotonic() - began)
        with found.lock:
            found.statuses[f"{response.status_code} {mode.value}"] += 1
        events = response.headers.get("content-type", [""])[0].startswith("text/event-stream")
        if events and not _is_whole_stream(response.text):
            found.fail(
                f"{name}: a stream that does not end as one", f"{case.as_curl_command()}\n{response.text[-500:]}"
            )
        for check in _CHECKS[:-1] if events else _CHECKS:
            try:
                case.validate_response(response, checks=[check])
            except BaseExceptionGroup as error:  # schemathesis's own failures
                titles = {getattr(failure, "title", type(failure).__name__) for failure in error.exceptions}
                text = f"{name}: {response.status_code}: {', '.join(sorted(titles))}"
                found.fail(text, f"{error}\n{case.as_curl_command()}\n{response.text[:500]}")
        if 400 <= response.status_code < 500 and not _is_error_body(response):
            found.fail(f"{name}: {response.status_code} without our error object", case.as_curl_command())


def _is_error_body(response: Any) -> bool:
    try:
        return set(response.json()["error"]) == {"message", "type", "param", "code"}
    except (ValueError, KeyError, TypeError):
        return False


def _is_whole_stream(text: str) -> bool:
    """Events of JSON, and at the end `[DONE]` or one error."""
    *events, end = text.split("\n\n")
    bodies = [event.removeprefix("data: ") for event in events]
    try:
        last = bodies.pop()
        objects = [json.loads(body) for body in bodies]
        ended = last == "[DONE]" or set(json.loads(last)) == {"error"}
    except (ValueError, IndexError):
        return False
    return not end and ended and not any("error" in body for body in objects)


def fuzz(url: str, cases: int, seed: int, threads: int) -> Findings:
    """Sends `cases` requests: a few to operations that take nothing, the rest in equal parts to the others. Half of
    each are made to fit the document and half not to."""
    load_all_checks()
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    schema.config.max_stream_events = 1_000_000  # or it leaves after some, and nobody sees how the stream ends
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        fuzzer = Fuzzer(url, schema, threads, bar, bar.add_task("cases", total=cases))
        operations, modes = fuzzer.operations(), list(schemathesis.GenerationMode)
        with_body = [operation for operation in operations if operation.body]
        for operation in operations:
            if operation not in with_body:
                for mode in modes:
                    fuzzer.batch(operation, mode, _PLAIN_CASES // 2, seed)
        turn = seed
        while (left := cases - fuzzer.made) > 0:
            for operation in with_body:
                for mode in modes:
                    turn += 1
                    fuzzer.batch(operation, mode, min(_BATCH, -(-left // (len(with_body) * len(modes)))), turn)
        fuzzer.close()
    return fuzzer.findings


def after(server: ServerProcess) -> list[str]:
    """What is wrong with a server that has been through it."""
    problems = []
    for path in ("/health", "/ready"):
        status, body = server.get(path)
        if status != 200:
            problems.append(f"{path} answers {status}: {body}")
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True, "temperature": 0}
    answer = requests.post(f"{server.url}/v1/chat/completions", json=chat, timeout=_SECONDS)
    if answer.status_code != 200 or answer.json()["usage"]["completion_tokens"] != 3:
        problems.append(f"an ordinary chat gets {answer.status_code}: {answer.text[:300]}")
    if held := settled(server):
        problems.append(f"held by an idle server: {held}")
    if compiles := server.metrics().get(_COMPILES):
        problems.append(f"{compiles:.0f} programs were compiled after ready")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz_server",
        description="Starts a server on the embedded digit reader, reads its OpenAPI document and sends requests that "
        "schemathesis makes from it, half of them valid. Exit status 1, with examples, if one was answered with a 5xx, "
        "with a body that the document does not know, or not at all, or if the server is not as it was.",
    )
    parser.add_argument("--cases", type=int, default=10_000, help="requests (default 10000)")
    parser.add_argument("--url", help="a server that runs already, e.g. http://127.0.0.1:8000")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (default 0)")
    parser.add_argument("--threads", type=int, default=4, help="requests at a time (default 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    args = parser.parse_args()
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    hypothesis.settings.register_profile("fuzz", print_blob=False)
    hypothesis.settings.load_profile("fuzz")
    began = time.monotonic()
    scratch = tempfile.TemporaryDirectory()
    with scratch as folder, running_or_serving(args.url, _FLAGS, Path(folder) / "server.log") as server:
        found = fuzz(server.url, args.cases, args.seed, args.threads)
        problems = after(server)
        if problems:
            console.print(server.log_tail(), markup=False)
    table = Table(title=f"{sum(found.cases.values())} cases in {time.monotonic() - began:.0f} s", show_header=False)
    for name, count in found.cases.most_common():
        table.add_row(name, str(count))
    table.add_section()
    for status, count in sorted(found.statuses.items()):
        table.add_row(status, str(count))
    table.add_section()
    table.add_row("slowest answer", f"{found.slowest:.1f} s")
    Console(highlight=False).print(table)
    problems += [f"{count} x {text}" for text, count in found.failures.items()]
    if args.json:
        report = {"cases": found.cases, "statuses": found.statuses, "problems": problems, "examples": found.examples}
        args.json.write_text(json.dumps(report | {"slowest_seconds": found.slowest}) + "\n")
    for problem in problems:
        console.print(f"FAILED {problem}", style="red", markup=False)
    for text, example in list(found.examples.items())[:10]:
        console.print(f"\n{text}\n{example}", markup=False)
    return int(bool(problems))


if __name__ == "__main__":
    warnings.simplefilter("ignore", HypothesisWarning)
    sys.exit(main())
