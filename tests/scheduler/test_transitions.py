"""What is due between two decisions: nobody shares a device, and everybody arrives."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.clusters.scheduler.leases import Lease, due
from hetflow.tests.profiles import examples


def lease(job: int, number: int, state: str, devices: list[str], **more: object) -> Lease:
    return Lease(job, number, tuple(devices), state, None, None, None, number, **more)  # type: ignore[arg-type]


def running(job: int, *devices: str) -> Lease:
    return lease(job, 1, "running", list(devices))


def planned(job: int, *devices: str) -> Lease:
    return lease(job, 2, "planned", list(devices))


def test_who_shrinks_goes_first_and_who_grows_waits_for_it() -> None:
    small, large = planned(1, "a"), planned(2, "b", "c")
    found = due([running(1, "a", "b"), small, running(2, "c"), large])
    assert [next_ for _, next_ in found.resize] == [small]
    assert found.begin == found.stop == ()
    asked = replace(running(1, "a", "b"), resizing_to=("a",))
    found = due([asked, small, running(2, "c"), large])  # it may still be on b
    assert found.begin == found.resize == found.stop == ()
    found = due([running(1, "a"), running(2, "c"), large])
    assert [next_ for _, next_ in found.resize] == [large]


def test_of_two_that_exchange_their_devices_the_later_job_stops() -> None:
    first, second = running(1, "a"), running(2, "b")
    there, back = planned(1, "b"), planned(2, "a")
    assert due([first, there, second, back]).stop == (second,)
    leaves = replace(second, state="stopping")
    found = due([first, there, leaves, back])
    assert found.begin == found.resize == found.stop == ()
    assert due([first, there, back]).resize == ((first, there),)
    assert due([running(1, "b"), back]).begin == (back,)


def test_who_waits_for_a_job_in_a_circle_is_not_stopped() -> None:
    jobs = [running(1, "a"), running(2, "b"), running(3, "c")]
    found = due([*jobs, planned(1, "b"), planned(2, "a"), planned(3, "b", "c")])
    assert [one.job for one in found.stop] == [2]


DEVICES = [f"d{number}" for number in range(6)]
SEATS = st.lists(st.sampled_from([None, 0, 1, 2, 3]), min_size=6, max_size=6).map(
    lambda owners: {
        job: [name for name, owner in zip(DEVICES, owners, strict=True) if owner == job]
        for job in {owner for owner in owners if owner is not None}
    }
)


@given(SEATS, SEATS, st.sets(st.integers(0, 3)), st.data())
@settings(max_examples=examples(200))
def test_every_exchange_ends_where_it_was_decided(
    now: dict[int, list[str]], then: dict[int, list[str]], fixed: set[int], data: st.DataObject
) -> None:
    """Jobs in ``fixed`` cannot be resized. Whatever is under way ends in any order."""
    holding: dict[int, Lease] = {}
    waiting: dict[int, Lease] = {}
    for job, devices in now.items():
        stays = job in then and (then[job] == devices or job not in fixed)
        holding[job] = lease(job, 1, "running" if stays else "stopping", devices)
    for job, devices in then.items():
        if now.get(job) != devices:
            waiting[job] = lease(job, 2, "planned", devices)
    stopped = set()
    for _ in range(40):
        found = due([*holding.values(), *waiting.values()])
        for one in found.begin:
            holding[one.job] = replace(waiting.pop(one.job), state="running")
        for one, next_ in found.resize:
            holding[one.job] = replace(one, resizing_to=next_.devices)
        for one in found.stop:
            holding[one.job] = replace(one, state="stopping")
            stopped.add(one.job)
        names = [name for one in holding.values() for name in one.held]
        assert len(names) == len(set(names))
        under_way = [job for job, one in holding.items()
                     if one.resizing_to or one.state == "stopping"]  # fmt: skip
        if not under_way:
            break
        job = data.draw(st.sampled_from(under_way))
        one = holding.pop(job)
        if one.state == "running":
            holding[job] = replace(waiting.pop(job), state="running")
    assert {job: list(one.devices) for job, one in holding.items()} == then
    assert not stopped or min(then) not in stopped  # the last of a circle is never the first
