"""A headless Chromium, driven by its DevTools protocol over a pipe: what a user does, sees and hears."""

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time

KEYS = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
TEXT_OF_KEYS = {"Enter": "\r", " ": " "}


def chromium():
    """Returns the path of the program, or None."""
    names = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"
    return next(filter(None, map(shutil.which, names)), None)


class Page:
    """A page of a window of some size; `problems` are errors of the console and requests to other addresses."""

    def __init__(self, send, receive, *, width, height):
        self._send_bytes = send
        self._receive_bytes = receive
        self._rest = b""
        self._number = 0
        self._session = None
        self.problems = []
        self.requests = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page", "Accessibility"):
            self.send(f"{domain}.enable")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)

    def send(self, method, **params):
        """Returns the result of a command; what the page reports meanwhile is kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._send_bytes(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _receive(self):
        while b"\0" not in self._rest:
            self._rest += self._receive_bytes()
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event):
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(str([each.get("value") for each in params["args"]]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def open(self, address):
        self.send("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && document.querySelector('#loading').hidden")

    def reload(self):
        self.evaluate("window.isOld = true")
        self.send("Page.reload")
        self.until("!window.isOld && document.readyState === 'complete' && document.querySelector('#loading').hidden")

    def evaluate(self, expression):
        """Returns the value of JavaScript code, after waiting for a promise."""
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def until(self, expression, seconds=30):
        """Waits until JavaScript is true; returns its value."""
        ends = time.monotonic() + seconds
        while True:
            with contextlib.suppress(AssertionError):  # such as that the page is being loaded
                if value := self.evaluate(expression):
                    return value
            assert time.monotonic() < ends, f"{expression}; {self.problems}; {self.evaluate('document.body.innerText')}"
            time.sleep(0.02)

    def until_python(self, condition, seconds=30):
        ends = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < ends
            time.sleep(0.02)

    def text(self, selector):
        """Returns the visible text of the first element."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText")

    def click(self, selector):
        """Clicks in the middle of the first element, wherever it is."""
        place = f"""(() => {{
            const found = document.querySelector({json.dumps(selector)});
            found.scrollIntoView({{block: "center"}});
            const box = found.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()"""
        x, y = self.evaluate(place)
        self.pointer("mouseMoved", x, y)
        self.pointer("mousePressed", x, y, button="left", clickCount=1)
        self.pointer("mouseReleased", x, y, button="left", clickCount=1)

    def pointer(self, kind, x, y, **params):
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **params)

    def press(self, *keys):
        """Presses keys: a character, or a name of `KEYS`."""
        for key in keys:
            text = TEXT_OF_KEYS.get(key, key if len(key) == 1 else "")
            code = KEYS.get(key, ord(key.upper()) if len(key) == 1 else 0)
            fields = {"key": key, "windowsVirtualKeyCode": code}
            self.send("Input.dispatchKeyEvent", type="keyDown", **fields, **({"text": text} if text else {}))
            self.send("Input.dispatchKeyEvent", type="keyUp", **fields)

    def type(self, text):
        """Enters text where the focus is."""
        self.send("Input.insertText", text=text)

    def names_by_role(self):
        """Pairs of the role and the name of everything that a screen reader reaches."""
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        nodes = [node for node in nodes if not node.get("ignored")]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes]


@contextlib.contextmanager
def open_page(folder, *, width, height=900):
    """A page of a new browser, whose profile is in a folder."""
    read, their_write = os.pipe()
    their_read, write = os.pipe()
    # --no-sandbox: a container has no user namespaces
    options = "headless=new remote-debugging-pipe no-sandbox disable-dev-shm-usage disable-gpu no-first-run "
    options += "disable-background-networking disable-component-update"
    command = [chromium(), *(f"--{option}" for option in options.split()), f"--user-data-dir={folder}"]
    log = (folder / "browser.log").open("wb")
    # The browser reads from 3 and writes to 4. The other ends get numbers that are neither.
    theirs = tuple(fcntl.fcntl(number, fcntl.F_DUPFD, 10) for number in (their_read, their_write))
    script = 'exec "$@" 3<&{} 4>&{}'.format(*theirs)
    browser = subprocess.Popen(["bash", "-c", script, "bash", *command], pass_fds=theirs, stdout=log, stderr=log)
    for number in (their_read, their_write, *theirs):
        os.close(number)

    def receive():
        ready, _, _ = select.select([read], [], [], 60)
        assert ready, "the browser does not answer"
        content = os.read(read, 2**20)
        assert content, (folder / "browser.log").read_text()
        return content

    try:
        page = Page(lambda content: os.write(write, content), receive, width=width, height=height)
        yield page
    finally:
        with contextlib.suppress(Exception):
            page.send("Browser.close")
        os.close(write)
        os.close(read)
        try:
            browser.wait(timeout=10)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait()
        log.close()
