"""Pages of PDF: an article in two columns, one in three, a report, a paper with notes, a table, a book, minutes."""

from tests.data_builders.files import drawn_pdf
from tests.data_builders.pages import Page


def column(
    x: float, top: float, *texts: str, size: float = 11, step: float = 14
) -> list[tuple[float, float, float, str]]:
    """Lines below each other."""
    return [(x, top - step * number, size, text) for number, text in enumerate(texts)]


def row_by_row(*columns: list[tuple[float, float, float, str]]) -> list[tuple[float, float, float, str]]:
    """The lines of columns, as programs draw them that go through the page from the top down."""
    lines = [line for lines in columns for line in lines]
    return sorted(lines, key=lambda line: (-line[1], line[0]))


_LEFT = (
    "Ann Vel was born in Kelm in",
    "1951 and later moved to the",
    "city of Velsund, where she",
    "built the first bridge.",
)
_RIGHT = (
    "Bo Mor was born in Rell and",
    "never left the town. He wrote",
    "the register of all mayors,",
    "which ends in 2010.",
)
_ARTICLE = row_by_row(column(60, 690, *_LEFT), column(330, 690, *_RIGHT))
_NEWS = row_by_row(
    column(50, 700, "The ferry of Rell", "runs again since", "it was repaired."),
    column(230, 697, "Cy Dorn, who is", "its captain since", "1999, is glad."),
    column(410, 694, "A trip costs nine", "crowns, and it is", "free for children."),
)


def _report(number: int, *texts: str) -> list[tuple[float, float, float, str]]:
    """The lines of a page of a report, with its header and page number, which are to be left out."""
    header = [(72, 760, 9, "Annual Report 2024"), (480, 760, 9, "Velo Corp")]
    return [*header, *column(72, 700, *texts), (290, 30, 9, f"Page {number} of 3")]


def _book(number: int, *texts: str) -> list[tuple[float, float, float, str]]:
    """The lines of a page of a book whose pages are counted from 41, under the number alone."""
    return [*column(72, 720, *texts), (300, 40, 10, str(number + 40))]


PAGES = [
    Page(
        "article.pdf",
        drawn_pdf([[(60, 740, 16, "Two lives on the Arn"), *_ARTICLE]], "/Title (Microsoft Word - lives.docx)"),
        "Two lives on the Arn\nAnn Vel was born in Kelm in 1951 and later moved to the city of Velsund, where she built the "
        "first bridge. Bo Mor was born in Rell and never left the town. He wrote the register of all mayors, which ends in "
        "2010.",
        ("born in Kelm in 1951 and later moved to the city", "He wrote the register of all mayors"),
        ("in Kelm in Bo Mor",),
    ),
    Page(
        "news.pdf",
        drawn_pdf([_NEWS]),
        "The ferry of Rell runs again since it was repaired. Cy Dorn, who is its captain since 1999, is glad. A trip costs "
        "nine crowns, and it is free for children.",
        ("ferry of Rell runs again since it was repaired", "captain since 1999", "A trip costs nine crowns"),
        ("Rell Cy Dorn",),
    ),
    Page(
        "report.pdf",
        drawn_pdf(
            [
                _report(1, "The company makes bicycles in Kelm, and", "it sells them all over the coun-"),
                _report(2, "tryside of Rell. The prices of", "the Tern are high."),
                _report(3, "In 2024 it sold 4,711 bicycles."),
            ],
            "/Title (Report of Velo)",
        ),
        "The company makes bicycles in Kelm, and it sells them all over the countryside of Rell. The prices of the Tern are "
        "high. In 2024 it sold 4,711 bicycles.",
        ("all over the countryside of Rell", "it sold 4,711 bicycles"),
    ),
    Page(
        "paper.pdf",
        drawn_pdf(
            [
                [
                    (72, 700, 11, "The Arn carries 4 x 10"), (180.4, 704.5, 7, "6"), (184.5, 700, 11, " tons of sand a year."),
                    (72, 686, 11, "It was surveyed in 1887"), (187.8, 690, 7, "3"), (192, 686, 11, " by Ida Morn, and the"),
                    (72, 672, 11, "water is H"), (121.1, 669.5, 7, "2"), (125.2, 672, 11, "O of"),
                    *column(72, 658, "the best class, as all agree."),
                    (72, 96, 6, "3"), (77, 92, 8.5, "Town Records of Kelm, page 12."),
                ]
            ]
        ),
        "The Arn carries 4 x 10^6 tons of sand a year. It was surveyed in 1887 by Ida Morn, and the water is H2O of the best "
        "class, as all agree.\nTown Records of Kelm, page 12.",
        ("10^6 tons of sand", "surveyed in 1887 by Ida Morn", "H2O of the best class", "Town Records of Kelm, page 12"),
        ("106", "18873", "3Town"),
    ),
    Page(
        "table.pdf",
        drawn_pdf(
            [
                row_by_row(
                    column(72, 700, "Town", "Kelm", "Rell", "Velsund"),
                    column(240, 700, "Mayor", "Ann Vel", "Di Ost", "Ida Morn"),
                    column(400, 700, "Since", "1990", "1998", "2006"),
                )
            ]
        ),
        "Town | Mayor | Since\nKelm | Ann Vel | 1990\nRell | Di Ost | 1998\nVelsund | Ida Morn | 2006",
        ("Kelm | Ann Vel | 1990", "Rell | Di Ost | 1998", "Velsund | Ida Morn | 2006"),
        ("Kelm Rell",),
    ),
    Page(
        "book.pdf",
        drawn_pdf(
            [
                _book(1, "The prize of the town went to Jean-", "Luc Vel, who ill with COVID-", "19 stayed in a state-of-the-"),
                _book(2, "art hospital in Alsace-", "Lorraine for the years 1990-", "1995. It was infor-", "mal."),
                _book(3, "The well-known house- and garden-", "show of the well-", "known town is in May."),
            ]
        ),
        "The prize of the town went to Jean-Luc Vel, who ill with COVID-19 stayed in a state-of-the-art hospital in "
        "Alsace-Lorraine for the years 1990-1995. It was informal. The well-known house- and gardenshow of the well-known "
        "town is in May.",
        ("Jean-Luc Vel", "COVID-19 stayed in a state-of-the-art hospital", "Alsace-Lorraine", "1990-1995", "informal",
         "of the well-known town"),
        ("JeanLuc", "COVID19", "19901995", "wellknown"),
    ),
    Page(
        "minutes.pdf",
        drawn_pdf(
            [
                [
                    (72, 740, 16, "Minutes"),
                    *column(72, 710, "The council met on 3 May. Ann Vel", "took the chair."),
                    (72, 664, 14, "Prices"),
                    *column(72, 640, "The fee is 30 crowns per m"),
                    (204.9, 644, 7, "2"), (209, 640, 11, " of garden."),
                ]
            ]
        ),
        "Minutes\nThe council met on 3 May. Ann Vel took the chair.\nPrices\nThe fee is 30 crowns per m^2 of garden.",
        ("Ann Vel took the chair.", "30 crowns per m^2 of garden"),
    ),
]  # fmt: skip
