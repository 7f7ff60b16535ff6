"""Logs are JSON, one line each."""

import json
import logging

from serving.logs import JsonLines, to_stderr


def test_logs_go_to_stderr_as_json_whoever_came_first(monkeypatch, capsys):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler()])
    monkeypatch.setattr(root, "level", logging.WARNING)
    to_stderr()
    logging.getLogger("serving.http").info("%s", "text", extra={"fields": {"request_id": "a"}})
    [line] = capsys.readouterr().err.splitlines()
    assert json.loads(line)["request_id"] == "a"


def lines(*records: logging.LogRecord) -> list[dict]:
    written = [JsonLines().format(record) for record in records]
    assert not any("\n" in line for line in written)
    return [json.loads(line) for line in written]


def record(text: str, **more) -> logging.LogRecord:
    made = logging.LogRecord("serving.http", logging.WARNING, "file.py", 1, text, ("x",), None)
    made.__dict__.update(more)
    return made


def test_a_record_is_one_line_with_time_level_and_logger():
    [line] = lines(record("two\nlines %s"))
    assert line["message"] == "two\nlines x"
    assert (line["level"], line["logger"]) == ("warning", "serving.http")
    assert line["time"].endswith("+00:00")


def test_fields_of_a_request_are_keys_of_the_line():
    [line] = lines(record("%s", fields={"request_id": "a", "status": 200}))
    assert (line["request_id"], line["status"]) == ("a", 200)
    assert "message" not in line


def test_a_stack_trace_stays_on_the_line():
    try:
        raise ValueError("inside")
    except ValueError as error:
        [line] = lines(record("failed %s", exc_info=(type(error), error, error.__traceback__)))
    assert "ValueError: inside" in line["traceback"]
