"""Plans in teams, however small the product is. Run as a program, this is the command line with such
plans."""

from dataclasses import replace

from ooc_gemm.planning import search


def teamed(team, side):
    """A search whose candidates have this team and blocks of this size. Only a C of one block has lanes."""
    best = search._best

    def found(problem, budget, rates):
        seconds, _, x = best(problem, replace(budget, lanes=0), rates)
        return seconds, replace(problem, parts=1), x._replace(bm=side[0], bn=side[1], team=team, cache=0)

    return found


if __name__ == "__main__":
    from ooc_gemm.cli import main

    search._best = teamed((1, 2), (32, 32))
    main()
