"""The openai client with tools and reasoning, against an engine that says what the test wants."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest
import uvicorn

from serving.api.keys import Keys
from serving.chat import ChatTemplate, choose_parsers
from tests.serving.api.harness import FakeEngine, app_of
from tests.serving.api.tool_models import GLM, HERMES, WEATHER

KEY = "sk-test"
QUESTION = [{"role": "user", "content": "Weather in Zürich and in Rome?"}]
ANSWERS = {
    "hermes": (
        HERMES,
        "Let me look.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"place": "Zürich", "days": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>',
    ),
    "glm": (
        GLM,
        "Two places.</think>Let me look."
        "<tool_call>weather<arg_key>place</arg_key><arg_value>Zürich</arg_value>"
        "<arg_key>days</arg_key><arg_value>1</arg_value></tool_call>"
        "<tool_call>weather<arg_key>place</arg_key><arg_value>Rome</arg_value></tool_call>",
    ),
}
ARGUMENTS = [{"place": "Zürich", "days": 1}, {"place": "Rome"}]


@contextmanager
def served(engine: FakeEngine, template: ChatTemplate) -> Iterator[str]:
    """Its address, while it is served."""
    app = app_of(engine, template=template, parsers=choose_parsers(template, {}), keys=Keys(frozenset({KEY})))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


@pytest.fixture(params=sorted(ANSWERS))
def client(request) -> Iterator[openai.OpenAI]:
    template, answer = ANSWERS[request.param]
    with (
        served(FakeEngine(answer, max_model_len=4000), template) as url,
        openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=30) as made,
    ):
        yield made


def test_calls_come_back_and_their_answers_go_in(client):
    answer = client.chat.completions.create(model="tiny/qwen3-vl", messages=QUESTION, tools=[WEATHER])
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
    assert [call.function.name for call in choice.message.tool_calls] == ["weather", "weather"]
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == ARGUMENTS
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in choice.message.tool_calls]
    turns = [*QUESTION, choice.message, *results]
    again = client.chat.completions.create(model="tiny/qwen3-vl", messages=turns, tools=[WEATHER])
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


def test_a_stream_of_calls_is_put_together_by_the_client(client):
    with client.chat.completions.stream(model="tiny/qwen3-vl", messages=QUESTION, tools=[WEATHER]) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message
    assert [json.loads(event.arguments) for event in done] == ARGUMENTS
    assert message.content == "Let me look."
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == ARGUMENTS
    assert len({call.id for call in message.tool_calls}) == 2


def test_forcing_a_call_is_refused_by_name(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tiny/qwen3-vl", messages=QUESTION, tools=[WEATHER], tool_choice="required"
        )
    assert caught.value.param == "tool_choice"


def test_a_wrong_key_is_an_authentication_error(client):
    with pytest.raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="sk-other").models.list()
    assert caught.value.code == "invalid_api_key"


def test_reasoning_is_read_from_its_field():
    with served(FakeEngine("hm</think>Four."), GLM) as url, openai.OpenAI(base_url=url, api_key=KEY) as client:
        message = client.chat.completions.create(model="tiny/qwen3-vl", messages=QUESTION).choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == ("Four.", "hm")


def test_sixty_four_streams_of_calls_at_once():
    template, answer = ANSWERS["hermes"]

    async def ask(client: openai.AsyncOpenAI) -> list[object]:
        stream = await client.chat.completions.create(
            model="tiny/qwen3-vl", messages=QUESTION, tools=[WEATHER], stream=True
        )
        arguments = ["", ""]
        async for chunk in stream:
            for part in chunk.choices[0].delta.tool_calls or ():
                arguments[part.index] += part.function.arguments
        return [json.loads(one) for one in arguments]

    async def all_of(url: str) -> list[list[object]]:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*(ask(client) for _ in range(64)))

    with served(FakeEngine(answer, max_model_len=4000), template) as url:
        assert asyncio.run(all_of(url)) == [ARGUMENTS] * 64
