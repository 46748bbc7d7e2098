"""Two lines in a kernel's test:

    case = dict(op="gated_delta_rule", q=q, k=k, v=v, g=g, beta=beta, do=do)
    softdelta.testing.assert_close({"o": o, "dq": q.grad}, case)
"""
from __future__ import annotations

from ._cases import Report, judge
from ._diagnose import diagnose as _diagnose


def assert_close(actual, case, *, limits=None, diagnose=False, dtype=None) -> Report:
    """Raises AssertionError, with the table of the verdict, unless every result in `actual` is right.

    actual  {"o": array, "dq": array, …}; one array is o; None: the results that the case holds
    case    a path of a case file, or the arguments of softdelta.dump as a dict: op, inputs by name, options
    limits  {"dq": 0.01} replaces the limit of RMSE(result − truth) / RMS(truth), otherwise computed for this very call
    diagnose  True: the message also says where the error is and which known mistake explains it (softdelta.diagnose);
            takes seconds, and only when something is wrong
    dtype   "bf16": arrays of uint16 hold bf16

    Right means: as close to the f64 truth as right kernels of this precision come, as a whole and in every block. A
    result that cannot be judged, because rounding alone may change it by half or more, is not right: the message says
    why, and a limit of your own (limits, at most 0.5) judges it all the same.
    Raises ValueError for a case that contradicts itself. Returns the report.
    """
    __tracebackhide__ = True
    if actual is not None and not isinstance(actual, dict):
        actual = {"o": actual}
    report = judge(actual, case, limits=limits, dtype=dtype)
    if not report.right:
        raise AssertionError(f"{report}\n\n{_diagnose(case, actual, dtype=dtype).details}" if diagnose else str(report))
    return report
