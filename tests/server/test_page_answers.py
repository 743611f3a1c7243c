"""The page in a browser: what one types, and what then comes."""

from __future__ import annotations

import pytest

from tests.browser import BrowserError
from tests.fakes.serving import ANSWERS, ROUTE
from tests.server.page import Page, needs_browser

pytestmark = needs_browser


def test_tokens_are_coloured_by_their_probability(page: Page) -> None:
    page.take_completion()
    page.submit(ROUTE)
    assert page.fake.bodies == [
        {
            "prompt": ROUTE,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": 5,
            "temperature": 0.7,
            "max_tokens": 256,
            "top_p": 1,
        }
    ]
    assert page.tokens() == [
        (" south", "level-0"),
        (" south", "level-1"),
        (" east", "level-2"),
        (" or", "level-3"),
        ("\n", "level-4"),
    ]
    assert page.text_of("#completion-log .said") == [ROUTE + " south south east or\n"]
    assert "17 prompt + 5 answer tokens" in page.text_of(".meta")[0]
    assert not page.browser.log


def test_a_token_shows_its_alternatives_to_mouse_and_keys(page: Page) -> None:
    """The best comes first, also where JSON's numbers come first; the chosen one is marked."""
    page.submit(ROUTE)
    page.browser.click(".token:nth-of-type(4)", only_point=True)
    expected = [".60.0 %", "112.0 %", "·or8.0 %", "all others20.0 %"]
    assert page.text_of("#hint div") == expected
    assert page.text_of("#hint .chosen") == ["·or8.0 %"]
    page.browser.click("h1", only_point=True)
    assert page.browser.run("hint.hidden")
    page.take_completion()
    page.submit(ROUTE)
    page.browser.run("document.querySelector('#completion-log .token').focus()")
    assert page.text_of("#hint .chosen") == ["·south97.0 %"]
    for _ in range(3):
        page.browser.press("ArrowRight", 39)
    assert page.text_of("#hint div") == expected
    page.browser.press("Home", 36)
    assert page.text_of("#hint .chosen") == ["·south97.0 %"]
    page.browser.press("Escape", 27)
    assert page.browser.run("hint.hidden")
    reached = (
        "[...document.querySelectorAll('#completion-log .token')].filter(e => "
        "e.tabIndex === 0)"
    )
    assert page.browser.run(f"{reached}.length") == 1


@pytest.mark.parametrize("is_chat", [True, False])
def test_what_a_model_says_is_never_markup(page: Page, is_chat: bool) -> None:
    if not is_chat:
        page.take_completion()
    page.submit("markup")
    said = "".join(text for text, _ in ANSWERS["markup"])
    log = "#chat-log .assistant" if is_chat else "#completion-log"
    assert page.text_of(f"{log} .said") == [said if is_chat else "markup" + said]
    page.browser.run(f"document.querySelector('{log} .token').focus()")
    for text, _ in ANSWERS["markup"]:
        assert text.replace(" ", "·") in page.text_of("#hint b")
        page.browser.press("ArrowRight", 39)
    assert (
        page.browser.run(
            "document.querySelectorAll('main :is(script, img), #hint b *').length"
        )
        == 0
    )
    assert not page.browser.log


def test_a_violation_would_be_heard_of(page: Page) -> None:
    page.browser.run("void (new Image().src = 'http://127.0.0.1:1/')")
    page.browser.run("new Promise((resolve) => setTimeout(resolve, 100))")
    assert any("Content Security Policy" in each for each in page.browser.log)
    with pytest.raises(BrowserError, match="TrustedHTML"):
        page.browser.run("document.body.innerHTML = '<b>'")


@pytest.mark.parametrize("is_chat", [True, False])
def test_text_is_right_where_tokens_are_pieces(page: Page, is_chat: bool) -> None:
    """A character of two tokens is one span of both; text may come before or after its
    tokens."""
    if not is_chat:
        page.take_completion()
    page.submit("pieces")
    assert (
        "".join(text for text, _ in page.tokens())
        == "a 🤗STone of\N{REPLACEMENT CHARACTER}"
    )
    assert page.tokens() == [
        ("a", "level-0"),
        (" 🤗", "level-2"),  # 0.5 × 0.5
        ("ST", "level-1"),
        ("one", "level-1"),
        (" of", "level-2"),
        ("\N{REPLACEMENT CHARACTER}", "level-4"),
    ]


def test_a_chat_goes_on(page: Page) -> None:
    """With the system prompt, and what was said before, until it is cleared."""
    page.browser.type("#system", "Be short")
    page.submit("pieces")
    page.browser.type("#seed", "7")
    page.browser.type("#temperature", "")
    page.browser.press("Backspace", 8)
    page.browser.type("#text", ROUTE)
    page.browser.press("Enter", 13)
    page.browser.wait("document.querySelectorAll('.meta').length === 2 && !running")
    system = {"role": "system", "content": "Be short"}
    first = {"role": "user", "content": "pieces"}
    answer = {"role": "assistant", "content": "a 🤗STone of\N{REPLACEMENT CHARACTER}"}
    assert page.fake.bodies[0]["messages"] == [system, first]
    assert page.fake.bodies[1]["messages"] == [
        system,
        first,
        answer,
        {"role": "user", "content": ROUTE},
    ]
    assert page.fake.bodies[1]["seed"] == 7 and "temperature" not in page.fake.bodies[1]
    assert (
        page.fake.bodies[1]["logprobs"] is True
        and page.fake.bodies[1]["top_logprobs"] == 5
    )
    page.browser.click("#clear")
    assert page.text_of(".entry") == []
    page.submit("pieces")
    assert page.fake.bodies[2]["messages"] == [system, first]


def test_stop_leaves_the_server_and_keeps_what_came(page: Page) -> None:
    page.browser.type("#text", "endless")
    page.browser.press("Enter", 13)
    page.browser.wait("document.querySelectorAll('.token').length > 3")
    assert page.browser.run("document.querySelector('#send').disabled")
    assert page.text_of("#status") == ["Answering…"], "it said that it waits for tokens"
    page.browser.click("#stop")
    page.wait_for_status("Stopped")
    wait_until_left(page)
    said = page.text_of("#chat-log .assistant .said")[0]
    page.submit(ROUTE)
    assert page.fake.bodies[1]["messages"][1] == {"role": "assistant", "content": said}


def wait_until_left(page: Page) -> None:
    for _ in range(100):
        if page.fake.num_left:
            return
        page.browser.run("new Promise((resolve) => setTimeout(resolve, 50))")
    pytest.fail("the server still answers")


def test_errors_are_shown_and_the_text_can_be_sent_again(page: Page) -> None:
    page.submit("too long", "Failed")
    expected = "maximum context length is 8 tokens, and this has <b>9</b>"
    assert page.text_of(".error") == [expected]
    assert page.browser.run("document.querySelector('#text').value") == "too long"
    page.submit("breaks", "Failed")
    assert page.text_of(".error")[1] == "a rank is gone: start the server again"
    page.submit(ROUTE)
    assert page.fake.bodies[-1]["messages"] == [{"role": "user", "content": ROUTE}]


def test_tool_calls_are_shown_as_text(page: Page) -> None:
    page.submit("tools")
    assert page.text_of(".tool") == ['look_up({"a": 1})']
    page.submit(ROUTE)
    function = {"name": "look_up", "arguments": '{"a": 1}'}
    call = {"id": "c1", "type": "function", "function": function}
    expected = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert page.fake.bodies[1]["messages"][1] == expected


@pytest.mark.parametrize("page", [{"key": "sesame"}], indirect=True)
def test_a_key_is_asked_for_and_kept_in_the_tab(page: Page) -> None:
    page.browser.wait("document.querySelector('#key-dialog').open")
    assert "API key" in page.text_of("#key-why")[0]
    for key in ("wrong", "sesame"):
        page.browser.type("#key", key)
        page.browser.press("Enter", 13)
        page.browser.wait("!document.querySelector('#key').value")
        page.browser.run("new Promise((resolve) => setTimeout(resolve, 300))")
        assert page.browser.run("document.querySelector('#key-dialog').open") == (
            key == "wrong"
        )
    page.submit(ROUTE)
    assert len(page.tokens()) == 5
    assert page.browser.run(
        "localStorage.length"
    ) == 0 and "sesame" not in page.browser.run("document.cookie")
    page.browser.wait("document.querySelector('#num_running').textContent === '3'")


@pytest.mark.parametrize("page", [{"has_chat_template": False}], indirect=True)
def test_a_model_without_a_template_completes(page: Page) -> None:
    assert page.browser.run("document.body.dataset.mode") == "completion"
    page.submit(ROUTE)
    assert len(page.tokens()) == 5
    page.browser.click(".modes label:first-of-type span")
    assert "--chat-template FILE" in page.text_of("#chat-empty")[0]
    assert page.browser.run("document.querySelector('#send').disabled")
    page.browser.type("#text", "hello")
    page.browser.press("Enter", 13)
    assert len(page.fake.bodies) == 1
