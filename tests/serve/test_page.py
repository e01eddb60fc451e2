"""The page of a server in a browser: a question is asked, rounds arrive, and a triple leads to its passage."""

import asyncio

import pytest

from tests.eval.report.browser import CHROMIUM, new_page
from tests.serve.conftest import EVIL, FACTS, QUESTION

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)")
ASK = "byId('question').value = {!r}; byId('form').requestSubmit()"
DONE = "new Promise((done) => {{ const look = () => ({}) ? done(true) : setTimeout(look, 20); look(); }})"
ANSWER = "document.querySelector('.answer').textContent"


def see(url, tmp_path, *scripts, key="", **screen):
    """What scripts give, one after another, on the page with its models loaded."""

    async def look():
        async with new_page(tmp_path / "profile") as page:
            await page.open(f"{url}/", **screen)
            if not key:
                await page.run(DONE.format("byId('model').value"))
            found = [await page.run(script) for script in scripts]
            assert all(one.startswith((url, "about:", "data:")) for one in page.requests)
            assert not [one for one in page.errors if "401" not in str(one)]
            return found

    return asyncio.run(look())


def test_a_question_is_answered_and_a_triple_leads_to_its_passage(running, model, tmp_path):
    model.delay = 0.2
    fact = " | ".join(FACTS[1])
    with running(system={"top_k": 3, "max_rounds": 2}) as url:
        found = see(
            url, tmp_path, ASK.format(QUESTION), DONE.format("document.querySelectorAll('.round').length === 1"),
            ANSWER, DONE.format(f"{ANSWER} !== '…'"), ANSWER, "document.querySelectorAll('.round').length",
            f"[...document.querySelectorAll('.fact')].find((one) => one.textContent === {fact!r}).click()",
            "[...document.querySelectorAll('.chosen p')].map((one) => one.textContent)",
            "[...document.querySelectorAll('mark')].map((one) => one.textContent)",
            "document.activeElement.textContent",
            "[...document.querySelectorAll('.graph .edge')].find((one) => one.textContent === 'author')"
            ".dispatchEvent(new MouseEvent('click'))",
            "[...document.querySelectorAll('.chosen p')].map((one) => one.textContent)",
            "[...document.querySelectorAll('.graph .gold')].map((one) => one.textContent)",
            "[document.title, document.querySelectorAll('img').length, document.body.textContent.includes('onerror')]",
        )  # fmt: skip
    assert found[2:6] == ["…", True, "Velsund", 1]
    assert found[7:10] == [["Born in Velsund."], ["Velsund"], "Ida Morn"]
    assert found[11] == ["A novel by Ida Morn."]
    assert found[12] == ["VelsundVelsund"]
    assert found[13] == ["TripleTune", 0, True], EVIL


def test_a_phone_the_keyboard_a_key_and_a_stop(running, model, tmp_path):
    press = "byId('question').dispatchEvent(new KeyboardEvent('keydown', {{ key: {!r}, bubbles: true }}))"
    model.delay = 20
    with running(key="secret") as url:
        found = see(
            url, tmp_path, DONE.format("!byId('keyed').hidden"), "byId('status').textContent",
            f"byId('question').value = {QUESTION!r}; byId('key').value = 'secret'", press.format("Enter"),
            DONE.format("document.querySelector('.answer')"), "document.documentElement.scrollWidth",
            press.format("Escape"), DONE.format(f"{ANSWER} !== '…'"), ANSWER, "byId('ask').disabled",
            key="secret", width=390, dark=True,
        )  # fmt: skip
    assert "Authorization" in found[1]
    assert found[5] == 390
    assert found[8:] == ["Stopped.", False]
    assert model.ended == 1
