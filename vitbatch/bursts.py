"""Calls of images that are still being prepared: the devices begin with the first while the last are on their way.

images come     1    2    3    4    5    6    7    8  ...
calls            [ 1 ]     [  2, 3  ]          [ 4, 5, 6, 7 ]        up to a full one
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from vitbatch.calls import Frame
from vitbatch.planning import CallPlan

# The first call may be made from this share of the patches that keep the devices busy, so that they do not wait for
# images that take long to prepare; later ones from twice as many each time it was looked at. Not where they would pad
# more than this share.
_FIRST_SHARE = 4
_FIRST_PADDING = 0.125


def plan_bursts(
    frames: Iterable[Frame], plan: Callable[[list[int]], list[CallPlan]], enough: int
) -> Iterator[tuple[CallPlan, Sequence[Frame]]]:
    """Calls over frames as they come, each with the frames that its plan counts from: planned whenever there are
    enough to keep the devices busy, and at first when there are fewer but they fill their lanes. What they hold depends
    on the frames alone, not on time.

    plan: splits images of so many patches into calls, in order. enough: patches that keep the devices busy.
    """
    waiting: list[Frame] = []
    patches, least = 0, enough // _FIRST_SHARE
    for frame in frames:
        waiting.append(frame)
        patches += len(frame.rows)
        if patches < least:
            continue
        least = min(2 * least, enough)
        plans = plan([len(f.rows) for f in waiting])
        # The last call may have room for frames to come.
        plans = plans[:-1] or plans
        if patches < enough and max(one.padded_ratio for one in plans) > _FIRST_PADDING:
            continue
        for one in plans:
            yield one, waiting
        waiting = waiting[plans[-1].images[-1] + 1 :]
        patches = sum(len(f.rows) for f in waiting)
    for one in plan([len(f.rows) for f in waiting]):
        yield one, waiting
