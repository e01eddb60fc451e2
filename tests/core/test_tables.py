"""Text of data is shown as it is, wherever it is shown."""

from tripletune.core.tables import Table, code_span, plain, plain_console


def test_text_of_data_does_not_steer_a_terminal(capsys):
    Table(["[bold]run[/x]", "n"], [[":smile: \x1b[31mname", 1.5], ["b", "-"]], "\x1b[31mtitle").show(plain_console())
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("[bold]run[/x]", "\ufffd[31mtitle", ":smile: \ufffd[31mname"))
    assert "\u2502   - \u2502" in shown, "numbers are flush right"


def test_text_of_data_becomes_no_markup():
    assert plain("[x](http://y)\n# H \\<b> \x1b`") == "[x\\](http://y) # H \\\\&lt;b&gt; \ufffd\\`"
    assert code_span("a`` <b>\n") == "``` a`` <b> ```"


def test_a_table_is_escaped_by_who_writes_it():
    rows = [["[x]", "|"]]
    assert Table(["a|b", "<"], rows).markdown() == "| a\\|b | &lt; |\n| --- | --- |\n| [x] | \\| |"
    assert Table(["a", "b"], rows, cell=code_span).markdown().endswith("| `[x]` | `\\|` |")
    assert r"50\% \& \textless{}b\_c & 1 \\" in Table(["a", "b"], [["50% & <b_c", 1]]).latex("caption")
