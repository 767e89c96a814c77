"""What `make test` leaves out: tests that are marked slow, and most cases of a test that has many."""

import conftest
import pytest


class Item:
    """A test as pytest collects it."""

    def __init__(self, nodeid, *marks):
        self.nodeid, self.marks = nodeid, set(marks)

    def get_closest_marker(self, name):
        return name if name in self.marks else None

    def add_marker(self, mark):
        self.marks.add(mark.name)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 90])
def test_a_few_cases_of_every_test_are_quick(count):
    cases = [Item(f"file.py::test[{i}]") for i in range(count)]
    other = Item("file.py::other")
    conftest.pytest_collection_modifyitems([*cases, other])
    quick = [i for i, item in enumerate(cases) if "slow" not in item.marks]
    assert len(quick) == min(count, conftest.CASES)
    assert (quick[0], quick[-1]) == (0, count - 1)
    assert not other.marks


def test_cases_that_are_slow_or_need_a_gpu_do_not_count():
    marks = [(), ("slow",), ("gpu",)]
    cases = [
        Item(f"file.py::test[{i}-{j}]", *mark) for i in range(conftest.CASES) for j, mark in enumerate(marks)
    ]
    conftest.pytest_collection_modifyitems(cases)
    assert [tuple(item.marks) for item in cases] == marks * conftest.CASES


def test_a_property_is_tried_with_fewer_examples(monkeypatch):
    monkeypatch.setattr(conftest.examples, "share", 0.1)
    assert [conftest.examples.examples(number) for number in (300, 60, 1)] == [30, 6, 1]
