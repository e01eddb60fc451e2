from tripletune.models.fingerprints import tokenizer_fingerprint


def test_a_tokenizer_is_told_apart_by_all_that_it_holds(tokenizer):
    fingerprint = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=4)
    assert tokenizer_fingerprint(tokenizer) == fingerprint, "a call leaves it as it is"
    template = tokenizer.chat_template
    tokenizer.chat_template = template + "{% if messages | length > 9 %}So many turns.{% endif %}"
    assert tokenizer_fingerprint(tokenizer) != fingerprint
    tokenizer.chat_template = template
    assert tokenizer_fingerprint(tokenizer) == fingerprint
    tokenizer.add_tokens(["Velsund"])
    assert tokenizer_fingerprint(tokenizer) != fingerprint
