"""Faults put in by hand around the engine: each costs the request it meets, and no other."""

import copy
import errno
import io
import logging
from typing import Any

import pytest

from tests.serving.api.harness import (
    PROCESSOR,
    TEMPLATE,
    TOKENIZER,
    FakeEngine,
    app_of,
    chat,
    chunks,
    encoded_image,
    error_of,
    image_part,
    until_aborted,
)


class Fault:
    """Makes copies of objects raise `fault` in one method, from a call on and for as long as `armed`."""

    def __init__(self, fault: BaseException, after: int = 0):
        self._fault, self._after, self.armed = fault, after, True

    def put(self, inner: Any, method: str) -> Any:
        broken, whole = copy.copy(inner), getattr(inner, method)

        def run(*args: object, **kwargs: object) -> Any:
            self._after -= 1
            if self.armed and self._after < 0:
                raise self._fault
            return whole(*args, **kwargs)

        object.__setattr__(broken, method, run)  # also of frozen dataclasses
        return broken


@pytest.mark.parametrize("stream", [False, True])
def test_a_detokeniser_that_fails_ends_its_request_and_its_generation(stream, caplog):
    fault = Fault(RuntimeError("secret detail"), after=5)
    engine = FakeEngine(script=until_aborted)
    app = app_of(engine, tokenizer=fault.put(TOKENIZER, "token_bytes"))
    response = chat(app, stream=stream)
    if stream:
        assert response.status_code == 200
        *_, last = chunks(response)
        assert last["error"]["type"] == "internal_error", "an error event and no [DONE]"
    else:
        assert response.status_code == 500
        assert error_of(response)["type"] == "internal_error"
    assert "secret" not in response.text
    assert "secret detail" in caplog.text
    assert engine.aborted == [engine.submissions[0].request_id], "nothing goes on for nobody"
    fault.armed, engine.script = False, None
    assert chat(app, stream=stream).status_code == 200


@pytest.mark.parametrize("fault", [RuntimeError("secret"), MemoryError(), RecursionError()])
def test_a_template_or_tokeniser_that_fails_never_reaches_the_engine(fault):
    for name, inner, method in (("template", TEMPLATE, "render"), ("tokenizer", TOKENIZER, "encode_rendered")):
        broken, engine = {name: Fault(fault).put(inner, method)}, FakeEngine()
        response = chat(app_of(engine, **broken))
        assert response.status_code == 500
        assert "secret" not in response.text
        assert engine.submissions == []


def test_the_image_pool_works_again_after_every_kind_of_fault():
    faults = [MemoryError(), SystemExit(1), KeyboardInterrupt(), StopIteration(), OSError(errno.ENOSPC, "disk full")]
    for fault in map(Fault, faults):
        app = app_of(FakeEngine(), processor=fault.put(PROCESSOR, "prepare"))
        for _ in range(5):  # more than there are threads
            assert chat(app, [image_part(), image_part()]).status_code == 500
        fault.armed = False
        assert chat(app, [image_part(encoded_image()), image_part()]).status_code == 200


def test_a_log_on_a_full_disk_costs_no_request(capsys):
    class FullDisk(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    logger, handler = logging.getLogger("serving.http"), logging.StreamHandler(FullDisk())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        assert chat(app_of(FakeEngine())).status_code == 200
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert "No space left" in capsys.readouterr().err, "the line was lost, and that is said"
