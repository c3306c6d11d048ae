"""`show`: every drawing, read as a person reads it."""

from __future__ import annotations

import html
import re

import pytest
from expecttest import assert_expected_inline
from meshfn.sharding import Mesh, Spec, SpecError
from meshfn.sharding.html import lines
from meshfn.sharding.show import ranks_text, show

FOUR = Mesh(g=2, u=2)


def test_a_letter_over_one_axis():
    assert_expected_inline(
        str(show("B S/u D", Mesh(u=4), B=2, S=8, D=16)),
        """\
B S/u D     mesh: u=4     sizes: B=2 S=8 D=16

S  0   2   4   6   8
   | 0 | 1 | 2 | 3 |

ranks  u  B  S    D  local shape  elements
0      0  :  0:2  :  2 2 16             64
1      1  :  2:4  :  2 2 16             64
2      2  :  4:6  :  2 2 16             64
3      3  :  6:8  :  2 2 16             64""",
    )


def test_uneven_over_two_axes():
    assert_expected_inline(
        str(show("B S/g/u (K G) E", FOUR, B=2, S=97, K=3, G=3, E=64)),
        """\
B S/g/u (K G) E     mesh: g=2 u=2     sizes: B=2 S=97 K=3 G=3 E=64

S  0   25  49  73  97
   | 0 | 1 | 2 | 3 |

ranks  g  u  B  S      K  G  E  local shape  elements
0      0  0  :  0:25   :  :  :  2 25 9 64       28800
1      0  1  :  25:49  :  :  :  2 24 9 64       27648
2      1  0  :  49:73  :  :  :  2 24 9 64       27648
3      1  1  :  73:97  :  :  :  2 24 9 64       27648""",
    )


def test_two_letters_are_a_grid_and_a_composite_is_drawn_by_its_factor():
    assert_expected_inline(
        str(show("B S/g (K/u G) E", FOUR, B=2, S=97, K=3, G=2, E=64)),
        """\
B S/g (K/u G) E     mesh: g=2 u=2     sizes: B=2 S=97 K=3 G=2 E=64

          K 0:2   K 2:3
        +-------+-------+
S 0:49  |   0   |   1   |
S 49:97 |   2   |   3   |
        +-------+-------+

ranks  g  u  B  S      K    G  E  local shape  elements
0      0  0  :  0:49   0:2  :  :  2 49 4 64       25088
1      0  1  :  0:49   2:3  :  :  2 49 2 64       12544
2      1  0  :  49:97  0:2  :  :  2 48 4 64       24576
3      1  1  :  49:97  2:3  :  :  2 48 2 64       12288""",
    )


def test_an_inner_factor_is_a_dimension_of_its_own():
    assert_expected_inline(
        str(show("(K/g G/u) D", FOUR, K=2, G=3, D=4)),
        """\
(K/g G/u) D     mesh: g=2 u=2     sizes: K=2 G=3 D=4

        G 0:2   G 2:3
      +-------+-------+
K 0:1 |   0   |   1   |
K 1:2 |   2   |   3   |
      +-------+-------+

ranks  g  u  K    G    D  local shape  elements
0      0  0  0:1  0:2  :  2 4                 8
1      0  1  0:1  2:3  :  1 4                 4
2      1  0  1:2  0:2  :  2 4                 8
3      1  1  1:2  2:3  :  1 4                 4""",
    )


def test_three_letters_are_a_grid_each():
    assert_expected_inline(
        str(show("B/dp S/g (K/u G) E", Mesh(dp=2, g=2, u=2), B=3, S=32, K=3, G=2, E=4)),
        """\
B/dp S/g (K/u G) E     mesh: dp=2 g=2 u=2     sizes: B=3 S=32 K=3 G=2 E=4

B 0:2
          K 0:2   K 2:3
        +-------+-------+
S 0:16  |   0   |   1   |
S 16:32 |   2   |   3   |
        +-------+-------+

B 2:3
          K 0:2   K 2:3
        +-------+-------+
S 0:16  |   4   |   5   |
S 16:32 |   6   |   7   |
        +-------+-------+

ranks  dp  g  u  B    S      K    G  E  local shape  elements
0      0   0  0  0:2  0:16   0:2  :  :  2 16 4 4          512
1      0   0  1  0:2  0:16   2:3  :  :  2 16 2 4          256
2      0   1  0  0:2  16:32  0:2  :  :  2 16 4 4          512
3      0   1  1  0:2  16:32  2:3  :  :  2 16 2 4          256
4      1   0  0  2:3  0:16   0:2  :  :  1 16 4 4          256
5      1   0  1  2:3  0:16   2:3  :  :  1 16 2 4          128
6      1   1  0  2:3  16:32  0:2  :  :  1 16 4 4          256
7      1   1  1  2:3  16:32  2:3  :  :  1 16 2 4          128""",
    )


def test_replicated_axes_put_several_ranks_in_a_cell_and_some_may_hold_nothing():
    assert_expected_inline(
        str(show("B S/u D", Mesh(dp=2, u=4), S=3)),
        """\
B S/u D     mesh: dp=2 u=4     sizes: S=3

S  0     1     2     3
   | 0,4 | 1,5 | 2,6 |

ranks  dp  u  B  S    D  local shape
0,4    *   0  :  0:1  :  B 1 D
1,5    *   1  :  1:2  :  B 1 D
2,6    *   2  :  2:3  :  B 1 D
3,7    *   3  :  -    :  B 0 D""",
    )


def test_head_tail_order():
    assert_expected_inline(
        str(show("B S/cp:zigzag D", Mesh(cp=4), B=1, S=32, D=8)),
        """\
B S/cp:zigzag D     mesh: cp=4     sizes: B=1 S=32 D=8
head-tail order: of 8 chunks of S, cp r holds r and 7 - r

S  0   4   8   12  16  20  24  28  32
   | 0 | 1 | 2 | 3 | 3 | 2 | 1 | 0 |

ranks  cp  B  S           D  local shape  elements
0      0   :  0:4 28:32   :  1 8 8              64
1      1   :  4:8 24:28   :  1 8 8              64
2      2   :  8:12 20:24  :  1 8 8              64
3      3   :  12:20       :  1 8 8              64""",
    )


def test_key_value_heads_that_query_heads_need():
    assert_expected_inline(
        str(show("B T K@H/u E", Mesh(u=4), B=1, T=32, H=12, K=3, E=4)),
        """\
B T K@H/u E     mesh: u=4     sizes: B=1 T=32 H=12 K=3 E=4
each rank holds the K that its H need; several may hold the same

K  0     1     2     3
   | 0,1 | 1,2 | 2,3 |

ranks  u  B  T  K    E  local shape  elements
0      0  :  :  0:1  :  1 32 1 4          128
1      1  :  :  0:2  :  1 32 2 4          256
2      2  :  :  1:3  :  1 32 2 4          256
3      3  :  :  2:3  :  1 32 1 4          128""",
    )


def test_pending_sum():
    assert_expected_inline(
        str(show("B S/g D +u", FOUR, B=1, S=32, D=8)),
        """\
B S/g D +u     mesh: g=2 u=2     sizes: B=1 S=32 D=8
pending sum over u: each rank holds an addend

S  0     16    32
   | 0,1 | 2,3 |

ranks  g  u  B  S      D  local shape  elements
0      0  0  :  0:16   :  1 16 8            128
1      0  1  :  0:16   :  1 16 8            128
2      1  0  :  16:32  :  1 16 8            128
3      1  1  :  16:32  :  1 16 8            128""",
    )


def test_pending_sum_of_a_whole():
    assert_expected_inline(
        str(show("B D +u", FOUR, B=1, D=8)),
        """\
B D +u     mesh: g=2 u=2     sizes: B=1 D=8
pending sum over u: each rank holds an addend of all of it

ranks  g  u  B  D  local shape  elements
0,2    *  0  :  :  1 8                 8
1,3    *  1  :  :  1 8                 8""",
    )


def test_whole():
    assert_expected_inline(
        str(show("B S D", FOUR)),
        """\
B S D     mesh: g=2 u=2
every rank holds all of it

ranks  g  u  B  S  D  local shape
0..3   *  *  :  :  :  B S D""",
    )


def test_an_axis_that_the_mesh_lacks_has_one_rank():
    assert_expected_inline(
        str(show("B S/cp D/u", FOUR, B=1, S=32, D=8)),
        """\
B S/cp D/u     mesh: g=2 u=2 cp=1 (not in the mesh)     sizes: B=1 S=32 D=8

D  0     4     8
   | 0,2 | 1,3 |

ranks  g  u  B  S  D    local shape  elements
0,2    *  0  :  :  0:4  1 32 4            128
1,3    *  1  :  :  4:8  1 32 4            128""",
    )


def test_any_leading_dimensions():
    assert_expected_inline(
        str(show("... S/u (K G)", FOUR, S=31, K=3)),
        """\
... S/u (K G)     mesh: g=2 u=2     sizes: S=31 K=3

S  0     16    31
   | 0,2 | 1,3 |

ranks  g  u  ...  S      K  G  local shape
0,2    *  0  ...  0:16   :  :  ... 16 3*G
1,3    *  1  ...  16:31  :  :  ... 15 3*G""",
    )


def test_nothing_of_a_letter():
    assert_expected_inline(
        str(show("S/u D", FOUR, S=0, D=3)),
        """\
S/u D     mesh: g=2 u=2     sizes: S=0 D=3
S is empty

ranks  g  u  S  D  local shape  elements
0,2    *  0  -  :  0 3                 0
1,3    *  1  -  :  0 3                 0""",
    )


@pytest.mark.parametrize(
    ("spec", "mesh", "sizes"),
    [
        ("S/u", Mesh(u=4096), {"S": 40960}),
        ("B/dp S/g/u D", Mesh(dp=16, g=8, u=32), {"B": 33, "S": 4100}),
        ("B/dp S/g D/u", Mesh(dp=16, g=8, u=32), {"B": 33, "S": 4100, "D": 1000}),
        ("S/cp:zigzag", Mesh(cp=4096), {"S": 8192}),
        ("K@H/u", Mesh(u=4096), {"H": 8192, "K": 512}),
        ("B S", Mesh(u=4096), {}),
        ("B +u", Mesh(dp=2, u=2048), {}),
    ],
)
def test_thousands_of_ranks_are_folded(spec, mesh, sizes):
    lines = str(show(spec, mesh, **sizes)).splitlines()
    assert len(lines) < 80
    assert max(map(len, lines)) <= 120
    assert spec == "B S" or re.fullmatch(r"\.\.\. \d+ more", lines[-1])


def test_a_folded_grid():
    picture = show("B/dp S/u D", Mesh(dp=16, u=256), B=32, S=4100)
    assert_expected_inline(
        "\n".join(str(picture).splitlines()[:13]),
        """\
B/dp S/u D     mesh: dp=16 u=256     sizes: B=32 S=4100

             S 0:17       S 17:34       S 34:51       S 51:68         ...       S 4084:4100
        +-------------+-------------+-------------+-------------+-------------+-------------+
B 0:2   |      0      |      1      |      2      |      3      |     ...     |     255     |
B 2:4   |     256     |     257     |     258     |     259     |     ...     |     511     |
B 4:6   |     512     |     513     |     514     |     515     |     ...     |     767     |
B 6:8   |     768     |     769     |     770     |     771     |     ...     |     1023    |
B 8:10  |     1024    |     1025    |     1026    |     1027    |     ...     |     1279    |
B 10:12 |     1280    |     1281    |     1282    |     1283    |     ...     |     1535    |
...     |     ...     |     ...     |     ...     |     ...     |     ...     |     ...     |
B 30:32 |     3840    |     3841    |     3842    |     3843    |     ...     |     4095    |
        +-------------+-------------+-------------+-------------+-------------+-------------+""",
    )


def test_every_element_is_in_a_cell_of_the_ranks_that_hold_it():
    mesh, sizes = Mesh(g=2, u=3), {"S": 24, "H": 9, "K": 3, "D": 5}
    for text in ("S/g/u", "S/u/g", "S/g:zigzag/u", "K@H/u", "K@H/g/u", "D/u"):
        spec = Spec.parse(text)
        (grid,) = show(text, mesh, **sizes).grids
        for piece, cell in zip(grid.columns, grid.cells[0], strict=True):
            for i in range(piece[0], piece[1]):
                holders = [r for r in range(mesh.size) if _holds(spec.slices(sizes, mesh, r)[0], i)]
                assert cell.text == ranks_text(holders), (text, i)


def _holds(index, i):
    return i in (range(100)[index] if isinstance(index, slice) else index.flatten().tolist())


def test_ranks():
    lists = ([3], [0, 2], [0, 1], [0, 1, 2, 3], [0, 4, 8, 12], [0, 1, 4, 5], [0, 1, 3, 5, 7, 9, 20])
    assert_expected_inline(
        "\n".join(map(ranks_text, lists)),
        """\
3
0,2
0,1
0..3
0..12 by 4
0,1,4,5
0,1,3,5,...""",
    )


def test_html_needs_nothing_else_and_says_the_same():
    picture = show("B S/g (K/u G) E", FOUR, B=2, S=97, K=3, G=2, E=64)
    page = picture._repr_html_()
    assert repr(picture) == str(picture)
    assert "<script" not in page
    assert "http" not in page
    assert " class=" not in page
    assert page.count("<table") == page.count("</table>") == 2
    assert len(set(re.findall(r"hsla\((\d+)", page))) == 4
    said = html.unescape(re.sub(r"<[^>]*>", " ", page)).split()
    assert sorted(said) == sorted(re.sub(r"(?m)^ *\+[-+]+\+$|\|", "", str(picture)).split())
    assert "&lt;u&gt;" in lines(["B <u>"])


@pytest.mark.parametrize(
    ("spec", "sizes"), [("B S/g/g D", {}), ("B S/gu D", {"S": 4}), ("B S/g", {}), ("K@H/u", {"K": 3})]
)
def test_what_cannot_be_drawn_raises(spec, sizes):
    with pytest.raises(SpecError):
        show(spec, FOUR, **sizes)


def test_a_missing_size_is_named():
    with pytest.raises(SpecError) as e:
        show("B S/g D", FOUR, B=3)
    assert_expected_inline(
        str(e.value),
        """\
no size for S
    B S/g D
      ^^^
    mesh: g=2 u=2     sizes: B=3     fix: pass S=..., its global size""",
    )
