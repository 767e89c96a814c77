"""Plans that cut k into several ranges, however small the product is. Run as a program, this is the command
line with such plans."""

from dataclasses import replace

from ooc_gemm.planning import search


def cut_into(parts, side):
    """A search whose candidates have blocks of this size, and k in so many ranges. Only a C of one block has
    lanes."""
    best = search._best

    def found(problem, budget, rates):
        seconds, _, x = best(problem, replace(budget, lanes=0), rates)
        problem = replace(problem, parts=parts, narrowed=0)
        return seconds, problem, x._replace(bm=side[0], bn=side[1], cache=0)

    return found


if __name__ == "__main__":
    from ooc_gemm.cli import main

    search._best = cut_into(5, (16, 16))
    main()
