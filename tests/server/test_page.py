"""The page in headless Chromium, before a server that says what the test tells it to."""

from __future__ import annotations

import json
import random
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from specla import LLM, SamplingParams
from tests.server.backend import DONE, PAGE, Answer, Backend, chunk, error, serving

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
TREE = {
    "tokens": [" a", " b", " c", " d"],
    "parent": [-1, 0, 0, 2],
    "scores": [0, -0.5, -1, -2],
    "path": [0, 2],
}
ROUNDS = [
    [(" <b>bold</b>", True), ("<img src=x onerror='hacked=1'>", True), ("\n", False)],
    [("é", True), ("漢字🌳\n\n", True), (" & so\u202eon", False)],
    [("</script><script>hacked=1</script>", True), ("", False)],
    [],  # its text is held back: it may be the start of a stop string
    [("\x1b[2J", False)],
]
TEXT = "".join(text for pieces in ROUNDS for text, _ in pieces)


def tell(body: dict[str, Any]) -> Answer:
    """The same text whether drafted or not, as the engine promises."""
    if body.get("num_speculative_tokens") == 0:
        rounds = [[(text, False)] for pieces in ROUNDS for text, _ in pieces]
    else:
        rounds = ROUNDS
    *most, last = rounds
    return 200, [*(chunk(pieces, TREE) for pieces in most), chunk(last, TREE, finish_reason="length"), DONE]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    profile = tmp_path_factory.mktemp("profile")
    with playwright.sync_playwright() as play:
        context = play.chromium.launch_persistent_context(
            str(profile), executable_path=CHROMIUM, headless=True, args=FLAGS
        )
        context.set_default_timeout(20_000)
        yield context
        context.close()


@pytest.fixture
def backend() -> Iterator[Backend]:
    backend = Backend(tell)
    with serving(backend):
        yield backend


@pytest.fixture
def page(browser: Any, backend: Backend) -> Iterator[Any]:
    page = browser.new_page()
    hosts, broken = set(), []
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.on("pageerror", lambda error: broken.append(error))
    page.goto(backend.url)
    playwright.expect(page.locator("#model")).to_have_text("specla-mini")
    yield page
    page.close()
    assert hosts == {backend.url.split("/")[2]}, "a page that asks nobody else"
    assert broken == []


def run(page: Any) -> None:
    page.click("#go")
    finished(page)


def finished(page: Any) -> None:
    playwright.expect(page.locator("#go")).to_be_enabled()


def test_events_are_the_same_wherever_the_bytes_are_cut(page: Any) -> None:
    stream = 'data: {"é": "漢🌳"}\r\n\r\n: a comment\ndata: one\r\ndata:two\r\n\r\nevent: x\n\n'
    stream += "\r\rdata:  three\r\rdata: 4\n\n"
    cuts = page.evaluate(
        """async (text) => {
          const bytes = new TextEncoder().encode(text);
          const read = async (parts) => {
            const body = new ReadableStream({ start(c) { parts.forEach((p) => c.enqueue(p)); c.close(); } });
            const got = [];
            for await (const data of events(body)) got.push(data);
            return JSON.stringify(got);
          };
          const all = [await read([...bytes].map((b) => new Uint8Array([b])))];
          for (let i = 0; i <= bytes.length; i++) all.push(await read([bytes.slice(0, i), bytes.slice(i)]));
          return all;
        }""",
        stream,
    )
    assert len(cuts) > len(stream)
    assert {cut: json.loads(cut) for cut in cuts} == {cuts[0]: ['{"é": "漢🌳"}', "one\ntwo", " three", "4"]}


def test_text_is_text_and_drafts_are_marked(page: Any) -> None:
    page.fill("#prompt", "<i>prompt</i>\n\n")
    run(page)
    assert page.evaluate("$('output').textContent") == "<i>prompt</i>\n\n" + TEXT
    drafted = page.evaluate(
        "[...document.querySelectorAll('#output .draft')].map((e) => e.textContent).join('')"
    )
    assert drafted == "".join(text for pieces in ROUNDS for text, draft in pieces if draft)
    assert set(page.evaluate("[...$('output').querySelectorAll('*')].map((e) => e.tagName)")) == {"DIV", "I"}
    assert page.evaluate("typeof hacked") == "undefined"
    assert "identical" in page.inner_text("#verdict")
    assert "1.00×" in page.inner_text("#speedup")


def test_both_runs_of_a_race_ask_for_the_same(page: Any, backend: Backend) -> None:
    for field, value in {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.8,
        "seed": 11,
        "drafts_at_most": 3,
    }.items():
        page.fill(f"#{field}", str(value))
    page.fill("#prompt", "Once")
    run(page)
    page.uncheck("#race")
    page.select_option("#kind", "chat/completions")
    run(page)
    drafting, plain, chat = backend.requests
    assert drafting.pop("num_speculative_tokens") == 3
    assert plain.pop("num_speculative_tokens") == 0
    asked = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.8,
        "seed": 11,
        "stream": True,
        "model": "specla-mini",
    }
    assert drafting == plain == drafting | asked | {"prompt": "Once", "path": "/v1/completions"}
    assert (
        chat["messages"] == [{"role": "user", "content": "Once"}] and chat["path"] == "/v1/chat/completions"
    )


def test_a_race_between_different_texts_is_no_victory(page: Any, backend: Backend) -> None:
    def differ(body: dict[str, Any]) -> Answer:
        return 200, [chunk([("yes" if body.get("num_speculative_tokens") is None else "no", False)]), DONE]

    backend.answer = differ
    run(page)
    assert "differ" in page.inner_text("#verdict") and "identical" not in page.inner_text("#verdict")


def test_a_long_text_is_only_appended_to(page: Any, backend: Backend) -> None:
    backend.answer = lambda body: (
        200,
        [*(chunk([(f"word{i}\n", i % 2 == 0)], TREE) for i in range(3000)), DONE],
    )
    page.uncheck("#race")
    page.evaluate(
        """() => {
          rewritten = 0;
          const watch = (all) => all.forEach((m) => { rewritten += m.removedNodes.length; });
          $('go').addEventListener('click', () => setTimeout(() =>
            new MutationObserver(watch).observe($('output'), { childList: true, subtree: true })));
        }"""
    )
    run(page)
    assert page.evaluate("$('output').querySelectorAll('[data-round]').length") == 3000
    assert page.evaluate("rewritten") == 0
    assert page.evaluate("rounds.length <= KEPT && rounds[rounds.length - 1].number === 3000")
    playwright.expect(page.locator("[data-round='3000']")).to_be_in_viewport()
    page.focus("#round")
    page.keyboard.press("Home")  # the oldest round that is kept
    playwright.expect(page.locator("#output .shown")).to_be_in_viewport()
    playwright.expect(page.locator("[data-round='3000']")).not_to_be_in_viewport()


def test_the_end_is_in_view_until_the_reader_scrolls_away(page: Any, backend: Backend) -> None:
    def endless(body: dict[str, Any]) -> Answer:
        return 200, (time.sleep(0.005) or part for part in repeat(chunk([("on\n", False)])))

    backend.answer = endless
    lines = "$('output').childElementCount"
    left = "$('output').scrollHeight - $('output').scrollTop - $('output').clientHeight"
    page.click("#go")
    playwright.expect(page.locator("#output > div:nth-child(60)")).to_be_attached()
    assert page.evaluate(left) < 4
    page.locator("#output").hover()
    page.mouse.wheel(0, -400)
    count = page.evaluate(lines)
    playwright.expect(page.locator(f"#output > div:nth-child({count + 40})")).to_be_attached()
    assert page.evaluate(left) > 400
    page.click("#stop")
    finished(page)


def test_trees_of_any_shape_are_drawn_without_overlaps(page: Any) -> None:
    """The accepted path and the target's own token after it run along the top."""
    draw = random.Random(0)
    page.set_viewport_size({"width": 1280, "height": 900})
    for _ in range(25):
        size = draw.randint(1, 17)
        parent = [-1] + [draw.randint(max(0, i - 4), i - 1) for i in range(1, size)]
        path = [0]
        while (children := [i for i in range(size) if parent[i] == path[-1]]) and draw.random() < 0.7:
            path.append(draw.choice(children))
        tokens = [draw.choice([" the", "\n", "", "a" * 40, " 漢字", "<b>"]) for _ in range(size)]
        tree = {
            "tokens": tokens,
            "parent": parent,
            "scores": draw.choice([None, [-0.3 * i for i in range(size)]]),
        }
        pieces = [{"text": tokens[i], "draft": True} for i in path[1:]] + [{"text": " own", "draft": False}]
        drawn = page.evaluate(
            """(round) => {
              drawTree(round);
              return [...document.querySelectorAll('#tree g')].map((g) => {
                const { x, y, width, height } = g.querySelector('rect').getBoundingClientRect();
                const label = g.querySelector('text').getBoundingClientRect();
                return { x, y, right: x + width, bottom: y + height, kind: g.getAttribute('class'),
                         inside: label.left >= x && label.right <= x + width };
              });
            }""",
            {"number": 1, "tree": tree | {"path": path}, "pieces": pieces, "spans": []},
        )
        kinds = [node["kind"] for node in drawn]
        assert sorted(kinds) == sorted(
            ["root", "bonus"] + ["accepted"] * (len(path) - 1) + ["rejected"] * (size - len(path))
        )
        assert len({node["y"] for node in drawn if node["kind"] != "rejected"}) == 1
        assert all(node["inside"] for node in drawn)
        for i, a in enumerate(drawn):
            for b in drawn[:i]:
                apart = (
                    a["x"] >= b["right"]
                    or b["x"] >= a["right"]
                    or a["y"] >= b["bottom"]
                    or b["y"] >= a["bottom"]
                )
                assert apart, (a, b)


def test_every_round_can_be_looked_at_again(page: Any) -> None:
    page.uncheck("#race")
    run(page)
    assert page.input_value("#round") == str(len(ROUNDS))
    page.locator("#output .draft", has_text="bold").click()
    assert page.input_value("#round") == "1"
    assert page.locator("#output .shown").count() == len(ROUNDS[0])
    page.focus("#round")
    page.keyboard.press("ArrowRight")
    assert "round 2: 3 drafts, 1 accepted" in page.inner_text("#tree-note")


def test_stop_ends_the_request(page: Any, backend: Backend) -> None:
    def endless(body: dict[str, Any]) -> Answer:
        return 200, (time.sleep(0.005) or part for part in repeat(chunk([("on and ", False)])))

    backend.answer = endless
    page.click("#go")
    playwright.expect(page.locator("#output")).to_contain_text("on and on")
    page.click("#stop")
    finished(page)
    assert backend.left.wait(10)
    assert "Stopped" in page.inner_text("#status") and page.is_hidden("#error") and page.is_disabled("#stop")
    assert len(backend.requests) == 1, "what was stopped is not raced"


@pytest.mark.parametrize(
    ("status", "parts", "told"),
    [
        (400, [error("max_tokens <b>must</b> be less")], "400: max_tokens <b>must</b> be less"),
        (503, [b"<html>proxy"], "503: <html>proxy"),
        (
            200,
            [chunk([("so", False)]), b'data: {"error": {"message": "a round failed"}}\n\n'],
            "a round failed",
        ),
        (200, [chunk([("so far", False)])], "the connection ended before the text did"),
        (200, [b"data: {half\n\n"], "JSON"),
    ],
)
def test_errors_are_told_and_the_page_goes_on(
    page: Any, backend: Backend, status: int, parts: list[bytes], told: str
) -> None:
    backend.answer = lambda body: (status, parts)
    run(page)
    assert told in page.inner_text("#error")
    backend.answer = tell
    run(page)
    assert page.is_hidden("#error") and page.evaluate("$('output').textContent").endswith(TEXT)


def test_a_server_that_has_gone_is_told(page: Any) -> None:
    page.route("**/v1/completions", lambda route: route.abort())
    run(page)
    assert page.inner_text("#error") == "the server does not answer"


def test_mistakes_in_the_form_are_told_before_anything_is_sent(page: Any, backend: Backend) -> None:
    for field, value in {
        "max_tokens": "0",
        "temperature": "-1",
        "top_p": "",
        "seed": "1.5",
        "prompt": "",
    }.items():
        right = page.input_value(f"#{field}")
        page.fill(f"#{field}", value)
        page.click("#go")
        assert page.locator(f"#{field}").evaluate("(e) => e === document.activeElement")
        assert page.inner_text("#error")
        page.fill(f"#{field}", right)
    assert backend.requests == []


def test_a_key_is_asked_for_where_one_is_needed(page: Any, backend: Backend) -> None:
    assert page.is_hidden("#key")
    backend.key = "sesame"
    page.reload()
    playwright.expect(page.locator("#error")).to_contain_text("no such key")
    page.fill("#key", "sesame")
    run(page)
    assert page.is_hidden("#error") and page.inner_text("#model") == "specla-mini"
    assert page.evaluate("$('output').textContent").endswith(TEXT)


@pytest.mark.parametrize("width", [320, 390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_reads_well_at_any_width_by_day_and_night(page: Any, width: int, scheme: str) -> None:
    """Nothing is wider than the screen, controls have names, all text has a contrast of 4.5 at least."""
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    run(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    nameless = "[...document.querySelectorAll('input, select, textarea, button')].filter((e) => " + (
        "!(e.labels?.[0]?.textContent.trim() || e.getAttribute('aria-label') || e.textContent.trim())).length"
    )
    assert page.evaluate(nameless) == 0
    contrasts = page.evaluate((Path(__file__).parent / "contrast.js").read_text())
    assert len(contrasts) > 25
    assert {text: value for text, value in contrasts if value < 4.5} == {}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The bundled pair behind the server itself."""
    uvicorn = pytest.importorskip("uvicorn", reason="needs the extra: pip install 'specla[server]'")
    from specla.server.app import create_app
    from specla.server.runner import AsyncEngine

    engine = AsyncEngine(LLM(max_num_seqs=2))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(create_app(engine), log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join()
    engine.close()


def test_it_shows_what_the_server_says(browser: Any, server: str) -> None:
    """The text of the engine alone, with the trees that it came from."""
    page = browser.new_page()
    page.goto(server)
    for field, value in {
        "prompt": "The old captain",
        "max_tokens": "40",
        "seed": "3",
        "drafts_at_most": "8",
    }.items():
        page.fill(f"#{field}", value)
    run(page)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40)
    text = LLM().generate("The old captain", params)[0].outputs[0].text
    assert page.evaluate("$('output').textContent") == "The old captain" + text
    assert page.is_hidden("#error") and "identical" in page.inner_text("#verdict")
    assert page.inner_text("#tokens") == "40"
    told = page.evaluate("rounds.map((r) => [r.total, r.tree.tokens.length, r.tree.path.length])")
    assert sum(total for total, _, _ in told) == 40
    assert all(1 <= path <= size <= 9 for _, size, path in told) and max(size for _, size, _ in told) > 1
    page.fill("#drafts_at_most", "99")
    run(page)
    assert "num_speculative_tokens" in page.inner_text("#error")
    page.close()


def test_the_page_stands_alone() -> None:
    text = PAGE.read_text()
    assert text.replace("http://www.w3.org/2000/svg", "").count("//www") == 0
    assert "https:" not in text and "innerHTML" not in text and "eval(" not in text
