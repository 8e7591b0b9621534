"""The registry of contenders: complete, and fair in the number of tries."""

import dataclasses
from typing import get_args

import pytest

from horst.lab.baselines.contenders import Name, Optimization
from horst.lab.baselines.tuning import CONTENDERS, TRIES, Task


def test_every_contender_has_an_entry():
    assert set(CONTENDERS) == set(get_args(Name))
    for contender in CONTENDERS.values():
        assert contender.about
        assert contender.formula
        assert contender.source
    assert len({contender.about for contender in CONTENDERS.values()}) == len(CONTENDERS)


@pytest.mark.parametrize("name", CONTENDERS)
@pytest.mark.parametrize("task", get_args(Task))
def test_every_contender_gets_the_same_number_of_tries_of_two_settings_that_it_reads(name, task):
    contender, tries = CONTENDERS[name], CONTENDERS[name].tries(task)
    assert len(contender.settings) == 2
    assert tuple(contender.vision) == tuple(contender.language)
    tried = {dataclasses.replace(Optimization(), **settings) for settings in tries}
    assert len(tried) == len(tries) == TRIES
    read = Optimization().settings(name)
    assert set(contender.settings) <= set(read), "a setting that the contender does not read changes nothing"
