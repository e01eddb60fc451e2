"""A page in headless Chromium, driven over its debugging protocol."""

import asyncio
import base64
import json
import shutil
import subprocess
import time
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0")


class Page:
    """`errors` are exceptions of the page's script, warnings and errors of its console; `requests` what it loaded."""

    def __init__(self, socket):
        self.socket, self.number = socket, 0
        self.errors, self.requests = [], []

    async def send(self, method, **parameters):
        """Send a command, and return its result; events that come before it are noted in `errors` and `requests`."""
        self.number += 1
        await self.socket.send_json({"id": self.number, "method": method, "params": parameters})
        while True:
            message = json.loads((await self.socket.receive(timeout=60)).data)
            if message.get("id") == self.number:
                return message["result"]
            if message["method"] == "Runtime.exceptionThrown":
                self.errors.append(message["params"])
            elif message["method"] == "Log.entryAdded":
                # The browser also notes at level "info" what it left undone, such as the autofocus of a page
                # on which the reader (here a script) had already chosen a field.
                if message["params"]["entry"]["level"] in ("warning", "error"):
                    self.errors.append(message["params"])
            elif message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])

    async def open(self, url, width=1280, height=900, dark=False):
        """Open a page in a window of this size, and wait until its scripts have run."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.send("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])
        await self.send("Page.navigate", url="about:blank")
        await self.send("Page.navigate", url=url)
        while await self.run("document.readyState") != "complete":
            await asyncio.sleep(0.05)
        await self.run("new Promise((done) => setTimeout(done, 100))")

    async def run(self, script):
        """The value of a script in the page, also of a promise; an exception of the script fails the test."""
        found = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def picture(self, path):
        """Write a PNG of the window to a path."""
        found = await self.send("Page.captureScreenshot", captureBeyondViewport=False)
        Path(path).write_bytes(base64.b64decode(found["data"]))


@asynccontextmanager
async def new_page(folder):
    """A `Page` of a browser whose profile and downloads lie in `folder`."""
    words = [CHROMIUM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            port = Path(folder) / "DevToolsActivePort"
            deadline = time.monotonic() + 60
            while not (port.is_file() and port.read_text().count("\n")):
                assert time.monotonic() < deadline, "the browser did not start"
                await asyncio.sleep(0.05)
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port.read_text().splitlines()[0]}") as session:
                targets = await (await session.get("/json")).json()
                address = next(one["webSocketDebuggerUrl"] for one in targets if one["type"] == "page")
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.send(f"{domain}.enable")
                    await page.send("Emulation.setFocusEmulationEnabled", enabled=True)
                    await page.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
                    yield page
        finally:
            process.terminate()
