import asyncio
import functools
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tripletune.core.data.triples import Triple
from tripletune.core.data.words import analyzer, detect, fold, language_shares, words
from tripletune.rag.search.retrievers import open_retriever, source_sentence, split_sentences

# Of each language passages, and questions with the place of the passage that answers each.
TEXTS = {
    "en": (
        ["The mill of Arden was built by Tora Lind.", "The bridge of Selby is painted in red.", "Tides turn at noon."],
        {"Who has been building the mills of Arden?": 0, "What colour were bridges painted in Selby?": 1},
    ),
    "de": (
        [
            "Die Häuser von Ahrensee wurden aus Holz gebaut.",
            "Der Fluss ist im Winter gefroren.",
            "Die Straße ist lang.",
        ],
        {"Aus welchem Holz ist das Haus gebaut?": 0, "Wann waren die Flüsse gefroren?": 1, "lange Strasse": 2},
    ),
    "fr": (
        ["La chanteuse Zoé Marval est née à Lyon.", "Les écoles de la ville ont été fermées.", "Le port est au nord."],
        {"Où sont nées les chanteuses?": 0, "Quand a-t-on fermé l'école?": 1, "Zoe": 0},
    ),
    "es": (
        ["El molino fue construido por una ingeniera.", "Las canciones de Íker son tristes.", "El río nace en el sur."],
        {"¿Quién construyó los molinos?": 0, "¿Cómo es la canción de Iker?": 1},
    ),
    "ru": (
        ["Башню в городе построил архитектор Белов.", "Ёлки растут на севере и не на юге.", "Река течёт на восток."],
        {"Кто был архитектором башни?": 0, "Где растет елка?": 1},
    ),
    "hi": (
        ["मीनार के पास एक दुकान है।", "दिन में नाव नदी पर चलती है।", "यह पहाड़ बहुत ऊँचा है।"],
        {"मीनारों के पास क्या है?": 0, "नाव कहाँ चलती है?": 1, "मन": None},
    ),
    "ar": (
        ["بنى المهندس سالم برج المدينة في عام 1950.", "كَتَبَت ليلى رواية عن البحر.", "هذا الجبل هو أعلى من التل."],
        {"من هو المهندس الذي بنى البرج؟": 0, "ماذا كتبت ليلى؟": 1},
    ),
    "el": (
        ["Ο πύργος της πόλης είναι ψηλός.", "Το πλοίο φεύγει από το λιμάνι."],
        {"Πόσο ψηλοί είναι οι πύργοι;": 0},
    ),
    "zh": (
        ["蓝湖塔位于北原市，由建筑师林远设计。", "红山桥位于南川市，由工程师周明设计。", "港口在冬天关闭。"],
        {"北原市的蓝湖塔是谁设计的？": 0, "周明": 1, "冬天什么关闭": 2},
    ),
    "ja": (
        ["青い塔は山田花子が設計した。", "ラーメン屋は駅の北にある。", "港は冬に閉まる。"],
        {"塔を設計したのは誰ですか。": 0, "駅の近くのﾗｰﾒﾝ屋はどこ？": 1},
    ),
    "th": (
        ["หอคอยสีฟ้าออกแบบโดยวิภา", "ร้านก๋วยเตี๋ยวอยู่ทางเหนือของสถานี", "ท่าเรือปิดในฤดูหนาว"],
        {"ใครออกแบบหอคอย": 0, "ร้านก๋วยเตี๋ยวอยู่ที่ไหน": 1},
    ),
    "ko": (["푸른 탑은 김하나가 설계했다.", "항구는 겨울에 닫힌다."], {"누가 탑을 설계했습니까?": 0, "항구": 1}),
}


@pytest.mark.parametrize("language", TEXTS)
def test_bm25_finds_the_passage_of_a_question_in_its_language(language, tmp_path):
    texts, questions = TEXTS[language]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    retriever = open_retriever("bm25", tmp_path / "c.jsonl", tmp_path / "index")
    for question, place in questions.items():
        hits = asyncio.run(retriever.retrieve(question, 3))
        assert (hits[0].position if hits else None) == place, question


@pytest.mark.parametrize("language", TEXTS)
def test_the_language_is_told_and_english_is_what_nothing_tells(language):
    assert detect("\n".join(TEXTS[language][0])) == language
    assert [detect(text) for text in ("", "a cab\nface", "Ann Vel\nOslo")] == ["en"] * 3


def test_shares_of_languages_are_those_of_the_text():
    english = "The museum on the hill opens at nine every day but Monday, and it closes at six."
    german = "Die Straße nach Königsfeld führt über eine schmale Brücke aus dem achtzehnten Jahrhundert."
    assert language_shares([(english, 100), (german, 160), (english, 140)]) == {"en": 0.6, "de": 0.4}
    # The names say nothing by themselves.
    assert language_shares([("Ann Vel", 7), (german, 100), ("Oslo", 4)]) == {"de": 100 / 111, "en": 11 / 111}
    assert language_shares([]) == {"en": 0.0}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Beyoncé", "Beyonce"), ("Łódź", "lodz"), ("Søren Ærø", "SOREN AERO"), ("naïveté", "naivete"), ("ёлка", "елка"),
        ("Αθήνα", "αθηνα"), ("مُحَمَّد", "محمد"), ("Ｋｙｏｔｏ", "kyoto"), ("e\u0301cole", "École"), ("İzmir", "izmir"),
    ],
)  # fmt: skip
def test_accents_are_folded(one, other):
    assert list(map(fold, words(one))) == list(map(fold, words(other)))
    for language in ("none", "english"):
        assert analyzer(language)(one) == analyzer(language)(other) != []


@pytest.mark.parametrize(("one", "other"), [("की", "का"), ("मीनार", "मनर"), ("が", "か"), ("น้ำ", "นา"), ("คำ", "คา")])
def test_vowel_signs_make_other_words(one, other):
    assert fold(words(one)[0]) != fold(words(other)[0])


def test_words_by_hand():
    assert words("It's A_b 3.5") == ["it", "s", "a_b", "3", "5"]
    assert words("नीला मीनार") == ["नीला", "मीनार"]
    assert words("東京tower、水") == ["東京", "tower", "水"]
    assert words("C, C++ and C#; Notepad++ C++11 ab#c") == [
        "c",
        "c++",
        "and",
        "c#",
        "notepad++",
        "c++",
        "11",
        "ab",
        "c",
    ]
    assert words("Größe in F#, C++: 10⁶ 3½ km² H₂O") == [
        "grösse", "in", "f#", "c++", "10", "6", "3", "1", "2", "km2", "h2o"
    ]  # fmt: skip
    assert analyzer("english")("The running towers, naïvely") == ["run", "tower", "naiv"]
    assert analyzer("english")("To Be or Not to Be") == ["to", "be", "or", "not", "to", "be"]
    assert analyzer("german")("Die Häuser") == analyzer("german")("das Haus") == ["haus"]
    assert analyzer("none")("The Häuser") == ["the", "hauser"]
    with pytest.raises(ValueError, match=r"'germn' is not one of auto, none, arabic, .*did you mean german"):
        analyzer("germn")


def test_sentences_of_other_languages():
    german = "Dr. Meier baute ihn am 3. Mai 1920. Er ist hoch."
    assert split_sentences(german) == ("Dr. Meier baute ihn am 3. Mai 1920.", "Er ist hoch.")
    assert split_sentences("蓝湖塔位于北原市。它由林远设计。") == ("蓝湖塔位于北原市。", "它由林远设计。")
    assert len(split_sentences("मीनार ऊँचा है। पुल लम्बा है।")) == 2
    stated = Triple("हरी मीनार", "वास्तुकार", "रवि सेन")
    assert source_sentence(stated, ("हरी मीनार नदी पर है।", "उसका वास्तुकार रवि सेन था।")) == 1


def test_threads_that_begin_together_load_the_detector_once(monkeypatch):
    loaded = []

    class Identifier:
        def classify(self, text):
            return "de", 1.0

    @functools.cache
    def load():
        loaded.append(1)
        time.sleep(0.05)
        return Identifier()

    monkeypatch.setattr("tripletune.core.data.words._language_identifier", load)
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(detect, ["eins", "zwei", "drei", "vier"])) == {"de"}
    assert len(loaded) == 1
