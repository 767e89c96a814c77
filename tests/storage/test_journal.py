"""The journal of a C that is being made: what a run has noted is what the next one finds."""

import json

import pytest

from ooc_gemm import InputError
from ooc_gemm.storage.io import locks
from ooc_gemm.storage.write import journal, logs

HEAD = {"inputs": {"a": 1}, "options": {"beta": "0.0"}}
NOW, WAS = (100, 7), (0, 0)


def begun(folder):
    return journal.begin_in_folder(folder, "c", HEAD)


def continued(folder):
    return journal.resume_in_folder(folder, "c")


def path(folder):
    return folder / journal.JOURNAL


def test_what_is_noted_is_found_again(tmp_path):
    log = begun(tmp_path)
    log.add((0, 1), NOW, WAS)
    log.add((2, 0), NOW, NOW)
    log.close()
    again = continued(tmp_path)
    assert {key: again.head[key] for key in HEAD} == HEAD
    assert again.done == {(0, 1): (NOW, WAS), (2, 0): (NOW, NOW)}
    again.remove()
    assert not path(tmp_path).exists()


def test_only_one_holds_it(tmp_path):
    log = begun(tmp_path)
    assert logs.is_held(tmp_path)
    for other in (begun, continued):
        with pytest.raises(InputError, match="c is being written by"):
            other(tmp_path)
    log.close()
    assert not logs.is_held(tmp_path)
    continued(tmp_path).close()


def test_without_a_journal_nothing_can_be_continued(tmp_path):
    with pytest.raises(InputError, match="c has no journal"):
        continued(tmp_path)


def test_what_is_undone_is_not_done(tmp_path):
    """After a flush has failed, only what was durable before counts."""
    log = begun(tmp_path)
    log.add((0, 0), NOW, WAS)
    log.durable(1)
    log.add((0, 1), NOW, WAS)
    assert log.undo() == [(0, 1)]
    with pytest.raises(OSError):
        log.add((0, 2), NOW, WAS)
    log.close()
    again = continued(tmp_path)
    assert again.done == {(0, 0): (NOW, WAS)}
    again.close()


def test_another_start_of_the_system_keeps_what_was_durable(tmp_path):
    log = begun(tmp_path)
    for column in range(3):
        log.add((0, column), NOW, WAS)
        if column == 1:
            log.durable(2)
    log.close()
    text = path(tmp_path).read_bytes()
    path(tmp_path).write_bytes(text.replace(locks.boot_id().encode(), b"some-other-start"))
    again = continued(tmp_path)
    assert sorted(again.done) == [(0, 0), (0, 1)]
    again.close()


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_line_that_is_cut_off_is_ignored(tmp_path, cut):
    """A process that was killed leaves such a line."""
    log = begun(tmp_path)
    log.add((0, 0), NOW, WAS)
    log.add((0, 1), NOW, WAS)
    log.close()
    path(tmp_path).write_bytes(path(tmp_path).read_bytes()[:-cut])
    again = continued(tmp_path)
    assert sorted(again.done) == [(0, 0)]
    again.add((0, 2), NOW, WAS)
    again.close()
    for line in path(tmp_path).read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize("damage", ["not JSON\n", '{"version": 99}\n', '{"head": 1}\n'])
def test_a_journal_that_makes_no_sense_is_refused(tmp_path, damage):
    begun(tmp_path).close()
    text = path(tmp_path).read_text()
    path(tmp_path).write_text(damage + text.partition("\n")[2] + '{"durable": 0, "save": 9}\n')
    with pytest.raises(InputError, match=r"is damaged|another version"):
        continued(tmp_path)
