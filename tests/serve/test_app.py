"""The API of a server as clients meet it: openai's SDK, wrong requests, crowds, and a model that is away."""

import asyncio
import json
import threading
import time

import httpx
import pytest

from tests.llm.server import MockServer, Reply
from tests.serve.conftest import EVIL, FACTS, QUESTION, answer, until
from tripletune.core.calls import CallError, PromptTooLong
from tripletune.core.options import ConfigError
from tripletune.llm.backends import LLMOptions

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
from tripletune.serve.limits import Door  # noqa: E402

ASKED = {"model": "ras", "messages": [{"role": "user", "content": QUESTION}]}


def sdk(url, kind=openai.OpenAI, **options):
    return kind(base_url=f"{url}/v1", api_key="none", max_retries=0, **options)


def post(url, body, path="/v1/chat/completions", **options):
    data = body if isinstance(body, (str, bytes)) else json.dumps(body)
    return httpx.post(url + path, content=data, timeout=30, **options)


def test_a_loop_answers_openais_sdk(running, model):
    with running() as url:
        client = sdk(url)
        assert [one.id for one in client.models.list()] == ["ras", "standard", "planner", "answerer"]
        assert client.models.retrieve("ras").tripletune == {"kind": "loop"}
        earlier = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes?"}]
        found = client.chat.completions.create(model="ras", messages=[*earlier, *ASKED["messages"]], max_tokens=7)
        texts = client.completions.create(model="ras", prompt=QUESTION)
    trace = found.tripletune
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == ("Velsund", "stop")
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (trace["prompt_tokens"], trace["completion_tokens"])
    assert (usage.prompt_tokens, trace["calls"], trace["ignored_turns"]) == (40, 4, 2)
    assert [asked.sampling.max_tokens for asked in model.asked[:4]] == [64, 64, 64, 7]
    titles = {one["id"]: one["title"] for one in trace["passages"]}
    facts = {tuple(one[key] for key in ("subject", "predicate", "object")): one["passages"] for one in trace["triples"]}
    assert {fact: [titles[one] for one in places] for fact, places in facts.items()} == {
        tuple(FACTS[0]): ["Glass Harbour"], tuple(FACTS[1]): ["Ida Morn"],
    }  # fmt: skip
    assert {one["text"] for one in trace["passages"]} == {"A novel by Ida Morn.", "Born in Velsund."}
    assert (texts.object, texts.choices[0].text, texts.usage.total_tokens) == ("text_completion", "Velsund", 48)
    assert model.closed


def test_a_stream_shows_each_step_before_the_answer(running, model):
    async def listen(url):
        client = sdk(url, openai.AsyncOpenAI)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return [chunk async for chunk in await client.chat.completions.create(**ASKED, **options)]

    with running() as url:
        chunks = asyncio.run(listen(url))
        whole = post(url, ASKED).json()["choices"][0]["message"]
        lines = post(url, {"model": "ras", "prompt": QUESTION, "stream": True}, "/v1/completions").text.split("\n\n")
    events = [chunk.tripletune["event"] for chunk in chunks if "event" in (chunk.model_extra.get("tripletune") or {})]
    assert events == ["plan", "retrieve", "plan", "retrieve", "plan"]
    *steps, said, end, usage = chunks
    assert steps[0].choices[0].delta.role == "assistant"
    assert steps[3].choices[0].delta.reasoning_content == "retrieve  Where was Ida Morn born?: Ida Morn\n"
    assert whole["reasoning_content"] == "".join(step.choices[0].delta.reasoning_content for step in steps)
    assert said.choices[0].delta.content == "Velsund"
    assert (end.choices[0].finish_reason, end.tripletune["stop_reason"]) == ("stop", "sufficient")
    assert (usage.choices, usage.usage.total_tokens) == ([], 48)
    assert lines[-2:] == ["data: [DONE]", ""]
    assert [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-2]] == [*[""] * 5, "Velsund", ""]


def test_a_part_is_the_model_behind_a_role(running, model):
    with running() as url:
        parts = [{"type": "text", "text": "Hi"}]
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
        how = {"temperature": 0.5, "seed": 3, "max_completion_tokens": 9, "stop": ["e: H"]}
        found = sdk(url).chat.completions.create(model="planner", messages=chat, **how)
    assert found.choices[0].message.content == "serv"
    assert "tripletune" not in found.model_extra
    (asked,) = model.asked
    assert asked.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    drawn = asked.sampling
    assert (drawn.temperature, drawn.seed, drawn.max_tokens) == (0.5, 3, 9)


def test_what_a_part_is_asked_without_limit_and_seed(running, model):
    model.answer, same = lambda asked: str(asked.sampling.seed), {"model": "planner", "messages": [USER]}
    with running() as url:
        found = [post(url, {**same, "temperature": one}).json()["choices"][0] for one in (1, 1, 0)]
    texts = [one["message"]["content"] for one in found]
    assert (len({*texts}), texts[2]) == (3, "None"), "equal samples at the same time are not one"
    assert [asked.sampling.max_tokens for asked in model.asked] == [512] * 3


def chat(*turns, **more):
    return {"model": "ras", "messages": list(turns), **more}


USER = {"role": "user", "content": "Where?"}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("", 400, "the body"), ('{"model": "ras', 400, "the body"), (b"\xff\xfe", 400, "the body"),
        ("[1]", 400, "the body"), ("[" * 100_000, 400, "the body"),
        ('{"model":"ras","messages":[{"role":"user","content":"\\ud800"}]}', 400, "the body"),
        ({"messages": [USER]}, 400, "model: Field required"), ({"model": 3}, 400, "model: Input"),
        ({"model": "ras"}, 400, "no question"), (chat(), 400, "no question"),
        (chat("x"), 400, "messages"), (chat({"role": "robot", "content": "x"}), 400, "messages.0.role"),
        (chat({"role": "user"}), 400, "no question"),
        (chat({"role": "user", "content": "  "}), 400, "no question"),
        (chat(USER, {"role": "assistant", "content": "x"}), 400, "must have the role user"),
        (chat({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}), 400, "no images"),
        (chat({"role": "user", "content": {"text": "x"}}), 400, "messages.0.content"),
        (chat(USER, n=2), 400, "n: "), (chat(USER, max_tokens=-1), 400, "max_tokens"),
        (chat(USER, max_tokens=1.5), 400, "max_tokens"), (chat(USER, temperature="hot"), 400, "temperature"),
        ('{"model":"ras","messages":[{"role":"user","content":"x"}],"top_p":NaN}', 400, "top_p"),
        (chat(USER, stream="yes"), 400, "stream"), (chat(USER, stop=3), 400, "stop"),
        (chat(USER, tripletune={"steps": [{"no": "query"}]}), 400, "query"),
        ({"model": "oracle", "messages": [USER]}, 404, "the models are ras, standard, planner, answerer"),
        (chat({"role": "user", "content": "x" * 300_000}), 413, "more than 200,000 bytes"),
        (chat(USER, user="u", tools=None, logit_bias={}, unknown=1), 200, "Velsund"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_request_is_said(running, model, body, status, words):
    with running(most=200_000) as url:
        found = post(url, body)
        assert found.status_code == status
        assert words in (found.text if status == 200 else found.json()["error"]["message"])
        if status >= 400:
            assert {"message", "type", "param", "code"} == found.json()["error"].keys()


def test_wrong_requests_are_refused_by_every_route(running, model):
    with running() as url:
        assert post(url, {"model": "ras", "prompt": ["a", "b"]}, "/v1/completions").json()["error"]["param"] == "prompt"
        gone, wrong = httpx.get(f"{url}/v2"), httpx.get(f"{url}/v1/completions")
        assert (gone.status_code, wrong.status_code, wrong.headers["allow"]) == (404, 405, "POST")
        assert "POST /v1/chat/completions" in gone.json()["error"]["message"]


def test_a_crowd_waits_or_is_told_when_to_come_back(running, model):
    model.delay = 1
    with running(door=Door(1, 1, 30)) as url, httpx.Client() as client:
        found = []
        asking = [threading.Thread(target=lambda: found.append(post(url, ASKED))) for _ in range(2)]
        for one in asking:
            one.start()
        until(lambda: "questions_waiting 1.0" in client.get(f"{url}/metrics").text)
        started = time.perf_counter()
        refused = post(url, ASKED)
        assert time.perf_counter() - started < 1
        assert (refused.status_code, int(refused.headers["retry-after"]) > 0) == (429, True)
        assert refused.json()["error"]["type"] == "rate_limit_error"
        for one in asking:
            one.join()
        assert [one.status_code for one in found] == [200, 200]
        metrics = client.get(f"{url}/metrics").text
    assert 'tripletune_question_seconds_count{model="ras",status="200"} 2.0' in metrics
    assert 'tripletune_question_seconds_count{model="ras",status="429"} 1.0' in metrics
    assert 'tripletune_tokens_total{kind="prompt",model="ras"} 80.0' in metrics


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_frees_the_place_and_ends_the_call(running, model, stream):
    model.delay = 20
    with running(door=Door(1, 0, 30)) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/chat/completions", json={**ASKED, "stream": stream}, timeout=0.3)
        until(lambda: model.ended == 1)
        model.delay = 0
        assert post(url, ASKED).status_code == 200


def test_a_question_that_takes_too_long_ends(running, model):
    model.delay = 20
    with running(door=Door(1, 1, 0.2)) as url:
        found = [post(url, {**ASKED, "stream": stream}) for stream in (False, True)]
        assert [(one.status_code, one.json()["error"]["code"]) for one in found] == [(504, "timeout")] * 2
    assert (model.ended, model.under_way) == (2, 0)


@pytest.mark.parametrize(
    ("error", "status"), [(CallError("gone"), 502), (PromptTooLong("too long"), 400), (KeyError("fault"), 500)]
)
def test_failures_of_the_model_are_errors_of_the_reply_and_no_texts_in_the_log(running, model, caplog, error, status):
    model.answer = lambda asked: error if asked.role == "ras.answer" else answer(asked)
    with running() as url:
        found = post(url, ASKED)
        assert found.status_code == status
        assert "Traceback" not in found.text
        # The stream has begun by then.
        *_, last, done = post(url, {**ASKED, "stream": True}).text.strip().split("\n\n")
        assert json.loads(last[6:])["error"]["message"] == found.json()["error"]["message"]
        assert done == "data: [DONE]"
        model.answer = answer
        assert post(url, ASKED).status_code == 200
    assert not [word for word in (QUESTION, "Velsund", "'fault'") if word in caplog.text]


def test_a_model_server_that_was_away_is_asked_again(running, files):
    with MockServer(lambda body: Reply(status=500) if down else "[NO_RETRIEVAL]") as server:
        down = True
        with running(LLMOptions(model="m", url=server.url, attempts=1)) as url:
            found = post(url, ASKED)
            assert (found.status_code, found.json()["error"]["code"]) == (502, "upstream_error")
            down = False
            assert post(url, ASKED).json()["choices"][0]["message"]["content"] == "NO_RETRIEVAL"


def test_the_key_and_where_a_request_comes_from(running, model):
    with running(key="secret", hosts=("127.0.0.1",)) as url:
        bearer = {"Authorization": "bearer secret"}
        assert [httpx.get(url + path).status_code for path in ("/", "/healthz", "/readyz")] == [200] * 3
        for path in ("/v1/models", "/metrics"):
            refused = httpx.get(url + path, headers={"Authorization": "Bearer other"})
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert httpx.get(url + path, headers=bearer).status_code == 200
        assert post(url, ASKED).status_code == 401
        foreign = post(url, ASKED, headers={**bearer, "Origin": "http://evil.example"})
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "other_origin")
        assert post(url, ASKED, headers={**bearer, "Origin": url}).status_code == 200
        assert post(url, ASKED, headers={**bearer, "Host": "evil.example"}).status_code == 400
    assert not model.asked[4:]


def test_a_server_that_ends_finishes_what_is_under_way(running, model):
    model.delay = 0.3
    with running() as url, httpx.Client() as idle:
        assert idle.get(f"{url}/readyz").status_code == 200
        found = []
        asking = threading.Thread(target=lambda: found.append(post(url, ASKED)))
        asking.start()
        until(lambda: model.under_way)
        running.end()
        until(lambda: idle.get(f"{url}/readyz").status_code == 503)
        late = idle.post(f"{url}/v1/chat/completions", json=ASKED)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
        asking.join()
        assert found[0].json()["choices"][0]["message"]["content"] == "Velsund"


def test_what_is_not_done_in_the_grace_is_told(running, model):
    model.delay = 20
    with running(grace=0.1) as url:
        found = []
        asking = threading.Thread(target=lambda: found.append(post(url, ASKED)))
        asking.start()
        until(lambda: model.under_way)
        running.end()
        asking.join()
        assert found[0].status_code == 503


def test_a_graph_llm_answers_many_at_once_as_alone(running, make_graph_llm, tmp_path, files):
    from tripletune.models.graph_llm import add_adapter
    from tripletune.rag.answering import open_system
    from tripletune.rag.system_options import SystemOptions

    llm, processor = make_graph_llm()
    add_adapter(llm).save_pretrained(tmp_path)
    llm.config.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    how = {"model": str(tmp_path), "top_k": 1, "max_rounds": 1, "max_plan_tokens": 4, "max_answer_tokens": 6}
    questions = [f"Where was {name} born?" for name in ("Ida Morn", "Ada", "the author of Glass Harbour", EVIL)]
    with open_system(SystemOptions.of(**files, **how)) as system:
        alone = [system.answer(question) for question in questions]
    with running(None, names=(), system=how) as url:

        async def ask():
            client = sdk(url, openai.AsyncOpenAI)
            chats = [[{"role": "user", "content": question}] for question in questions]
            return await asyncio.gather(*(client.chat.completions.create(model="ras", messages=one) for one in chats))

        together = asyncio.run(ask())
        names = [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]]
        steps = [{"query": "Where?", "triples": [FACTS[1]]}]
        plan = post(url, chat(USER, tripletune={"steps": steps}, max_tokens=3) | {"model": "planner"}).json()
        short = [post(url, chat(USER, max_tokens=1) | {"model": name}).json() for name in ("ras", "standard")]
        long = post(url, chat({"role": "user", "content": "word " * 20_000}))
    assert [one.choices[0].message.content for one in together] == [trace.answer for trace in alone]
    assert [one.usage.completion_tokens for one in together] == [trace.completion_tokens for trace in alone]
    assert names == ["ras", "no_retrieval", "standard", "planner", "answerer"]
    assert plan["usage"]["completion_tokens"] == 3
    assert [one.choices[0].finish_reason for one in together] == [
        "length" if "cut_off.ras.answer" in trace.tallies else "stop" for trace in alone
    ]
    assert [one["choices"][0]["finish_reason"] for one in short] == ["length", "length"]
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_only_what_can_run_is_offered(running, model):
    with running(names=()) as url:
        found = post(url, {**ASKED, "model": "cirag"}).json()["error"]["message"]
    assert "why it is missing: --system cirag reranks" in found
    assert "--encoder" in found


def test_what_is_asked_for_by_name_and_missing_is_an_error(files):
    from tripletune.rag.system_options import SystemOptions
    from tripletune.serve.models import open_shelf

    with pytest.raises((ValueError, ConfigError), match="cirag needs a chat model"):
        open_shelf(SystemOptions.of(**files), None, ("cirag",))
    with pytest.raises(ValueError, match="ras needs a model: give the folder of a Graph-LLM"):
        open_shelf(SystemOptions.of(**files), None)


def test_an_option_of_one_system_keeps_no_other_from_being_offered(files):
    from tripletune.rag.system_options import SystemOptions
    from tripletune.serve.models import open_shelf

    teacher = LLMOptions(model="m", url="http://127.0.0.1:9/v1")
    shelf = open_shelf(SystemOptions.of(**files, first_query="generated"), teacher)
    assert {"ras", "ircot", "standard"} <= set(shelf.names)
    for setting, message in (
        ("first_query=other", "first_query"),
        ("read_k=3", "gear .*--encoder"),
        ("top_kk=3", "--set top_kk=3: none of the systems that are offered .* has this option"),
    ):
        options = SystemOptions.of(**files)
        options.set.append(setting)
        with pytest.raises(ValueError, match=message):
            open_shelf(options, teacher)
    with pytest.raises(ValueError, match="'ircot' has no option 'first_query'"):
        open_shelf(SystemOptions.of(**files, first_query="generated"), teacher, ("ras", "ircot"))
