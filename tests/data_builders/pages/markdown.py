"""Pages of Markdown: notes of several tools, with front matter, notes, deletions and HTML inside."""

from tests.data_builders.pages import Page

PAGES = [
    Page(
        "river.md",
        "---\n# written by the exporter\ntitle: River notes\ndraft: false\ntags:\n  - water\n---\n\n# The Arn\n\nThe Arn flows "
        "through Kelm[^1] to the sea.\n\nIt is ~~300~~ 312 km long.\n\n[^1]: Its old name is Kalm.\n",
        "The Arn\nThe Arn flows through Kelm to the sea.\nIt is 312 km long.\nIts old name is Kalm.",
        ("flows through Kelm to the sea", "It is 312 km long", "Its old name is Kalm"),
        ("300",),
    ),
    Page(
        "lake.md",
        '+++\n# Hugo\ntitle = "Lake"\nweight = 3\n[params]\nauthor = "Bo Mor"\n+++\n\nThe lake has 10<sup>9</sup> litres.\n\n'
        "| Year | Level |\n|---|---|\n| 1990 | 4.1 |\n| 2000 | 3.9 |\n",
        "The lake has 10^9 litres.\nYear | Level\n1990 | 4.1\n2000 | 3.9",
        ("10^9 litres", "2000 | 3.9"),
        ("109",),
    ),
    Page(
        "meeting.md",
        "---\n\nLast edited: 2024-05-03\naliases: [council, board]\n\ncssclass: wide\n---\n## Council\n\n- [x] Ann Vel is chair"
        "\n- [ ] Bo Mor writes\n\n> The vote was 7 to 2.\n\n<!-- secret: Cy leaves -->\n\n<del>The fee is 9.</del> The fee is 8.\n",
        "Council\n[x] Ann Vel is chair\n[ ] Bo Mor writes\nThe vote was 7 to 2.\nThe fee is 8.",
        ("Ann Vel is chair", "The vote was 7 to 2", "The fee is 8."),
        ("secret", "fee is 9"),
    ),
    Page(
        "paper.md",
        "% On the sand of the Arn\n% Ida Morn\n% 2004\n\n# Method\n\nWe took 40 samples.[^a] The mean was 2.5 mm.\n\n```\n[^a-z]+ "
        "is a pattern\n```\n\n[^a]: At Kelm.\n",
        "Method\nWe took 40 samples. The mean was 2.5 mm.\n[^a-z]+ is a pattern\nAt Kelm.",
        ("We took 40 samples. The mean", "At Kelm.", "[^a-z]+ is a pattern"),
    ),
    Page(
        "export.md",
        '---\ntitle: "Ferry: a history"\ndescription: >\n  Short.\n\n  Long.\nlinks: [a,\n  b\n]\n---\n# Ferry\n\nThe ferry of Rell '
        "runs since 1904.\n\n---\n\nSince 1950 it is owned by Velo.\n\n<details><summary>Crew</summary>\n\nTwelve people.\n\n"
        "</details>\n",
        "Ferry\nThe ferry of Rell runs since 1904.\nSince 1950 it is owned by Velo.\nCrew\nTwelve people.",
        ("runs since 1904", "Since 1950 it is owned by Velo", "Twelve people"),
    ),
    Page(
        "prose.md",
        "---\n\nThe first witness: Ada of Kelm.\n\n---\n\nShe saw CO<sub>2</sub> rise to 10<sup>-3</sup> at 19:30.\n\n"
        '<p hidden>Not for print.</p>\n\n<table><tr><td rowspan="2">Ada</td><td>saw</td></tr><tr><td>heard</td></tr></table>\n',
        "The first witness: Ada of Kelm.\nShe saw CO2 rise to 10^-3 at 19:30.\nAda | saw\nAda | heard",
        ("The first witness: Ada of Kelm", "CO2 rise to 10^-3 at", "Ada | heard"),
        ("10-3", "Not for print"),
    ),
]  # fmt: skip
