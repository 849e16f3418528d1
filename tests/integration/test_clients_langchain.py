"""LangChain's ChatOpenAI and a LangGraph agent against a live server with a model that knows nothing."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from tests.integration.server import Server

pytestmark = pytest.mark.integration


class Weather(BaseModel):
    """The weather of a place."""

    model_config = ConfigDict(extra="forbid")  # else a random model adds keys of its own, as the schema lets it
    place: str = Field(max_length=8)
    degrees: int = Field(ge=-40, le=50)
    sky: Literal["clear", "cloudy"]


@tool
def weather(place: Literal["Köln", "東京"], days: Literal[1, 2, 3]) -> str:
    """The weather of a place."""
    return f"{place}: {days} days of sun"


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One for all tests: LangChain keeps its connections from call to call."""
    one = asyncio.new_event_loop()
    yield one
    one.close()


@pytest.fixture(scope="module")
def chat(session_server: Server) -> Any:
    return ChatOpenAI(
        model="tiny", base_url=f"{session_server.url}/v1", api_key=SecretStr("none"), temperature=1, seed=3,
        max_retries=0, timeout=60, max_completion_tokens=160,
    )  # fmt: skip


@pytest.fixture
def short(chat: Any) -> Any:
    return chat.bind(max_completion_tokens=24, extra_body={"ignore_eos": True})


def test_invoke_and_stream_are_equal(short: Any) -> None:
    messages = [("system", "be brief"), ("human", "Where is the station?")]
    whole = short.invoke(messages)
    assert isinstance(whole, AIMessage) and whole.content
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] == 24
    assert "".join(str(chunk.content) for chunk in short.stream(messages)) == whole.content


def test_async_and_batch_are_equal_to_invoke(short: Any, loop: asyncio.AbstractEventLoop) -> None:
    questions = [f"question {n}" for n in range(4)]

    async def run() -> tuple[list[Any], str]:
        many = await short.abatch(questions)
        return many, "".join([str(chunk.content) async for chunk in short.astream(questions[0])])

    many, streamed = loop.run_until_complete(run())
    assert streamed == many[0].content
    assert [one.content for one in short.batch(questions)] == [one.content for one in many]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("strict", [True, None])
def test_structured_output_is_valid(
    chat: Any, loop: asyncio.AbstractEventLoop, method: Any, strict: bool | None
) -> None:
    structured = chat.with_structured_output(Weather, method=method, strict=strict)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydantic's, of langchain's own serialising of 'parsed'
        first = structured.invoke("Köln?")
        assert isinstance(first, Weather)
        assert loop.run_until_complete(structured.ainvoke("Köln?")) == first
        assert list(structured.stream("Köln?"))[-1] == first


def test_bound_tools_stream_the_call_that_invoke_gives(chat: Any) -> None:
    bound = chat.bind_tools([weather], tool_choice="weather")
    whole = bound.invoke("the weather?")
    pieces = list(bound.stream("the weather?"))
    joined = pieces[0]
    for piece in pieces[1:]:
        joined = joined + piece
    for reply in (whole, joined):
        assert [(call["name"], call["args"]) for call in reply.tool_calls] == [
            (call["name"], call["args"]) for call in whole.tool_calls
        ]
    (call,) = whole.tool_calls
    assert call["name"] == "weather" and call["args"]["place"] in ("Köln", "東京")


def test_an_agent_calls_its_tool_and_answers(chat: Any) -> None:
    calls_then_answers = {True: chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False),
                          False: chat.bind_tools([weather], tool_choice="none")}  # fmt: skip

    def think(state: MessagesState) -> dict[str, list[BaseMessage]]:
        first = not any(isinstance(message, ToolMessage) for message in state["messages"])
        return {"messages": [calls_then_answers[first].invoke(state["messages"])]}

    def route(state: MessagesState) -> str:
        return "tools" if getattr(state["messages"][-1], "tool_calls", None) else END

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([weather]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", route, ["tools", END])
    graph.add_edge("tools", "think")
    messages = graph.compile().invoke({"messages": [("human", "the weather?")]})["messages"]
    kinds = [message.type for message in messages]
    assert kinds == ["human", "ai", "tool", "ai"]
    assert messages[2].content.endswith("days of sun") and messages[2].tool_call_id == messages[1].tool_calls[0]["id"]
    assert not messages[3].tool_calls
