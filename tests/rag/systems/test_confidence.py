"""How sure an answer is, and "I don't know" instead of one that is not sure enough."""

import asyncio
from dataclasses import replace

import pytest

from tests.fakes import Client, Facts, Model, Shelf
from tripletune.core.calls import SAMPLE_SEED, Completion, RoleClients, SetupError, TokenScores
from tripletune.eval.metrics._labels import refuses
from tripletune.rag.systems import LoopOptions, Tools, find_system, make_options
from tripletune.rag.systems._confidence import ABSTENTION, support_of


class Sure(Model):
    """Answers with scores; a sample with an odd seed answers otherwise."""

    def __init__(self, *plans, logprob=-0.6931472, **options):
        super().__init__(*plans, **options)
        self.logprob = logprob

    async def generate(self, sample, max_new_tokens, evidence=None):
        completion = await super().generate(sample, max_new_tokens, evidence)
        if sample.task == "planning":
            return completion
        text = "someone else" if (SAMPLE_SEED.get() or 0) % 2 else completion.text
        scores = None if self.logprob is None else TokenScores(self.logprob, 1.5)
        return Completion(text, 10, 2, scores=scores)


class Scored(Client):
    """A chat model that says how sure it is, where it is asked."""

    async def chat(self, messages, *, role, sampling=None, question_id=""):
        completion = await super().chat(messages, role=role, sampling=sampling, question_id=question_id)
        return replace(completion, scores=TokenScores(-0.6931472, 1.5) if sampling.scored else None)


def answered(model, system="ras", **options):
    tools = Tools(model, model, Shelf(), Facts())
    return asyncio.run(find_system(system).run("Who?", "Who?", tools, LoopOptions(**options)))


PLANS = ("[SUBQ] Ridley Scott", "[SUFFICIENT]")


def test_a_trace_notes_how_sure_the_model_was_and_what_it_read():
    trace = answered(Sure(*PLANS), first_query="generated")
    # One of the two facts is (Ridley Scott 1, says, it).
    assert trace.confidence == {"probability": 0.5, "margin": 1.5, "support": 1.0}
    assert trace.withheld == ""
    assert answered(Sure(*PLANS, logprob=None)).confidence == {"support": 0.0}


@pytest.mark.parametrize(
    ("abstain", "answer", "withheld"), [(0.5, "Ridley Scott", ""), (0.51, ABSTENTION, "Ridley Scott")]
)
def test_an_answer_below_the_threshold_is_withheld(abstain, answer, withheld):
    trace = answered(Sure(*PLANS), abstain=abstain)
    assert (trace.answer, trace.withheld) == (answer, withheld)
    assert refuses(ABSTENTION)


def test_samples_agree_or_not():
    trace = answered(Sure(*PLANS), answer_samples=4)
    assert trace.confidence["agreement"] == 0.5, "seeds 1 and 3 answer otherwise"
    assert trace.confidence["probability"] == 0.5
    assert trace.answer == "Ridley Scott"
    assert trace.calls == 2 + 1 + 4, "two plans, the answer and its samples"
    assert answered(Sure(*PLANS), answer_samples=4, confidence="agreement", abstain=0.6).answer == ABSTENTION
    with pytest.raises(ValueError, match="set answer_samples"):
        LoopOptions(confidence="agreement", abstain=0.6)


def test_support_is_the_best_share_of_words_in_one_text():
    assert support_of("Ridley Scott", ["Scott | is | tall", "Ridley | is | Scott"]) == 1
    assert support_of("the Ridley Scott Jr", ["Scott Ridley"]) == pytest.approx(2 / 3)
    assert support_of("Oslo", []) == 0
    assert [support_of(answer, ["yes"]) for answer in ("Yes.", "no", "")] == [None, None, None]
    trace = answered(Model(*PLANS, answer="yes"), confidence="support", abstain=1)
    assert trace.answer == "yes", "no fact can name it, so nothing speaks against it"


def test_what_is_not_known_is_an_error_and_no_answer():
    with pytest.raises(RuntimeError, match=r"abstain 0\.5: the probability of this answer is not known"):
        answered(Sure(*PLANS, logprob=None), abstain=0.5)


def test_a_chat_model_is_asked_for_log_probabilities_only_on_request():
    async def run(**options):
        client = Client("Answer: Oslo")
        tools = Tools(llm=client, retriever=Shelf())
        await find_system("standard").run("Where?", "Where?", tools, LoopOptions(**options))
        return client.asked[0].sampling.scored

    assert not asyncio.run(run())
    assert asyncio.run(run(logprobs=True))
    with pytest.raises(RuntimeError, match="is not known"):
        asyncio.run(run(abstain=0.1))


@pytest.mark.parametrize(("planner", "calls"), [(None, 1), (Client("[SUBQ] Oslo", "[SUFFICIENT]"), 1)])
def test_abstaining_pays_for_one_call_of_a_server_without_log_probabilities(planner, calls):
    """The model that answers is asked first, be it for a plan; one that only plans need not know how sure it is."""
    client = Client("[SUBQ] Oslo", "[SUFFICIENT]", "Oslo")
    llm = client if planner is None else RoleClients(client, {"ras.plan": planner})
    tools = Tools(llm=llm, retriever=Shelf(), store=Facts(), scored_role="ras.answer")
    options = LoopOptions(abstain=0.1, first_query="generated")
    with pytest.raises(SetupError, match="script sends no log-probabilities, which abstain compares"):
        asyncio.run(find_system("ras").run("Where?", "Where?", tools, options))
    assert len(client.asked) == calls
    assert client.asked[0].sampling.scored
    if planner is not None:
        assert len(planner.asked) == 2
        assert not planner.asked[0].sampling.scored


def test_one_check_of_log_probabilities_is_enough():
    client = Scored("[SUBQ] Oslo", "[SUFFICIENT]", "Oslo")
    tools = Tools(llm=client, retriever=Shelf(), store=Facts(), scored_role="ras.answer")
    options = LoopOptions(abstain=0.1, first_query="generated")
    trace = asyncio.run(find_system("ras").run("Where?", "Where?", tools, options))
    assert [asked.sampling.scored for asked in client.asked] == [True, False, True]
    assert (trace.answer, trace.confidence["probability"]) == ("Oslo", 0.5)


def test_an_answer_of_the_loop_itself_is_not_sampled():
    client = Client("So the final answer is: Oslo")
    system = find_system("self_ask")
    options = make_options(system, ["answer_samples=3"])
    trace = asyncio.run(system.run("Where?", "Where?", Tools(llm=client, retriever=Shelf()), options))
    assert trace.answer == "Oslo"
    assert "agreement" not in trace.confidence


@pytest.mark.parametrize(
    ("system", "more", "is_refused"),
    [
        ("self_ask", [], True),
        ("react", ["confidence=agreement", "answer_samples=5"], True),
        ("react", ["confidence=support"], False),
        ("self_ask", ["reader=common"], False),
        ("ircot", [], False),
        ("ircot", ["last_thought=yes"], True),
    ],
)
def test_a_threshold_that_an_answer_of_the_loop_cannot_meet_is_refused_before_any_call(system, more, is_refused):
    assignments = ["abstain=0.5", *more]
    if is_refused:
        with pytest.raises(
            ValueError, match="a part of a longer reply: set confidence to support, or reader to common"
        ):
            make_options(find_system(system), assignments)
    else:
        assert make_options(find_system(system), assignments).abstain == 0.5


def test_samples_of_a_cascade_leave_its_notes_alone():
    from tripletune.rag import Trace
    from tripletune.rag.evidence import Evidence
    from tripletune.rag.systems._confidence import note_confidence

    trace = Trace("Where?", answer="Oslo", calls=1, tallies={"answered.triples": 1, "calls.cirag.answer": 1})
    trace.details = {"granularity": "triples", "answers": ["Oslo"], "tokens": {"cirag.answer": [5, 1]}}

    async def again():
        trace.calls += 1
        trace.tally("answered.passages")
        trace.tally("answered.triples")
        trace.tally("calls.cirag.answer")
        trace.details["granularity"] = "passages"
        trace.details["answers"] = ["Bergen"]
        trace.details["tokens"]["cirag.answer"] = [10, 2]
        return "Bergen"

    asyncio.run(note_confidence(trace, LoopOptions(answer_samples=1), Evidence([], []), again))
    assert trace.details == {"granularity": "triples", "answers": ["Oslo"], "tokens": {"cirag.answer": [10, 2]}}
    assert trace.tallies == {"answered.triples": 1, "calls.cirag.answer": 2}
    assert trace.confidence == {"agreement": 0.0, "support": 0.0}


def test_samples_of_a_chat_model_have_seeds_and_a_temperature():
    client = Client("Oslo", "Oslo", "Bergen")
    options = LoopOptions(answer_samples=2, evidence="text", max_rounds=0)
    trace = asyncio.run(find_system("ras").run("Where?", "Where?", Tools(llm=client, retriever=Shelf()), options))
    assert trace.confidence["agreement"] == 0.5
    assert [(asked.sampling.temperature, asked.sampling.seed) for asked in client.asked] == [(0, None), (1, 0), (1, 1)]
