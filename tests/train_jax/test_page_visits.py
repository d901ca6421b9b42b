"""Visits to the page of `trm serve` in a real Chromium: mishaps lose no turn, and what a model writes runs nothing.

axe judges the page if its script is there: `npm install --no-save axe-core`, or its path in the variable AXE_CORE.
"""

import importlib.util
import json
import os
import time
from pathlib import Path

import pytest
from support.browser import chromium, open_page
from support.served import alphabet, listening, model_of
from test_page import ANSWERED, LIMITS, choose, send, texts
from test_served_puzzles import write_sudokus

from train_jax.language.chat.conversations import parse_conversation
from train_jax.run.restore import restore
from train_jax.serve.app import create_app
from train_jax.serve.gate import Gate
from train_jax.serve.language import TextService
from train_jax.serve.puzzles import Player, PuzzleService

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no chromium; install Debian's package `chromium`"),
]
ROOT = Path(__file__).parents[2]
LETTERS = "abcdefghijklmnopqrstuvwxyz" * 40
CAPACITY = 900


@pytest.fixture(scope="module")
def letters():
    return model_of("alphabet", alphabet(), limits=LIMITS, capacity=CAPACITY)


@pytest.fixture(scope="module")
def served(letters, made_once):
    """The addresses of a server, and of one that needs a token."""
    gate = Gate(LIMITS)
    texts_of_models = TextService(gate, [model_of("toy", limits=LIMITS, capacity=CAPACITY), letters])
    player = Player("four", restore(str(made_once("sudokus", write_sudokus) / "run")))
    services = [texts_of_models, PuzzleService(gate, [player])]
    locked = Gate(LIMITS, "secret")
    behind = [TextService(locked, texts_of_models.models.values()), PuzzleService(locked, [])]
    with listening(create_app(gate, services)) as port, listening(create_app(locked, behind)) as other:
        yield f"http://127.0.0.1:{port}/", f"http://127.0.0.1:{other}/"
    for service in services:
        service.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with open_page(tmp_path_factory.mktemp("browser"), width=1000) as page:
        yield page


@pytest.fixture
def page(browser, served):
    """The page at the first visit of a browser."""
    browser.send("Page.navigate", url=served[0] + "page.css")  # a place without the page's scripts
    browser.until("document.readyState === 'complete' && location.pathname === '/page.css'")
    browser.evaluate("localStorage.clear(); sessionStorage.clear()")
    browser.problems.clear()
    browser.requests.clear()
    browser.open(served[0])
    choose(browser, "#temperature", "0")
    yield browser
    browser.evaluate("1")
    assert all(each.startswith((served[0], "data:", "blob:")) for each in browser.requests)
    assert not browser.problems


@pytest.fixture
def slow(letters, monkeypatch):
    step = letters.thread.engine.step
    monkeypatch.setattr(letters.thread.engine, "step", lambda: (time.sleep(0.1), step())[1])


def use_letters(page):
    """Asks the model that never ends its answers."""
    page.click("#models label:nth-of-type(2) input")
    page.click("#models label:nth-of-type(1) input")


def ask(page, text):
    before = page.evaluate("document.querySelectorAll('.turn').length")
    send(page, text)
    page.until(f"document.querySelectorAll('.turn').length === {before + 1} && {ANSWERED}")


def sent(page):
    """Records the bodies of further requests in `window.sent`."""
    page.evaluate("""window.sent = []; window.oldFetch = window.fetch;
        window.fetch = (path, request) => { sent.push(request?.body); return oldFetch(path, request); }; 1""")


def press(page, label):
    page.click(f'[aria-label="{label}"]')


def questions(page):
    return texts(page, ".question p")


# ---- nothing is lost


def test_an_answer_goes_on_after_a_reload(page, slow):
    use_letters(page)
    choose(page, "#max_tokens", "300")
    send(page, "hi")
    page.until("document.querySelector('.text')?.innerText.length > 20")
    page.reload()
    begun = page.until("document.querySelector('.text').innerText.trim()")
    assert len(begun) >= 20 and page.evaluate("document.activeElement.id") == "message"
    page.until(f"document.querySelector('.text').innerText.trim().length > {len(begun) + 20}")
    page.click("#stop")
    page.until(ANSWERED)
    text = page.text(".text").strip()
    assert LETTERS.startswith(text) and texts(page, ".question p") == ["hi"]


def test_two_tabs_keep_both_conversations(page, served):
    ask(page, "one")
    first = page._session
    page._session = None
    target = page.send("Target.createTarget", url="about:blank")["targetId"]
    page._session = page.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    page.send("Runtime.enable")
    page.open(served[0])
    assert questions(page) == [], "a new tab begins a conversation"
    ask(page, "two")
    second = page._session
    page._session = first
    ask(page, "three")
    page.reload()
    assert questions(page) == ["one", "three"]
    page.click("#open-list")
    assert [text.split("\n")[0] for text in texts(page, "#list .open")] == ["one", "two"]
    page._session = second
    page.reload()
    assert questions(page) == ["two"]
    page.send("Page.close")
    page._session = first


def test_a_refused_message_leaves_the_history(page):
    ask(page, "one")
    page.evaluate("document.querySelector('#message').value = 'x'.repeat(2000); 1")
    page.click("#send")
    page.until("document.querySelectorAll('.turn').length === 2 && " + ANSWERED)
    assert "longer than the model reads" in page.text(".turn:last-child .error")
    page.problems.clear()  # the browser logs the refusal
    sent(page)
    ask(page, "two")
    roles = [each["role"] for each in json.loads(page.evaluate("sent[0]"))["messages"]]
    assert roles == ["user", "assistant", "user"] and texts(page, ".turn:last-child .markdown") == ["OK."]
    page.reload()
    assert len(questions(page)) == 3


def test_a_full_conversation_offers_another_one(page):
    use_letters(page)
    ask(page, "fill it")
    send(page, "and this")
    page.until("document.querySelectorAll('.turn').length === 2 && " + ANSWERED)
    assert "longer than the model reads" in page.text(".turn:last-child .error")
    page.problems.clear()
    page.evaluate("[...document.querySelectorAll('.tools button')].find((e) => e.innerText.includes('new')).click()")
    page.until("document.querySelectorAll('.turn').length === 1 && " + ANSWERED)
    assert questions(page) == ["and this"] and page.text(".text").strip().startswith("abc")
    page.click("#open-list")
    assert len(texts(page, "#list .open")) == 2


def offline(page, is_offline):
    conditions = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.send("Network.emulateNetworkConditions", offline=is_offline, **conditions)


def test_a_lost_server_leaves_the_question_and_a_retry(page):
    ask(page, "one")
    offline(page, True)
    send(page, "two")
    page.until("document.querySelectorAll('.turn').length === 2 && " + ANSWERED)
    assert page.text(".turn:last-child .error") == "The server cannot be reached."
    offline(page, False)
    page.problems.clear()
    press(page, "Ask this again")
    page.until("document.querySelectorAll('.markdown').length === 2 && " + ANSWERED)
    assert (questions(page) == ["one", "two"] and texts(page, ".error") == [""]) or texts(page, ".turn .error") == []


def test_a_server_lost_in_mid_stream_leaves_what_was_written(page, slow):
    use_letters(page)
    choose(page, "#max_tokens", "200")
    send(page, "hi")
    page.until("document.querySelector('.text')?.innerText.length > 20")
    page.evaluate(
        "window.oldRead = ReadableStreamDefaultReader.prototype.read;"
        "ReadableStreamDefaultReader.prototype.read = () => Promise.reject(new TypeError('network error')); 1"
    )
    page.until(ANSWERED)
    assert "connection to the server was lost" in page.text(".error")
    begun = page.text(".markdown").strip()
    page.evaluate("ReadableStreamDefaultReader.prototype.read = oldRead; 1")
    press(page, "Continue this answer")
    page.until(f"document.querySelector('.text').innerText.trim().length > {len(begun)} && " + ANSWERED)
    assert LETTERS.startswith(page.text(".text").strip()) and texts(page, ".turn .error") == []


def test_a_wrong_token_is_said_to_be_wrong(page, served):
    page.send("Page.navigate", url=served[1])
    page.until("document.querySelector('#ask-token')?.open")
    page.type("guess")
    page.press("Enter")
    page.until("document.querySelector('#token-mistake').checkVisibility()")
    assert page.text("#token-mistake") == "This token is wrong. Enter another one."
    page.type("secret")
    page.press("Enter")
    page.until("document.querySelector('#loading').hidden")
    ask(page, "hi")
    page.requests.clear()
    page.problems.clear()  # the browser logs each 401


def test_regenerated_answers_are_versions(page):
    ask(page, "one")
    press(page, "Regenerate this answer")
    page.until("document.querySelector('.count')?.innerText === '2 of 2' && " + ANSWERED)
    press(page, "Previous version")
    assert page.text(".count") == "1 of 2"
    page.reload()
    assert page.text(".count") == "1 of 2" and texts(page, ".markdown") == ["OK."]


def test_edited_deleted_and_new_can_be_undone(page):
    ask(page, "one")
    ask(page, "two")
    press(page, "Edit question 1")
    page.evaluate("document.querySelector('.question textarea').value = 'other'; 1")
    page.press("Enter")
    page.until("document.querySelectorAll('.turn').length === 1 && " + ANSWERED)
    assert questions(page) == ["other"]
    page.click("#undo button")
    assert questions(page) == ["one", "two"]
    page.click("#new")
    assert questions(page) == []
    page.click("#undo button")
    assert questions(page) == ["one", "two"]
    page.click("#open-list")
    press(page, "Delete “one”")
    assert questions(page) == [] and "No conversation" in page.text("#list-rows")
    page.press("Escape")
    page.click("#undo button")
    page.reload()
    assert questions(page) == ["one", "two"]


def test_a_browser_that_keeps_no_more_says_so(page):
    page.evaluate("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }; 1")
    ask(page, "one")
    assert page.text("#problem") == "The browser keeps no more conversations: delete some." and questions(page) == [
        "one"
    ]


def test_what_older_versions_kept_is_there(page):
    version = {"parts": [{"type": "text", "text": "old"}], "tokens": [], "finish": "stop", "error": None}
    turn = {"question": "before", "answers": {"toy": {"step": 0, "versions": {"0": version}}}}
    kept = json.dumps({"turns": [turn], "models": ["toy"], "settings": {"temperature": 0.1}})
    page.evaluate(
        f"localStorage.clear(); sessionStorage.clear(); localStorage.setItem('trm-serve', {json.dumps(kept)}); 1"
    )
    page.reload()
    page.click("#open-list")
    page.click("#list .open")
    assert questions(page) == ["before"] and texts(page, ".markdown") == ["old"]


# ---- what one does with a conversation


def test_the_start_offers_something_to_try(page):
    assert len(texts(page, "#tries button")) == 3 and texts(page, ".card h3") == ["toy", "alphabet"]
    page.click("#tries button")
    page.until("document.querySelectorAll('.turn').length === 1 && " + ANSWERED)
    assert questions(page) == ["Who are you?"] and not page.evaluate(
        "document.querySelector('#start').checkVisibility()"
    )


def test_a_system_prompt_belongs_to_its_conversation(page):
    page.click(".bar summary")
    page.click("#system")
    page.type("Be brief.")
    page.evaluate("document.activeElement.blur(); 1")
    sent(page)
    ask(page, "hi")
    messages = json.loads(page.evaluate("sent[0]"))["messages"]
    assert messages[0] == {"role": "system", "content": "Be brief."} and len(messages) == 2
    page.reload()
    assert page.evaluate("document.querySelector('#system').value") == "Be brief."
    page.click("#new")
    assert page.evaluate("document.querySelector('#system').value") == ""


def test_an_export_is_what_build_data_reads(page):
    ask(page, "hi")
    page.evaluate(
        "URL.createObjectURL = (blob) => { blob.text().then((text) => (window.saved = text)); return 'blob:x'; }; 1"
    )
    page.evaluate("HTMLAnchorElement.prototype.click = function () {}; 1")
    press(page, "Export as JSON")
    conversation = parse_conversation(json.loads(page.until("window.saved")))
    assert [each.role for each in conversation] == ["user", "assistant"] and conversation[1].text == "OK."
    assert [part.type for part in conversation[1].parts] == ["python", "python_output", "text"]
    press(page, "Export as Markdown")
    page.until("window.saved.startsWith('# hi')")
    assert page.evaluate("saved").endswith("`6*7` = 42 OK.\n")


def test_an_answer_is_copied(page):
    ask(page, "hi")
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }; 1")
    press(page, "Copy this answer")
    assert page.until("window.copied") == "`6*7` = 42 OK."


# ---- keyboard and screen reader


def test_the_answer_is_three_tab_stops_from_the_question(page):
    for number in range(12):
        page.evaluate(f"document.querySelector('#message').value = 'q{number}'; 1")
        page.click("#send")
        page.until(f"document.querySelectorAll('.turn').length === {number + 1} && " + ANSWERED)
    page.reload()
    assert page.evaluate("document.activeElement.id") == "message"
    assert page.evaluate("innerHeight + scrollY >= document.body.scrollHeight - 2")
    send(page, "last")
    page.until("document.querySelectorAll('.turn').length === 13 && " + ANSWERED)
    stops = 0
    while not page.evaluate("document.activeElement.matches('.turn:last-child .text')"):
        page.evaluate("1")
        page.send("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9, modifiers=8)
        page.send("Input.dispatchKeyEvent", type="keyUp", key="Tab", code="Tab", windowsVirtualKeyCode=9, modifiers=8)
        stops += 1
        assert stops <= 3
    page.press("ArrowUp")
    assert page.evaluate("document.activeElement.matches('.turn:nth-child(12) .text')")


def axe_script():
    """Returns axe's code, or None."""
    places = [os.environ.get("AXE_CORE", ""), ROOT / "node_modules" / "axe-core" / "axe.min.js"]
    for package in ("axe_playwright_python", "axe_core_python"):
        if found := importlib.util.find_spec(package):
            places.append(Path(found.origin).parent / "axe.min.js")
    return next(
        (Path(place).read_text(encoding="utf-8") for place in places if str(place) and Path(place).is_file()), None
    )


SMALL = """[...document.querySelectorAll('button, select, summary, input:not(.cell):not([type=range])')]
    .filter((each) => each.checkVisibility() && !each.closest('.unseen'))
    .filter((each) => { const box = each.getBoundingClientRect(); return box.height < 23.9 || box.width < 23.9; })
    .map((each) => each.outerHTML.slice(0, 90))"""


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(page, width, theme):
    script = axe_script()
    if script is None:
        pytest.skip("no axe; npm install --no-save axe-core, or set AXE_CORE to axe.min.js")
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    page.send("Emulation.setDeviceMetricsOverride", **metrics)
    choose(page, "#theme", theme)
    page.evaluate(script + "; 1")

    def check(where):
        found = page.evaluate(
            "axe.run().then(({violations}) => violations.map((v) => "
            "[v.impact, v.id, v.nodes.map((n) => n.html.slice(0, 150))]))"
        )
        assert not [each for each in found if each[0] in ("serious", "critical")], (where, found)
        assert page.evaluate(SMALL) == [], where
        assert page.evaluate("document.documentElement.scrollWidth") <= width, where

    check("start")
    ask(page, "hi")
    press(page, "Regenerate this answer")
    page.until("document.querySelector('.count') && " + ANSWERED)
    page.click(".bar summary")
    check("chat")
    page.click("#tokens")
    check("tokens")
    page.click("#open-list")
    check("list")
    page.press("Escape")
    page.evaluate("document.querySelector('#ask-token').showModal(); 1")
    check("token")
    page.press("Escape")
    page.click("#tab-puzzles")
    page.click("#cycles")
    page.click("#solve")
    page.until("!document.querySelector('#solve').hidden && document.querySelector('#play').innerText === 'Play'")
    check("puzzles")


# ---- what a model, a title or a link has runs nothing

PAYLOADS = [
    "<script>window.ran = 1</script>", "<img src=x onerror='window.ran = 1'>", "<svg onload='window.ran = 1'></svg>",
    "<iframe src='javascript:parent.ran = 1'></iframe>", "<a href='javascript:window.ran = 1'>x</a>",
    "[x](javascript:window.ran=1)", "[x](JaVaScRiPt:window.ran=1)", "[x](data:text/html,<script>ran=1</script>)",
    "![x](javascript:window.ran=1)", "![x](http://evil.example/x.png)", "<img src='http://evil.example/x.png'>",
    "<body onload='window.ran = 1'>", "<input autofocus onfocus='window.ran = 1'>",
    "<details open ontoggle='window.ran = 1'>x</details>", "<video><source onerror='window.ran = 1'></video>",
    "<math><mtext><table><mglyph><style><img src=x onerror='window.ran = 1'></style></mglyph></table></mtext></math>",
    "<style>@import 'http://evil.example/x.css';</style>", "<link rel=stylesheet href='http://evil.example/x.css'>",
    "<meta http-equiv=refresh content='0;url=http://evil.example'>", "<base href='http://evil.example/'>",
    "<form action='http://evil.example'><button>x</button></form>", "<object data='http://evil.example'></object>",
    "<embed src='javascript:window.ran = 1'>", "[x]: javascript:window.ran=1\n\n[x]", "<javascript:window.ran=1>",
    "```html\n<img src=x onerror='window.ran = 1'>\n```", "| a |\n|---|\n| <img src=x onerror='window.ran = 1'> |",
    "`<img src=x onerror='window.ran = 1'>`", "<div style='background:url(http://evil.example/x)'>x</div>",
    "<a href='x' onclick='window.ran = 1' autofocus onfocus='window.ran = 1'>x</a>", 
    "&lt;script&gt;window.ran=1&lt;/script&gt;",
]  # fmt: skip


def test_what_a_model_writes_runs_nothing(page):
    turns = []
    for payload in PAYLOADS:
        parts = [{"type": "text", "text": payload}, {"type": "python", "text": payload}]
        version = {
            "step": 0,
            "parts": parts,
            "tokens": [[[*payload.encode()], -0.1]],
            "finish": "stop",
            "error": payload,
        }
        turns.append({"question": payload, "answers": {"toy": {"shown": 0, "versions": [version]}}})
    for number, turn in enumerate(turns):
        kept = json.dumps({"id": f"x{number}", "system": turn["question"], "turns": [turn], "saved": number})
        page.evaluate(f"localStorage.setItem('trm-serve:conversation:x{number}', {json.dumps(kept)}); 1")
    kept = json.dumps({"id": "all", "system": "", "turns": turns, "saved": 10**14})
    page.evaluate(f"localStorage.setItem('trm-serve:conversation:all', {json.dumps(kept)}); 1")
    page.click("#open-list")
    page.click("#list .open")
    assert len(questions(page)) == len(PAYLOADS) >= 30
    page.click("#open-list")  # the titles
    assert len(texts(page, "#list .open")) == len(PAYLOADS) + 1
    page.press("Escape")
    page.evaluate("document.querySelectorAll('.answer a').forEach((each) => { each.target = ''; }); 1")
    links = page.evaluate("[...document.querySelectorAll('#log a')].map((each) => each.getAttribute('href'))")
    assert all(each.startswith(("http:", "https:", "mailto:")) for each in links), links
    forbidden = "script, img, iframe, svg, style, link, object, embed, form, input, video, math"
    assert page.evaluate(f"document.querySelectorAll('#log .text :is({forbidden})').length") == 0
    page.click("#tokens")
    time.sleep(0.3)
    assert page.evaluate("window.ran") is None


def test_links_with_puzzles(page, served):
    page.open(served[0] + "#model=four&puzzle=" + "12...4...3......")
    page.reload()
    assert page.evaluate("document.querySelector('#puzzle-text').value") == "12..\n.4..\n.3..\n...."
    assert page.evaluate("document.querySelector('#puzzles').checkVisibility()")
    for payload in PAYLOADS:
        page.evaluate(
            f"location.hash = new URLSearchParams({{ model: {json.dumps(payload)}, puzzle: {json.dumps(payload)} }}); 1"
        )
    page.until("document.querySelector('#problem').innerText.includes('no puzzle of this model')")
    assert page.evaluate("window.ran") is None
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }; 1")
    page.click("#link")
    assert page.until("window.copied").endswith("#model=four&puzzle=12..%0A.4..%0A.3..%0A....")
