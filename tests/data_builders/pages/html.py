"""Pages of HTML: an encyclopedia, a shop, a handbook, a register, news, a blog, a manual, a law, a list of people."""

from tests.data_builders.pages import Page

PAGES = [
    Page(
        "encyclopedia.html",
        """<!DOCTYPE html><html><head><title>Arn (river) - Wiki</title><style>.x{color:red}</style></head><body>
<div role="navigation"><ul><li><a href="/">Main page</a><li><a href="/r">Random</a></ul></div>
<main><h1>Arn (river)</h1>
<p>The <b>Arn</b> is a river of 312&nbsp;km.<sup class="reference" id="r1"><a href="#cite-1">[1]</a></sup> Its basin has
18,400&nbsp;km<sup>2</sup>, and it carries 4&nbsp;×&nbsp;10<sup>6</sup> tons of sand a year.<sup><a href="#cite-2">[2]</a>
</sup> It was surveyed in 1887<sup><a href="#cite-3">[3]</a></sup> by Ida Morn.</p>
<h2>Energy<span class="edit" aria-hidden="true">[edit]</span></h2>
<p>The energy of its water is <span style="display: none"><math><semantics><mrow><mi>E</mi><mo>=</mo><mi>m</mi><msup>
<mi>v</mi><mn>2</mn></msup></mrow><annotation encoding="application/x-tex">{\\displaystyle E=mv^{2}}</annotation>
</semantics></math></span><img src="e.svg" alt="{\\displaystyle E=mv^{2}}"> in the simplest model.</p>
<table><caption>Gauges</caption><tr><th>Gauge<th>Year<th>Flow</tr>
<tr><td rowspan="2">Kelm<td>1990<td>210</tr><tr><td>2010<td>190</tr><tr><td>Velsund<td>1990<td>380</tr></table>
<ol><li id="cite-1"><a href="#r1">^</a> Register of Rivers, 1999.</li><li id="cite-2">Sand Survey, 2004.</li>
<li id="cite-3">Town Records of Kelm.</li></ol></main>
<footer>Text is free to use. Privacy policy.</footer></body></html>""",
        """Arn (river)
The Arn is a river of 312 km. Its basin has 18,400 km^2, and it carries 4 × 10^6 tons of sand a year. It was surveyed in 1887 by Ida Morn.
Energy
The energy of its water is E=mv^2 in the simplest model.
Gauges
Gauge | Year | Flow
Kelm | 1990 | 210
Kelm | 2010 | 190
Velsund | 1990 | 380
Register of Rivers, 1999.
Sand Survey, 2004.
Town Records of Kelm.""",
        ("10^6 tons of sand", "surveyed in 1887 by Ida Morn", "Kelm | 2010 | 190", "E=mv^2 in the simplest", "18,400 km^2"),
        ("106 tons", "18873"),
    ),
    Page(
        "shop.html",
        """<html><body><nav><a href=/>Shop</a><a href=/b>Bikes</a></nav><h1>Tern city bike</h1>
<p>The Tern costs <del>1,290</del> <ins>990</ins> crowns. It weighs <s>14</s> 12 kg.</p>
<p style="display:none">The Tern costs 1 crown.</p><p hidden>Only for staff: margin 40 per cent.
<p>It is made in Kelm by Velo<sup>®</sup>.<noscript>Please enable JavaScript.</noscript>
<template><p>Price: {{price}}</p></template></p>
<select><option>Red<option>Blue</select><button>Add to basket</button>
<div><p>Delivery takes 3<sup>1</sup>/<sub>2</sub> days.</p></div><footer><p>© Velo 2024</p></footer></body></html>""",
        """Tern city bike
The Tern costs 990 crowns. It weighs 12 kg.
It is made in Kelm by Velo.
Delivery takes 3 1/2 days.""",
        ("The Tern costs 990 crowns", "weighs 12 kg", "takes 3 1/2 days", "made in Kelm by Velo"),
        ("1,290", "14", "1 crown.", "margin", "31/2"),
    ),
    Page(
        "handbook.html",
        """<html><body><div class=page><div class=side><nav><ul><li><a href=1>Start</a><li><a href=2>Leave</a></ul></div>
<h1>Handbook</h1><p>Staff of the Kelm office have 28 days of leave.<p>Requests go to Ann Vel.
<h2>Travel</h2><dl><dt>Train<dd>Second class.<dt>Plane<dd>Only above 800 km.</dl>
<p>Report within 14 days<a href="#n1" role="doc-noteref">1</a>.</p>
<aside><p>Ask Bo Mor about visas.</p></aside><hr><p><a id=n1></a>Days are working days.</p></div></body></html>""",
        """Start
Leave
Handbook
Staff of the Kelm office have 28 days of leave.
Requests go to Ann Vel.
Travel
Train
Second class.
Plane
Only above 800 km.
Report within 14 days.
Ask Bo Mor about visas.
Days are working days.""",
        ("28 days of leave", "Requests go to Ann Vel", "within 14 days.", "Only above 800 km"),
        ("days1",),
    ),
    Page(
        "register.html",
        """<h1>Register of mayors</h1><table><thead><tr><th rowspan=2>Town</th><th colspan=2>Term</th><th rowspan=2>Mayor</th>
</tr><tr><th>From</th><th>To</th></tr></thead><tbody><tr><td rowspan=3>Kelm</td><td>1990</td><td>1998</td><td>Ann Vel</td>
</tr><tr><td>1998</td><td>2006</td><td>Bo Mor</td></tr><tr><td>2006</td><td>2010</td><td>Cy Dorn</td></tr>
<tr><td>Rell</td><td>1990</td><td>2010</td><td>Di Ost</td></tr><tr><td colspan=4>Towns without mayors: Velsund</td></tr>
</tbody></table>""",
        """Register of mayors
Town | Term | Term | Mayor
Town | From | To | Mayor
Kelm | 1990 | 1998 | Ann Vel
Kelm | 1998 | 2006 | Bo Mor
Kelm | 2006 | 2010 | Cy Dorn
Rell | 1990 | 2010 | Di Ost
Towns without mayors: Velsund""",
        ("Kelm | 1998 | 2006 | Bo Mor", "Kelm | 2006 | 2010 | Cy Dorn", "Rell | 1990 | 2010 | Di Ost"),
    ),
    Page(
        "news.html",
        """<html><body><header><h1>Bridge of Velsund opens</h1></header><article><p>By <a href=/a>Ida Morn</a></p>
<p>The bridge opened on the 3<sup>rd</sup> of May. It is 1.2&nbsp;km long<span style="visibility:hidden">, 5 km</span>.
<dialog><p>Subscribe now!</p></dialog></p><blockquote><p>“I am glad”, said mayor Jean-Luc O’Neil.</p></blockquote>
<p><strong>Correction:</strong> <span style="text-decoration: line-through">It cost 9 million.</span> It cost 19 million.</p>
<footer><p>Photo by Bo Mor.</p></footer></article><div role="contentinfo">All rights reserved.</div></body></html>""",
        """Bridge of Velsund opens
By Ida Morn
The bridge opened on the 3rd of May. It is 1.2 km long.
“I am glad”, said mayor Jean-Luc O’Neil.
Correction: It cost 19 million.
Photo by Bo Mor.""",
        ("3rd of May", "1.2 km long.", "It cost 19 million.", "Photo by Bo Mor"),
        ("5 km", "cost 9 million"),
    ),
    Page(
        "blog.html",
        """<html><body><article><h1>A week in Rell</h1><p>We stayed at the inn <em>Three Keys</em><sup>1</sup> for 60 crowns.
<p>The ruby script of <ruby>東京<rt>とうきょう</rt></ruby> is taught here.
<details><summary>Route</summary><p>From Kelm by boat, 4 hours.</p></details>
<p>Press <button>play to hear the song of <p>the ferrymen, which Cy Dorn wrote.
</article></body></html>""",
        """A week in Rell
We stayed at the inn Three Keys^1 for 60 crowns.
The ruby script of 東京(とうきょう) is taught here.
Route
From Kelm by boat, 4 hours.
Press play to hear the song of
the ferrymen, which Cy Dorn wrote.""",
        ("for 60 crowns", "which Cy Dorn wrote", "by boat, 4 hours"),
        ("Keys1",),
    ),
    Page(
        "manual.html",
        """<html><body><div role="navigation"><a href=#a>Contents</a></div><h1>Pump P2</h1><p>Water is H<sub>2</sub>O; the pump
moves 2.5<sup>3</sup> litres. The code 101<sub>2</sub> means stop. Its limit is
<math><mfrac><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow><mn>2</mn></mfrac></math> bar.</p>
<ul><li>Open valve A<ul><li>slowly, 5 s</ul><li>Close valve B</ul>
<pre>P2 --flow 10</pre><table><tr><td><p>Part</p><td><p>Hours</p><tr><td>Seal<td>4,000</table></body></html>""",
        """Pump P2
Water is H2O; the pump moves 2.5^3 litres. The code 101_2 means stop. Its limit is (a+b)/2 bar.
Open valve A
slowly, 5 s
Close valve B
P2 --flow 10
Part | Hours
Seal | 4,000""",
        ("H2O", "2.5^3 litres", "code 101_2 means", "(a+b)/2 bar", "Seal | 4,000"),
        ("2.53 litres", "1012"),
    ),
    Page(
        "law.html",
        """<html><body><h1>Water Act</h1><h2>§ 4</h2><p>(1) The fee is <del cite="/v2">20</del><ins>30</ins> crowns for each
m<sup>3</sup>.<sup><a href="#f1">a</a></sup></p><p>(2) <del>Farms are free of fees.</del></p><p>(3) The council of Kelm
decides<a class="footnote-reference" href="#f2">[2]</a>.</p><div class="footnotes"><p>Since 2011. <a href="#x">↩</a></p>
<p>Before 2009, the county. <a href="#y">↩</a></p></div></body></html>""",
        """Water Act
§ 4
(1) The fee is 30 crowns for each m^3.
(2)
(3) The council of Kelm decides.
Since 2011.
Before 2009, the county.""",
        ("The fee is 30 crowns", "council of Kelm decides.", "Before 2009, the county."),
        ("fee is 20", "Farms are free"),
    ),
    Page(
        "people.html",
        """<html><body><h1>People</h1><table><tr><th>Name</th><td>Ann Vel</td></tr><tr><th>Born</th><td>3 May 1951<br>Kelm</td>
</tr><tr><th>Died</th><td></td></tr></table><p aria-hidden="false">M<sup>me</sup> Vel leads the XX<sup>e</sup> club.</p>
<textarea>Write a comment</textarea><iframe src=x>Your browser has no frames.</iframe>
<p>She <span hidden>never </span>won the prize.</p></body></html>""",
        """People
Name | Ann Vel
Born | 3 May 1951 Kelm
Died
Mme Vel leads the XXe club.
She won the prize.""",
        ("Born | 3 May 1951 Kelm", "She won the prize", "Mme Vel leads the XXe club"),
        ("never",),
    ),
]  # fmt: skip
