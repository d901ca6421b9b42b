"""The page of `trm serve` in a real Chromium: on a phone and on a desk, by pointer, keyboard and screen reader."""

import hashlib
import json
import time
from importlib import resources

import pytest
from starlette.testclient import TestClient
from support.browser import chromium, open_page
from support.served import alphabet, listening, model_of
from test_served_puzzles import write_sudokus

from train_jax.run.restore import restore
from train_jax.serve.app import create_app
from train_jax.serve.gate import Gate
from train_jax.serve.language import TextService
from train_jax.serve.limits import Limits
from train_jax.serve.puzzles import Player, PuzzleService

LIBRARIES = ("marked.js", "purify.js")
LIMITS = Limits(requests_per_minute=10**6)


def in_chromium(test):
    reason = "no chromium; install Debian's package `chromium`"
    return pytest.mark.slow(pytest.mark.skipif(chromium() is None, reason=reason)(test))


ANSWERED = (
    "document.querySelector('.answer') && "
    "[...document.querySelectorAll('.answer')].every((each) => each.getAttribute('aria-busy') === 'false')"
)
TYPED = "document.querySelector('#puzzle-text').value"
SOLVED = "!document.querySelector('#solve').hidden && document.querySelector('#play').innerText === 'Play'"
FOCUSABLE = """[...document.querySelectorAll('button, input, select, textarea, summary, [tabindex]')]
    .filter((each) => each.checkVisibility() && each.tabIndex >= 0 && !each.disabled).length"""


def test_the_libraries_are_those_that_the_list_names():
    folder = resources.files("train_jax.serve") / "page" / "vendor"
    listed = (folder / "README.md").read_text(encoding="utf-8")
    for name in LIBRARIES:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() in listed
        assert (folder / name).with_suffix(".LICENSE").is_file()


def test_the_files_come_from_here_and_load_nothing_from_elsewhere():
    with TestClient(create_app(Gate(LIMITS, "secret"), []), base_url="http://any.host") as client:
        kinds = {"/": "text/html", "/page.css": "text/css"}
        kinds |= {f"/{name}.js": "text/javascript" for name in ("page", "base", "chat", "conversations", "markdown")}
        kinds |= {f"/vendor/{name}": "text/javascript" for name in LIBRARIES}
        for path, kind in kinds.items():
            response = client.get(path)
            assert response.status_code == 200 and response.headers["content-type"].startswith(kind)
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "script-src 'self';" in policy and "img-src data:;" in policy
            if not path.startswith("/vendor/"):  # the comments of libraries have addresses
                assert "http://" not in response.text and "https://" not in response.text
        assert client.get("/v1/models").status_code == 404 and client.get("/metrics").status_code == 401


@pytest.fixture(scope="module")
def toy():
    return model_of(others={5: alphabet()}, limits=LIMITS, capacity=900)


@pytest.fixture(scope="module")
def address(toy, made_once):
    gate = Gate(LIMITS)
    player = Player("four", restore(str(made_once("sudokus", write_sudokus) / "run")))
    texts = TextService(gate, [toy, model_of("alphabet", alphabet(), limits=LIMITS)])
    services = [texts, PuzzleService(gate, [player])]
    with listening(create_app(gate, services)) as port:
        yield f"http://127.0.0.1:{port}/"
    for service in services:
        service.close()


@pytest.fixture(params=[390, 1280])
def page(request, address, tmp_path):
    with open_page(tmp_path, width=request.param) as page:
        page.open(address)
        choose(page, "#temperature", "0")
        yield page
        page.evaluate("1")  # reads what the page reported last
        assert not page.problems and all(each.startswith((address, "data:")) for each in page.requests)
        assert page.evaluate("document.documentElement.scrollWidth") <= request.param, "nothing is beside the screen"


def choose(page, selector, value):
    page.evaluate(f"document.querySelector('{selector}').value = '{value}'")
    page.evaluate(f"document.querySelector('{selector}').dispatchEvent(new Event('change'))")


def send(page, text):
    page.click("#message")
    page.type(text)
    page.press("Enter")


def texts(page, selector):
    return page.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.innerText)")


@in_chromium
def test_a_conversation(page, toy, monkeypatch):
    send(page, "hi")
    page.until(ANSWERED)
    assert texts(page, ".markdown") == ["OK."] and texts(page, ".tool strong") == ["42"]
    page.click("#tokens")
    assert texts(page, ".question p") == ["hi"] and texts(page, ".tool code") == ["6*7"]
    assert texts(page, ".tool strong") == ["42"] and texts(page, ".text > .token") == ["O", "K", "."]
    # the probability of a token
    page.evaluate("document.querySelector('.text').focus()")
    page.press("ArrowRight", "ArrowRight")
    shown = page.text(".readout")
    assert shown.startswith("“K” ") and shown.endswith(" %") and 5 < float(shown.split()[1]) < 14
    # another checkpoint answers the same question
    step = toy.thread.engine.step
    monkeypatch.setattr(toy.thread.engine, "step", lambda: (time.sleep(0.05), step())[1])
    page.evaluate("document.querySelector('.answer input[type=range]').focus()")
    page.press("ArrowRight")
    page.until("document.querySelector('.text').innerText.startsWith('abcdefghij')")
    assert page.evaluate("document.querySelector('.answer').getAttribute('aria-busy')") == "true"
    page.click("#stop")
    page.until(ANSWERED)
    stopped = page.text(".text")
    assert stopped in "abcdefghijklmnopqrstuvwxyz" * 40 and page.text(".speed").endswith("stopped")
    page.until_python(lambda: toy.thread.rows == 0)
    # two models; the stopped answer is a part of the conversation
    page.click("#models label:nth-of-type(2) input")
    page.click(".answer input[type=range]")
    page.press("ArrowLeft", "ArrowLeft")
    page.until("document.querySelector('.text').innerText.includes('OK.')")
    send(page, "and now?")
    page.until("document.querySelectorAll('.answer').length === 3 && " + ANSWERED)
    assert texts(page, ".answer h3") == ["toy", "toy", "alphabet"]
    before = texts(page, ".question p, .text")
    page.reload()
    assert texts(page, ".question p, .text") == before and page.text("#models").split() == ["Models", "toy", "alphabet"]
    page.click("#new")
    page.reload()
    assert texts(page, ".turn") == []


@in_chromium
@pytest.mark.parametrize("page", [390], indirect=True)
def test_a_puzzle(page):
    page.click("#tab-puzzles")
    page.until(f"/[1-4]/.test({TYPED})")  # a hard one of the test set
    page.click("#empty")
    page.click("#editor .cell")
    page.press("1", "ArrowRight", "2", "ArrowDown", "ArrowDown", "9", "3", "ArrowUp", "4", "x")
    page.click("#text-form summary")
    assert page.evaluate(TYPED) == "12..\n.4..\n.3..\n...."
    page.click("#several")
    page.click("#solve")
    page.until(SOLVED)
    assert len(texts(page, "#boards figure")) == 4 and page.text("#step-shown") == "3 of 3"
    assert page.evaluate("document.querySelectorAll('.halts')[3].children.length") == 3
    assert all("ACT step 3" in text and "solved" in text for text in texts(page, "#boards figcaption"))
    page.evaluate("document.querySelector('#step').focus()")
    page.press("ArrowLeft", "ArrowLeft")
    assert "ACT step 1, " in page.text("#boards figcaption")
    page.evaluate("""document.querySelector('#editor').dispatchEvent(new ClipboardEvent("paste", {
        bubbles: true, cancelable: true, clipboardData: (() => {
            const data = new DataTransfer();
            data.setData("text", "1 2 1 .\\n" + ". ".repeat(12));
            return data;
        })(),
    }))""")
    page.click("#solve")
    page.until("!document.querySelector('#problem').hidden")
    assert page.text("#problem").startswith("puzzle: the Sudoku has digit 1 more than once in row 1, expected every")
    assert len(page.problems) == 1 and "400" in page.problems.pop(), "the browser logs the refusal, nothing else"


@in_chromium
def test_keyboard_and_screen_reader_reach_everything(page):
    send(page, "hi")
    page.until(ANSWERED)
    for tab, expected in (
        ("#tab-chat", {("textbox", "Message"), ("slider", "Checkpoint of toy"), ("log", "Conversation")}),
        ("#tab-puzzles", {("group", "4x4 Sudoku"), ("textbox", "row 4, column 4"), ("button", "Solve")}),
    ):
        page.click(tab)
        named = page.names_by_role()
        controls = ("button", "textbox", "checkbox", "slider", "combobox", "spinbutton", "tab", "radio", "image")
        assert expected <= {*named} and not [role for role, name in named if role in controls and not name.strip()]
        page.evaluate("document.activeElement.blur(); window.reached = new Set()")
        count = page.evaluate(FOCUSABLE)
        for _ in range(count + 2):  # the focus also leaves the page
            page.press("Tab")
            page.evaluate("reached.add(document.activeElement)")
        assert page.evaluate("reached.delete(document.body), reached.size") == count
